"""The cluster back end without verl: replay modes, merging, statistics."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest

from experiments.metrics.metric import PERCENTILES
from experiments.metrics.ratios import gap_metrics, ppo_metrics
from experiments.metrics.registry import undeclared
from experiments.metrics.staleness import staleness_metrics
from experiments.metrics.tokens import TokenTable
from experiments.schema import AlgorithmConfig, RatioLevel
from experiments.verl_backend.columns import token_column, token_table
from experiments.verl_backend.cycle import CycleMetrics, sort_values
from experiments.verl_backend.merging import FLAGS, Answer, Merging, finish_of
from experiments.verl_backend.replay_mode import ReplayMode, UnsupportedStrategy, interrupted_rollout, replay_mode
from experiments.verl_backend.sglang_rows import extract_routed_experts_from_meta_info
from experiments.verl_backend.statistics import RatioStatistics, pack, unpack
from strategies import Exact, Gated, LastSegment, Live, MaskStale, MergeError, Recompute, Replace, Shuffled, SliceConcat
from strategies.checks import check_rollout
from strategies.reply import ReplyError
from strategies.types import EngineCall, ReplayView, Rollout


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


@dataclasses.dataclass(frozen=True)
class Broken:
    """slice_concat, with its view spoiled."""

    spoil: Any
    single_view: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        (view,) = SliceConcat()(rollout)
        return [self.spoil(view)]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda v: ReplayView(v.rows[:-2], v.loss_mask), r"shape \(6, 2, 2\) expected, int8 of \(4, 2, 2\) came"),
        (lambda v: ReplayView(v.rows[:, :1], v.loss_mask), r"of \(6, 1, 2\) came"),
        (lambda v: ReplayView(v.rows.astype(np.float32), v.loss_mask), "float32"),
        (lambda v: ReplayView(v.rows + np.int32(40000), v.loss_mask), r"0\.\.15, or -1, expected, 40001\.\.40002 came"),
        (lambda v: ReplayView(v.rows - np.int8(5), v.loss_mask), r"-4\.\.-3 came"),
        (lambda v: ReplayView(v.rows, np.ones_like(v.loss_mask)), r"put it on token 0 \(3 such tokens\)"),
    ],
    ids=["short", "a layer short", "float", "beyond 16 bits", "negative", "loss on the prompt"],
)
@pytest.mark.parametrize("policy", ["raise", "drop", "live"])
def test_a_view_that_verl_would_fill_or_cut_is_an_error(spoil: Any, text: str, policy: Any):
    """verl's worker puts zeros where rows are short: the trainer would replay expert 0."""
    rule = merging(strategy=Broken(spoil), on_missing_rows=policy, live_rows=True)
    calls = [rule.record(answer(3, 2, 4), "r.0", {}), rule.record(answer(5, 2, 6, "stop"), "r.1", {})]
    with pytest.raises(MergeError, match=f"rollout r: .*{text}"):
        rule.merge("r", [0, 1, 2], [3, 4, 5, 6], calls, {})


def test_an_error_of_a_users_class_names_trajectory_and_class():
    def spoil(view: ReplayView) -> ReplayView:
        raise KeyError("layer")

    for policy in ("raise", "drop"):
        rule = merging(strategy=Broken(spoil), on_missing_rows=policy)
        with pytest.raises(RuntimeError, match="rollout r, strategy Broken: KeyError: 'layer'"):
            rule.merge("r", [0, 1, 2], [3, 4], [rule.record(answer(3, 2, 4, "stop"), "r.0", {})], {})


def test_a_strategy_of_several_views_is_an_error_at_the_trajectory_too():
    rows = [np.full((count, 2, 2), 1) + np.arange(2) for count in (4, 6)]
    first = merging().record(Answer(3, [3, 4], [-1.0] * 2, rows[0], 0, "abort"), "r.0", {})
    last = merging().record(Answer(5, [5, 6], [-1.0] * 2, rows[1] + 1, 1, "stop"), "r.1", {})
    with pytest.raises(MergeError, match="one view of 7 tokens expected"):
        merging(strategy=Exact()).merge("r", [0, 1, 2], [3, 4, 5, 6], [first, last], {})


@pytest.mark.parametrize("fault", ["no rows", "a row short"])
def test_missing_rows_are_an_error_or_dropped_or_live_and_counted(fault: str):
    """F1, F2, F4; tests/verl/test_client.py has them behind verl's client."""
    rows = None if fault == "no rows" else 3
    for policy in ("raise", "drop", "live"):
        rule, flags = merging(on_missing_rows=policy, live_rows=True), {}

        def merged(rule: Merging = rule, flags: dict[str, int] = flags) -> Any:
            calls = [rule.record(answer(3, 2, rows), "r.0", flags), rule.record(answer(5, 2, 6, "stop"), "r.1", flags)]
            return rule.merge("r", [0, 1, 2], [3, 4, 5, 6], calls, flags)

        if policy == "raise":
            with pytest.raises((MergeError, ReplyError), match=r"request r\.0"):
                merged()
            continue
        came = merged()
        assert (came.rows == -1).all()
        assert came.response_mask.tolist() == [policy == "live"] * 4
        refused = {"rows_refused": 1} if fault == "a row short" else {}
        assert dict(came.flags) == {"rows_missing": 1, "dropped" if policy == "drop" else "live": 1, **refused}


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
