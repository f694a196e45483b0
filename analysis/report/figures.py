"""The figures of a report: one function each; a table of numbers in, a figure out, narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import merge_figures, style

Looks = Mapping[str, Mapping[str, Any]]
"""Strategy -> how its lines are drawn (`style.lines`)."""

WIDTH = 4.8  # inches; 9 pt stay readable where a phone shows this in 360 pixels
TITLE = 0.34  # inches that the title takes at the top
_LEGEND_ROW, _BELOW = 0.2, 0.52  # inches
_CHARACTER, _HANDLE = 0.069, 0.52  # inches in the legend, of a character and of what else a name takes
_MARKERS = 7  # on a curve, at most


def curves(
    frame: pd.DataFrame,
    looks: Looks,
    title: str,
    label: str,
    limit: tuple[float, str] | None = None,
    share: bool = False,
) -> Figure:
    """Returns the median of every arm over the updates, with its band; faint where not every run of the arm is there.

    Args:
        frame: `curves.band`.
        looks: how each arm is drawn.
        title: what is shown.
        label: of the y axis, with unit.
        limit: a value to draw across the figure, and what it means.
        share: the axis is `style.share_scale`.
    """
    figure, (axes,) = _figure(title, _present(frame, looks), looks, rows=1)
    _curves(axes, frame, looks)
    values = [*frame["median"], *frame["low"], *frame["high"]]
    if share:
        style.share_scale(axes)
    else:
        style.value_scale(axes, [*values, limit[0]] if limit else values)
    if limit:
        axes.axhline(limit[0], color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(limit[1], (0.995, limit[0]), xycoords=("axes fraction", "data"), xytext=(0, 2),
                      textcoords="offset points", ha="right", va="bottom", fontsize=7.5)  # fmt: skip
    axes.set_ylabel(label)
    axes.set_xlabel("update")
    return figure


def stacked(frame: pd.DataFrame, looks: Looks, title: str, labels: Mapping[str, str]) -> Figure:
    """Returns a panel of `curves` for every metric (`frame["key"]`) of `labels` (key -> label of the y axis)."""
    keys = [key for key in labels if (frame["key"] == key).any()]
    figure, panels = _figure(title, _present(frame, looks), looks, rows=len(keys), height=1.75)
    for axes, key in zip(panels, keys, strict=True):
        own = frame[frame["key"] == key]
        _curves(axes, own, looks)
        style.value_scale(axes, [*own["median"], *own["low"], *own["high"]])
        axes.set_ylabel(labels[key])
    panels[-1].set_xlabel("update")
    return figure


def seeds(frame: pd.DataFrame, looks: Looks, title: str, label: str) -> Figure:
    """Returns one panel per arm with the curve of every run (`curves.seeds`), on one scale."""

    def draw(axes: Axes, strategy: str, own: pd.DataFrame) -> None:
        for _, run in own.groupby("run", sort=True):
            axes.plot(run["step"], _finite(run["value"]), color=looks[strategy]["color"], linewidth=0.7, alpha=0.7)

    return _panels(frame, looks, title, label, draw, frame["value"])


def fans(
    frame: pd.DataFrame, looks: Looks, title: str, label: str, keys: Sequence[str], clip: tuple[float, float] | None
) -> Figure:
    """Returns one panel per arm with the percentiles `keys` (rising, the middle one is the line) over the updates.

    Args:
        clip: the log-ratios at which PPO clips, drawn dashed; None where the runs have no common ones.
    """
    middle = len(keys) // 2

    def draw(axes: Axes, strategy: str, own: pd.DataFrame) -> None:
        for place in range(middle):
            axes.fill_between(own["step"], _finite(own[keys[place]]), _finite(own[keys[-1 - place]]),
                              color=looks[strategy]["color"], alpha=0.16 + 0.08 * place, linewidth=0)  # fmt: skip
        axes.plot(own["step"], _finite(own[keys[middle]]), color=looks[strategy]["color"], linewidth=1.1)
        for bound in clip or ():
            axes.axhline(bound, color=style.INK, linewidth=0.7, linestyle=(0, (3, 2)))

    return _panels(frame, looks, title, label, draw, frame[list(keys)].to_numpy().ravel(), threshold=0.01)


def by_layer(frame: pd.DataFrame, looks: Looks, title: str, label: str) -> Figure:
    """Returns the value of every MoE layer by arm, with interval: `strategy`, `layer`, `median`, `low`, `high`."""
    present = _present(frame, looks)
    figure, (axes,) = _figure(title, present, looks, rows=1)
    for place, strategy in enumerate(present):
        own, look = frame[frame["strategy"] == strategy], looks[strategy]
        x = own["layer"] + 0.4 * ((place + 0.5) / len(present) - 0.5)
        axes.vlines(x, own["low"], own["high"], color=look["color"], linewidth=1.1)
        axes.plot(x, own["median"], linewidth=0.9, **look)
    layers = sorted(frame["layer"].unique())
    axes.set_xticks(layers[:: 1 + len(layers) // 12])
    style.value_scale(axes, [*frame["median"], *frame["low"], *frame["high"]])
    axes.set_xlabel("MoE layer")
    axes.set_ylabel(label)
    return figure


def merge_errors(frame: pd.DataFrame, looks: Looks, title: str, label: str) -> Figure:
    """Returns the merge error of every rule by bucket (`merge_frames.part_errors`, `lag_errors`), with interval."""
    figure, (axes,) = _figure(title, sorted(frame["strategy"].unique()), looks, rows=1)
    buckets = merge_figures.present_buckets(frame)
    merge_figures.categories(axes, frame, buckets, joined=[name for name in buckets if name != "only"])
    axes.set_xlabel(label)
    axes.set_ylabel(merge_figures.MERGE_ERROR)
    return figure


def paired(frame: pd.DataFrame, looks: Looks, title: str) -> Figure:
    """Returns a panel per scalar with the value of every run by arm, the runs of one seed joined: `scalar`, `strategy`,
    `seed`, `value`.
    """
    present = _present(frame, looks)
    names = list(dict.fromkeys(frame["scalar"]))
    figure, panels = _figure(title, present, looks, rows=len(names))
    place = {strategy: index for index, strategy in enumerate(present)}
    for axes, name in zip(panels, names, strict=True):
        panel = frame[frame["scalar"] == name]
        for _, own in panel.groupby("seed", sort=True):
            own = own.assign(x=own["strategy"].map(place)).sort_values("x")
            axes.plot(own["x"], own["value"], color=style.LEADER, linewidth=0.7)
        for strategy in present:
            own = panel[panel["strategy"] == strategy]
            axes.plot([place[strategy]] * len(own), own["value"], **{**looks[strategy], "linestyle": "none"})
        style.value_scale(axes, panel["value"])
        axes.set_ylabel(name, fontsize=7.5 if len(name) > 28 else 9.0)
    fit = max(map(len, present)) * _CHARACTER < 0.8 * WIDTH / len(present)  # else the legend alone names the arms
    panels[-1].set_xticks(range(len(present)), present if fit else [""] * len(present))
    panels[-1].tick_params(axis="x", length=0)
    panels[-1].set_xlim(-0.5, len(present) - 0.5)
    return figure


def survival(frame: pd.DataFrame, looks: Looks, title: str) -> Figure:
    """Returns the share of runs without collapse over the updates: `strategy`, `time`, `survival`."""
    present = _present(frame, looks)
    figure, (axes,) = _figure(title, present, looks, rows=1)
    for strategy in present:
        own = frame[frame["strategy"] == strategy]
        axes.plot(own["time"], own["survival"], drawstyle="steps-post", linewidth=1.3, **looks[strategy])
    style.value_scale(axes, [0.0, 1.0])
    axes.set_xlabel("update")
    axes.set_ylabel("share of runs")
    return figure


def profile(frame: pd.DataFrame, looks: Looks, title: str) -> Figure:
    """Returns the share of an arm's runs that do at least as well as a value: `strategy`, `tau`, `share`, `metric`."""
    present = _present(frame, looks)
    figure, (axes,) = _figure(title, present, looks, rows=1)
    for place, strategy in enumerate(present):
        own = frame[frame["strategy"] == strategy]
        axes.plot(own["tau"], own["share"], drawstyle="steps-post", linewidth=1.3, markevery=(3 * place, 25),
                  **looks[strategy])  # fmt: skip
    if frame["tau"].min() > 0 and frame["tau"].max() > style.SPAN * frame["tau"].min():
        style.log_scale(axes)
    style.value_scale(axes, [0.0, 1.0])
    axes.set_xlabel(str(frame["metric"].iloc[0]))
    axes.set_ylabel("share of runs")
    return figure


