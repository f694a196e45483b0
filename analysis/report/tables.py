"""The tables of a report: what `analysis.study` found, as text, each with what it is and how far it may be believed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis import markdown
from analysis.markdown import interval, number
from analysis.plan import CRITERIA
from analysis.runs import Runs
from analysis.study import StudyResult

_DECIMAL = re.compile(r"\d+\.\d+")
_SHOWN = 6  # values of one fact


@dataclass(frozen=True)
class Table:
    """A table as it is shown.

    Attributes:
        name: of its place in a document.
        title: what it shows.
        columns: heads.
        rows: cells.
        note: how to read it.
        text: the columns that are text; the others are numbers.
        long: whether a page folds it away.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: Sequence[str] = ()
    long: bool = False

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return f"**{self.title}**\n\n{markdown.table(self.columns, self.rows, self.text)}\n\n{self.note}"


def tables(runs: Runs, result: StudyResult) -> list[Table]:
    """Returns the tables that have a row, in the order of the report: of statistics first, then of provenance."""
    found = [
        _primary(result),
        _summary(result),
        _secondary(result),
        _improvement(result),
        _offline(result),
        _offline_pairs(result),
        _collapse(result),
        _collapse_tests(result),
        _power(result),
        _differences(result),
        versions(runs),
    ]
    return [table for table in found if table.rows]


def arms(runs: Runs, result: StudyResult) -> Table:
    """Returns what was compared: an arm's seeds, how many of its runs are whole, their updates and their time."""
    rows = []
    for arm in result.arms:
        own = result.completeness[result.completeness["strategy"] == arm]
        whole = own.loc[own["state"] == "complete", "seed"]
        rest = own[own["state"] != "complete"].groupby("state")["seed"]
        other = "; ".join(f"{_ranges(seeds)} {state}" for state, seeds in rest)
        facts = runs.runs[runs.runs["strategy"] == arm]
        rows.append([arm, _ranges(whole), other or "none", str(len(whole)), _span(facts["steps"], 0),
                     _span(pd.to_numeric(facts["seconds"], errors="coerce") / 60, 1)])  # fmt: skip
    columns = ["arm", "complete seeds", "other seeds", "n", "updates", "minutes a run"]
    return Table("arms", "What was compared", columns, rows, text=("arm", "complete seeds", "other seeds"))


def excluded(result: StudyResult) -> Table:
    """Returns the runs that were found and not used."""
    rows = [[str(row["run"]), str(row["where"]), str(row["reason"])] for row in result.excluded.to_dict("records")]
    columns = ["run", "where", "why"]
    return Table("excluded", "Runs found and not used", columns, rows, text=columns)


def _primary(result: StudyResult) -> Table:
    rows = [
        [
            *_compared(row), str(row["n"]), number(row["mean_a"]), number(row["mean_b"]),
            interval(row["mean"], row["low"], row["high"]), number(row["d_z"]), number(row["p"]), number(row["p_holm"]),
            str(row["outcome"]),
        ]
        for row in result.primary.to_dict("records")
    ]  # fmt: skip
    columns = [
        "comparison",
        "metric",
        "pairs",
        "mean of the first",
        "of the second",
        "difference",
        "d_z",
        "p",
        "p (Holm)",
        "outcome",
    ]
    note = (
        "Declared before the runs. Difference: first minus second, mean over paired seeds, with 95 % bootstrap "
        "interval. d_z: mean / sd of the differences. p: exact sign-flip test, two-sided."
    )
    return Table(
        "primary", "Primary: the declared comparison", columns, rows, note, text=("comparison", "metric", "outcome")
    )


