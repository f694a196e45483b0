"""How every figure looks: one colour and marker per strategy everywhere, labels beside the lines, a zero that is shown.

Merge errors span decades and are exactly zero where a rule is exact: axes are logarithmic down to the lowest decade,
and linear from there to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

# Okabe and Ito's colours, which colour-blind readers tell apart, and greys; marker and dash tell them apart in grey.
_STYLES: dict[str, tuple[str, str]] = {
    "replace": ("#D55E00", "o"),
    "slice_concat": ("#0072B2", "s"),
    "naive_concat": ("#000000", "X"),
    "live": ("#009E73", "^"),
    "recompute": ("#CC79A7", "D"),
    "last_segment": ("#E69F00", "v"),
    "mask_stale": ("#56B4E9", "P"),
    "gated": ("#7F7F7F", "h"),
    "shuffled": ("#3D3D3D", "*"),
    "exact": ("#949494", "d"),
}
_OTHER = ("#7F7F7F", "p")
_DASHES: dict[str, Any] = {
    "slice_concat": (0, (5, 1.5)),
    "naive_concat": (0, (1.2, 1.2)),
    "live": (0, (7, 1.5, 1.2, 1.5)),
    "recompute": (0, (4, 1.5, 1.2, 1.5, 1.2, 1.5)),
    "last_segment": (0, (2.5, 2.5)),
    "mask_stale": (0, (9, 2)),
    "gated": (0, (3, 1, 1, 1)),
    "shuffled": (0, (1, 2.5)),
    "exact": (0, (6, 1.2, 2.5, 1.2)),
}
_MARKER_SIZES = {"X": 6.5, "P": 6.5, "*": 9.0}
INK = "#222222"
FAINT = "#DDDDDD"
LEADER = "#AAAAAA"
_DARK = {  # the same hues, as far from dark paper as the others are from white
    "#D55E00": "#F08A3C",
    "#0072B2": "#4FA8E8",
    "#000000": "#F5F5F5",
    "#009E73": "#2CC498",
    "#CC79A7": "#E59BC5",
    "#E69F00": "#F0B43C",
    "#56B4E9": "#8ACCF2",
    "#7F7F7F": "#A0A0A0",
    "#3D3D3D": "#C8C8C8",
    "#949494": "#8C8C8C",
    INK: "#E4E4E4",
    FAINT: "#3A3A3A",
    LEADER: "#6E6E6E",
    "#FFFFFF": "#16181B",
}
SPAN = 20.0
"""A linear axis whose largest value is further above most of them shows nothing but that value."""
_LABEL_PITCH_PT = 10.5
_DECADES = 5  # shown at most; smaller values are rounding, and lie between 0 and the lowest decade
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_ZERO_SHARE = 0.45  # of a decade, for the part from 0 to the lowest decade

_SETTINGS: Any = {
    "svg.hashsalt": "routemerge",  # equal numbers, equal bytes
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.grid": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
}


def settings() -> Any:
    """Returns a context in which matplotlib draws as this project does, whatever the user's own settings are."""
    return mpl.rc_context({**mpl.rcParamsDefault, **_SETTINGS})


