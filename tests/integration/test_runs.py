"""Whole runs of experiment=smoke with the real engine and the real megatron-core trainer."""

import json

import numpy as np
import pytest

from analysis.wandb_file import read_wandb_file

# A batch of the first updates is trained on policies that differ little; these learning rates make merge errors plain.
FAST = "trainer.learning_rate=2e-3"
EVERY_UPDATE = ("shadow.every=1", "shadow.probe_every=1")


def staleness(rows):
    return [
        {k: v for k, v in row.items() if k.startswith(("stale/", "fully_async/", "response_length/"))} for row in rows
    ]


def test_a_run_leaves_every_output_and_says_what_it_did(smoke_run, capsys):
    run = smoke_run("strategy=replace", "tracking=offline")
    assert run.code == 0
    assert [row["step"] for row in run.rows] == list(range(1, 9))
    summary = run.summary
    assert (summary["status"], summary["steps"], summary["strategy"]) == ("completed", 8, "replace")
    assert {"last", "mean", "p95", "max"} <= set(summary["metrics"]["actor/ppo_kl"])
    assert (run.folder / "checkpoint" / "state.pt").is_file()
    printed = capsys.readouterr().out
    assert "replace, seed 0: completed after 8 updates" in printed
    assert "ppo_kl" in printed
    (file,) = run.folder.glob("wandb/**/*.wandb")
    history = read_wandb_file(file).history
    assert [row["step"] for row in history] == list(range(1, 9))
    assert history[3]["actor/ppo_kl"] == run.rows[3]["actor/ppo_kl"]


def test_the_same_seed_gives_the_same_bytes(smoke_run):
    first, second = smoke_run(FAST, folder="a"), smoke_run(FAST, folder="b")
    assert first.metrics_bytes == second.metrics_bytes
    other = smoke_run(FAST, "seed=1", folder="c")
    assert other.metrics_bytes != first.metrics_bytes


def test_strategies_are_interrupted_at_the_same_tokens_until_their_weights_differ(smoke_run):
    """With a learning rate of 0 they never differ: the whole schedule is the same, and no rule has an error."""
    runs = [
        smoke_run(f"strategy={name}", "trainer.learning_rate=0", folder=name) for name in ("replace", "exact", "live")
    ]
    assert staleness(runs[0].rows) == staleness(runs[1].rows) == staleness(runs[2].rows)
    assert max(row["fully_async/partial/partial_ratio"] for row in runs[0].rows) > 0
    assert all(row["merge/replace/abs"] < 1e-5 for row in runs[0].rows if "merge/replace/abs" in row)
    assert all(runs[0].rows[0][key] == runs[1].rows[0][key] for key in runs[0].rows[0].keys() & runs[1].rows[0].keys())


def test_the_first_update_is_the_same_under_every_strategy_even_when_they_part_later(smoke_run):
    rows = {name: smoke_run(f"strategy={name}", FAST, folder=name).rows for name in ("replace", "naive_concat")}
    assert rows["replace"][0]["actor/ppo_kl"] == rows["naive_concat"][0]["actor/ppo_kl"]
    assert rows["replace"][-1]["actor/ppo_kl"] != rows["naive_concat"][-1]["actor/ppo_kl"]


def merge_error(rows, strategy, suffix="abs"):
    return [row[f"merge/{strategy}/{suffix}"] for row in rows if f"merge/{strategy}/{suffix}" in row][1:]


def test_merge_errors_are_where_theory_puts_them(smoke_run):
    """All rules on the same rollouts: replace errs early, slice_concat late, naive_concat grossly."""
    rows = smoke_run(
        "strategy=exact",
        "trainer.learning_rate=5e-4",
        *EVERY_UPDATE,
        "shadow.strategies=[replace,slice_concat,naive_concat]",
    ).rows
    assert max(merge_error(rows, "replace", "abs_by_segment/last")) == 0.0
    assert min(merge_error(rows, "replace", "abs_by_segment/first")) > 1e-5
    assert max(merge_error(rows, "slice_concat", "abs_by_segment/first")) == 0.0
    assert max(merge_error(rows, "slice_concat", "abs_by_segment/last")) > 1e-6
    mean = {name: sum(e := merge_error(rows, name)) / len(e) for name in ("replace", "slice_concat", "naive_concat")}
    assert mean["naive_concat"] > 2 * max(mean["replace"], mean["slice_concat"]), "the positive control must stand out"


