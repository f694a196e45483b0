"""Figures of many arms, or of arms with long names: nothing that is written lies on something else."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis import style
from analysis.report import figures

FEW = ["replace", "slice_concat", "exact"]
MANY = [f"a_strategy_with_a_long_name_{number}" for number in range(12)]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Returns the pairs of texts of a figure that lie on each other."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    axes = [each for each in figure.axes if each.get_visible()]
    outside = {  # matplotlib keeps the labels of ticks beyond the limits, and does not draw them
        tick.label1
        for axis in (axis for each in axes for axis in (each.xaxis, each.yaxis))
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    shown = [text for text in texts if text not in outside and (text.axes is None or text.axes in axes)]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    return [(a, b) for (a, first), (b, second) in itertools.combinations(boxes, 2) if first.overlaps(second)]


@pytest.mark.parametrize("arms", [FEW, MANY], ids=["few", "many"])
def test_no_text_lies_on_another(arms: list[str]) -> None:
    looks = style.lines(arms)
    curve = [(arm, f"{arm}-s0", step, sign * 0.004) for arm in arms for step, sign in ((1, -1), (2, 1))]
    seeds = pd.DataFrame(curve, columns=["strategy", "run", "step", "value"])
    values = pd.DataFrame(
        [("mean gap/abs", arm, seed, 0.01 + seed / 1000) for arm in arms for seed in (0, 1)],
        columns=["scalar", "strategy", "seed", "value"],
    )
    with style.settings():
        drawn = [
            figures.seeds(seeds, looks, "Run by run", "actor/ppo_kl (nats)"),
            figures.paired(values, looks, "The compared metric"),
        ]
        assert [overlapping(figure) for figure in drawn] == [[], []]