def _summary(result: StudyResult) -> Table:
    rows = []
    for (metric, reduce), own in result.summary.groupby(["metric", "reduce"], sort=False):
        cells = own.set_index("strategy").reindex(list(result.arms)).to_dict("records")
        better = own["better"].iloc[0]
        rows.append([f"{reduce} {metric}", "" if better == "none" else str(better),
                     *(interval(cell["iqm"], cell["low"], cell["high"]) for cell in cells)])  # fmt: skip
    note = (
        "Interquartile mean over the seeds of one number per run, with 95 % bootstrap interval. Only the primary "
        "metric was declared; the others are descriptive."
    )
    return Table(
        "summary", "Every arm in numbers", ["metric", "better", *result.arms], rows, note, text=("metric", "better")
    )


def _secondary(result: StudyResult) -> Table:
    note = (
        "Exploratory: not declared before the runs, p not adjusted, and with so many comparisons some are small by "
        "chance. No claim rests on them."
    )
    return _comparisons("secondary", "Exploratory: other metrics and pairs", result.secondary, note)


def _offline_pairs(result: StudyResult) -> Table:
    note = "Exploratory. Paired by seed: the rules are scored on the same rollouts, under the same weights."
    return _comparisons("offline_pairs", "Exploratory: merge error, rule against rule", result.offline_pairs, note)


def _comparisons(name: str, title: str, frame: pd.DataFrame, note: str) -> Table:
    rows = [
        [
            *reversed(_compared(row)), str(row["n"]), number(row["mean_a"]), number(row["mean_b"]),
            interval(row["mean"], row["low"], row["high"]), number(row["d_z"]), number(row["p"]),
        ]
        for row in frame.to_dict("records")
    ]  # fmt: skip
    columns = ["metric", "comparison", "pairs", "mean of the first", "of the second", "difference", "d_z", "p"]
    return Table(name, title, columns, rows, note, text=("metric", "comparison"), long=True)


def _improvement(result: StudyResult) -> Table:
    rows = [
        [
            f"{row['reduce']} {row['metric']}",
            f"{row['a']} beats {row['b']}",
            interval(row["probability"], row["low"], row["high"]),
        ]
        for row in result.improvement.to_dict("records")
    ]
    note = "Share of all pairs of runs in which the first is better (ties count half), with 95 % bootstrap interval."
    columns = ["metric", "comparison", "probability"]
    return Table(
        "improvement", "Exploratory: probability of improvement", columns, rows, note, text=("metric", "comparison")
    )


def _offline(result: StudyResult) -> Table:
    rows = []
    for rule, own in result.offline.groupby("strategy", sort=False):
        values = own["value"].dropna()
        rows.append((float(values.mean()), [str(rule), str(len(values)), number(values.mean()), number(values.min()),
                                            number(values.max())]))  # fmt: skip
    note = (
        "|log-prob under the rule's rows minus log-prob under the exact rows|, nats per token: every rule on the same "
        "rollouts, first the mean of a seed, then mean, smallest and largest over the seeds."
    )
    columns = ["rule", "seeds", "mean", "smallest seed", "largest seed"]
    ordered = [row for _, row in sorted(rows, key=lambda row: row[0])]
    return Table("offline", "Merge error, scored offline", columns, ordered, note, text=("rule",))


def _collapse(result: StudyResult) -> Table:
    rows = [
        [
            str(row["strategy"]),
            str(row["runs"]),
            str(row["collapsed"]),
            str(row["lost"]),
            number(row["restricted_mean"]),
            number(row["horizon"]),
        ]
        for row in result.collapse.to_dict("records")
    ]
    rules = [
        f"{rule.name}: {rule.metric} {rule.kind.replace('_', ' ')} {rule.threshold:g} for {rule.updates} updates"
        for rule in (result.plan.collapse if result.plan else CRITERIA)
    ]
    note = (
        "A run that ends without collapse is censored there, and so is one that was lost. Mean time: without collapse, "
        "up to the horizon, updates. A metric that is not finite is a collapse" + "".join(f"; {each}" for each in rules)
    )
    columns = ["arm", "runs", "collapsed", "lost", "mean time", "horizon"]
    return Table("collapse", "Collapse", columns, rows, note, text=("arm",))