def style(strategy: str) -> dict[str, Any]:
    """Returns colour and marker of a strategy, for `plot` and `errorbar`; a user's own strategies share one."""
    colour, marker = _STYLES.get(strategy, _OTHER)
    return {
        "color": colour,
        "marker": marker,
        "markersize": _MARKER_SIZES.get(marker, 5.0),
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def lines(strategies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns `style` and line style of every strategy, for `plot`. A user's own strategy borrows the look of one that
    is not among them, so that lines of one figure differ; beyond the looks that there are, they share one.
    """
    spare = iter([name for name in _STYLES if name not in strategies])
    looks = {}
    for name in strategies:
        known = name if name in _STYLES else next(spare, name)
        looks[name] = {**style(known), "linestyle": _DASHES.get(known, "-")}
    return looks


def error_scale(axes: Axes, which: str, means: Iterable[float], highs: Iterable[float]) -> None:
    """Scales axis `which` (`x` or `y`) of `axes`: 0 at its end, then decades from the least positive mean to the
    largest upper end `highs` of an interval; an interval that reaches further down runs into the zero.
    """
    positive = np.array([mean for mean in means if mean > 0])
    axis = axes.xaxis if which == "x" else axes.yaxis
    scale, limits = (axes.set_xscale, axes.set_xlim) if which == "x" else (axes.set_yscale, axes.set_ylim)
    if not len(positive):
        limits(-0.05, 1.0)
        axis.set_major_locator(FixedLocator([0.0]))
        return
    largest = max([float(positive.max()), *(high for high in highs if high == high)])
    highest = int(np.ceil(np.log10(largest)))
    lowest = max(int(np.floor(np.log10(positive.min()))), highest - _DECADES)
    threshold = 10.0**lowest
    scale("symlog", linthresh=threshold, linscale=_ZERO_SHARE, base=10)
    limits(-0.12 * threshold, 1.5 * max(largest, threshold))
    axis.set_major_locator(FixedLocator([0.0, *(10.0**decade for decade in range(lowest, highest + 1))]))
    axis.set_major_formatter(FuncFormatter(_decade))
    axis.set_minor_locator(NullLocator())
    axes.grid(axis="x" if which == "x" else "y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def value_scale(axes: Axes, values: Iterable[float], threshold: float | None = None) -> None:
    """Scales the y axis of `axes` for `values`: linear where most of them lie within a factor of SPAN of the largest,
    logarithmic where they are positive and do not, and else linear around 0 and logarithmic beyond.

    Args:
        threshold: where the logarithmic part begins; None: at the decade of the middle one of the sizes.
    """
    array = np.asarray(list(values), dtype=np.float64)
    array = array[np.isfinite(array)]
    sizes = np.abs(array[array != 0])
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    if threshold is None and (not len(sizes) or sizes.max() < SPAN * np.quantile(sizes, 0.25)):
        low, high = (array.min(), array.max()) if len(array) else (0.0, 0.0)
        margin = 0.05 * ((high - low) or abs(high) or 1.0)
        axes.set_ylim(low - margin, high + margin)
        return
    if threshold is None and array.min() > 0:
        axes.set_yscale("log")
        axes.set_ylim(sizes.min() / 1.3, sizes.max() * 1.3)
        _label_decades(axes.yaxis)
        return
    largest = sizes.max(initial=threshold or 0.0)
    highest = int(np.ceil(np.log10(largest)))
    lowest = max(int(np.floor(np.log10(threshold or np.median(sizes)))), highest - _DECADES)
    axes.set_yscale("symlog", linthresh=10.0**lowest, linscale=1.0, base=10)
    decades = [10.0**decade for decade in range(lowest, highest + 1)]
    axes.yaxis.set_major_locator(FixedLocator([*(-value for value in decades), 0.0, *decades]))
    axes.yaxis.set_major_formatter(FuncFormatter(_decade))
    axes.yaxis.set_minor_locator(NullLocator())
    margin = 0.12 * 10.0**lowest
    axes.set_ylim(1.4 * min(array.min(initial=0.0), 0.0) - margin, 1.4 * max(array.max(initial=0.0), 0.0) + margin)


def log_scale(axes: Axes) -> None:
    """Makes the x axis of `axes` logarithmic."""
    axes.set_xscale("log")
    _label_decades(axes.xaxis)


def _label_decades(axis: Axis) -> None:
    """Labels the decades of a logarithmic axis, and 2 and 5 times a decade where it has fewer than two."""
    low, high = axis.get_view_interval()
    whole = np.floor(np.log10(high)) - np.ceil(np.log10(low)) + 1
    if whole >= 2:
        axis.set_major_formatter(FuncFormatter(_decade))
        axis.set_minor_formatter(NullFormatter())
        return
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def share_scale(axes: Axes) -> None:
    """Scales the y axis of `axes` for shares whose distance from 1 matters: logarithmic in that distance, down to
    1e-4.
    """
    nearest = 1e-4
    axes.set_yscale(
        "function",
        functions=(
            lambda share: -np.log10(np.maximum(1.0 - share, 0.0) + nearest),
            lambda height: 1.0 + nearest - 10.0**-height,
        ),
    )
    ticks = [0.0, 0.5, 0.9, 0.99, 0.999, 1.0]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0.0, 1.0)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _decade(value: float, _: int) -> str:
    if value == 0:
        return "0"
    exponent = np.log10(abs(value))
    return ("−" if value < 0 else "") + "10" + str(round(exponent)).translate(_SUPERSCRIPT)


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float]]) -> None:
    """Writes each name to the right of `axes`, level with its line's end where there is room, with a thin leader.

    Limits and scale of the axes must be final.

    Args:
        ends: name, x and y of every line's last point, in data coordinates.
    """
    ends = sorted(
        ends, key=lambda end: -end[1]
    )  # of level points the leftmost is labelled highest: leaders do not cross
    figure = axes.figure
    points = 72.0 / figure.dpi
    heights = [axes.transData.transform((x, y))[1] * points for _, x, y in ends]
    bottom, top = (axes.transAxes.transform((0.0, edge))[1] * points for edge in (0.0, 1.0))
    placed = _spread(heights, _LABEL_PITCH_PT, bottom, top)
    for (name, x, y), height in zip(ends, placed, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.03, (height - bottom) / (top - bottom)),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            arrowprops={"arrowstyle": "-", "color": LEADER, "linewidth": 0.6, "shrinkA": 1.0, "shrinkB": 3.0},
            annotation_clip=False,
        )


def _spread(heights: Sequence[float], pitch: float, bottom: float, top: float) -> list[float]:
    """Returns `heights` moved apart to at least `pitch`, order kept, within bottom and top where they fit."""
    order = np.argsort(heights, kind="stable")  # level points: the first given is lowest
    placed = np.clip(np.asarray(heights, dtype=np.float64)[order], bottom, top)
    for _ in range(200):
        gaps = np.diff(placed)
        close = np.flatnonzero(gaps < pitch - 1e-6)
        if not len(close):
            break
        for index in close:
            push = (pitch - (placed[index + 1] - placed[index])) / 2
            if push > 0:
                placed[index] -= push
                placed[index + 1] += push
        placed += max(0.0, bottom - placed[0]) - max(0.0, placed[-1] - top)
    out = np.empty(len(placed))
    out[order] = placed
    return out.tolist()


def colours(dark: bool) -> dict[str, str]:
    """Returns every colour that figures use, and what it is on light or dark paper."""
    return {light: shown if dark else light for light, shown in _DARK.items()}


def save(figure: Figure, path: Path | TextIO) -> None:
    """Writes `figure` as SVG, the same bytes for the same numbers: no date, no version."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
