"""The cluster back end without verl: replay modes, merging, memory, preflight, plan, statistics."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments import check
from experiments.check import ConfigError
from experiments.metrics.metric import PERCENTILES
from experiments.metrics.ratios import gap_metrics, ppo_metrics
from experiments.metrics.registry import undeclared
from experiments.metrics.staleness import staleness_metrics
from experiments.metrics.tokens import TokenTable
from experiments.schema import AlgorithmConfig, RatioLevel
from experiments.verl_backend.columns import token_column, token_table
from experiments.verl_backend.cycle import CycleMetrics, sort_values
from experiments.verl_backend.launch import Job, agent_loops, overrides, resumed_update, strategy_mode
from experiments.verl_backend.merging import FLAGS, Answer, Merging, finish_of
from experiments.verl_backend.plan import plan_text
from experiments.verl_backend.preflight import TESTED, Facts, Node, checks, cluster_nodes
from experiments.verl_backend.replay_mode import ReplayMode, UnsupportedStrategy, interrupted_rollout, replay_mode
from experiments.verl_backend.resources import Layout, ModelSize, expected_memory
from experiments.verl_backend.settings import TrainerSettings
from experiments.verl_backend.sglang_rows import extract_routed_experts_from_meta_info
from experiments.verl_backend.statistics import RatioStatistics, pack, unpack
from strategies import Exact, Gated, LastSegment, Live, MaskStale, MergeError, Recompute, Replace, Shuffled, SliceConcat
from strategies.checks import check_rollout
from strategies.types import EngineCall, ReplayView, Rollout
from tests.conftest import ROOT, compose

QWEN3_30B = ModelSize(48, 2048, 32, 4, 128, 768, 128, 8, 151936)
GOOD = Facts((Node(16, 128),), None, TESTED, None, None, (), None)


def job(*arguments: str, folder: Path = Path("run")) -> Job:
    node = compose("experiment=qwen3_30b_a3b", *arguments)
    config = check.load(node)
    check.check(config, check.build_strategies(config)[0])
    name = next((a.split("=")[1] for a in arguments if a.startswith("strategy=")), "replace")
    return Job(config, node, name, folder, "python run.py")


def failures(of: Job, facts: Facts = GOOD, **changed: Any) -> list[str]:
    mode = strategy_mode(of.config)
    verl = OmegaConf.create(overrides(of, mode))
    for key, value in changed.items():
        OmegaConf.update(verl, key.replace("__", "."), value)
    return checks(of.config, verl, mode, facts)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        (SliceConcat(), ReplayMode("R3", False)),
        (Replace(), ReplayMode("R3", False)),
        (MaskStale(), ReplayMode("R3", False)),
        (Shuffled(seed=0), ReplayMode("R3", False)),
        (LastSegment(), ReplayMode("R3", True)),
        (Gated(max_lag=None, max_churn=0.1), ReplayMode("R3", True)),
        (Gated(max_lag=2, max_churn=0.5), ReplayMode("R3", True, in_trainer=True)),
        (Live(), ReplayMode("disabled", False)),
        (Recompute(), ReplayMode("R2", False)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_strategy_does_decides_verls_replay_mode(strategy: Any, mode: ReplayMode):
    assert replay_mode(strategy) == mode


def test_the_rollout_that_decides_it_is_consistent():
    check_rollout(interrupted_rollout())
    assert len(Exact()(interrupted_rollout())) == 3


def test_what_verl_cannot_carry_is_refused_with_the_reason():
    with pytest.raises(UnsupportedStrategy, match=r"shadow\.every=1"):
        replay_mode(Exact())


def test_a_strategy_that_needs_the_trainers_version_is_merged_there():
    """The agent-loop worker sends all rows and a placeholder that nothing may replay."""
    rule = merging(strategy=Gated(max_lag=1, max_churn=None), live_rows=True, in_trainer=True, keeps_rows=True)
    calls = [rule.record(answer(3, 2, 4), "r.0", {}), rule.record(answer(5, 2, 6, "stop"), "r.1", {})]
    merged = rule.merge("r", [0, 1, 2], [3, 4, 5, 6], calls, {})
    assert merged.rows is not None
    assert (merged.rows == -1).all()
    assert merged.response_mask.all()
    fresh, stale = (
        rule.merge_rows(dataclasses.replace(merged.rollout, trainer_version=version)).rows for version in (5, 6)
    )
    assert (fresh != -1).all()
    assert (stale == -1).all()  # tokens of version 4, two versions old


def merging(**changes: Any) -> Merging:
    rule = Merging(SliceConcat(), 2, 2, 16, True, "raise", False, 3, False, False)
    return dataclasses.replace(rule, **changes)


def answer(sent: int, new: int, rows: int | None, finish: str = "abort") -> Answer:
    content = None if rows is None else np.broadcast_to(np.array([1, 2]), (rows, 2, 2))
    return Answer(sent, list(range(sent, sent + new)), [-1.0] * new, content, 4, finish)


def test_only_live_rows_that_the_trainer_can_leave_live_pass():
    calls = [merging().record(answer(3, 2, 4), "r.0", {}), merging().record(answer(5, 2, 6, "stop"), "r.1", {})]
    with pytest.raises(MergeError, match=r"set backend\.live_rows=true"):
        merging(strategy=LastSegment()).merge("r", [0, 1, 2], [3, 4, 5, 6], calls, {})
    merged = merging(strategy=LastSegment(), live_rows=True).merge("r", [0, 1, 2], [3, 4, 5, 6], calls, {})
    assert merged.rows is not None
    assert (merged.rows == -1).any()


def test_a_strategy_of_several_views_is_an_error_at_the_trajectory_too():
    rows = [np.full((count, 2, 2), 1) + np.arange(2) for count in (4, 6)]
    first = merging().record(Answer(3, [3, 4], [-1.0] * 2, rows[0], 0, "abort"), "r.0", {})
    last = merging().record(Answer(5, [5, 6], [-1.0] * 2, rows[1] + 1, 1, "stop"), "r.1", {})
    with pytest.raises(MergeError, match="one view of 7 tokens expected"):
        merging(strategy=Exact()).merge("r", [0, 1, 2], [3, 4, 5, 6], [first, last], {})


def test_a_trajectory_without_a_generated_token_carries_no_loss_and_no_usable_row():
    call = merging().record(answer(3, 0, None), "r.0", {})
    merged = merging().merge("r", [0, 1, 2], [], [call], {})
    assert merged.response_mask.size == 0
    assert merged.rows is not None
    assert (merged.rows == -1).all()


def test_without_recorded_rows_there_are_none():
    rule = merging(strategy=Live(), records_rows=False)
    merged = rule.merge("r", [0, 1, 2], [3, 4], [rule.record(answer(3, 2, None, "stop"), "r.0", {})], {})
    assert merged.rows is None
    assert merged.rollout.versions().tolist() == [-1, -1, -1, 4, 4]


def test_the_trainer_gets_the_calls_without_rows_unless_it_needs_them():
    for keeps in (False, True):
        rule = merging(keeps_rows=keeps)
        merged = rule.merge("r", [0, 1, 2], [3, 4], [rule.record(answer(3, 2, 4, "stop"), "r.0", {})], {})
        assert (merged.rollout.calls[0].rows is not None) is keeps


def test_stop_reasons_of_both_engines_are_understood():
    assert [finish_of(reason) for reason in ("abort", "aborted", "completed", "length", None)] == [
        *("abort", "abort", "stop", "length", "stop")
    ]


def test_the_payload_of_a_queue_abort_is_empty():
    assert extract_routed_experts_from_meta_info({"meta_info": {}}).shape == (0,)


def test_memory_of_qwen3_30b_by_hand():
    """30.5 G parameters; an eighth of the experts and all of the rest on a GPU; KV of 4 heads of 128, 48 layers."""
    assert pytest.approx(30.53e9, rel=1e-3) == QWEN3_30B.parameters
    assert QWEN3_30B.row_bytes == 768
    assert QWEN3_30B.kv_bytes == 2 * 2 * 48 * 4 * 128
    layout = Layout(8, 8, 1, 1, 1, 8, 1, 4, True, True, 20480, True, 18432, 0.8, 80)
    memory = expected_memory(QWEN3_30B, layout)
    on_a_gpu = QWEN3_30B.expert_parameters / 8 + QWEN3_30B.layer_parameters + QWEN3_30B.embedding_parameters
    assert memory.parameters == pytest.approx(2 * on_a_gpu / 2**30)
    assert memory.gradients == pytest.approx(2 * memory.parameters)
    assert memory.optimizer == 0
    kept = dataclasses.replace(layout, offload_optimizer=False)
    assert expected_memory(QWEN3_30B, kept).training == pytest.approx(memory.training + memory.host_optimizer)
    assert memory.batch_rows_per_trajectory == pytest.approx(13.5)
    assert memory.kv_tokens == int((64 - memory.rollout_weights) * 2**30 // (QWEN3_30B.kv_bytes / 4))


def test_the_preset_passes_the_preflight_of_a_fitting_machine():
    assert failures(job("strategy=slice_concat")) == []


def test_the_preflight_lists_all_failures_at_once():
    versions = TESTED | {"sglang": "0.5.9", "verl": None}
    facts = Facts((Node(0, 4),), None, versions, "no module", {"hidden_size": 1}, ("f",), None, logged_in=False)
    of = job(
        "strategy=slice_concat",
        "backend.verl.trainer.n_gpus_per_node=6",
        "backend.verl.actor_rollout_ref.rollout.calculate_log_probs=false",
        "backend.verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    )
    text = "\n".join(failures(of, facts, ray_kwargs__ray_init__runtime_env__env_vars__WANDB_MODE=None))
    for part in (
        "verl 0.9.1 expected, it is not installed",
        "sglang 0.5.12 expected (the tested version), 0.5.9",
        "calculate_log_probs` must be true, not false",
        "expert x expert-tensor x pipeline parallel size 8 must divide the 6 training GPUs",
        "GPUs: 14 expected (nodes x GPUs: trainer 1 x 6, rollout 1 x 8), this machine has 0 by node",
        "CPUs: 58 expected for verl's actors and pools, which wait for ever without, this machine has 4",
        "cannot import our packages",
        "there is no file",
        "is no MoE",
        "WANDB_MODE=offline expected",
        "no credentials on this node",
        "below the longest sequence",
    ):
        assert part in text


def test_the_nodes_of_a_cluster_are_counted_not_the_one_that_asks():
    head = Node(0, 8)
    fits = dataclasses.replace(GOOD, nodes=(head, Node(8, 64), Node(8, 64)), ray_address="head:6379")
    assert failures(job(), fits) == []
    (failure,) = failures(job(), dataclasses.replace(fits, nodes=(head, Node(8, 128), Node(4, 64), Node(4, 64))))
    assert "the cluster at head:6379 has 0, 8, 4, 4 by node" in failure
    (failure,) = failures(job(), dataclasses.replace(fits, nodes=(), cluster_error="Connection refused"))
    assert failure == "RAY_ADDRESS=head:6379: no Ray cluster answers: Connection refused"


def test_a_cluster_that_cannot_be_asked_is_a_reason_and_no_traceback():
    nodes, error = cluster_nodes("127.0.0.1:1")  # in this environment Ray is missing, in the other nobody listens
    assert nodes == ()
    assert error


def test_replay_keys_that_disagree_with_the_strategy_are_found():
    keys = {
        "actor_rollout_ref__rollout__enable_rollout_routing_replay": False,
        "actor_rollout_ref__actor__megatron__router_replay__mode": "disabled",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "vanilla",
    }
    assert len(failures(job("strategy=slice_concat"), **keys)) == 3


def test_a_checkpoint_of_another_size_is_found():
    facts = dataclasses.replace(GOOD, model_config={"num_experts": 64, "num_hidden_layers": 48})
    assert failures(job(), facts) == ["model: `num_experts` is 64 in its config.json, 128 in conf/"]


def test_r2_needs_decoupled_mode_in_verl():
    assert "algorithm.old_log_prob=decoupled" in failures(job("strategy=recompute"))[0]
    assert failures(job("strategy=recompute", "algorithm.old_log_prob=decoupled")) == []


def test_a_sequence_level_ratio_is_not_silently_ignored():
    assert "are of level token" in failures(job("algorithm.ratio_level=sequence"))[0]


def test_exact_is_refused_and_offered_as_a_shadow():
    with pytest.raises(ConfigError, match="Score it as a shadow instead"):
        strategy_mode(job("strategy=exact").config)


def test_live_rows_are_switched_on_by_what_needs_them():
    assert not strategy_mode(job("strategy=replace").config).live_rows
    needing = (["strategy=last_segment"], ["backend.on_missing_rows=live"])
    for arguments in (*needing, ["shadow.every=5", "shadow.strategies=[live]"]):
        assert strategy_mode(job(*arguments).config).live_rows
    with pytest.raises(ConfigError, match="live_rows=false"):
        strategy_mode(job("strategy=last_segment", "backend.live_rows=false").config)


def test_the_bypass_switch_and_the_libraries_are_set_at_launch(tmp_path: Path):
    of = job("strategy=last_segment", folder=tmp_path)
    values = overrides(of, strategy_mode(of.config))
    actor = values["actor_rollout_ref"]["actor"]
    assert actor["policy_loss"]["loss_mode"] == "bypass_mode"
    assert actor["policy_loss"]["rollout_correction"]["rollout_is"] is None
    assert (actor["ppo_mini_batch_size"], values["rollout"]["total_rollout_steps"]) == (32, 200 * 32)
    assert values["actor_rollout_ref"]["model"]["external_lib"] == [
        "experiments.verl_backend.sglang_rows",
        "experiments.verl_backend.live_rows",
    ]
    environment = values["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    assert environment["WANDB_MODE"] == "offline"
    assert environment["PYTHONPATH"].startswith(str(ROOT))


def test_the_agent_loop_file_builds_the_runs_merging():
    of = job("strategy=gated", "strategy.max_lag=null", "shadow.every=5", "shadow.strategies=[replace]")
    loops = agent_loops(of.config, strategy_mode(of.config))
    assert [loop.name for loop in loops] == ["single_turn_agent", "tool_agent"]
    built = instantiate(loops[0].merging)
    assert built.strategy == Gated(max_lag=None, max_churn=0.5)
    assert (built.num_layers, built.top_k, built.num_experts) == (48, 8, 128)
    assert (built.in_trainer, built.keeps_rows) == (False, True)


def test_the_trainer_reads_its_settings_from_verls_configuration():
    of = job("strategy=gated", "shadow.every=5", "shadow.strategies=[replace]")
    settings = TrainerSettings.of(OmegaConf.create(overrides(of, strategy_mode(of.config))["routemerge"]))
    assert settings.merging.strategy == Gated(max_lag=2, max_churn=0.5)
    assert settings.merging.in_trainer
    assert settings.algorithm == of.config.algorithm
    assert (settings.shadow.own, dict(settings.shadow.strategies)) == ("gated", {"replace": Replace()})
    assert [update for update in range(1, 12) if settings.shadow_due(update)] == [1, 6, 11]


def test_a_run_that_verl_continues_keeps_its_record(tmp_path: Path):
    of = job("backend.verl.trainer.resume_mode=auto", folder=tmp_path)
    verl = OmegaConf.create(overrides(of, strategy_mode(of.config)))
    assert resumed_update(of, verl) is None
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("20")
    assert resumed_update(of, verl) == 80  # a sync every four updates


def test_the_plan_names_strategy_resources_memory_failures_and_values():
    of = job("strategy=slice_concat")
    mode = strategy_mode(of.config)
    text = plan_text(of.config, "slice_concat", mode, overrides(of, mode), None, ["one thing"])
    for part in (
        "strategies.SliceConcat",
        "8 GPUs train",
        "2 engines of 4",
        "30.53 G",
        "FAIL one thing",
        "bypass_mode",
    ):
        assert part in text


ALGORITHM = AlgorithmConfig(
    clip_low=0.2, clip_high=0.28, dual_clip=3.0, ratio_level=RatioLevel.token, importance_weight_cap=2.0
)


def rollouts() -> list[Rollout]:
    """Returns eight rollouts of one to three calls under versions 0 to 2, one log-prob missing."""
    random, out = np.random.default_rng(0), []
    for index in range(8):
        calls, held, prompt = [], 3 + index % 2, 3 + index % 2
        for version in range(1 + index % 3):
            new = 5 + index
            scores = -random.exponential(1.0, new).astype(np.float32)
            if index == 4 and not version:
                scores[1] = np.nan
            call = EngineCall(
                f"{index}.{version}", held, np.ones(new, np.int32), scores, None, np.full(new, version), "abort"
            )
            calls.append(call)
            held += new
        out.append(Rollout(str(index), np.ones(held, np.int32), prompt, tuple(calls), 2, 2, 16))
    return out


def tables(of: list[Rollout], trainer_version: int) -> tuple[TokenTable, TokenTable]:
    """Returns the batch as the local loop sees it, and as a micro-batch of verl's columns gives it."""
    random = np.random.default_rng(1)
    views = [[ReplayView(np.zeros((0, 1, 1), np.int8), rollout.counted())] for rollout in of]
    scores = [[rollout.log_probs().astype(np.float64) + random.normal(0, 0.3, rollout.length)] for rollout in of]
    advantages = random.normal(size=len(of))
    whole = TokenTable.from_views(
        of, views, scores, old_log_probs=None, advantages=advantages, trainer_version=trainer_version
    )
    codes = token_column(of, 40, trainer_version)
    counted = np.zeros(codes.shape, bool)
    prompt = np.array([rollout.prompt_len for rollout in of])
    counted[whole.rollout, whole.position - prompt[whole.rollout]] = True
    assert (codes[~counted] == 0).all()
    flat = token_table(
        codes[counted],
        whole.rollout,
        whole.log_probs,
        whole.old_log_probs,
        whole.rollout_log_probs,
        whole.advantages,
    )
    return whole, flat


