"""The report as one HTML page: no script, nothing fetched, light and dark, phone to paper."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from analysis.report import svg
from analysis.report.content import Report, Shown
from analysis.report.figures import TITLE

_HERE = Path(__file__).parent
_SIGNED_EXPONENT = re.compile(r"-?[\d.]+e-\d+")


def html(report: Report) -> str:
    """Returns the page. All text is escaped: names and settings of runs come from outside."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["unbroken"] = _unbroken
    css = (_HERE / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        report=report,
        css=Markup(
            css.replace("/* light */", svg.variables(dark=False)).replace("/* dark */", svg.variables(dark=True))
        ),
        picture=_picture,
    )


def _unbroken(text: str) -> Markup:
    """Returns `text` such that no line ends inside a number, where a browser would break it at the sign of 2e-3."""
    return Markup(_SIGNED_EXPONENT.sub(r'<span class="unbroken">\g<0></span>', str(escape(text))))


def _picture(shown: Shown) -> Markup:
    return svg.inline(shown.svg, shown.name, shown.alternative, hidden=TITLE - 0.06)
