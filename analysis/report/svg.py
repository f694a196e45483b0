"""Figures for the page: an SVG that follows light and dark, names nothing twice, and is not larger than it must be."""

from __future__ import annotations

import io
import re

from markupsafe import Markup, escape
from matplotlib.figure import Figure

from analysis import style

_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(?<=href="#)|(?<=url\(#)')
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_PATH = re.compile(r'(?<= d=")[^"]+')
_DECIMALS = re.compile(r"(\.\d\d)\d+")
_VIEW = re.compile(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="0 0 [\d.]+ [\d.]+"')
_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


def text(figure: Figure) -> str:
    """Returns `figure` as SVG, the same text for the same numbers, its paths with two decimals of a point."""
    buffer = io.StringIO()
    style.save(figure, buffer)
    return _PATH.sub(lambda path: _DECIMALS.sub(r"\1", path[0]), buffer.getvalue())


def inline(svg: str, name: str, alternative: str, hidden: float) -> Markup:
    """Returns `svg` (of `text`) for inclusion in a page.

    Colours become the page's variables `--c-<hex>`, so that the page decides them; ids are made unique by `name`.

    Args:
        svg: a figure.
        name: of the figure, unique in the page.
        alternative: the figure in words.
        hidden: height of the title that the page shows itself, inches.
    """
    body = _METADATA.sub("", _HEAD.sub("", svg, count=1))
    body = _ID.sub(rf'id="{name}-\1"', body)
    body = _REFERENCE.sub(f"{name}-", body)
    body = _COLOUR.sub(lambda match: f"var(--c-{match[0][1:]})", body)
    width, height = map(float, _VIEW.search(body).groups())  # type: ignore[union-attr]
    top = hidden * 72
    view = f'viewBox="0 {top:g} {width:g} {height - top:g}" role="img" aria-label="{escape(alternative)}"'
    return Markup(_VIEW.sub(lambda _: view, body, count=1))


def variables(dark: bool) -> str:
    """Returns the CSS variables of every colour that figures have, for light or dark paper."""
    return " ".join(f"--c-{light[1:].lower()}: {shown.lower()};" for light, shown in style.colours(dark).items())