def exact_keys(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics without those that a histogram gives within 4 %."""
    histogram = {f"{ratio}/p{q}" for ratio in ("gap_ratio", "ppo_ratio") for q in PERCENTILES}
    histogram |= {"gap/abs_p99", "gap/abs_p99.9", "gap/k3_trim", "gap/k3_top_share"}
    return {str(key): value for key, value in metrics.items() if key not in histogram}


def test_the_metrics_are_those_of_the_local_loop_after_verls_reduction():
    """Sums over micro-batches, means over two ranks; every split, the clipped tokens, the sequences' ratios."""
    whole, flat = tables(rollouts(), trainer_version=4)
    parts = [RatioStatistics.of(flat.select(np.isin(flat.rollout, own)), ALGORITHM) for own in ([0, 1, 2], [3, 4], [])]
    parts.append(RatioStatistics.of(flat.select(flat.rollout >= 5), ALGORITHM))
    packed, ranks = [pack(part) for part in parts], 2
    reduced = {
        key: {"sum": sum(values) / ranks, "min": min(values), "max": max(values)}[packed[0][key][1]]
        for key in packed[0]
        for values in [[of[key][0] for of in packed]]
    }
    came = unpack(reduced, ranks, 2.0)
    expected = ppo_metrics([whole], ALGORITHM)
    ours = came.ppo_metrics() | came.mini_step_metrics("first") | came.mini_step_metrics("last")
    assert set(ours) == set(expected)
    assert exact_keys(ours) == pytest.approx(exact_keys(expected), rel=1e-9, abs=1e-12)
    gap = gap_metrics(whole, 2.0)
    assert set(came.gap_metrics()) == set(gap) - {"gap/missing_log_probs"}
    left = exact_keys(came.gap_metrics())
    assert left == pytest.approx({key: value for key, value in exact_keys(gap).items() if key in left}, rel=1e-9)
    assert unpack({key: value for key, (value, _) in packed[2].items()}, 1, 2.0).ppo_metrics() == {}


def test_a_cycle_gives_what_the_local_loop_logs_of_rollouts_and_starts_again():
    of, cycle = rollouts(), CycleMetrics(max_response_tokens=40)
    assert cycle.values() == {}
    for update in range(2):
        half = of[4 * update : 4 * update + 4]
        cycle.add_batch(half, [1.0, 0.0, 0.5, 0.5], ["a", "a", "b", "b"], trainer_version=4)
        cycle.count_flags(np.eye(len(FLAGS), dtype=int)[[list(FLAGS).index("dropped")]])
    cycle.add_values({"merge/replace/abs": 0.5})
    metrics = {"actor/rollout_corr/kl": 1.0, "response_length/mean": 9.0, "perf/throughput": 3.0}
    cycle.take_over(metrics)
    assert metrics == {"rollout_corr/kl": 1.0, "perf/throughput": 3.0}
    values = cycle.finish()
    assert cycle.values() == {}
    assert undeclared(values) == []
    assert values["replay/dropped_samples/rows_missing"] == 2.0
    assert values["replay/rollouts"] == 8.0
    assert values["gap/missing_log_probs"] == 1.0
    assert values["merge/replace/abs"] == 0.5
    assert (values["reward/mean"], values["reward/flat_group_frac"]) == (0.5, 0.5)
    for key, value in staleness_metrics(of, 4, 0).items():
        assert key == "stale/retractions" or values[key] == value


def test_what_verl_logs_is_sorted_into_metrics_timings_and_the_rest():
    metrics, timings, others = sort_values(
        {"actor/grad_norm": 0.5, "timing_s/gen": 2.0, "timing_s/old_log_prob": 1.0, "perf/mfu": 0.1, "text": "no"}
    )
    assert metrics == {"actor/grad_norm": 0.5}
    assert timings == {"time/generate_s": 2.0, "time/score_s": 1.0}
    assert set(others) == {"timing_s/gen", "timing_s/old_log_prob", "perf/mfu"}
