"""Statistics over paired seeds against numbers worked by hand, rliable's, and a simulated null."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.compare import (
    bearable_tests,
    holm,
    interval,
    interval_coverage,
    iqm,
    paired,
    performance_profile,
    probability_of_improvement,
    sign_flip,
)
from analysis.scalars import direction, scalars
from tests.unit.study_kit import METRIC, make_runs, one_run, two_arms

NAN = math.nan


# One number per run.


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", 3.0),
        ("median", 2.0),
        ("p95", 3 + 0.8 * 6),
        ("max", 9.0),
        ("min", 0.0),
        ("sd", math.sqrt(50 / 4)),
        ("auc", (0.5 + 1.5 + 2.5 + 6) / 4),
        ("first_fifth", 0.0),
        ("last_fifth", 9.0),
        ("last", 9.0),
    ],
)
def test_a_run_becomes_one_number(reduce: str, expected: float) -> None:
    runs = make_runs(one_run("replace", 0, {METRIC: [0, 1, 2, 3, 9]}, steps=5))
    (row,) = scalars(runs, METRIC, reduce).to_dict("records")
    assert row["value"] == pytest.approx(expected)
    assert (row["strategy"], row["seed"], row["updates"], row["reason"]) == ("replace", 0, 5, "")


def test_a_sparse_metric_is_reduced_over_the_updates_that_logged_it_and_says_how_many() -> None:
    runs = make_runs(one_run("replace", 0, {METRIC: [NAN, 1, NAN, 3, 9]}, steps=5))
    row = scalars(runs, METRIC, "auc").iloc[0]
    assert row["value"] == pytest.approx((2 * 2 + 6) / 3)  # between updates 2, 4 and 5
    assert row["updates"] == 3


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (one_run("replace", 0, {METRIC: [1, np.inf, 1]}, steps=3), "not finite at update 2"),
        (one_run("replace", 0, {METRIC: NAN}), "never logged"),
        (one_run("replace", 0, {"reward/mean": 1.0}), "never logged"),
        (one_run("replace", 0, {METRIC: 1.0}, steps=5, planned=9, status="failed"), "failed after 5 of 9 updates"),
        (one_run("replace", 0, {METRIC: 1.0}, steps=5, planned=9), "ended after 5 of 9 updates"),
    ],
)
def test_a_curve_that_is_not_whole_gives_no_number_and_the_reason(run: dict, reason: str) -> None:
    row = scalars(make_runs(run, one_run("exact", 0, {METRIC: 1.0})), METRIC, "mean").iloc[0]
    assert math.isnan(row["value"])
    assert row["reason"] == reason


def test_an_unknown_reduction_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="reduce='average': expected one of mean, median"):
        scalars(make_runs(one_run("replace", 0, {})), METRIC, "average")


@pytest.mark.parametrize(
    ("metric", "reduce", "better"),
    [
        (METRIC, "mean", "lower"),
        ("merge/replace/abs", "mean", "lower"),
        ("gap_ratio/F2", "mean", "lower"),
        ("ppo_ratio/ess_raw", "min", "higher"),
        ("ppo_ratio/p99.9", "max", "lower"),
        ("ppo_ratio/p0.1", "min", "higher"),
        ("ppo_ratio/p50", "mean", "none"),
        ("actor/pg_clipfrac", "mean", "lower"),
        ("actor/ppo_kl", "mean", "none"),
        ("actor/ppo_kl", "sd", "lower"),
        ("reward/mean", "auc", "higher"),
        ("reward/mean", "sd", "none"),
    ],
)
def test_the_better_end_of_a_scalar_is_known(metric: str, reduce: str, better: str) -> None:
    assert direction(metric, reduce) == better


# Pairs.


def test_six_differences_of_one_sign_give_the_smallest_p() -> None:
    result = paired(scalars(two_arms([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]), METRIC, "mean"), "slice_concat", "replace")
    assert (result.n, result.seeds, result.standing) == (6, (0, 1, 2, 3, 4, 5), "confirmatory")
    assert result.p == result.smallest_p == 2 / 64
    assert result.mean == pytest.approx(-0.35)
    assert result.mean_a - result.mean_b == pytest.approx(result.mean)
    assert result.d_z == pytest.approx(-0.35 / np.std([1, 2, 3, 4, 5, 6], ddof=1) * 10)
    assert -0.6 < result.low < result.mean < result.high < -0.1


def test_sign_flip_counts_patterns_as_on_paper() -> None:
    # Of the 64 patterns of 1..6, |sum| is at least 21 - 2 = 19 when nothing or the 1 is flipped: 2 of each sign.
    assert sign_flip(np.array([-1.0, 2, 3, 4, 5, 6])) == 4 / 64
    # Equal sizes: |sum| >= 2 of four is every pattern but the 6 of two against two.
    assert sign_flip(np.array([1.0, 1, 1, -1])) == 10 / 16
    # A zero does not add evidence: the p is that of the other two.
    assert sign_flip(np.array([0.0, 1, 1])) == sign_flip(np.array([1.0, 1])) == 2 / 4
    assert sign_flip(np.zeros(4)) == 1


@pytest.mark.parametrize("n", [3, 7, 18])
def test_sign_flip_is_that_of_scipy_enumerated_and_drawn(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.4, 1.0, n)
    theirs = stats.permutation_test(
        (differences,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        n_resamples=2**16,
        rng=np.random.default_rng(0),
    )
    assert sign_flip(differences) == pytest.approx(float(theirs.pvalue), abs=0)


def test_sign_flip_counts_ties_among_terms_that_cancel() -> None:
    # 0.3 - 0.1 - 0.2 is zero but for rounding, so that every pattern is at least as large.
    assert sign_flip(np.array([0.3, -0.1, -0.2])) == 1


def test_zero_differences_raise_the_smallest_p() -> None:
    result = paired(scalars(two_arms([0, 0, -1, -1, -1, -1]), METRIC, "mean"), "slice_concat", "replace")
    assert result.p == result.smallest_p == 2 / 16


sizes = st.floats(-1e3, 1e3).map(lambda value: round(value, 3))


@settings(max_examples=40, deadline=None)
@given(st.lists(sizes, min_size=3, max_size=7))
def test_sign_flip_is_the_share_of_patterns_at_least_as_large(values: list[float]) -> None:
    differences = np.array(values)
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    observed = abs(sum(values))
    expected = np.mean([total >= observed - 1e-9 for total in sums])
    assert sign_flip(differences) == pytest.approx(expected, abs=0)
    assert sign_flip(-differences) == sign_flip(differences) == sign_flip(np.flip(differences))
    assert sign_flip(8 * differences) == sign_flip(differences)


@settings(max_examples=10, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=6), st.integers(-3, 3))
def test_swapping_the_arms_turns_the_difference_round_and_a_common_shift_changes_nothing(
    values: list[float], shift: int
) -> None:
    ours = scalars(two_arms(values, base=2000.0), METRIC, "mean")
    forth, back = paired(ours, "slice_concat", "replace"), paired(ours, "replace", "slice_concat")
    shifted = paired(ours.assign(value=ours["value"] + shift), "slice_concat", "replace")
    np.testing.assert_allclose([forth.mean, forth.low, forth.high], [-back.mean, -back.high, -back.low], atol=1e-6)
    np.testing.assert_equal([forth.p, forth.n], [back.p, back.n])
    np.testing.assert_allclose(shifted.mean, forth.mean, atol=1e-9)


def test_a_seed_that_is_no_pair_is_left_out_by_name() -> None:
    runs = make_runs(
        one_run("replace", 0, {METRIC: 1.0}),
        one_run("slice_concat", 0, {METRIC: 1.0}),
        one_run("replace", 1, {METRIC: 1.0}),
        one_run("slice_concat", 2, {METRIC: 1.0}, steps=4, planned=9, status="failed"),
        one_run("replace", 2, {METRIC: 1.0}),
        one_run("replace", 3, {METRIC: 1.0}, name="first"),
        one_run("replace", 3, {METRIC: 1.0}, name="second"),
        one_run("slice_concat", 3, {METRIC: 1.0}),
    )
    result = paired(scalars(runs, METRIC, "mean"), "slice_concat", "replace")
    assert result.seeds == (0,)
    assert result.left_out == (
        "seed 1: no run of slice_concat",
        "seed 2: slice_concat failed after 4 of 9 updates",
        "seed 3: 2 runs of replace (first, second); give one",
    )


@pytest.mark.parametrize(
    ("n", "standing"), [(1, "too few seeds"), (2, "too few seeds"), (3, "screening"), (6, "confirmatory")]
)
def test_fewer_than_three_seeds_have_neither_interval_nor_p(n: int, standing: str) -> None:
    result = paired(scalars(two_arms([-1.0] * n), METRIC, "mean"), "slice_concat", "replace")
    assert result.standing == standing
    assert [math.isnan(value) for value in (result.low, result.high, result.p)] == [n < 3] * 3


def test_tests_that_holm_can_bear_are_those_of_the_reference_table() -> None:
    assert [bearable_tests(n, 0.05) for n in (3, 4, 5, 6, 7, 8, 10)] == [0, 0, 0, 1, 3, 6, 25]


def test_holm_steps_down_and_stops_at_the_first_failure() -> None:
    adjusted, rejected = holm([0.04, 0.01, 0.03, 0.005], 0.05)
    np.testing.assert_allclose(adjusted, [0.06, 0.03, 0.06, 0.02])
    assert rejected.tolist() == [False, True, False, True]
    adjusted, rejected = holm([0.01, NAN], 0.05)  # an untestable hypothesis still costs
    np.testing.assert_allclose(adjusted, [0.02, NAN])
    assert rejected.tolist() == [True, False]
    assert holm([], 0.05)[1].tolist() == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.randoms())
def test_holm_does_not_depend_on_the_order_and_lies_between_p_and_bonferroni(p: list[float], random) -> None:
    order = list(range(len(p)))
    random.shuffle(order)
    adjusted, _ = holm(p, 0.05)
    np.testing.assert_array_equal(holm([p[i] for i in order], 0.05)[0], adjusted[order])
    assert (adjusted >= np.array(p)).all()
    assert (adjusted <= np.minimum(len(p) * np.array(p), 1) + 1e-12).all()


@pytest.mark.parametrize("n", [6, 8])
def test_under_the_null_at_most_five_percent_are_rejected(n: int) -> None:
    generator = np.random.default_rng(1)
    studies = generator.standard_t(3, (200, n)) * generator.uniform(0.1, 3, n)  # heavy tails, unequal spreads
    rejected = np.mean([sign_flip(differences) <= 0.05 for differences in studies])
    assert rejected <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / len(studies))


def test_the_interval_is_as_narrow_as_it_says() -> None:
    generator = np.random.default_rng(2)
    held = np.mean([low <= 0 <= high for low, high in (interval(generator.standard_normal(6)) for _ in range(60))])
    assert interval_coverage(6) == pytest.approx(0.867, abs=0.002)
    assert held == pytest.approx(interval_coverage(6), abs=0.1)


# Arms. The expected numbers are those of rliable 1.2.0 on the same scores, one task.

X = np.array([0.31, 0.55, 0.42, 0.87, 0.12, 0.42])
Y = np.array([0.22, 0.42, 0.61, 0.35, 0.18, 0.05])


def test_interquartile_mean_and_interval_equal_rliable() -> None:
    assert float(iqm(X)) == pytest.approx(0.425)
    assert float(iqm(Y)) == pytest.approx(0.2925)
    assert float(iqm(np.array([3.0, 1, 8]))) == 4  # three scores are not trimmed
    np.testing.assert_allclose(interval(X, iqm), [0.2425, 0.6775], atol=0.01)


def test_probability_of_improvement_equals_rliable() -> None:
    value, low, high = probability_of_improvement(X, Y, "higher")
    assert value == pytest.approx(2 / 3)
    assert (low, high) == pytest.approx((1 / 3, 0.958), abs=0.03)
    assert probability_of_improvement(Y, X, "higher")[0] == pytest.approx(1 / 3)
    assert probability_of_improvement(X, Y, "lower")[0] == pytest.approx(1 / 3)
    assert probability_of_improvement(X, X, "lower")[0] == 0.5


def test_probability_of_improvement_claims_no_interval_from_two_runs() -> None:
    value, low, high = probability_of_improvement(X[:2], Y, "lower")
    assert value == pytest.approx((3 + 1) / 12)  # 0.31 beats 0.42, 0.61 and 0.35; 0.55 beats 0.61
    assert math.isnan(low)
    assert math.isnan(high)
    assert all(math.isnan(each) for each in probability_of_improvement(X[:0], Y, "lower"))


def frame(metric: str, **arms: list[float]) -> pd.DataFrame:
    rows = [(arm, seed, metric, "mean", value) for arm, values in arms.items() for seed, value in enumerate(values)]
    return pd.DataFrame(rows, columns=["strategy", "seed", "metric", "reduce", "value"])


def test_performance_profile_is_the_share_of_runs_as_good() -> None:
    profile = performance_profile(frame(METRIC, replace=[1, 3, NAN], exact=[0, 1, 2]), points=4)
    shares = {arm: own["share"].tolist() for arm, own in profile.groupby("strategy")}
    assert profile["tau"].unique().tolist() == [0, 1, 2, 3]
    assert shares["exact"] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert shares["replace"] == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3])  # a run without a value never is


def test_performance_profile_of_a_reward_equals_rliable() -> None:
    profile = performance_profile(frame("reward/mean", x=list(X), low=[0.05] * 6), points=83)
    at = profile[(profile["strategy"] == "x")].set_index(profile["tau"].round(2)[: len(profile) // 2])["share"]
    assert [at[0.1], at[0.3], at[0.6]] == pytest.approx([1, 5 / 6, 1 / 6])