def _curves(axes: Axes, frame: pd.DataFrame, looks: Looks) -> None:
    present = _present(frame, looks)
    for place, strategy in enumerate(present):
        own, look = frame[frame["strategy"] == strategy], looks[strategy]
        whole = (own["n"] == own["runs"]).to_numpy()
        median, step = _finite(own["median"]), own["step"].to_numpy()
        axes.fill_between(step, _finite(own["low"]), _finite(own["high"]), where=whole, color=look["color"],
                          alpha=0.18, linewidth=0)  # fmt: skip
        every = max(1, len(own) // _MARKERS)
        marks = (every * place // len(present), every)  # arms that lie on each other show their markers side by side
        axes.plot(step, np.where(whole, median, np.nan), linewidth=1.2, markevery=marks, **look)
        if not whole.all():
            axes.plot(step, median, linewidth=0.8, alpha=0.45, color=look["color"], linestyle=look["linestyle"])


def _panels(
    frame: pd.DataFrame,
    looks: Looks,
    title: str,
    label: str,
    draw: Callable[[Axes, str, pd.DataFrame], None],
    values: Any,
    threshold: float | None = None,
) -> Figure:
    """Returns two columns of panels (one where their titles need the width), one per arm, which share both axes; `draw`
    draws one.
    """
    present = _present(frame, looks)
    columns = min(2, len(present)) if max(map(len, present)) * _CHARACTER < 0.4 * WIDTH else 1
    rows = -(-len(present) // columns)
    height = 1.45 * rows + 0.25 * (rows - 1) + TITLE + 0.2 + _BELOW
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(left=0.17, right=0.985, bottom=_BELOW / height, top=1 - (TITLE + 0.2) / height,
                           hspace=0.25, wspace=0.08)  # fmt: skip
    figure.suptitle(title, x=0.012, y=1 - 0.07 / height, ha="left", va="top", fontsize=10.5)
    for axes in grid.flat[len(present) :]:
        axes.set_visible(False)
    for axes, strategy in zip(grid.flat, present, strict=False):
        draw(axes, strategy, frame[frame["strategy"] == strategy])
        style.value_scale(axes, values, threshold)
        axes.set_title(strategy, fontsize=8.5)
    for axes in grid[-1]:
        axes.set_xlabel("update")
    for axes in grid[-2] if rows > 1 else ():
        below = grid[-1][list(grid[-2]).index(axes)]
        if not below.get_visible():
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("update")
    figure.supylabel(label, x=0.012, fontsize=9.0, ha="left")
    return figure


def _figure(
    title: str, names: Sequence[str], looks: Looks, rows: int, height: float = 2.35
) -> tuple[Figure, Sequence[Axes]]:
    """Returns a figure of `rows` panels below each other, with title and, above the panels, the legend of `names`."""
    per_row = _per_row(names)
    legend_rows = -(-len(names) // per_row)
    head = TITLE + _LEGEND_ROW * legend_rows + 0.06
    total = rows * height + 0.2 * (rows - 1) + head + _BELOW
    figure = Figure(figsize=(WIDTH, total))
    panels = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    figure.subplots_adjust(left=0.15, right=0.985, bottom=_BELOW / total, top=1 - head / total,
                           hspace=0.2 / height)  # fmt: skip
    figure.suptitle(title, x=0.012, y=1 - 0.07 / total, ha="left", va="top", fontsize=10.5)
    handles = [panels[0].plot([], [], linewidth=1.2, **looks[name])[0] for name in names]
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=(0.0, 1 - (TITLE - 0.04) / total), ncols=per_row,
                  frameon=False, fontsize=8.5, handlelength=2.6, columnspacing=1.2, labelspacing=0.25,
                  borderaxespad=0.2)  # fmt: skip
    return figure, panels


def _per_row(names: Sequence[str]) -> int:
    """Returns how many names fit beside each other in the legend, which fills column by column."""
    for columns in range(len(names), 1, -1):
        rows = -(-len(names) // columns)
        widths = [max(map(len, names[start : start + rows])) for start in range(0, len(names), rows)]
        if sum(_CHARACTER * width + _HANDLE for width in widths) < WIDTH:
            return columns
    return 1


def _present(frame: pd.DataFrame, looks: Looks) -> list[str]:
    """Returns the arms that `frame` has, in the order of `looks`."""
    there = set(frame["strategy"])
    return [name for name in looks if name in there]


def _finite(values: pd.Series) -> np.ndarray:
    """Returns `values` with NaN for infinities, which no axis can show."""
    array = values.to_numpy(np.float64)
    return np.where(np.isfinite(array), array, np.nan)
