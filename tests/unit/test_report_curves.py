"""Curves with bands: what the band is, what becomes of runs that end early, and that no spike is thinned away."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.report.curves import band, by_run, median_interval, percentiles, seeds, thin_band

KEY = "actor/ppo_kl"


def history(**runs: list[float]) -> pd.DataFrame:
    """Returns a table like `Runs.history`; a run is named `<arm>_<seed>`."""
    parts = [
        pd.DataFrame(
            {
                "run": name,
                "strategy": name.split("_")[0],
                "seed": int(name.split("_")[1]),
                "step": np.arange(1, len(values) + 1),
                KEY: np.asarray(values, dtype=np.float64),
            }
        )
        for name, values in runs.items()
    ]
    return pd.concat(parts, ignore_index=True).astype({"run": "category", "strategy": "category"})


@pytest.mark.parametrize(
    ("n", "k", "coverage"),
    [(1, 1, 0.0), (2, 1, 0.5), (3, 1, 0.75), (5, 1, 0.9375), (6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375)],
)
def test_the_interval_of_a_median_is_that_of_the_binomial_tables(n: int, k: int, coverage: float) -> None:
    assert median_interval(n) == (k, pytest.approx(coverage))


@pytest.mark.parametrize("n", [6, 9, 25])
def test_the_interval_holds_the_median_as_often_as_it_says(n: int) -> None:
    k, coverage = median_interval(n)
    ordered = np.sort(np.random.default_rng(0).exponential(size=(40_000, n)), axis=1)
    held = (ordered[:, k - 1] < np.log(2)) & (np.log(2) < ordered[:, n - k])
    assert held.mean() == pytest.approx(coverage, abs=0.005)


def test_a_band_is_median_smallest_and_largest_of_few_seeds() -> None:
    frame = band(history(a_0=[1, 5], a_1=[3, 5], a_2=[8, 6], b_0=[7, 7]), KEY)
    first, second = frame[frame["strategy"] == "a"].to_dict("records")
    assert (first["n"], first["median"], first["low"], first["high"]) == (3, 3, 1, 8)
    assert (second["median"], second["low"], second["high"]) == (5, 5, 6)
    lone = frame[frame["strategy"] == "b"]
    assert lone["low"].isna().all()
    assert lone["high"].isna().all()


def test_a_run_that_ends_early_is_missed_and_not_filled_in() -> None:
    frame = band(history(a_0=[1, 1, 1], a_1=[3, 3]), KEY)
    assert list(frame["n"]) == [2, 2, 1]
    assert set(frame["runs"]) == {2}


def test_an_infinite_value_keeps_its_place_and_nan_is_not_a_value() -> None:
    frame = band(history(a_0=[1, np.nan], a_1=[2, 4], a_2=[np.inf, np.inf]), KEY)
    assert list(frame["n"]) == [3, 2]
    assert list(frame["median"]) == [2, np.inf]
    assert frame["high"].iloc[0] == np.inf


def test_thinning_keeps_every_spike_of_median_and_band() -> None:
    generator = np.random.default_rng(0)
    values = [generator.normal(size=10_000) for _ in range(3)]
    for curve in values:
        curve[6_543] = 50.0
    values[0][1_234] = 99.0  # in one seed only: the band has it, the median does not
    whole = band(history(a_0=list(values[0]), a_1=list(values[1]), a_2=list(values[2])), KEY)
    thinned = thin_band(whole, columns=100)
    assert len(thinned) <= 200
    assert thinned["median"].max() == whole["median"].max() == 50.0
    assert thinned["median"].min() == whole["median"].min()
    assert thinned["high"].max() == 99.0
    assert thinned["low"].min() == whole["low"].min()
    assert (np.diff(thinned["step"]) > 0).all()


def test_short_curves_are_not_thinned() -> None:
    whole = band(history(a_0=[1, 2, 3], a_1=[2, 3, 4]), KEY)
    pd.testing.assert_frame_equal(thin_band(whole), whole)


def test_every_run_keeps_its_own_spike() -> None:
    spiky, calm = [0.0] * 5_000, [0.0] * 5_000
    spiky[77] = 9.0
    frame = seeds(history(a_0=spiky, a_1=calm), KEY, columns=50)
    assert frame.groupby("run")["value"].max().to_dict() == {"a_0": 9.0, "a_1": 0.0}


def test_the_mean_of_a_run_is_over_the_updates_that_logged() -> None:
    frame = by_run(history(a_0=[1, np.nan, 3], a_1=[4, 4, 4], a_2=[np.nan] * 3), [KEY])
    (row,) = frame.to_dict("records")
    assert (row["n"], row["median"], row["low"], row["high"]) == (2, 3.0, 2.0, 4.0)


def test_percentiles_are_thinned_to_the_outermost() -> None:
    middle = history(a_0=[0.0] * 2_000)
    outer = middle[KEY].to_numpy() + 1
    outer[1_500] = 7.0
    frame = middle.assign(p5=-outer, p50=0.0, p95=outer)
    thinned = percentiles(frame, ["p5", "p50", "p95"])
    assert len(thinned) < 1_000
    assert (thinned["p95"].max(), thinned["p5"].min()) == (7.0, -7.0)