def test_shadow_scoring_changes_nothing_in_training(smoke_run):
    """Also with several mini-steps and R2, where the run itself scores before the update."""
    for settings in (("strategy=replace",), ("strategy=recompute", "algorithm.mini_batches=2")):
        others = "shadow.strategies=[slice_concat,live,gated]"
        plain = smoke_run(FAST, *settings, "shadow=off", folder=f"plain{settings[0]}")
        scored = smoke_run(FAST, *settings, *EVERY_UPDATE, others, folder=f"scored{settings[0]}")
        assert all("merge/live/abs" in row for row in scored.rows)
        without = [{k: row[k] for k in mine} for row, mine in zip(scored.rows, plain.rows, strict=True)]
        assert json.dumps(without) == json.dumps(plain.rows)
        assert not (plain.folder / "merge_errors.jsonl").exists()


def test_the_log_ratio_splits_into_staleness_merge_error_and_engine_mismatch(smoke_run):
    rows = smoke_run("strategy=replace", FAST, *EVERY_UPDATE).rows
    assert max(row["decomp/residual_max"] for row in rows) < 1e-6
    assert min(row["decomp/coverage"] for row in rows) == 1.0
    assert max(row["decomp/engine_abs"] for row in rows) < 1e-5, "fp32 on both sides"
    late = rows[3:]
    assert min(row["decomp/stale_abs"] for row in late) > 1e-3
    for row in rows:
        squares = sum(row[f"decomp/{part}_sq"] for part in ("stale", "merge", "engine"))
        crossed = sum(row[f"decomp/cov_{pair}"] for pair in ("stale_merge", "stale_engine", "merge_engine"))
        assert abs(squares + 2 * crossed - row["gap/sq"]) < 1e-9
        assert row["decomp/merge_abs"] == pytest.approx(row["merge/replace/abs"], abs=1e-12)
    assert max(row["decomp/weights_kept"] for row in rows) <= 1 + max(row["stale/age_max"] for row in rows) + 1


def test_the_engines_rows_are_audited_and_wrong_ones_stop_the_run(smoke_run, capsys, monkeypatch):
    rows = smoke_run("strategy=slice_concat", FAST, *EVERY_UPDATE, folder="right").rows
    assert max(row["route/audit_mismatch"] for row in rows) == 0.0
    from experiments.engines.running_batch import RunningBatch

    leave = RunningBatch._leave

    def leave_with_shifted_rows(self, slot):
        generation = leave(self, slot)
        generation.rows = np.roll(generation.rows, 1, axis=0)
        return generation

    monkeypatch.setattr(RunningBatch, "_leave", leave_with_shifted_rows)
    run = smoke_run("strategy=slice_concat", FAST, *EVERY_UPDATE, folder="wrong")
    assert run.code == 1
    assert "AuditError: request r" in capsys.readouterr().err
    unaudited = smoke_run("strategy=slice_concat", FAST, "shadow=off", folder="unaudited")
    assert unaudited.code == 0, "nothing else sees it"


def test_route_agreement_with_the_live_router_before_and_after_the_update(smoke_run):
    row = smoke_run("strategy=live", FAST, *EVERY_UPDATE).rows[-1]
    assert "route/overlap_by_source/live_before" not in row, "live rows are not compared with themselves"
    row = smoke_run("strategy=slice_concat", FAST, *EVERY_UPDATE, folder="b").rows[-1]
    assert 0.5 < row["route/overlap_by_source/live_after"] < row["route/overlap_by_source/live_before"] < 1.0
    assert row["route/margin_p5"] > 0


