"""Whole runs of experiment=smoke with engine.resume_rows=pinned: what it makes of the rules, and that it repeats."""

import pytest

FAST = ("trainer.learning_rate=2e-3", "threads=1")
PINNED = (*FAST, "engine.resume_rows=pinned")
ONE_ROW = "strategy._target_=tests.integration.one_row_strategy.OneRow"
OTHER_RULES = ("shadow.every=1", "shadow.probe_every=1", "shadow.strategies=[replace,slice_concat]")


def values(rows, key):
    """Returns the metric of every update that has it."""
    found = [row[key] for row in rows if key in row]
    assert found
    return found


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_every_position_has_one_row_and_no_rule_has_an_error(smoke_run, mode):
    """Tokens of the newest version are the check of exactness: their log-probs are the engine's, behind any resume."""
    run = smoke_run(*PINNED, ONE_ROW, *OTHER_RULES, f"schedule.pause_mode={mode}")
    assert run.code == 0, "the strategy found a position with two rows"
    rows = run.rows
    assert max(values(rows, "fully_async/partial/partial_ratio")) > 0.2
    assert max(values(rows, "merge/replace/abs_max") + values(rows, "merge/slice_concat/abs_max")) == 0.0
    assert max(values(rows, "gap/abs_by_lag/0")) < 1e-5
    assert max(values(rows, "merge/excluded_frac")) == 0.0
    assert max(values(rows, "route/audit_mismatch")) == 0.0, "behind the pinned prefix the router chose itself"
    assert (
        sum(values(rows, "stale/retractions")) == 0 if mode == "abort" else sum(values(rows, "stale/retractions")) > 0
    )


def test_a_position_has_two_rows_when_prefixes_are_routed_afresh(smoke_run, capsys):
    """The default, as real engines do; and the proof that the test above can fail."""
    assert smoke_run(*FAST, ONE_ROW).code == 1
    assert "used other rows" in capsys.readouterr().err


def test_exact_costs_one_forward_per_rollout_and_trains_as_slice_concat(smoke_run):
    exact = smoke_run(*PINNED, "strategy=exact", folder="exact")
    sliced = smoke_run(*PINNED, "strategy=slice_concat", folder="sliced")
    for key in ("actor/ppo_kl", "actor/grad_norm", "reward/mean"):
        assert values(exact.rows, key) == values(sliced.rows, key)


def test_a_pinned_run_repeats_to_the_byte_also_through_a_checkpoint(smoke_run):
    settings = (*PINNED, "strategy=slice_concat")
    whole = smoke_run(*settings, folder="whole")
    part = smoke_run(*settings, "steps=4", folder="part")
    assert whole.metrics_bytes.startswith(part.metrics_bytes)
    resumed = smoke_run(*settings, f"resume={part.folder}", folder="part")
    assert resumed.metrics_bytes == whole.metrics_bytes
