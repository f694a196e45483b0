"""PPO and gap metrics against slow loops, closed forms and identities."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import mean, pstdev, stdev

import numpy as np
import pytest

from experiments.metrics.log_ratio import LogRatioSums, k3
from experiments.metrics.ratios import best_shift, floor_metrics, gap_metrics, ppo_metrics, shadow_metrics
from experiments.metrics.tokens import TokenTable
from experiments.schema import RatioLevel
from tests.unit.metrics_cases import algorithm, random_batch


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return random_batch(5, spread=0.5).table()


def per_sequence(table: TokenTable, values: np.ndarray) -> list[list[float]]:
    rows: dict[int, list[float]] = defaultdict(list)
    for rollout, value in zip(table.rollout.tolist(), values.tolist(), strict=True):
        rows[rollout].append(value)
    return list(rows.values())


def test_gap_metrics_equal_slow_loops(table: TokenTable):
    x = [a - b for a, b in zip(table.log_probs.tolist(), table.rollout_log_probs.tolist(), strict=True)]
    got = gap_metrics(table, cap=2.0)
    weights = [min(math.exp(v), 2.0) for v in x]
    trainer, engine = per_sequence(table, table.log_probs), per_sequence(table, table.rollout_log_probs)
    g = [mean(e) - mean(t) for t, e in zip(trainer, engine, strict=True)]
    drift = [sum(t) - sum(e) for t, e in zip(trainer, engine, strict=True)]
    p, q = [math.exp(v) for v in table.log_probs], [math.exp(v) for v in table.rollout_log_probs]
    difference = [abs(a - b) for a, b in zip(p, q, strict=True)]
    expected = {
        "gap/abs": mean(abs(v) for v in x),
        "gap/abs_max": max(abs(v) for v in x),
        "gap/sq": mean(v * v for v in x),
        "gap/token_mult_error": mean(math.exp(abs(v)) for v in x),
        "gap/missing_log_probs": 0.0,
        "rollout_corr/kl": mean(-v for v in x),
        "rollout_corr/k3_kl": mean(math.exp(v) - 1 - v for v in x),
        "rollout_corr/training_ppl": mean(math.exp(-mean(s)) for s in trainer),
        "rollout_corr/rollout_ppl": mean(math.exp(-mean(s)) for s in engine),
        "rollout_corr/log_ppl_diff": mean(g),
        "rollout_corr/log_ppl_abs_diff": mean(abs(v) for v in g),
        "rollout_corr/log_ppl_diff_max": max(g),
        "rollout_corr/log_ppl_diff_min": min(g),
        "rollout_corr/ppl_ratio": mean(math.exp(v) for v in g),
        "rollout_corr/chi2_token": mean(math.exp(2 * v) for v in x) - 1,
        "rollout_corr/chi2_seq": mean(math.exp(2 * v) for v in drift) - 1,
        "rollout_corr/rollout_is_mean": mean(weights),
        "rollout_corr/rollout_is_std": pstdev(weights),
        "rollout_corr/rollout_is_max": max(weights),
        "rollout_corr/rollout_is_min": min(weights),
        "rollout_corr/rollout_is_ratio_fraction_high": mean(math.exp(v) > 2 for v in x),
        "rollout_corr/rollout_is_ratio_fraction_low": mean(math.exp(v) < 0.5 for v in x),
        "rollout_corr/rollout_is_eff_sample_size": mean(weights) ** 2 / mean(w * w for w in weights),
        "training/rollout_probs_diff_mean": mean(difference),
        "training/rollout_probs_diff_max": max(difference),
        "training/rollout_probs_diff_std": stdev(difference),
        "training/rollout_actor_probs_pearson_corr": float(np.corrcoef(p, q)[0, 1]),
        "gap_ratio/ratio_mean": mean(math.exp(v) for v in x),
        "gap_ratio/ratio_std": pstdev(math.exp(v) for v in x),
        "gap_ratio/ratio_min": math.exp(min(x)),
        "gap_ratio/ratio_max": math.exp(max(x)),
        "gap_ratio/F2": mean(abs(v) > math.log(2) for v in x),
        "gap_ratio/F5": mean(abs(v) > math.log(5) for v in x),
        "gap_ratio/ess_raw": sum(math.exp(v) for v in x) ** 2 / (len(x) * sum(math.exp(2 * v) for v in x)),
        "gap_ratio/log1p_chi2_seq": math.log(mean(math.exp(2 * v) for v in drift)),
        "gap_ratio/m2": mean(v * v for v in x),
        "gap_ratio/clamped_frac": 0.0,
        "gap_ratio/nonfinite": 0.0,
        "gap_ratio/p50": math.exp(float(np.median(x))),
        "gap_ratio/p99.9": math.exp(float(np.quantile(x, 0.999))),
        "gap/abs_p99": float(np.quantile(np.abs(x), 0.99)),
    }
    assert {key: got[key] for key in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gap_statistics_by_version_segment_and_lag_equal_those_of_the_tokens_alone(table: TokenTable):
    got = gap_metrics(table, cap=2.0)
    multi = gap_metrics(table.select(table.multi_version), cap=2.0)
    last = gap_metrics(table.select((table.segment == table.segments - 1) & (table.segments > 1)), cap=2.0)
    lag = gap_metrics(table.select((table.lag == 3) | (table.lag == 4)), cap=2.0)
    for key in (
        "gap/abs",
        "rollout_corr/k3_kl",
        "rollout_corr/kl",
        "gap_ratio/F2",
        "gap_ratio/m2",
        "gap_ratio/ess_raw",
    ):
        assert got[f"{key}_by_versions/multi"] == pytest.approx(multi[key])
        assert got[f"{key}_by_segment/last"] == pytest.approx(last[key])
        assert got[f"{key}_by_lag/3-4"] == pytest.approx(lag[key])


def test_ppo_metrics_equal_slow_loops(table: TokenTable):
    settings = algorithm(dual_clip=1.3)
    got = ppo_metrics([table], settings)
    d = (table.log_probs - table.old_log_probs).tolist()
    clipped = lower = bad = 0
    for i, v in enumerate(d):
        ratio, advantage = math.exp(v), float(table.advantages[i])
        plain, inside = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28)
        clipped += inside > plain
        lower += advantage < 0 and max(plain, inside) > -advantage * 1.3
        bad += advantage < 0 and math.exp(table.rollout_log_probs[i]) - math.exp(table.log_probs[i]) >= 0.5
    sequence = [math.exp(mean(s)) for s in per_sequence(table, table.log_probs - table.old_log_probs)]
    expected = {
        "actor/ppo_kl": mean(-v for v in d),
        "ppo/kl_k2": mean(v * v / 2 for v in d),
        "ppo/kl_k3": mean(math.exp(v) - 1 - v for v in d),
        "actor/pg_clipfrac": clipped / len(d),
        "actor/pg_clipfrac_lower": lower / len(d),
        "ppo/bad_update_frac": bad / len(d),
        "ppo/seq_ratio": mean(sequence),
        "ppo/seq_ratio_min": min(sequence),
        "ppo/seq_ratio_max": max(sequence),
        "ppo_ratio/ess_trunc": mean(min(math.exp(v), 2) for v in d) ** 2 / mean(min(math.exp(v), 2) ** 2 for v in d),
        "ppo_ratio/chi2_token": mean(math.exp(2 * v) for v in d) - 1,
    }
    assert {key: got[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert 0 < got["actor/pg_clipfrac_lower"] < got["actor/pg_clipfrac"] + 0.5
    assert got["ppo/bad_update_frac"] > 0


def test_sequence_level_clip_fraction_uses_the_ratio_of_the_whole_response(table: TokenTable):
    got = ppo_metrics([table], algorithm(ratio_level=RatioLevel.sequence))
    clipped = 0
    for d, advantage in zip(
        per_sequence(table, table.log_probs - table.old_log_probs), per_sequence(table, table.advantages), strict=True
    ):
        ratio = math.exp(mean(d))
        clipped += len(d) * ((advantage[0] > 0 and ratio > 1.28) or (advantage[0] < 0 and ratio < 0.8))
    assert got["actor/pg_clipfrac"] == pytest.approx(clipped / table.size)
    assert got["actor/pg_clipfrac"] > 0
    assert got["actor/pg_clipfrac_lower"] == 0.0


def test_an_update_is_the_tokens_of_all_its_mini_steps_and_first_and_last_are_told_apart():
    steps = [random_batch(seed, rollouts=count, spread=0.3).table() for seed, count in ((1, 4), (2, 16), (3, 8))]
    got = ppo_metrics(steps, algorithm())
    d = [step.log_probs - step.old_log_probs for step in steps]
    assert got["actor/ppo_kl"] == pytest.approx(-np.concatenate(d).mean())
    for label, step in (("first", 0), ("last", 2)):
        alone = ppo_metrics([steps[step]], algorithm())
        for key in ("actor/ppo_kl", "ppo/kl_k3", "actor/pg_clipfrac", "ppo_ratio/ess_raw"):
            assert got[f"{key}_by_mini_step/{label}"] == pytest.approx(alone[key])


def test_decoupled_ppo_kl_is_blind_on_the_first_mini_step_and_bypass_is_the_gap():
    batch = random_batch(4)
    decoupled = replace(batch.table(), old_log_probs=batch.table().log_probs)
    assert ppo_metrics([decoupled], algorithm())["actor/ppo_kl"] == 0.0
    bypass = batch.table(bypass=True)
    assert ppo_metrics([bypass], algorithm())["actor/ppo_kl"] == pytest.approx(
        gap_metrics(bypass, 2.0)["rollout_corr/kl"]
    )


def test_untruncated_weights_obey_the_variance_identity(table: TokenTable):
    got = gap_metrics(table, 2.0)
    variance_over_mean_square = (got["gap_ratio/ratio_std"] / got["gap_ratio/ratio_mean"]) ** 2
    assert variance_over_mean_square == pytest.approx(1 / got["gap_ratio/ess_raw"] - 1, rel=1e-9)


def test_ess_of_one_dominant_token_is_one_over_n_and_of_equal_weights_one():
    n = 1000
    x = np.zeros(n)
    assert LogRatioSums.of(x, np.arange(n), 2.0).ess == pytest.approx(1.0)
    assert LogRatioSums.of(x, np.arange(n), 2.0).ratio_std == 0.0
    x[0] = 20.0
    assert LogRatioSums.of(x, np.arange(n), 2.0).ess == pytest.approx(1 / n, rel=1e-4)


@pytest.mark.parametrize("x", [0.0, 1e-12, -1e-9, 1e-5, -9.99e-5, 1.01e-4, 0.3, -2.0, 20.0])
def test_k3_is_non_negative_and_right_to_ten_digits_at_any_size(x: float):
    # Taylor series in exact to the last digit: sum of x^n / n! from n = 2, no cancellation for small x.
    expected = sum(x**n / math.factorial(n) for n in range(2, 120))
    got = float(k3(np.array([x]))[0])
    assert got >= 0
    assert got == pytest.approx(expected, rel=1e-9, abs=0)


def test_k3_stays_non_negative_on_many_random_values():
    x = np.random.default_rng(0).normal(0, 1, 20_000) * 10.0 ** np.random.default_rng(1).uniform(-12, 1.5, 20_000)
    assert (k3(x) >= 0).all()


def test_a_huge_log_ratio_is_clamped_in_exponentials_and_counted():
    table = random_batch(6).table()
    log_probs = table.log_probs.copy()
    log_probs[0] = table.rollout_log_probs[0] - 500.0
    got = gap_metrics(replace(table, log_probs=log_probs), 2.0)
    assert got["gap_ratio/clamped_frac"] == pytest.approx(1 / table.size)
    assert got["gap_ratio/ratio_min"] == pytest.approx(math.exp(-20.0))
    assert got["gap/abs_max"] == pytest.approx(500.0)
    assert all(np.isfinite(list(got.values())))


def test_one_outlier_decides_k3_and_the_trimmed_value_shows_it():
    table = random_batch(7, spread=0.001).table()
    log_probs = table.log_probs.copy()
    log_probs[3] = table.rollout_log_probs[3] + 5.0
    got = gap_metrics(replace(table, log_probs=log_probs), 2.0)
    assert got["gap/k3_top_share"] > 0.99
    assert got["gap/k3_trim"] < 1e-5 < got["rollout_corr/k3_kl"]


def test_equal_log_probs_give_the_neutral_value_of_every_metric_and_leave_out_what_is_undefined():
    batch = random_batch(8)
    table = replace(batch.table(), log_probs=batch.table().rollout_log_probs)
    got = gap_metrics(table, 2.0)
    assert got["gap/abs"] == got["rollout_corr/kl"] == got["rollout_corr/k3_kl"] == got["gap_ratio/ratio_std"] == 0.0
    assert got["gap_ratio/p99"] == got["rollout_corr/ppl_ratio"] == got["rollout_corr/rollout_is_mean"] == 1.0
    assert "gap/k3_top_share" not in got
    empty = table.select(np.zeros(0, int))
    assert gap_metrics(empty, 2.0) == {}
    assert ppo_metrics([empty], algorithm()) == {}
    assert shadow_metrics(empty, algorithm(), "replace") == {}


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_best_shift_finds_log_probs_that_are_off_by_one(shift: int):
    table = random_batch(9, spread=0.02).table()
    shifted = replace(table, log_probs=np.roll(table.rollout_log_probs, -shift) + 0.01 * table.log_probs)
    assert best_shift(shifted) == {"gap/shift_best": float(shift)}


def test_noise_floor_of_two_forwards():
    got = floor_metrics(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -2.5, -3.0]))
    assert got["gap/floor_abs"] == pytest.approx(0.5 / 3)
    assert got["gap/floor_abs_max"] == 0.5
    assert got["gap/floor_k3"] == pytest.approx((math.exp(0.5) - 1.5) / 3)


def test_shadow_metrics_put_the_strategy_after_the_group(table: TokenTable):
    got = shadow_metrics(table, algorithm(), "slice_concat")
    assert got["actor/slice_concat/ppo_kl"] == ppo_metrics([table], algorithm())["actor/ppo_kl"]
    assert got["gap/slice_concat/abs_by_lag/3-4"] == gap_metrics(table, 2.0)["gap/abs_by_lag/3-4"]
