"""Curves over the updates: the arms of a study with a band over their seeds, thinned to what a figure can show.

Legend: an *arm* is all runs of one strategy; an update counts for a run if the run logged a number there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import comb

import numpy as np
import pandas as pd
from numpy.typing import NDArray

LEVEL = 0.95
COLUMNS = 360
"""Pixel columns of a figure at phone width: more points than two per column cannot be told apart."""


@cache
def median_interval(n: int) -> tuple[int, float]:
    """Returns k and the coverage of the interval from the k-th smallest to the k-th largest of n values, for the
    median of what they are drawn from; whatever that is, as long as it is continuous.

    coverage = 1 - 2 P(B < k), B binomial(n, 1/2). k is the largest with a coverage of at least LEVEL; below 6 values
    there is none, and k is 1: the range, whose coverage is 1 - 2^(1-n).

    Source: David and Nagaraja, Order Statistics, 3rd ed. 2003, section 7.1.
    """
    best = 1
    for k in range(1, (n + 1) // 2 + 1):
        if _coverage(n, k) >= LEVEL:
            best = k
    return best, _coverage(n, best)


def _coverage(n: int, k: int) -> float:
    return 1.0 - 2.0 * sum(comb(n, i) for i in range(k)) / 2.0**n


def band(history: pd.DataFrame, key: str) -> pd.DataFrame:
    """Returns the median over the seeds of every arm at every update, with the interval of `median_interval`.

    Infinite values keep their place in the order; NaN is a run that did not log the key there.

    Args:
        history: `strategy`, `run`, `step` and `key` (analysis/runs.py).

    Returns:
        `strategy`, `step`, `n` (runs that logged the key), `runs` (runs of the arm that ever logged it), `median`,
        `low`, `high` (NaN with one run).
    """
    frames = []
    for strategy, matrix, steps in _matrices(history, key):
        ordered = np.sort(matrix, axis=0)  # NaN last
        n = np.isfinite(matrix).sum(axis=0) + np.isinf(matrix).sum(axis=0)
        place = np.array([median_interval(int(count))[0] if count else 1 for count in range(len(matrix) + 1)])[n]
        column = np.arange(len(steps))
        low, high = ordered[place - 1, column], ordered[n - place, column]
        lower, upper = ordered[(n - 1) // 2, column], ordered[n // 2, column]
        # Of two equal infinities the mean would be NaN by way of their difference.
        median = np.where(lower == upper, lower, lower + (upper - lower) / 2)
        frames.append(
            pd.DataFrame(
                {
                    "strategy": strategy,
                    "step": steps,
                    "n": n,
                    "runs": len(matrix),
                    "median": median,
                    "low": np.where(n > 1, low, np.nan),
                    "high": np.where(n > 1, high, np.nan),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _matrices(history: pd.DataFrame, key: str) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.int64]]]:
    """Yields each arm with its values [runs, updates], NaN where a run has none, and the updates where one has."""
    logged = history.loc[history[key].notna(), ["strategy", "run", "step", key]]
    for strategy, own in logged.groupby("strategy", sort=True, observed=True):
        run, runs = pd.factorize(own["run"])
        step, steps = pd.factorize(own["step"].to_numpy(np.int64), sort=True)
        matrix = np.full((len(runs), len(steps)), np.nan)
        matrix[run, step] = own[key].to_numpy(np.float64)
        yield str(strategy), matrix, steps


def percentiles(history: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Returns the median over the seeds of every key (rising percentiles of one thing), by arm and update: `strategy`,
    `step`, `n`, `runs` and one column per key; thinned as `thin_band`, the outer columns to their outermost.
    """
    whole = band(history, keys[0])[["strategy", "step", "n", "runs"]]
    for key in keys:
        own = band(history, key)[["strategy", "step", "median"]].rename(columns={"median": key})
        whole = whole.merge(own, on=["strategy", "step"], how="left")
    middle = len(keys) // 2
    return _thinned(whole, ["strategy"], keys[-1], COLUMNS // 2, lows=keys[:middle], highs=keys[middle + 1 :])


def thin_band(frame: pd.DataFrame, columns: int = COLUMNS) -> pd.DataFrame:
    """Returns `frame` (of `band`) with at most two updates per arm and pixel column: those with the smallest and the
    largest median, so that no spike is lost; `low` and `high` are the outermost of the column.
    """
    return _thinned(frame, ["strategy"], "median", columns, lows=["low"], highs=["high"])


def seeds(history: pd.DataFrame, key: str, columns: int = COLUMNS // 2) -> pd.DataFrame:
    """Returns the curve of every run, thinned as `thin_band`: `strategy`, `seed`, `run`, `step`, `value`."""
    frame = history.loc[history[key].notna(), ["strategy", "seed", "run", "step", key]].rename(columns={key: "value"})
    frame = _thinned(frame, ["strategy", "run"], "value", columns)
    return frame.assign(strategy=frame["strategy"].astype(str), run=frame["run"].astype(str))


def by_run(history: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Returns, by arm and key, the interval of `median_interval` over the runs' means over their updates: `strategy`,
    `key`, `n` (runs), `median`, `low`, `high`.
    """
    means = history.groupby(["strategy", "run"], observed=True)[list(keys)].mean()
    frames = []
    for place, key in enumerate(keys):
        own = means[[key]].dropna().reset_index().assign(step=place)
        frames.append(band(own, key).assign(key=key))
    return pd.concat(frames, ignore_index=True)[["strategy", "key", "n", "median", "low", "high"]]


def _thinned(
    frame: pd.DataFrame,
    by: Sequence[str],
    value: str,
    columns: int,
    lows: Sequence[str] = (),
    highs: Sequence[str] = (),
) -> pd.DataFrame:
    frame = frame.sort_values([*by, "step"], kind="stable", ignore_index=True)
    if frame.empty or frame.groupby(list(by), sort=False, observed=True).size().max() <= 2 * columns:
        return frame
    first, last = frame["step"].min(), frame["step"].max()
    column = ((frame["step"] - first) * columns // (last - first + 1)).rename("_column")
    groups = frame.groupby([*(frame[name] for name in by), column], sort=False, observed=True)
    # idxmin refuses a group that is all NaN; there is none, as an update counts only with a number.
    kept = np.unique(np.concatenate([groups[value].idxmin().to_numpy(), groups[value].idxmax().to_numpy()]))
    outer = {name: groups[name].transform("min") for name in lows} | {
        name: groups[name].transform("max") for name in highs
    }
    return frame.assign(**outer).loc[kept].reset_index(drop=True)
