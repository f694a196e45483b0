"""The tables of a study, one function each: tidy, NaN where a number could not be computed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis import collapse
from analysis.compare import (
    MIN_SEEDS,
    PairedDifference,
    interval,
    iqm,
    paired,
    performance_profile,
    probability_of_improvement,
)
from analysis.power import detectable_effect, statement
from analysis.runs import Runs
from analysis.scalars import direction, scalars, unusable

type Key = tuple[str, str]
"""Metric and reduction."""

FLOOR = "gap/floor_abs"
_HAS_FLOOR = re.compile(r"^(gap|merge/[^/]+)/abs(_by_|$)")
_OFFLINE = re.compile(r"^merge/([^/]+)/abs$")


def completeness(runs: Runs, arms: Sequence[str], seeds: Sequence[int]) -> pd.DataFrame:
    """Returns the grid of arms and seeds, and the runs beside it: `strategy`, `seed`, `state` (`complete`,
    `incomplete`, `repeated`, `excluded`, `missing`, `not planned`), `runs`, `note`.
    """
    excluded = runs.excluded.groupby("run")["reason"].agg("; ".join)
    by_cell: dict[tuple[str, int], list[str]] = {cell: [] for cell in itertools.product(arms, seeds)}
    planned = set(by_cell)
    rows_by_name = {str(run): facts for run, facts in runs.runs.iterrows()}
    for run, facts in rows_by_name.items():
        by_cell.setdefault((str(facts["strategy"]), int(facts["seed"])), []).append(run)
    rows = []
    for (strategy, seed), names in by_cell.items():
        notes = [reason for name in names if (reason := unusable(rows_by_name[name]))]
        reason = excluded.get(f"{strategy}-s{seed}")  # the name that load_runs would give
        if not names and reason:
            notes.append(str(reason))
        state = _state(names, notes) if (strategy, seed) in planned else "not planned"
        rows.append((strategy, seed, state, ", ".join(names), "; ".join(notes)))
    return pd.DataFrame(rows, columns=["strategy", "seed", "state", "runs", "note"])


def _state(names: Sequence[str], notes: Sequence[str]) -> str:
    if not names:
        return "excluded" if notes else "missing"
    return "repeated" if len(names) > 1 else "incomplete" if notes else "complete"


def noise_floor(runs: Runs, metric: str) -> float:
    """Returns the noise floor of a metric that has one: the largest over the runs of their mean `gap/floor_abs`; NaN
    where none was measured.
    """
    if not _HAS_FLOOR.match(metric) or FLOOR not in runs.history:
        return math.nan
    return float(runs.history.groupby("run", observed=True)[FLOOR].mean().max())


def comparisons(results: Sequence[PairedDifference]) -> pd.DataFrame:
    """Returns one row per result: `metric`, `reduce`, `a`, `b`, `better`, `n`, `mean_a`, `mean_b`, `mean`, `low`,
    `high`, `sd`, `d_z`, `p`, `smallest_p`, `floor`, `standing`, `left_out`.
    """
    names = ("metric", "reduce", "a", "b", "n", "mean_a", "mean_b", "mean", "low", "high", "sd", "d_z", "p",
             "smallest_p", "floor", "standing")  # fmt: skip
    rows = [
        {
            **{name: getattr(result, name) for name in names},
            "better": direction(result.metric, result.reduce),
            "left_out": "; ".join(result.left_out),
        }
        for result in results
    ]
    return pd.DataFrame(rows, columns=[*names[:4], "better", *names[4:], "left_out"])


def summary(values: Mapping[Key, pd.DataFrame], arms: Sequence[str]) -> pd.DataFrame:
    """Returns every arm and scalar: `strategy`, `metric`, `reduce`, `better`, `n` (runs with a value), `mean`, `sd`,
    `iqm`, and `low`, `high` of the iqm.
    """
    rows = []
    for (metric, reduce), frame in values.items():
        for arm in arms:
            own = frame.loc[frame["strategy"] == arm, "value"].dropna().to_numpy(np.float64)
            n = len(own)
            mean, middle = (float(own.mean()), float(iqm(own))) if n else (math.nan, math.nan)
            sd = float(own.std(ddof=1)) if n > 1 else math.nan
            rows.append((arm, metric, reduce, direction(metric, reduce), n, mean, sd, middle, *interval(own, iqm)))
    columns = ["strategy", "metric", "reduce", "better", "n", "mean", "sd", "iqm", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def improvement(
    keys: Iterable[Key], values: Mapping[Key, pd.DataFrame], pairs: Sequence[tuple[str, str]]
) -> pd.DataFrame:
    """Returns the probability that a run of `a` is better than one of `b`: `metric`, `reduce`, `a`, `b`, `better`,
    `probability`, `low`, `high`.
    """
    rows = []
    for key in keys:
        better = direction(*key)
        arms = {str(arm): own.dropna().to_numpy(np.float64) for arm, own in values[key].groupby("strategy")["value"]}
        for a, b in pairs:
            x, y = (arms.get(arm, np.empty(0)) for arm in (a, b))
            rows.append((*key, a, b, better, *probability_of_improvement(x, y, better)))
    return pd.DataFrame(rows, columns=["metric", "reduce", "a", "b", "better", "probability", "low", "high"])


def profiles(keys: Iterable[Key], values: Mapping[Key, pd.DataFrame]) -> pd.DataFrame:
    """Returns the performance profiles of several scalars: `metric`, `reduce`, `strategy`, `tau`, `share`."""
    parts = [performance_profile(values[key]).assign(metric=key[0], reduce=key[1]) for key in keys]
    columns = ["metric", "reduce", "strategy", "tau", "share"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def offline(runs: Runs) -> pd.DataFrame:
    """Returns the mean merge error of every scored rule in every seed: `strategy` (the rule), `seed`, `value` (nats),
    `runs` (whose rollouts it is a mean over), and the other columns of `scalars`.

    First the mean over the updates of a run, then over the runs of the seed: rules are paired perfectly, by rollout.
    """
    parts = []
    for key in runs.history:
        match = _OFFLINE.match(str(key))
        if match:
            own = scalars(runs, str(key), "mean").dropna(subset="value")
            frame = own.groupby("seed")["value"].agg(value="mean", runs="count").reset_index()
            parts.append(frame.assign(run=match[1], strategy=match[1], metric="merge/abs", reduce="mean", reason=""))
    columns = ["run", "strategy", "seed", "metric", "reduce", "value", "runs", "reason"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def offline_pairs(offline: pd.DataFrame, arms: Sequence[str]) -> list[PairedDifference]:
    """Returns every rule of `offline` against every other, in the order of `arms`, rules that are none of them last."""
    scored = list(dict.fromkeys(offline["strategy"]))
    rules = [*(arm for arm in arms if arm in scored), *(rule for rule in scored if rule not in arms)]
    return [paired(offline, b, a) for a, b in itertools.combinations(rules, 2)]


def collapse_tests(times: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Returns the permutation log-rank test of every pair: `a`, `b`, `n`, `p`, `smallest_p`, `note` (why there is no
    p).
    """
    rows = []
    for a, b in pairs:
        p, smallest, n = collapse.log_rank(times, a, b)
        some = times.loc[times["strategy"].isin([a, b]), "collapsed"].any()
        note = "" if p == p else f"fewer than {MIN_SEEDS} paired seeds" if n < MIN_SEEDS else "no run collapsed"
        rows.append((a, b, n, p, smallest, note if some or n < MIN_SEEDS else "no run collapsed"))
    return pd.DataFrame(rows, columns=["a", "b", "n", "p", "smallest_p", "note"])


def power(results: Sequence[PairedDifference], alpha: float) -> pd.DataFrame:
    """Returns what every comparison could have seen at `alpha`: `metric`, `reduce`, `a`, `b`, `n`, `sd`, `alpha`,
    `detectable` (inf: no difference), `statement`.
    """
    rows = []
    for r in results:
        detectable = detectable_effect(r.n, alpha)
        size = detectable * r.sd if math.isfinite(detectable) else detectable
        rows.append((r.metric, r.reduce, r.a, r.b, r.n, r.sd, alpha, size, statement(r, alpha)))
    columns = ["metric", "reduce", "a", "b", "n", "sd", "alpha", "detectable", "statement"]
    return pd.DataFrame(rows, columns=columns)
