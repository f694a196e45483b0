"""When runs collapse, as censored data: a run that ends without collapsing is known only to have lasted that long.

Sources: Kaplan and Meier, JASA 53, 1958 (survival; scipy.stats.ecdf); Royston and Parmar, BMC Med. Res. Methodol. 13,
2013 (restricted mean time); Peto and Peto, J. R. Statist. Soc. A 135, 1972 (log-rank scores).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from analysis.compare import MIN_SEEDS, sign_flip, smallest_p
from analysis.plan import Criterion
from analysis.runs import Runs

type Float = NDArray[np.float64]

NOT_FINITE = "not finite"
_NOT_FINITE = re.compile(r"not finite|non-?finite|\bNaN\b|\binfinite\b|\binf\b", re.IGNORECASE)


def collapse_times(runs: Runs, criteria: Sequence[Criterion]) -> pd.DataFrame:
    """Returns one row per run: `run`, `strategy`, `seed`, `time`, `collapsed`, `planned`, `reason`.

    `time` is the update at which the first criterion had held for its number of updates, or at which a metric was not
    finite (one more than the last update where the run failed for that); for a run that did not collapse it is the
    last update, where the run is right-censored: at its planned end, or where it was lost.
    """
    infinite = np.zeros(len(runs.history), dtype=bool)
    for key in runs.history.columns.difference(["run", "strategy", "seed", "step"]):
        infinite |= np.isinf(runs.history[key].to_numpy(np.float64))
    read = runs.history.columns.intersection(["run", "step", *(criterion.metric for criterion in criteria)])
    table = runs.history[read].assign(infinite=infinite)
    curves = {str(run): own for run, own in table.groupby("run", observed=True, sort=False)}
    rows = []
    for run, facts in runs.runs.iterrows():
        found = _collapse(curves[str(run)], criteria) if str(run) in curves else None
        error = facts.get("error")
        if found is None and facts["status"] == "failed" and isinstance(error, str) and _NOT_FINITE.search(error):
            found = float(facts["steps"]) + 1, NOT_FINITE
        time, reason = found or (float(facts["steps"]), _censored(facts))
        planned = math.nan if pd.isna(facts["planned"]) else float(facts["planned"])
        rows.append((run, facts["strategy"], facts["seed"], time, found is not None, planned, reason))
    return pd.DataFrame(rows, columns=["run", "strategy", "seed", "time", "collapsed", "planned", "reason"])


def _censored(facts: pd.Series) -> str:
    return "planned end" if facts["status"] == "completed" else str(facts["status"])


def _collapse(curve: pd.DataFrame, criteria: Sequence[Criterion]) -> tuple[float, str] | None:
    """Returns the earliest collapse of a run, and the criterion; None where it met none."""
    found = []
    if curve["infinite"].any():
        found.append((float(curve.loc[curve["infinite"], "step"].iloc[0]), NOT_FINITE))
    for criterion in criteria:
        if criterion.metric in curve:
            logged = curve.loc[curve[criterion.metric].notna()]
            index = _held(logged[criterion.metric].to_numpy(np.float64), criterion)
            if index is not None:
                found.append((float(logged["step"].iloc[index]), criterion.name))
    return min(found, default=None)


def _held(values: Float, criterion: Criterion) -> int | None:
    """Returns the index at which the criterion has held for its number of values in a row; None where it never has."""
    if criterion.kind == "above":
        met = values > criterion.threshold
    elif criterion.kind == "below":
        met = values < criterion.threshold
    else:
        best = np.maximum.accumulate(values)
        met = (best > 0) & (values < criterion.threshold * best)  # a share of a score below zero means nothing
    if len(met) < criterion.updates:
        return None
    stretches = np.convolve(met, np.ones(criterion.updates), mode="valid")
    whole = np.flatnonzero(stretches >= criterion.updates - 0.5)
    return int(whole[0]) + criterion.updates - 1 if len(whole) else None


def survival(times: pd.DataFrame) -> pd.DataFrame:
    """Returns the Kaplan-Meier curve of every arm: `strategy`, `time`, `survival`, `at_risk`, a step down at each time,
    from 1 at time 0.
    """
    parts = []
    for strategy, own in times.groupby("strategy", sort=False, observed=True):
        curve = _kaplan_meier(own)
        at_risk = [int((own["time"] >= time).sum()) for time in curve.time]
        parts.append(
            pd.DataFrame({"strategy": strategy, "time": curve.time, "survival": curve.share, "at_risk": at_risk})
        )
    columns = ["strategy", "time", "survival", "at_risk"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


@dataclass(frozen=True, eq=False)
class _Curve:
    time: Float
    share: Float

    def mean_to(self, horizon: float) -> float:
        """Returns the area under the curve from 0 to `horizon`."""
        edges = np.append(self.time[self.time < horizon], horizon)
        return float((np.diff(edges) * self.share[: len(edges) - 1]).sum())


def _kaplan_meier(own: pd.DataFrame) -> _Curve:
    collapsed = own["collapsed"].to_numpy(bool)
    times = own["time"].to_numpy(np.float64)
    found = stats.ecdf(stats.CensoredData(uncensored=times[collapsed], right=times[~collapsed])).sf
    return _Curve(np.concatenate([[0.0], found.quantiles]), np.concatenate([[1.0], found.probabilities]))


def collapse_table(times: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per arm: `strategy`, `runs`, `collapsed`, `lost` (censored before the planned end),
    `restricted_mean` (mean time without collapse up to `horizon`) and `horizon`, updates.

    The horizon is the same for all arms, and every curve is known up to it: it is the shortest of the longest times of
    the arms whose last run was censored (after its last collapse a curve is known to be 0).
    """
    columns = ["strategy", "runs", "collapsed", "lost", "restricted_mean", "horizon"]
    if times.empty:
        return pd.DataFrame(columns=columns)
    arms = times.groupby("strategy", sort=False, observed=True)
    longest = [own["time"].max() for _, own in arms if not own.loc[own["time"] == own["time"].max(), "collapsed"].all()]
    horizon = float(min(longest, default=times["time"].max()))
    rows = []
    for strategy, own in arms:
        lost = int((~own["collapsed"] & ((own["reason"] != "planned end") | (own["time"] < own["planned"]))).sum())
        mean = _kaplan_meier(own).mean_to(horizon)
        rows.append((strategy, len(own), int(own["collapsed"].sum()), lost, mean, horizon))
    return pd.DataFrame(rows, columns=columns)


