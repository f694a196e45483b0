"""A report before it is a page or a summary: figures drawn, tables made, sentences in their order."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import style
from analysis.differences import varying
from analysis.merge_frames import Absent
from analysis.plan import CRITERIA
from analysis.report import svg
from analysis.report.charts import CHARTS, Chart, silent_arms
from analysis.report.commands import commands
from analysis.report.evidence import Evidence
from analysis.report.tables import Table, arms, excluded, tables

_OLD_LOG_PROB = "algorithm.old_log_prob"
_DPI = 200


@dataclass(frozen=True, eq=False)
class Shown:
    """A figure, drawn.

    Attributes:
        name: of its files.
        title, caption, reading, alternative: its words (charts.py); the alternative is for who does not see it.
        numbers: what is plotted.
        svg: its text.
        png: its bytes.
    """

    name: str
    title: str
    caption: str
    reading: str
    alternative: str
    numbers: pd.DataFrame
    svg: str
    png: bytes

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self.png


@dataclass(frozen=True, eq=False)
class Report:
    """What a report says, in its order.

    Attributes:
        title: the experiments.
        verdict: a sentence per declared comparison, or that there is no claim.
        warnings: to be read before any result.
        arms, excluded: what was compared, and what was found and not used.
        notes: how the numbers were made.
        shown: figures.
        left_out: title of every figure that there is not, and why.
        tables: of statistics and provenance.
        commands: of the runs (one command where they are a whole grid), and of this report, last.
    """

    title: str
    verdict: str
    warnings: Sequence[str]
    arms: Table
    excluded: Table
    notes: Sequence[str]
    shown: Sequence[Shown]
    left_out: Sequence[tuple[str, str]]
    tables: Sequence[Table]
    commands: Sequence[str]

    def figure(self, name: str) -> Shown | Absent:
        """Returns a figure by its name (charts.py), or why there is none.

        Raises:
            ValueError: no figure has this name.
        """
        titles = {chart.name: chart.title for chart in CHARTS}
        if name not in titles:
            raise ValueError(f"no figure {name!r}: expected one of {', '.join(titles)}")
        shown = {each.name: each for each in self.shown}
        return shown[name] if name in shown else Absent(dict(self.left_out)[titles[name]])

    def table(self, name: str) -> Table:
        """Returns a table by its name.

        Raises:
            ValueError: the report has no table of this name.
        """
        found = {table.name: table for table in (self.arms, self.excluded, *self.tables)}
        if name not in found:
            raise ValueError(f"no table {name!r}: this report has {', '.join(found)}")
        return found[name]


def report(evidence: Evidence, command: str) -> Report:
    """Returns the report of `evidence`; `command` is the one that makes it."""
    runs, result = evidence.runs, evidence.result
    looks = style.lines(list(dict.fromkeys([*result.arms, *map(str, runs.segments["strategy"].unique())])))
    shown, left_out = [], []
    with style.settings():
        for chart in CHARTS:
            numbers = chart.numbers(evidence)
            if isinstance(numbers, Absent):
                left_out.append((chart.title, numbers.reason))
            else:
                shown.append(_draw(chart, numbers, looks, evidence))
    experiments = sorted({str(name) for name in runs.runs["experiment"].dropna()})
    in_order = runs.runs.sort_values(["seed", "strategy"])
    made = commands(map(str, in_order["command"].dropna())) if "command" in in_order else []
    return Report(
        title=", ".join(experiments) or "runs",
        verdict=result.verdict,
        warnings=[*result.warnings, *_uneven(evidence), *_blind(evidence), *_unjudged(evidence)],
        arms=arms(runs, result),
        excluded=excluded(result),
        notes=[note for note in result.notes if not note.startswith("Excluded:")] + _alike(evidence),
        shown=shown,
        left_out=left_out,
        tables=tables(runs, result),
        commands=[*made, command],
    )


def _draw(chart: Chart, numbers: pd.DataFrame, looks: dict, evidence: Evidence) -> Shown:
    figure = chart.draw(chart.title, numbers, looks, evidence)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None})
    silent = silent_arms(evidence.runs.history, chart.keys) if chart.keys else []
    caption = chart.caption(numbers, evidence)
    if silent:
        caption += f" Not logged by {', '.join(silent)}."
    return Shown(
        chart.name,
        chart.title,
        caption,
        chart.reading,
        chart.alternative(numbers),
        numbers,
        svg.text(figure),
        png.getvalue(),
    )


def _alike(evidence: Evidence) -> list[str]:
    """Returns that the arms differ in their strategy alone, where configurations are known and that is so, and of how
    many runs versions are not known.
    """
    runs, result = evidence.runs, evidence.result
    unknown = sum(not runs.versions.get(str(run)) for run in runs.runs.index)
    notes = []
    if runs.configs and len(result.arms) > 1 and result.differences.empty:
        same = "every other setting is the same" if unknown else "every other setting, version and commit is the same"
        notes.append(f"Seed by seed, the arms differ in their strategy only: {same}.")
    if unknown:
        notes.append(
            f"Versions and commit of {unknown} of {len(runs.runs)} runs are not known: their source lacks them."
        )
    return notes


def _uneven(evidence: Evidence) -> list[str]:
    """Returns a warning where the seeds are not repetitions of one experiment: pairs do not show that."""
    result = evidence.result
    keys = [key for key in varying(evidence.runs, result.arms) if key not in set(result.differences["key"])]
    where = ", ".join(keys)
    return [f"The runs are of more than one experiment: between seeds they differ in {where}."] if keys else []


def _unjudged(evidence: Evidence) -> list[str]:
    """Returns a warning where a criterion of collapse could not be met, as its metric is not there."""
    criteria = evidence.result.plan.collapse if evidence.result.plan else CRITERIA
    missing = [each.metric for each in criteria if each.metric not in evidence.runs.history]
    return [f"Collapse is not judged by {', '.join(missing)}: no run logged it."] if missing else []


def _blind(evidence: Evidence) -> list[str]:
    """Returns a warning where ppo_kl cannot tell strategies apart (docs/metrics.md)."""
    modes = {name: config.get(_OLD_LOG_PROB) for name, config in evidence.runs.configs.items()}
    decoupled = [name for name, mode in modes.items() if mode == "decoupled"]
    if not decoupled:
        return []
    which = "all runs" if len(decoupled) == len(modes) else f"{len(decoupled)} of {len(modes)} runs"
    return [
        f"{which} have {_OLD_LOG_PROB}=decoupled: old and new log-probs share the replayed rows, a wrong merge "
        "cancels in actor/ppo_kl and the PPO ratio, and gap/* and merge/* carry the comparison."
    ]
