"""The report as one HTML page: no script, nothing fetched, light and dark, phone to paper."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis.report import svg
from analysis.report.content import Report, Shown
from analysis.report.figures import TITLE

_HERE = Path(__file__).parent


def html(report: Report) -> str:
    """Returns the page. All text is escaped: names and settings of runs come from outside."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    css = (_HERE / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        report=report,
        css=Markup(
            css.replace("/* light */", svg.variables(dark=False)).replace("/* dark */", svg.variables(dark=True))
        ),
        picture=_picture,
    )


def _picture(shown: Shown) -> Markup:
    return svg.inline(shown.svg, shown.name, shown.alternative, hidden=TITLE - 0.06)
