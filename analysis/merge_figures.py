"""The figures of docs/merge_error.md: one function each; a table of analysis/merge_frames.py in, a figure out."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.merge_frames import BOUNDARIES

MERGE_ERROR = "mean |merge error| per token (nats)"
_WIDTH, _HEIGHT = 6.6, 3.7  # inches
_MARGINS = {"left": 0.11, "right": 0.79, "bottom": 0.15, "top": 0.9}
_DODGE = 0.36  # of the distance between two categories, over all strategies


def ranking(frame: pd.DataFrame) -> Figure:
    """Returns strategies from least to most merge error, one point with interval per run."""
    strategies = list(frame["strategy"].cat.categories)
    figure = Figure(figsize=(_WIDTH, 1.1 + 0.32 * len(strategies)))
    axes = figure.subplots()
    figure.subplots_adjust(
        left=0.2, right=0.97, bottom=0.55 / figure.get_figheight(), top=1 - 0.4 / figure.get_figheight()
    )
    seeds = sorted(frame["seed"].unique())
    for row in frame.to_dict("records"):
        offset = (seeds.index(row["seed"]) - (len(seeds) - 1) / 2) * min(0.18, 0.7 / len(seeds))
        y = len(strategies) - 1 - strategies.index(row["strategy"]) - offset
        axes.plot([row["low"], row["high"]], [y, y], color=style.INK, linewidth=1.1)
        axes.plot([row["mean"]], [y], linestyle="none", **style.style(row["strategy"]))
    axes.set_yticks(range(len(strategies)), reversed(strategies))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(strategies) - 0.4)
    style.error_scale(axes, "x", frame["mean"], frame["high"])
    axes.set_xlabel(MERGE_ERROR)
    axes.set_title("How far each merge rule is from the exact rows")
    return figure


def by_segment(frame: pd.DataFrame) -> Figure:
    """Returns the merge error in the first, middle and last segment of interrupted rollouts, and in the others."""
    figure, axes = _panel("Merge error by segment of the rollout", "segment (only: rollouts that were not interrupted)")
    present = present_buckets(frame)
    style.label_ends(axes, categories(axes, frame, present, joined=[name for name in present if name != "only"]))
    return figure


def by_span(frame: pd.DataFrame) -> Figure:
    """Returns the merge error of interrupted rollouts against the weight versions that they span."""
    figure, axes = _panel(
        "Merge error of interrupted rollouts by version span", "weight versions from the oldest to the newest segment"
    )
    style.label_ends(axes, categories(axes, frame, present_buckets(frame), joined=present_buckets(frame)))
    return figure


def by_lag(frame: pd.DataFrame) -> Figure:
    """Returns the merge error against the version lag of the segment."""
    figure, axes = _panel("Merge error by version lag", "trainer version at the update minus the segment's version")
    style.label_ends(axes, categories(axes, frame, present_buckets(frame), joined=present_buckets(frame)))
    return figure


def by_slots(frame: pd.DataFrame) -> Figure:
    """Returns the merge error against the share of expert slots that the merge changed."""
    figure, axes = _panel(
        "Merge error by how many routes the merge changed", "expert slots that differ from the exact rows"
    )
    style.label_ends(axes, categories(axes, frame, present_buckets(frame), joined=present_buckets(frame)))
    return figure


def by_boundary(frame: pd.DataFrame) -> Figure:
    """Returns the merge error before and after a resume boundary."""
    figure, axes = _panel("Merge error around a resume boundary", "tokens from the nearest resume boundary")
    present = present_buckets(frame)
    style.label_ends(axes, categories(axes, frame, present, joined=present))
    after = [label for label in list(BOUNDARIES.values())[3:] if label in present]
    if after and present.index(after[0]) > 0:
        x = present.index(after[0]) - 0.5
        axes.axvline(x, color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(
            "resume", (x, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -8), textcoords="offset points"
        )
    return figure


def by_learning_rate(frame: pd.DataFrame) -> Figure:
    """Returns two panels over the learning rate: the merge error of every strategy, and route churn."""
    figure = Figure(figsize=(_WIDTH, 5.2))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.subplots_adjust(left=0.11, right=0.79, bottom=0.1, top=0.93, hspace=0.3)
    rates = sorted(frame["learning_rate"].unique())
    upper.set_xscale("log")
    upper.set_xlim(rates[0] / 1.4, rates[-1] * 1.4)
    style.error_scale(upper, "y", frame["mean"], frame["high"])
    ends = []
    for strategy, own in frame.groupby("strategy", sort=True):
        mean = own.groupby("learning_rate")["mean"].mean()
        look = style.style(str(strategy))
        upper.plot(own["learning_rate"], own["mean"], linestyle="none", **{**look, "markersize": 3.0})
        upper.vlines(own["learning_rate"], own["low"], own["high"], color=look["color"], linewidth=0.9)
        upper.plot(mean.index, mean.to_numpy(), linewidth=1.1, **look)
        ends.append((str(strategy), mean.index[-1], mean.iloc[-1]))
    style.label_ends(upper, ends)
    upper.set_ylabel(MERGE_ERROR)
    upper.set_title("Merge error and route churn by learning rate")
    churn = frame.drop_duplicates(["learning_rate", "seed"]).dropna(subset=["churn"])
    style.error_scale(lower, "y", churn["churn"], ())
    lower.plot(churn["learning_rate"], churn["churn"], linestyle="none", marker="o", markersize=3.0, color=style.INK)
    mean = churn.groupby("learning_rate")["churn"].mean()
    lower.plot(mean.index, mean.to_numpy(), linewidth=1.1, color=style.INK)
    lower.set_ylabel("route churn")
    lower.set_xlabel("trainer.learning_rate")
    lower.set_xticks(rates, [f"{rate:g}" for rate in rates])
    lower.minorticks_off()
    return figure


def _panel(title: str, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT))
    axes = figure.subplots()
    figure.subplots_adjust(**_MARGINS)
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.set_ylabel(MERGE_ERROR)
    return figure, axes


def categories(
    axes: Axes, frame: pd.DataFrame, present: list[str], joined: list[str]
) -> list[tuple[str, float, float]]:
    """Draws one line per strategy over the categories `present`, side by side, broken where a category has no data.

    Returns:
        The ends of the lines, for `style.label_ends`.
    """
    axes.set_xticks(range(len(present)), present)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(present) - 0.5)
    style.error_scale(axes, "y", frame["mean"], frame.get("high", ()))
    strategies = sorted(frame["strategy"].unique())
    ends = []
    for place, strategy in enumerate(strategies):
        offset = _DODGE * ((place + 0.5) / len(strategies) - 0.5)
        own = frame[frame["strategy"] == strategy].set_index("bucket").reindex(present)
        x, y, look = np.arange(len(present)) + offset, own["mean"].to_numpy(), style.style(strategy)
        axes.plot(x[: len(joined)], y[: len(joined)], linewidth=1.1, color=look["color"], alpha=0.75)
        axes.plot(x, y, linestyle="none", **look)
        if "low" in own:
            axes.vlines(x, own["low"], own["high"], color=look["color"], linewidth=1.1)
        last = int(np.flatnonzero(np.isfinite(y))[-1])
        ends.append((strategy, x[last], y[last]))
    return ends


def present_buckets(frame: pd.DataFrame) -> list[str]:
    """Returns the buckets that have data, in their order."""
    return [name for name in frame["bucket"].cat.categories if (frame["bucket"] == name).any()]
