"""Metrics read from records: staleness, replay, rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.metrics.replay import replay_metrics
from experiments.metrics.rewards import reward_metrics
from experiments.metrics.staleness import staleness_metrics
from experiments.trainers.base import ReplayCounts
from strategies.types import LIVE, UNKNOWN_VERSION, EngineCall, ReplayView, Rollout
from tests.unit.metrics_cases import EXPERTS, random_batch, random_rows, rollout_of


def test_age_is_token_weighted_and_not_that_of_the_last_segment():
    rollout = rollout_of("r0", 2, [[-1.0] * 3, [-1.0]], [[3, 3, 3], [5]], np.random.default_rng(0))
    got = staleness_metrics([rollout], 6, retractions=0)
    assert got["stale/age_mean"] == 2.5
    assert got["stale/age_max"] == 3
    assert got["fully_async/partial/max_partial_span"] == 2


def test_partial_rollouts_segments_and_coverage_are_counted():
    rng = np.random.default_rng(0)
    rollouts = [
        rollout_of("one", 2, [[-1.0] * 4], [[5] * 4], rng),
        rollout_of("resumed", 2, [[-1.0] * 2, [-1.0] * 2], [[5] * 2, [5] * 2], rng),
        rollout_of("partial", 2, [[-1.0], [-1.0], [-1.0]], [[3], [4], [5]], rng),
        rollout_of("unknown", 2, [[-1.0] * 2, [-1.0]], [[UNKNOWN_VERSION] * 2, [5]], rng),
        rollout_of("in place", 2, [[-1.0] * 2], [[4, 5]], rng),
    ]
    got = staleness_metrics(rollouts, 5, 2)
    assert got["fully_async/partial/partial_ratio"] == pytest.approx(2 / 5)
    assert got["fully_async/partial/total_partial_num"] == 2
    assert got["stale/multi_version_token_frac"] == pytest.approx(5 / 16)
    assert got["stale/version_coverage"] == pytest.approx(14 / 16)
    assert got["stale/age_mean"] == pytest.approx((2 + 1 + 1) / 14)
    assert [got[f"stale/segments_{n}"] for n in ("1", "2", "3", "4plus")] == [2, 2, 1, 0]
    assert got["stale/mixed_version_calls"] == 1
    assert got["stale/retractions"] == 2


def test_the_cost_of_interruption_is_what_later_calls_fed_again():
    rng = np.random.default_rng(0)

    def call(index: int, s: int, n: int, finish: str, **more: object) -> EngineCall:
        rows = random_rows(rng, s + n - 1) if n else None
        versions = np.full(n, 1, np.int32)
        record = EngineCall(f"r.{index}", s, np.zeros(n, np.int32), np.zeros(n, np.float32), rows, versions, finish)
        return replace(record, **more)  # pyright: ignore[reportArgumentType]

    calls = (call(0, 5, 3, "abort"), call(1, 8, 0, "abort"), call(2, 8, 4, "stop"))
    rollout = Rollout("r", np.zeros(12, np.int32), 5, calls, 4, 4, EXPERTS)
    got = staleness_metrics([rollout], 1, retractions=0)
    assert got["stale/empty_aborts"] == 1
    assert got["stale/resumed_tokens"] == 3 + 3
    assert got["stale/reprefill_tokens"] == 7 + 7, "positions 0..6 had been fed; the last sampled token never"
    kept = replace(rollout, calls=(calls[0], call(1, 8, 4, "stop", kv_kept=True)))
    assert staleness_metrics([kept], 1, retractions=0)["stale/reprefill_tokens"] == 0


def test_staleness_refuses_a_token_from_the_future_and_an_empty_batch():
    rollout = rollout_of("r9", 2, [[-1.0]], [[7]], np.random.default_rng(0))
    with pytest.raises(RuntimeError, match="rollout r9 has a token of version 7, the trainer is at 6"):
        staleness_metrics([rollout], 6, retractions=0)
    with pytest.raises(ValueError, match="at least one rollout"):
        staleness_metrics([], 6, retractions=0)


def test_staleness_is_quiet_on_rollouts_that_generated_nothing():
    empty = Rollout("r", np.zeros(3, np.int32), 3, (), 4, 4, EXPERTS)
    got = staleness_metrics([empty], 6, retractions=0)
    assert "stale/age_mean" not in got
    assert got["fully_async/partial/partial_ratio"] == 0


def view(rows: np.ndarray) -> ReplayView:
    mask = np.ones(len(rows) + 1, bool)
    mask[0] = False
    return ReplayView(rows, mask)


def test_replay_shares_and_the_cells_that_fell_back_unasked():
    rows = random_rows(np.random.default_rng(0), 10)
    rows[:3, 1] = LIVE
    got = replay_metrics(ReplayCounts(replayed=74, live=6, mismatched=0), [view(rows)], 2, EXPERTS, {"truncated": 1})
    assert got["replay/active_frac"] == pytest.approx(74 / 80)
    assert got["replay/fallback_frac"] == pytest.approx(6 / 80)
    assert got["replay/unrequested_live"] == 0
    assert got["replay/dropped_samples/truncated"] == 1
    fallen = replay_metrics(ReplayCounts(70, 10, 3), [view(rows)], 2, EXPERTS, {}, layers_used=4)
    assert fallen["replay/unrequested_live"] == 4
    assert fallen["replay/verify_mismatch"] == 3
    assert fallen["replay/layers_used"] == 4


def test_faulty_rows_are_counted():
    counts = ReplayCounts(1, 0, 0)
    rng = np.random.default_rng(1)
    good = [view(random_rows(rng, 30)), view(random_rows(rng, 12))]
    clean = replay_metrics(counts, good, 1, EXPERTS, {})
    faults = ("id_errors", "constant_layer", "repeated_rows", "missing_rows", "surplus_rows")
    assert [clean[f"replay/{name}"] for name in faults] == [0] * 5

    wrong = random_rows(rng, 30)
    wrong[0, 0, 0] = EXPERTS
    wrong[1, 1, 1] = LIVE
    wrong[2, 2, 0] = wrong[2, 2, 1]
    assert replay_metrics(counts, [view(wrong), *good], 1, EXPERTS, {})["replay/id_errors"] == 3

    constant = random_rows(rng, 30)
    constant[:, 2] = constant[0, 2][::-1]
    assert replay_metrics(counts, [*good, view(constant)], 1, EXPERTS, {})["replay/constant_layer"] == 1

    repeated = random_rows(rng, 30)
    repeated[10:19] = repeated[10]
    repeated[20:25] = repeated[20]
    assert replay_metrics(counts, [view(repeated), *good], 1, EXPERTS, {})["replay/repeated_rows"] == 9

    live = np.full((30, 4, 4), LIVE, np.int16)
    quiet = replay_metrics(counts, [view(live)], 1, EXPERTS, {})
    assert [quiet[f"replay/{name}"] for name in faults] == [0] * 5

    short = ReplayView(random_rows(rng, 5), np.ones(8, bool))
    long = ReplayView(random_rows(rng, 9), np.ones(8, bool))
    both = replay_metrics(counts, [short, long], 1, EXPERTS, {})
    assert (both["replay/missing_rows"], both["replay/surplus_rows"]) == (2, 2)


def test_equal_rows_at_the_seam_of_two_views_are_not_a_run():
    rows = random_rows(np.random.default_rng(2), 1)
    halves = [view(np.repeat(rows, 4, axis=0)), view(np.repeat(rows, 4, axis=0))]
    assert replay_metrics(ReplayCounts(1, 0, 0), halves, 1, EXPERTS, {})["replay/repeated_rows"] == 0


def test_rewards_and_lengths():
    rewards = np.array([1.0, 0.0, 0.5, 0.5], np.float32)
    got = reward_metrics(
        rewards, np.array([0, 0, 1, 1]), np.array([4, 8, 2, 2]), full_reward=1.0, max_response_tokens=8
    )
    assert got == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": np.sqrt(0.125),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/solved_frac": 0.25,
            "reward/flat_group_frac": 0.5,
            "response_length/mean": 4.0,
            "response_length/max": 8.0,
            "response_length/min": 2.0,
            "response_length/clip_ratio": 0.25,
        }
    )
    with pytest.raises(RuntimeError, match="reward/mean: 1 of 4"):
        reward_metrics(np.array([1.0, np.nan, 0, 0]), np.zeros(4, int), np.ones(4, int), 1.0, 8)


def test_records_of_a_random_batch_are_consistent():
    batch = random_batch(3)
    got = staleness_metrics(batch.rollouts, 8, retractions=0)
    table = batch.table()
    assert got["stale/age_mean"] == pytest.approx(table.lag.mean())
    assert got["stale/multi_version_token_frac"] == pytest.approx(table.multi_version.mean())
