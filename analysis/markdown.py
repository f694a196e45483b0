"""Tables in Markdown, and a document whose tables are written by code, so that it never drifts from the numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

_PLACE = re.compile(r"<!-- table: (?P<name>\S+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
_OPEN = re.compile(r"<!-- table: (\S+) -->")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[str] = ()) -> str:
    """Returns a Markdown table; the first column and those in `text` are text, the others are numbers."""
    lines = [titles, ["---" if title in (titles[0], *text) else "---:" for title in titles], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def number(value: float | None) -> str:
    """Returns two significant digits; `0` for exactly zero; `-` for what is not there."""
    if value is None or value != value:
        return "-"
    if value == 0:
        return "0"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def interval(mean: float | None, low: float | None, high: float | None) -> str:
    """Returns `mean [low, high]`; the mean alone where there is no interval, or where nothing varies."""
    known = low is not None and high is not None and low == low and high == high and low < high
    return f"{number(mean)} [{number(low)}, {number(high)}]" if known else number(mean)


def read(path: Path) -> str:
    """Returns the document to fill.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected the document to fill") from error


def filled(path: Path, document: str, tables: Mapping[str, str]) -> str:
    """Returns `fill(document, tables)` of the document in `path`.

    Raises:
        ValueError: as `fill`, with the path.
    """
    try:
        return fill(document, tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def fill(document: str, tables: Mapping[str, str]) -> str:
    """Returns `document` with the text between `<!-- table: NAME -->` and `<!-- end -->` replaced by `tables[NAME]`.

    Raises:
        ValueError: the document has a place that `tables` lacks, a place without an end, or no place at all.
    """
    opened, places = _OPEN.findall(document), [match["name"] for match in _PLACE.finditer(document)]
    if opened != places:
        raise ValueError(
            f"a place has no '<!-- end -->' before the next one; places opened: {opened}, closed: {places}"
        )
    if not places:
        raise ValueError(f"no '<!-- table: NAME -->' found; known names: {', '.join(tables)}")
    unknown = [name for name in places if name not in tables]
    if unknown:
        raise ValueError(f"unknown table {', '.join(unknown)}; known names: {', '.join(tables)}")
    return _PLACE.sub(lambda m: f"<!-- table: {m['name']} -->\n{tables[m['name']]}\n<!-- end -->", document)