def log_rank(times: pd.DataFrame, a: str, b: str) -> tuple[float, float, int]:
    """Returns the two-sided p of the permutation log-rank test of `a` against `b`, the smallest one attainable and the
    number of pairs.

    The log-rank statistic (observed minus expected collapses of an arm) is the sum of the arm's log-rank scores:
    collapsed (1 or 0) minus the pooled Nelson-Aalen cumulative hazard at the run's time. Labels are swapped within
    seeds, all 2^n ways, because arms share seeds. NaN where no run collapsed or fewer than MIN_SEEDS seeds are paired.
    """
    both = times[times["strategy"].isin([a, b])]
    single = both.drop_duplicates(["strategy", "seed"], keep=False)
    pairs = single[single.groupby("seed")["strategy"].transform("nunique") == 2]
    seeds = pairs["seed"].nunique()
    if seeds < MIN_SEEDS or not pairs["collapsed"].any():
        return math.nan, math.nan, seeds
    scored = pairs.assign(score=_log_rank_scores(pairs)).pivot(index="seed", columns="strategy", values="score")
    differences = (scored[a] - scored[b]).to_numpy(np.float64)
    return sign_flip(differences), smallest_p(int(np.count_nonzero(differences))), seeds


def _log_rank_scores(pairs: pd.DataFrame) -> Float:
    times, collapsed = pairs["time"].to_numpy(np.float64), pairs["collapsed"].to_numpy(np.float64)
    events = np.unique(times[collapsed > 0])
    deaths = ((times[:, None] == events) * collapsed[:, None]).sum(axis=0)
    at_risk = (times[:, None] >= events).sum(axis=0)
    hazard = np.cumsum(deaths / at_risk)
    index = np.searchsorted(events, times, side="right")
    return collapsed - np.concatenate([[0.0], hazard])[index]
