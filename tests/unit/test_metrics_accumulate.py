"""Accumulated statistics equal those of the whole batch; averaged ones do not."""

from __future__ import annotations

import re
from functools import reduce
from operator import add

import numpy as np
import pytest

from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.metrics.log_ratio import LogRatioSums
from experiments.metrics.ratios import Exact, gap_statistics, ppo_statistics

APPROXIMATE = re.compile(r".*_ratio/p[\d.]+|gap/abs_p[\d.]+|gap/k3_trim|gap/k3_top_share")
"""Keys that come from the histogram."""


def log_ratios(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns x `[N]` and the sequence `[N]` of each token, sequences of 1 to 40 tokens."""
    rng = np.random.default_rng(0)
    sequence = np.repeat(np.arange(300), rng.integers(1, 41, 300))
    x = {
        "bulk": rng.normal(0, 0.05, sequence.size),
        "heavy tail": rng.standard_t(2, sequence.size) * 0.05,
        "tiny": rng.normal(0, 1e-5, sequence.size),
        "exact zeros": np.where(rng.random(sequence.size) < 0.9, 0.0, rng.normal(0, 0.3, sequence.size)),
        "beyond the clamp": rng.normal(0, 15, sequence.size),
    }[case]
    return x, sequence


def parts_of(sequence: np.ndarray, parts: int) -> list[np.ndarray]:
    """Returns unequal groups of whole sequences."""
    share = np.arange(1, parts + 1) / sum(range(1, parts + 1))
    owner = np.random.default_rng(1).choice(parts, sequence.max() + 1, p=share)
    return [owner[sequence] == part for part in range(parts)]


@pytest.mark.parametrize("case", ["bulk", "heavy tail", "tiny", "exact zeros", "beyond the clamp"])
def test_accumulated_statistics_equal_those_of_the_whole_batch(case: str):
    x, sequence = log_ratios(case)
    total = reduce(add, (LogRatioAccumulator.of(x[keep], sequence[keep], 2.0) for keep in parts_of(sequence, 7)))
    sums, exact = LogRatioSums.of(x, sequence, 2.0), Exact(x)
    for got, expected in (
        (total.gap_metrics(), gap_statistics(sums, exact)),
        (total.ppo_metrics(), ppo_statistics(sums, exact)),
    ):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            if not APPROXIMATE.fullmatch(key):
                assert got[key] == pytest.approx(value, rel=1e-9, abs=1e-15), key
            elif "_ratio/" in key:
                assert np.log(got[key]) == pytest.approx(np.log(value), rel=0.04, abs=1e-6), key
            else:
                bound = 20.0 if "abs_p" in key else np.inf
                assert got[key] == pytest.approx(min(value, bound), rel=0.04, abs=1e-6), key


def test_one_outlier_is_seen_whole_and_hidden_by_averaging_over_micro_batches():
    rng = np.random.default_rng(3)
    x = rng.normal(0, 0.02, 8 * 512)
    x[100] = np.log(70.0)
    sequence = np.arange(x.size) // 64
    parts = [slice(512 * i, 512 * (i + 1)) for i in range(8)]
    accumulators = [LogRatioAccumulator.of(x[part], sequence[part], 2.0) for part in parts]
    truth = np.exp(x).sum() ** 2 / (x.size * np.exp(2 * x).sum())
    whole = reduce(add, accumulators).gap_metrics()
    averaged = np.mean([a.gap_metrics()["gap_ratio/ess_raw"] for a in accumulators])
    assert whole["gap_ratio/ess_raw"] == pytest.approx(truth, rel=1e-9)
    assert truth < 0.5 < 0.85 < averaged
    largest = np.mean([a.gap_metrics()["gap_ratio/ratio_max"] for a in accumulators])
    assert whole["gap_ratio/ratio_max"] == pytest.approx(70.0)
    assert largest < 15


def test_order_and_grouping_of_merges_do_not_matter():
    x, sequence = log_ratios("heavy tail")
    a, b, c = (LogRatioAccumulator.of(x[keep], sequence[keep], 2.0) for keep in parts_of(sequence, 3))
    left, right = ((a + b) + c).gap_metrics(), (c + (b + a)).gap_metrics()
    assert left == pytest.approx(right, rel=1e-12)


def test_a_value_that_is_not_finite_is_refused_and_caps_must_agree():
    with pytest.raises(RuntimeError, match="1 of 2 values are NaN or infinite"):
        LogRatioAccumulator.of(np.array([0.0, np.nan]), np.array([0, 0]), 2.0)
    one = LogRatioAccumulator.of(np.zeros(2), np.zeros(2, int), 2.0)
    with pytest.raises(ValueError, match="caps of truncated weights differ"):
        _ = one + LogRatioAccumulator.of(np.zeros(2), np.zeros(2, int), 3.0)
