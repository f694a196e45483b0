"""`python -m analysis merge-error RUN_DIR... --out DIR`: figures, their numbers as CSV, and tables of merge error.

docs/merge_error.md says how to read them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import markdown, merge_figures, merge_frames, style
from analysis.load import read_run
from analysis.merge_frames import Absent, Study


@dataclass(frozen=True)
class Section:
    """One table of numbers, and how it is shown.

    Attributes:
        name: of the place in the document, and of the files `merge_<name>.csv` and `.svg`.
        numbers: the table, or why there is none.
        text: the table in Markdown.
        draw: the figure; None for a table alone.
    """

    name: str
    numbers: Callable[[Study], pd.DataFrame | Absent]
    text: Callable[[pd.DataFrame], str]
    draw: Callable[[pd.DataFrame], Figure] | None


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `merge-error` to the sub-commands of `python -m analysis`."""
    parser = commands.add_parser("merge-error", help="figures and tables of docs/merge_error.md", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR",
        help="run directories; the first and its repetitions with other seeds make the figures; runs that differ from "
        "it in learning rate, pause mode or resumed rows are compared with it",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for SVG and CSV")
    parser.add_argument("--write", type=Path, metavar="DOC", help="document whose marked tables are replaced")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Writes figures and tables, and prints the tables.

    Raises:
        ValueError: a run directory or the document cannot be used.
    """
    document = markdown.read(arguments.write) if arguments.write else None
    study = Study.of([read_run(folder) for folder in arguments.runs])
    results = {section: section.numbers(study) for section in SECTIONS}
    tables = {
        section.name: f"*Not measured: {result.reason}.*" if isinstance(result, Absent) else section.text(result)
        for section, result in results.items()
    }
    filled = None if document is None else markdown.filled(arguments.write, document, tables)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with style.settings():
        for section, result in results.items():
            _write(section, result, arguments.out)
    if filled is not None:
        arguments.write.write_text(filled, encoding="utf-8")
    for name, text in tables.items():
        sys.stdout.write(f"<!-- table: {name} -->\n{text}\n<!-- end -->\n\n")
    absent = [f"{s.name}: no figure: {r.reason}" for s, r in results.items() if isinstance(r, Absent)]
    for note in (*study.notes, *absent):
        sys.stdout.write(f"{note}\n")


def figure(study: Study, name: str) -> Figure | Absent:
    """Returns the figure of a section (SECTIONS), or why there is none.

    Raises:
        ValueError: no section of this name has a figure.
    """
    draws = {section.name: section for section in SECTIONS if section.draw is not None}
    section = draws.get(name)
    if section is None or section.draw is None:
        raise ValueError(f"no figure {name!r}: expected one of {', '.join(draws)}")
    numbers = section.numbers(study)
    if isinstance(numbers, Absent):
        return numbers
    with style.settings():
        return section.draw(numbers)


def _write(section: Section, result: pd.DataFrame | Absent, out: Path) -> None:
    """Writes the files of a section; without data it removes those of an earlier call, which are of other runs."""
    svg, csv = (out / f"merge_{section.name}.{kind}" for kind in ("svg", "csv"))
    if isinstance(result, Absent):
        svg.unlink(missing_ok=True)
        csv.unlink(missing_ok=True)
        return
    result.to_csv(csv, index=False, lineterminator="\n")
    if section.draw is not None:
        style.save(section.draw(result), svg)


def _ranking_text(frame: pd.DataFrame) -> str:
    """Returns run after run, each in its own order: `below the next` speaks of the next row."""
    rows = [
        [
            row["strategy"], str(row["seed"]), markdown.interval(row["mean"], row["low"], row["high"]),
            f"{row['loss_frac']:.0%}", _share(row["better_than_next"]),
        ]
        for row in frame.sort_values(["seed", "mean"], kind="stable").to_dict("records")
    ]  # fmt: skip
    return markdown.table(["strategy", "seed", "mean |merge error|, nats", "share of tokens", "below the next"], rows)


def _share(value: float) -> str:
    return f"{value:.1%}" if value == value else "-"


def _bucket_text(frame: pd.DataFrame) -> str:
    """Returns strategies by row and buckets by column."""
    buckets = [name for name in frame["bucket"].cat.categories if (frame["bucket"] == name).any()]
    rows = []
    for strategy, own in frame.groupby("strategy", sort=True):
        cells = own.set_index("bucket").reindex(buckets).to_dict("records")
        rows.append([str(strategy), *(markdown.interval(c["mean"], c.get("low"), c.get("high")) for c in cells)])
    return markdown.table(["strategy", *buckets], rows)


def _learning_rate_text(frame: pd.DataFrame) -> str:
    strategies = sorted(frame["strategy"].unique())
    rows = []
    for (rate, seed), own in frame.groupby(["learning_rate", "seed"], sort=True):
        cells = own.set_index("strategy").reindex(strategies).to_dict("records")
        errors = [markdown.interval(cell["mean"], cell["low"], cell["high"]) for cell in cells]
        rows.append([f"{rate:g}", str(seed), markdown.number(own["churn"].iloc[0]), *errors])
    return markdown.table(["learning rate", "seed", "route churn", *strategies], rows)


def _modes_text(frame: pd.DataFrame) -> str:
    fixed = ["pause_mode", "resume_rows", "seed", "excluded", "gap", "engine", "ppo_kl", "reward"]
    strategies = sorted(set(frame.columns) - set(fixed))
    rows = [
        [
            str(row["pause_mode"]), str(row["resume_rows"]), str(row["seed"]),
            *(markdown.number(row[name]) for name in (*fixed[3:], *strategies)),
        ]
        for row in frame.to_dict("records")
    ]  # fmt: skip
    titles = [
        "pause mode",
        "resumed rows",
        "seed",
        "rollouts left out",
        "gap/abs",
        "decomp/engine_abs",
        "ppo_kl",
        "reward",
        *strategies,
    ]
    return markdown.table(titles, rows)


def _runs_text(frame: pd.DataFrame) -> str:
    rows = [
        [
            str(row["strategy"]), str(row["seed"]), f"{row['learning_rate']:g}", str(row["pause_mode"]),
            str(row["resume_rows"]), str(row["updates"]), f"`{row['commit']}`", f"`{row['command']}`",
        ]
        for row in frame.to_dict("records")
    ]  # fmt: skip
    titles = ["trained with", "seed", "learning rate", "pause mode", "resumed rows", "updates", "commit", "command"]
    return markdown.table(titles, rows)


SECTIONS = (
    Section("ranking", merge_frames.ranking, _ranking_text, merge_figures.ranking),
    Section("segments", merge_frames.by_segment, _bucket_text, merge_figures.by_segment),
    Section("boundary", merge_frames.by_boundary, _bucket_text, merge_figures.by_boundary),
    Section("span", merge_frames.by_span, _bucket_text, merge_figures.by_span),
    Section("lag", merge_frames.by_lag, _bucket_text, merge_figures.by_lag),
    Section("slots", merge_frames.by_slots, _bucket_text, merge_figures.by_slots),
    Section("learning_rate", merge_frames.by_learning_rate, _learning_rate_text, merge_figures.by_learning_rate),
    Section("modes", merge_frames.by_mode, _modes_text, None),
    Section("runs", merge_frames.runs, _runs_text, None),
)
