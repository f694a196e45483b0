"""`python -m analysis report SOURCE... --out DIR`: report.html, summary.md, figures/ (SVG, PNG) and data/ (CSV).

SOURCE is a folder of run directories, a folder of offline W&B runs or a W&B project (entity/project).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from analysis import markdown
from analysis.plan import Plan
from analysis.report import page, summary
from analysis.report.charts import CHARTS
from analysis.report.content import Report, report
from analysis.report.evidence import Evidence
from analysis.runs import INCOMPLETE, load_runs

_KNOWN_STATES = ("completed", "failed", "running", "interrupted", "crashed", INCOMPLETE)
STATES = ("completed", "failed")
"""A failed run has no whole curve, but when it ended is a result of its arm: collapse is censored data."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `report` to the sub-commands of `python -m analysis`."""
    parser = commands.add_parser("report", help="one page on the runs of a study", description=__doc__)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="where the runs are")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="what was declared before the runs (analysis/plans/); "
        "without one every result is exploratory",
    )  # fmt: skip
    parser.add_argument(
        "--state",
        action="append",
        choices=_KNOWN_STATES,
        help=f"status to use; may repeat (default: {', '.join(STATES)})",
    )
    parser.add_argument("--group", action="append", help="experiment (W&B group) to use; may repeat")
    parser.add_argument("--tag", action="append", help="tag of which a run needs one; may repeat")
    parser.add_argument("--strategy", action="append", help="arm to use; may repeat")
    parser.add_argument("--write", type=Path, metavar="DOC", help="Markdown document whose marked places are filled")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Writes the report, and prints its verdict, its warnings and where it is; on stderr, the runs that are not used.

    Raises:
        ValueError: no run is usable, `out` is a file, or the plan, a source or the document cannot be read.
    """
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"--out {arguments.out}: expected a folder to write to, found a file")
    document = markdown.read(arguments.write) if arguments.write else None
    plan = Plan.read(arguments.plan) if arguments.plan else None
    runs = load_runs(
        *arguments.sources,
        states=tuple(arguments.state or STATES),
        groups=arguments.group,
        tags=arguments.tag,
        strategies=arguments.strategy,
    )
    sys.stderr.writelines(f"{line}\n" for line in runs.not_used())
    found = report(Evidence.of(runs, plan), _command(arguments))
    filled = None if document is None else _filled(arguments, document, found)
    write(found, arguments.out)
    if filled is not None:
        arguments.write.write_text(filled, encoding="utf-8")
    lines = [found.verdict, *(f"warning: {each}" for each in found.warnings)]
    lines += [f"left out: {title}: {reason}" for title, reason in found.left_out]
    sys.stdout.write("\n".join([*lines, f"report: {arguments.out / 'report.html'}"]) + "\n")


def write(found: Report, out: Path) -> None:
    """Writes the files of a report to `out`; those of a figure that it does not have are of other runs, and go."""
    figures, data = out / "figures", out / "data"
    for folder in (figures, data):
        folder.mkdir(parents=True, exist_ok=True)
    for name in {chart.name for chart in CHARTS} - {each.name for each in found.shown}:
        for path in (figures / f"{name}.svg", figures / f"{name}.png", data / f"{name}.csv"):
            path.unlink(missing_ok=True)
    for each in found.shown:
        (figures / f"{each.name}.svg").write_text(each.svg, encoding="utf-8")
        (figures / f"{each.name}.png").write_bytes(each.png)
        each.numbers.to_csv(data / f"{each.name}.csv", index=False, lineterminator="\n")
    (out / "summary.md").write_text(summary.summary(found), encoding="utf-8")
    (out / "report.html").write_text(page.html(found), encoding="utf-8")


def _filled(arguments: argparse.Namespace, document: str, found: Report) -> str:
    figures = Path(os.path.relpath(arguments.out / "figures", arguments.write.parent)).as_posix()
    return markdown.filled(arguments.write, document, summary.blocks(found, figures))


def _command(arguments: argparse.Namespace) -> str:
    words = ["python", "-m", "analysis", "report", *arguments.sources]
    for name in ("plan", "state", "group", "tag", "strategy", "out", "write"):
        value = getattr(arguments, name)
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{name}", str(each)]
    return shlex.join(words)
