"""Collapse as censored data, and what a study could have seen."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.collapse import collapse_table, collapse_times, log_rank, survival
from analysis.compare import paired
from analysis.plan import CRITERIA, Criterion
from analysis.power import detectable_effect, statement
from analysis.scalars import scalars
from tests.unit.study_kit import METRIC, make_runs, one_run, two_arms

F2 = "gap_ratio/F2"


def only(**run) -> tuple[float, bool, str]:
    """Returns time, collapsed and reason of one run."""
    row = collapse_times(make_runs(one_run("replace", 0, **run)), CRITERIA).iloc[0]
    return row["time"], row["collapsed"], row["reason"]


def test_a_run_that_reaches_its_end_is_censored_there() -> None:
    assert only(curves={"reward/mean": 0.5, F2: 0.0}, steps=30) == (30, False, "planned end")


def test_reward_below_half_of_its_running_maximum_for_twenty_updates_is_a_collapse() -> None:
    curve = [0.2, 0.8] + [0.39] * 19 + [0.5] + [0.39] * 20 + [0.1] * 3
    assert only(curves={"reward/mean": curve}, steps=len(curve)) == (42, True, "reward")


def test_a_share_of_a_maximum_below_zero_means_nothing() -> None:
    assert only(curves={"reward/mean": np.linspace(-1, -9, 40)}, steps=40) == (40, False, "planned end")


def test_five_updates_in_a_row_of_large_f2_are_a_collapse_and_the_earliest_criterion_counts() -> None:
    curve = [0.2] * 4 + [0.0] + [0.2] * 5 + [0.0] * 30
    reward = [1.0] + [0.1] * 39
    assert only(curves={F2: curve, "reward/mean": reward}, steps=40) == (10, True, "F2")


def test_updates_that_did_not_log_the_metric_do_not_break_a_stretch() -> None:
    curve = [0.2, math.nan, 0.2, 0.2, math.nan, 0.2, 0.2, 0.0]
    assert only(curves={F2: curve}, steps=8) == (7, True, "F2")


def test_an_infinite_metric_is_a_collapse_whatever_its_key() -> None:
    assert only(curves={"actor/grad_norm": [1, np.inf, 1]}, steps=3) == (2, True, "not finite")


def test_a_run_that_failed_because_a_metric_was_not_finite_has_collapsed_and_one_lost_otherwise_is_censored() -> None:
    lost = {"curves": {"reward/mean": 0.5}, "steps": 7, "planned": 30, "status": "failed"}
    message = "RuntimeError: step 8: metrics that are not finite: actor/ppo_kl=nan; the run cannot be trusted"
    assert only(**lost, error=message) == (8, True, "not finite")
    assert only(**lost, error="OSError: no space left on device") == (7, False, "failed")
    assert only(**lost) == (7, False, "failed")


def test_criteria_are_those_given() -> None:
    runs = make_runs(one_run("replace", 0, {"actor/entropy": [3, 2, 1, 1]}, steps=4))
    low = Criterion("entropy", "actor/entropy", "below", 1.5, 2)
    assert collapse_times(runs, [low]).iloc[0]["reason"] == "entropy"


# Times 3, 5+, 8, 8 (+: censored): S is 3/4 from 3 and 0 from 8.
TIMES = pd.DataFrame(
    [
        ("replace", 0, 3.0, True), ("replace", 1, 5.0, False), ("replace", 2, 8.0, True), ("replace", 3, 8.0, True),
        ("exact", 0, 10.0, False), ("exact", 1, 10.0, False), ("exact", 2, 4.0, False), ("exact", 3, 10.0, False),
    ],
    columns=["strategy", "seed", "time", "collapsed"],
).assign(planned=10.0, reason=lambda t: np.where(t["time"] == 10, "planned end", "failed"))  # fmt: skip


def test_survival_is_kaplan_meier() -> None:
    curve = survival(TIMES)
    ours = curve[curve["strategy"] == "replace"]
    assert ours["time"].tolist() == [0, 3, 5, 8]
    assert ours["survival"].tolist() == [1, 0.75, 0.75, 0]
    assert ours["at_risk"].tolist() == [4, 4, 3, 2]
    assert (curve.loc[curve["strategy"] == "exact", "survival"] == 1).all()


def test_restricted_mean_time_is_the_area_up_to_a_common_horizon() -> None:
    table = collapse_table(TIMES).set_index("strategy")
    assert table["horizon"].tolist() == [10, 10]  # the curve of replace is known to be 0 after its last collapse
    assert table.loc["replace", "restricted_mean"] == 3 + 0.75 * 5
    assert table.loc["exact", "restricted_mean"] == 10
    assert table[["runs", "collapsed", "lost"]].to_numpy().tolist() == [[4, 3, 1], [4, 0, 1]]


def test_the_horizon_ends_where_a_curve_ends_by_censoring() -> None:
    table = collapse_table(TIMES[(TIMES["strategy"] == "replace") | (TIMES["time"] < 10)]).set_index("strategy")
    assert table.loc["replace", ["horizon", "restricted_mean"]].tolist() == [4, 3 + 0.75]


def test_log_rank_scores_add_up_to_the_log_rank_statistic() -> None:
    from analysis.collapse import _log_rank_scores

    arms = TIMES["strategy"] == "replace"
    observed_minus_expected = _log_rank_scores(TIMES)[arms].sum()
    # At 3: 1 - 4/8. At 8, 2 of replace among 5 at risk: 2 - 2 * 2/5.
    assert observed_minus_expected == pytest.approx(1 - 4 / 8 + 2 - 2 * 2 / 5)
    censored = [
        stats.CensoredData(uncensored=own.loc[own["collapsed"], "time"], right=own.loc[~own["collapsed"], "time"])
        for own in (TIMES[arms], TIMES[~arms])
    ]
    variance = 4 * 4 / 64 + 2 * (2 / 5) * (3 / 5) * (3 / 4)
    assert stats.logrank(*censored).statistic == pytest.approx(observed_minus_expected / math.sqrt(variance))


def test_permutation_log_rank_swaps_labels_within_seeds() -> None:
    collapsed = [
        (arm, seed, 10.0 if arm == "exact" else 3.0 + seed, arm != "exact")
        for seed in range(6)
        for arm in ("exact", "replace")
    ]
    times = pd.DataFrame(collapsed, columns=["strategy", "seed", "time", "collapsed"])
    assert log_rank(times, "replace", "exact") == (2 / 64, 2 / 64, 6)
    assert log_rank(times, "exact", "replace")[0] == 2 / 64
    assert math.isnan(log_rank(times[times["seed"] < 2], "replace", "exact")[0])
    assert math.isnan(log_rank(times.assign(collapsed=False), "replace", "exact")[0])


def test_detectable_effect_of_six_pairs_is_the_closed_form() -> None:
    # Six pairs reject only when all differences have one sign: Phi(d)^6 + Phi(-d)^6.
    d = detectable_effect(6, 0.05)
    assert stats.norm.cdf(d) ** 6 + stats.norm.cdf(-d) ** 6 == pytest.approx(0.8, abs=0.02)


def test_detectable_effect_falls_with_seeds_and_nears_the_t_test() -> None:
    effects = [detectable_effect(n, 0.05) for n in (6, 7, 8, 10, 11, 14)]
    assert effects == sorted(effects, reverse=True)
    assert effects[-1] == pytest.approx(0.81, abs=0.01)  # paired t-test, n = 14
    assert detectable_effect(10, 0.05) == pytest.approx(0.997, abs=0.05)  # paired t-test, n = 10


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_where_nothing_can_be_rejected_no_difference_could_have_been_seen(n: int) -> None:
    assert detectable_effect(n, 0.05) == math.inf
    result = paired(scalars(two_arms([-1.0 * seed for seed in range(n)]), METRIC, "mean"), "slice_concat", "replace")
    text = statement(result, 0.05)
    assert text.startswith(f"With {n} paired seeds no difference, however large, could have been significant")


def test_the_power_statement_is_in_the_unit_of_the_metric() -> None:
    result = paired(scalars(two_arms([-3, -1, -3, -1, -3, -1]), METRIC, "mean"), "slice_concat", "replace")
    assert result.sd == pytest.approx(math.sqrt(6 / 5))
    size = detectable_effect(6, 0.05) * result.sd
    assert f"could have seen a difference of {size:.2g} " in statement(result, 0.05)