def test_the_run_ranks_the_rules_that_it_scored(smoke_run, capsys):
    run = smoke_run(
        "strategy=exact",
        FAST,
        *EVERY_UPDATE,
        "shadow.strategies=[naive_concat,slice_concat]",
    )
    decision = run.summary["decision"]
    assert [entry["strategy"] for entry in decision["ranking"]] == ["slice_concat", "naive_concat"]
    assert "slice_concat errs least" in decision["verdict"]
    assert decision["verdict"] in capsys.readouterr().out
    lines = [json.loads(line) for line in (run.folder / "merge_errors.jsonl").read_text().splitlines()]
    for name in ("slice_concat", "naive_concat"):
        own = [line["errors"][name] for line in lines if line["step"] == 8]
        assert sum(e[0] for e in own) / sum(e[1] for e in own) == pytest.approx(run.rows[-1][f"merge/{name}/abs"])
    assert all(line["errors"]["slice_concat"][2] == 0.0 for line in lines if line["segment"] == 0)


def test_replay_runs_on_every_cell_and_live_on_none(smoke_run):
    replayed, live = smoke_run("strategy=slice_concat", folder="a"), smoke_run("strategy=live", folder="b")
    assert all(row["replay/active_frac"] == 1.0 for row in replayed.rows)
    assert all(row["replay/active_frac"] == 0.0 for row in live.rows)


def largest(rows, key):
    return max(row[key] for row in rows if key in row)


