"""Merge error and the decomposition of the log-ratio."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.metrics.decomposition import decompose, decomposition_metrics, rest_metrics
from experiments.metrics.merge_error import merge_errors, merge_metrics
from experiments.metrics.tokens import TokenTable
from tests.unit.metrics_cases import random_batch, view_per_segment


@pytest.fixture(scope="module")
def exact() -> TokenTable:
    return random_batch(11, rollouts=40, per_segment=True).table()


def shifted(table: TokenTable, error: np.ndarray) -> TokenTable:
    return replace(table, log_probs=table.log_probs + error)


def test_merge_error_is_the_difference_at_equal_tokens_and_zero_for_exact_itself(exact: TokenTable):
    assert merge_metrics(exact, exact, "exact", floor=0.0)["merge/exact/abs"] == 0.0
    error = np.random.default_rng(0).normal(0, 0.3, exact.size)
    got = merge_metrics(shifted(exact, error), exact, "replace", floor=0.1)
    expected = {
        "merge/replace/mean": error.mean(),
        "merge/replace/abs": np.abs(error).mean(),
        "merge/replace/abs_p99": np.quantile(np.abs(error), 0.99),
        "merge/replace/abs_p99.9": np.quantile(np.abs(error), 0.999),
        "merge/replace/abs_max": np.abs(error).max(),
        "merge/replace/k3": np.mean([math.exp(m) - 1 - m for m in error]),
        "merge/replace/F2": np.mean(np.abs(error) > math.log(2)),
        "merge/replace/nonzero_frac": np.mean(np.abs(error) > 0.1),
        "merge/replace/loss_frac": 1.0,
    }
    assert {key: got[key] for key in expected} == pytest.approx(expected)


def test_error_confined_to_first_segments_shows_in_that_bucket_alone(exact: TokenTable):
    early = (exact.segment == 0) & (exact.segments > 1)
    got = merge_metrics(shifted(exact, np.where(early, 0.25, 0.0)), exact, "replace", floor=0.0)
    for statistic in ("mean", "abs", "abs_p99"):
        assert got[f"merge/replace/{statistic}_by_segment/first"] == pytest.approx(0.25)
        assert got[f"merge/replace/{statistic}_by_segment/last"] == pytest.approx(0.0)
        assert got[f"merge/replace/{statistic}_by_segment/only"] == pytest.approx(0.0)
        assert got[f"merge/replace/{statistic}_by_versions/single"] <= 0.25
    assert got["merge/replace/abs_by_boundary/after_0"] == pytest.approx(0.0)
    assert got["merge/replace/abs_by_boundary/before_3_1"] > 0.05


def test_error_by_probability_and_lag_is_over_the_tokens_of_the_bucket(exact: TokenTable):
    error = np.random.default_rng(1).normal(0, 0.3, exact.size)
    got = merge_metrics(shifted(exact, error), exact, "replace", floor=0.0)
    probability = np.exp(exact.rollout_log_probs)
    keep = (probability >= 0.3) & (probability < 0.4)
    assert got["merge/replace/abs_by_prob/3"] == pytest.approx(np.abs(error[keep]).mean())
    assert got["merge/replace/k3_by_lag/2"] == pytest.approx(np.mean(np.expm1(error) - error, where=exact.lag == 2))


def test_a_strategy_that_masks_is_compared_on_its_own_tokens(exact: TokenTable):
    error = np.random.default_rng(2).normal(0, 0.3, exact.size)
    last = exact.segment == exact.segments - 1
    masked = shifted(exact, error).select(last)
    assert merge_errors(masked, exact) == pytest.approx(error[last])
    got = merge_metrics(masked, exact, "mask_stale", floor=0.0)
    assert got["merge/mask_stale/loss_frac"] == pytest.approx(last.mean())
    assert merge_metrics(exact.select(np.zeros(0, int)), exact, "none", floor=0.0) == {}


def test_a_token_that_the_exact_views_lack_is_an_error(exact: TokenTable):
    with pytest.raises(RuntimeError, match="1 tokens carry loss under the strategy, but in no exact view; first: r0"):
        merge_errors(exact, exact.select(np.arange(1, exact.size)))


def test_tables_over_other_rollouts_are_refused(exact: TokenTable):
    with pytest.raises(ValueError, match="not over the same rollouts"):
        merge_errors(random_batch(1, rollouts=3).table(), exact)


def test_parts_add_up_to_the_log_ratio_token_by_token_and_in_the_second_moments(exact: TokenTable):
    rng = np.random.default_rng(3)
    strategy = shifted(exact, rng.normal(0, 0.2, exact.size))
    generating = shifted(exact, rng.normal(0, 0.1, exact.size))
    parts = decompose(strategy, exact, generating)
    total = strategy.log_probs - strategy.rollout_log_probs
    assert parts.stale + parts.merge + parts.engine == pytest.approx(total, abs=1e-12)
    assert parts.stale == pytest.approx(exact.log_probs - generating.log_probs)
    assert parts.engine == pytest.approx(generating.log_probs - exact.rollout_log_probs)
    got = decomposition_metrics(parts)
    means = sum(got[f"decomp/{part}_mean"] for part in ("stale", "merge", "engine"))
    squares = sum(got[f"decomp/{part}_sq"] for part in ("stale", "merge", "engine"))
    cross = sum(got[f"decomp/cov_{pair}"] for pair in ("stale_merge", "stale_engine", "merge_engine"))
    assert means == pytest.approx(total.mean())
    assert squares + 2 * cross == pytest.approx(np.mean(total**2))
    assert got["decomp/residual_max"] < 1e-12
    assert got["decomp/coverage"] == 1.0


def test_tokens_without_generating_weights_are_left_out_of_the_parts_and_counted(exact: TokenTable):
    old = exact.lag >= 4
    parts = decompose(exact, exact, shifted(exact, np.full(exact.size, 0.1)).select(~old))
    assert parts.coverage == pytest.approx(1 - old.mean())
    assert parts.stale == pytest.approx(np.full(int((~old).sum()), -0.1))
    nothing = decompose(exact, exact, exact.select(np.zeros(0, int)))
    assert decomposition_metrics(nothing) == {"decomp/coverage": 0.0}


def test_without_old_weights_the_rest_is_the_gap_minus_the_merge_error(exact: TokenTable):
    strategy = shifted(exact, np.random.default_rng(4).normal(0, 0.2, exact.size))
    rest = exact.log_probs - exact.rollout_log_probs
    got = rest_metrics(strategy, exact)
    assert got["decomp/rest_mean"] == pytest.approx(rest.mean())
    assert got["decomp/rest_sq"] == pytest.approx(np.mean(rest**2))


def test_a_view_per_segment_and_the_table_cover_the_same_tokens():
    batch = random_batch(12)
    assert sum(v.loss_mask.sum() for r in batch.rollouts for v in view_per_segment(r)) == batch.table().size
