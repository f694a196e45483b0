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
from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.verl_backend.cycle import CycleMetrics, lag_index, lag_indices
from experiments.verl_backend.launch import Job, agent_loops, overrides, strategy_mode
from experiments.verl_backend.merging import FLAGS, Answer, Merging, finish_of
from experiments.verl_backend.plan import plan_text
from experiments.verl_backend.preflight import TESTED, Facts, checks
from experiments.verl_backend.replay_mode import ReplayMode, UnsupportedStrategy, interrupted_rollout, replay_mode
from experiments.verl_backend.resources import Layout, ModelSize, expected_memory
from experiments.verl_backend.sglang_rows import extract_routed_experts_from_meta_info
from experiments.verl_backend.statistics import StepStatistics, pack, unpack
from strategies import Exact, Gated, LastSegment, Live, MaskStale, MergeError, Recompute, Replace, Shuffled, SliceConcat
from strategies.checks import check_rollout
from tests.conftest import ROOT, compose

QWEN3_30B = ModelSize(48, 2048, 32, 4, 128, 768, 128, 8, 151936)
GOOD = Facts(16, TESTED, None, None, (), None)


def job(*arguments: str, folder: Path = Path("run")) -> Job:
    node = compose("experiment=qwen3_30b_a3b", *arguments)
    config = check.load(node)
    check.check(config, check.build_strategies(config)[0])
    name = next((a.split("=")[1] for a in arguments if a.startswith("strategy=")), "replace")
    return Job(config, node, name, folder)


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


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [(Exact(), "shadow.every=1"), (Gated(max_lag=2, max_churn=None), "needs Rollout.trainer_version")],
)
def test_what_verl_cannot_carry_is_refused_with_the_reason(strategy: Any, reason: str):
    with pytest.raises(UnsupportedStrategy, match=reason):
        replay_mode(strategy)


def merging(**changes: Any) -> Merging:
    rule = Merging(SliceConcat(), 2, 2, 16, True, "raise", False, 3, {})
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
    assert merged.versions.tolist() == [4, 4]


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
    facts = Facts(0, TESTED | {"sglang": "0.5.9", "verl": None}, "no module", {"hidden_size": 1}, ("f",), None)
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
        "GPUs: 14 expected",
        "cannot import our packages",
        "there is no file",
        "is no MoE",
        "WANDB_MODE=offline expected",
        "below the longest sequence",
    ):
        assert part in text


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
    assert {name: type(rule) for name, rule in built.shadow.items()} == {"exact": Exact, "replace": Replace}


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


def test_statistics_survive_sums_over_micro_batches_and_means_over_ranks():
    random = np.random.default_rng(0)
    x, lag = random.normal(0, 0.1, 400), random.integers(-1, 6, 400)
    sequence = np.repeat(np.arange(8), 50)
    parts = [StepStatistics.of(x[rows], sequence[rows], lag[rows], 2.0) for rows in np.split(np.arange(400), 4)]
    packed = [pack(part) for part in [*parts, StepStatistics.of(x[:0], sequence[:0], lag[:0], 2.0)]]
    ranks = 2
    reduced = {
        key: {"sum": sum(values) / ranks, "min": min(values), "max": max(values)}[packed[0][key][1]]
        for key in packed[0]
        for values in [[of[key][0] for of in packed]]
    }
    whole = LogRatioAccumulator.of(x, sequence, 2.0)
    came = unpack(reduced, ranks, 2.0)
    expected = whole.gap_metrics()
    assert {k: came.gap_metrics()[k] for k in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert unpack({key: value for key, (value, _) in packed[-1].items()}, 1, 2.0).ppo_metrics() == {}


def test_version_lags_fall_into_the_buckets_of_the_local_loop():
    assert lag_index(np.array([0, 1, 2, 3, 4, 5, 8, 9, 50])).tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    assert lag_indices([np.array([0, 3, -1], np.int32)], 5, 3).tolist() == [[3, 0, -1, -1, -1]]


def test_row_counters_add_up_over_a_cycle_and_start_again():
    cycle, metrics = CycleMetrics(), {}
    for _ in range(2):
        cycle.count_flags(np.eye(len(FLAGS), dtype=int)[[FLAGS.index("dropped")]])
    cycle.finish_step(metrics, last_of_cycle=True)
    assert (metrics["replay/dropped"], metrics["replay/trajectories"]) == (2.0, 2.0)
    assert cycle.values()["replay/dropped"] == 0.0