@pytest.mark.parametrize(
    ("overrides", "holds"),
    [
        (["schedule.pause_mode=in_place", "strategy=exact"], lambda rows: largest(rows, "stale/retractions") == 0),
        (["schedule.pause_mode=retract", "strategy=slice_concat"], lambda rows: largest(rows, "stale/retractions") > 0),
        (
            ["algorithm.old_log_prob=decoupled", "algorithm.mini_batches=2", "algorithm.epochs=2"],
            lambda rows: all(
                abs(row["actor/ppo_kl_by_mini_step/first"]) < 1e-5 < abs(row["actor/ppo_kl_by_mini_step/last"])
                for row in rows
            ),
        ),
        (
            ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01", "sampling.temperature=0.8"],
            lambda rows: rows[0]["actor/kl_loss"] < 1e-8 < rows[-1]["actor/kl_loss"] and rows[0]["actor/entropy"] > 0,
        ),
        (
            ["algorithm.ratio_level=sequence", "strategy=replace"],
            lambda rows: all(row["actor/pg_clipfrac_lower"] == 0 for row in rows),
        ),
        (
            ["schedule.sync_interval=2", "schedule.staleness_threshold=0"],
            lambda rows: [row["loop/trainer_version"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3],
        ),
        (["schedule.staleness_threshold=0"], lambda rows: largest(rows, "stale/age_max") == 0),
        (["engine.dtype=bfloat16", "strategy=slice_concat"], lambda rows: rows[0]["gap/abs"] > 1e-4),
        (["sampling.top_p=0.9"], lambda rows: rows[0]["gap/abs"] > 1e-3),
        (["trainer.recompute_activations=true", "strategy=exact"], lambda rows: rows[0]["actor/grad_norm"] > 0),
        (["strategy=recompute"], lambda rows: all(row["replay/active_frac"] == 1.0 for row in rows)),
        (["schedule=wall", "strategy=slice_concat"], lambda rows: largest(rows, "stale/age_max") >= 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_setting_of_the_loop_runs_and_does_what_it_says(smoke_run, overrides, holds):
    run = smoke_run(*overrides)
    assert run.code == 0
    assert len(run.rows) == 8
    assert holds(run.rows)


def test_replayed_log_probs_are_the_engines_where_the_weights_are_the_same(smoke_run):
    """The reference itself is checked against the engine: fresh tokens, and all tokens when the weights never move."""
    fresh = smoke_run("strategy=exact", FAST, folder="fresh").rows
    assert max(row["gap/abs_by_lag/0"] for row in fresh if "gap/abs_by_lag/0" in row) < 1e-5
    frozen = smoke_run("strategy=exact", "trainer.learning_rate=0", folder="frozen").rows
    assert largest(frozen, "gap/abs_max") < 1e-4


def test_in_place_pauses_keep_one_matrix_and_merge_errors_vanish(smoke_run):
    rows = smoke_run("schedule.pause_mode=in_place", "strategy=replace", FAST).rows
    assert max(row["fully_async/partial/partial_ratio"] for row in rows) > 0
    assert max(merge_error(rows, "replace", "abs_max")) == 0.0


def test_a_retraction_is_counted_and_its_rows_are_marked(smoke_run):
    rows = smoke_run("schedule.pause_mode=retract", "strategy=replace", FAST).rows
    assert sum(row["stale/retractions"] for row in rows) > 0
    assert sum(row["stale/mixed_version_calls"] for row in rows) > 0
    assert max(row["merge/excluded_frac"] for row in rows if "merge/excluded_frac" in row) > 0


def test_decoupled_ppo_kl_is_blind_to_the_strategy(smoke_run):
    run = smoke_run("strategy=naive_concat", FAST, "algorithm.old_log_prob=decoupled")
    assert max(abs(row["actor/ppo_kl"]) for row in run.rows) < 1e-5
    assert max(merge_error(run.rows, "naive_concat")) > 1e-3


def test_a_resumed_run_is_the_run_that_was_not_interrupted(smoke_run):
    whole = smoke_run(FAST, "strategy=slice_concat", folder="whole")
    part = smoke_run(FAST, "strategy=slice_concat", "steps=4", folder="part")
    assert whole.metrics_bytes.startswith(part.metrics_bytes)
    resumed = smoke_run(FAST, "strategy=slice_concat", f"resume={part.folder}", folder="part")
    assert resumed.code == 0
    assert resumed.metrics_bytes == whole.metrics_bytes


def test_a_resume_between_two_syncs_gives_the_engine_the_weights_that_it_had(smoke_run):
    settings = (FAST, "schedule.sync_interval=2")
    part = smoke_run(*settings, "steps=3", folder="part")
    rows = smoke_run(*settings, f"resume={part.folder}", folder="part").rows
    assert [row["loop/trainer_version"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    whole = smoke_run(*settings, folder="whole").rows
    # The fourth batch was sampled before the stop and after it, by the same weights: as if nothing had happened.
    assert rows[3]["stale/age_max"] == whole[3]["stale/age_max"]
    assert abs(rows[3]["gap/abs"] - whole[3]["gap/abs"]) < 0.5 * whole[3]["gap/abs"]


def test_a_run_resumed_with_another_configuration_is_refused(smoke_run):
    part = smoke_run("steps=4", folder="part")
    with pytest.raises(ValueError, match=r"algorithm.clip_low=0.2, now algorithm.clip_low=0.1"):
        smoke_run("algorithm.clip_low=0.1", f"resume={part.folder}", folder="part")


def test_a_damaged_checkpoint_is_a_clear_error(smoke_run):
    part = smoke_run("steps=4", folder="part")
    file = part.folder / "checkpoint" / "state.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="truncated or not a checkpoint"):
        smoke_run(f"resume={part.folder}", folder="part")
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        smoke_run(f"resume={part.folder}/elsewhere")


def test_a_merge_error_ends_the_run_with_the_rollout_in_the_message(smoke_run, capsys, monkeypatch):
    """A strategy that lacks rows must stop the run, not fall back; here a user's class that always lacks them."""
    run = smoke_run("strategy._target_=tests.integration.failing_strategy.AlwaysFails")
    assert run.code == 1
    assert "MergeError: rollout r" in capsys.readouterr().err
    assert run.summary["status"] == "failed"
    assert "MergeError" in (run.folder / "traceback.txt").read_text()
    assert json.loads((run.folder / "summary.json").read_text())["error"].startswith("MergeError")