def _collapse_tests(result: StudyResult) -> Table:
    frame = result.collapse_tests
    if frame.empty or frame["p"].isna().all():
        return Table("collapse_tests", "", [], [])
    rows = [
        [f"{row['a']} against {row['b']}", str(row["n"]), number(row["p"]), number(row["smallest_p"]), str(row["note"])]
        for row in frame.to_dict("records")
    ]
    note = "Permutation log-rank test, labels swapped within seeds. Exploratory, p not adjusted."
    columns = ["comparison", "pairs", "p", "smallest possible p", "note"]
    return Table("collapse_tests", "Exploratory: time to collapse", columns, rows, note, text=("comparison", "note"))


def _power(result: StudyResult) -> Table:
    declared = len(result.primary)
    frame = result.power.head(declared) if declared else result.power
    rows = [
        [*_compared(row), str(row["n"]), number(row["sd"]), number(row["alpha"]),
         "none" if math.isinf(row["detectable"]) else number(row["detectable"])]
        for row in frame.to_dict("records")
    ]  # fmt: skip
    columns = ["comparison", "metric", "pairs", "sd of the differences", "alpha", "detectable"]
    note = "Detectable: the smallest true difference that this study would have found with 80 % probability."
    note = " ".join([note, *(frame["statement"] if declared else ())])
    return Table("power", "What this study could have seen", columns, rows, note, text=("comparison", "metric"),
                 long=not declared)  # fmt: skip


def _differences(result: StudyResult) -> Table:
    frame = result.differences
    rows = [
        [str(row["key"]), str(row["kind"]), *(str(row[arm]) for arm in result.arms)] for row in frame.to_dict("records")
    ]
    note = "Between runs of the same seed. What is the strategy's cannot be told from what these do."
    columns = ["key", "kind", *result.arms]
    return Table("differences", "What the arms differ in beside their strategy", columns, rows, note, text=columns)


def versions(runs: Runs) -> Table:
    """Returns packages, commit and machine of the runs; a fact that varies has each value with its number of runs, a
    package that no run had is left out, and where nothing is known that is said.
    """
    seen: dict[str, dict[str, int]] = {}
    for facts in runs.versions.values():
        for key, value in _flat({key: value for key, value in facts.items() if value is not None}):
            values = seen.setdefault(key, {})
            values[value] = values.get(value, 0) + 1
    rows = [[key, _values(values, len(runs.versions))] for key, values in seen.items()]
    rows = rows or [["all", "not known: the source of the runs lacks them"]]
    note = f"All {len(runs.versions)} runs, where nothing else is said."
    columns = ["what", "value"]
    return Table("versions", "Versions and machines", columns, rows, note, text=columns)


def _values(values: dict[str, int], runs: int) -> str:
    """Returns the values of a fact with their numbers of runs, the value alone where all runs have it, and the range of
    measured numbers.
    """
    if len(values) == 1 and sum(values.values()) == runs:
        return next(iter(values))
    if all(_DECIMAL.fullmatch(value) for value in values):
        return f"{min(values, key=float)} to {max(values, key=float)}"
    known = [f"{value} ({count} of {runs} runs)" for value, count in sorted(values.items())]
    return "; ".join(known[:_SHOWN]) + (f"; and {len(known) - _SHOWN} more" if len(known) > _SHOWN else "")


def _compared(row: Mapping[Any, Any]) -> tuple[str, str]:
    """Returns the arms of a comparison and its scalar."""
    return f"{row['a']} − {row['b']}", f"{row['reduce']} {row['metric']}"


def _flat(tree: dict, prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _ranges(values: Iterable[int]) -> str:
    """Returns `0-3, 5` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for value in sorted(map(int, values)):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts) or "none"


def _span(values: pd.Series, decimals: int) -> str:
    known = values.dropna()
    if known.empty:
        return "-"
    low, high = f"{known.min():.{decimals}f}", f"{known.max():.{decimals}f}"
    return low if low == high else f"{low} to {high}"
