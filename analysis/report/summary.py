"""The report in Markdown: named blocks that fill a document of one's own, and a summary made of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import markdown
from analysis.report.content import Report, Shown
from analysis.report.tables import Table


def blocks(report: Report, figures: str) -> dict[str, str]:
    """Returns every block by the name of its place (`markdown.fill`): `verdict`, `warnings`, `arms`, `excluded`,
    `notes`, `figure-<name>`, `left-out`, the names of the tables, and `commands`.

    Args:
        report: the report.
        figures: folder of the figures, relative to the document.
    """
    return {
        "verdict": f"**{_text(report.verdict)}**",
        "warnings": _list(report.warnings, "None."),
        "arms": _table(report.arms),
        "excluded": _table(report.excluded) if report.excluded.rows else "Every run that was found is used.",
        "notes": _list(report.notes, "None."),
        **{f"figure-{each.name}": _figure(each, figures) for each in report.shown},
        "left-out": _list([f"{title}: {reason}." for title, reason in report.left_out], "None."),
        **{table.name: _folded(table) if table.long else _table(table) for table in report.tables},
        "commands": "```\n" + "\n".join(report.commands) + "\n```",
    }


def summary(report: Report) -> str:
    """Returns the whole report as a document whose places `--write` fills again."""
    found = blocks(report, "figures")
    titles = {"arms": report.arms.title, "excluded": report.excluded.title, "left-out": "Figures left out",
              "commands": "How to reproduce", **{table.name: table.title for table in report.tables}}  # fmt: skip
    parts = [f"# {_text(report.title)}", _place("verdict", found["verdict"])]
    if report.warnings:
        parts += ["Read this first:", _place("warnings", found["warnings"])]
    for name in found:
        if name in ("verdict", "warnings", "notes") or (name == "left-out" and not report.left_out):
            continue
        level = "###" if name.startswith("figure-") or name in {table.name for table in report.tables} else "##"
        title = titles.get(name) or next(each.title for each in report.shown if f"figure-{each.name}" == name)
        if report.shown and name == f"figure-{report.shown[0].name}":
            parts.append("## Figures")
        if report.tables and name == report.tables[0].name:
            parts.append("## Statistics")
        parts += [f"{level} {title}", _place(name, found[name])]
        if name == "excluded":
            parts += ["## How the numbers were made", _place("notes", found["notes"])]
    return "\n\n".join(parts) + "\n"


def _place(name: str, body: str) -> str:
    return f"<!-- table: {name} -->\n{body}\n<!-- end -->"


def _figure(shown: Shown, folder: str) -> str:
    return (
        f"![{_text(shown.alternative)}]({folder}/{shown.name}.svg)\n\n{_text(shown.reading)} *{_text(shown.caption)}*"
    )


def _table(table: Table) -> str:
    body = markdown.table(table.columns, [[_text(cell) for cell in row] for row in table.rows], text=table.text)
    return f"{body}\n\n{_text(table.note)}" if table.note else body


def _folded(table: Table) -> str:
    return f"<details><summary>{len(table.rows)} rows</summary>\n\n{_table(table)}\n\n</details>"


def _list(lines: Sequence[str], none: str) -> str:
    return "\n".join(f"- {_text(line)}" for line in lines) or none


def _text(text: str) -> str:
    """Returns `text` such that Markdown shows it as it is: what comes from a run cannot add markup or end a place."""
    for special in ("\\", "<", ">", "`", "*", "_", "[", "]"):
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())
