"""Whether replay happened as asked. A silent fallback to the live router looks like a result, so this is always logged.

Legend: `t` tokens of a view, `L` MoE layers, `K` experts per token, `E` experts; a cell is (position, layer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from experiments.metrics import route_keys as m
from experiments.trainers.base import ReplayCounts
from strategies.types import LIVE, ReplayView

LONG_RUN = 8
"""Equal rows in a row that count as suspicious: two neighbouring tokens may well be routed alike, eight are not."""


def replay_metrics(
    counts: ReplayCounts,
    views: Sequence[ReplayView],
    passes: int,
    num_experts: int,
    dropped: Mapping[str, int],
    layers_used: int | None = None,
) -> dict[str, float]:
    """Returns `replay/*`.

    Args:
        counts: what the forwards of the update did, added up.
        views: the views that were forwarded, with the rows that were installed (frozen live rows filled in).
        passes: how often each view was forwarded in `counts` (epochs).
        num_experts: `E`.
        dropped: refused rollouts by reason.
        layers_used: routers that consumed a target; None where the trainer does not say.
    """
    live = sum(int((view.rows[..., 0] == LIVE).sum()) for view in views)
    cells = counts.replayed + counts.live
    out: dict[str, float] = {m.REPLAY_MISMATCH: counts.mismatched, m.REPLAY_UNREQUESTED: counts.live - passes * live}
    if cells:
        out |= {m.REPLAY_ACTIVE: counts.replayed / cells, m.REPLAY_FALLBACK: counts.live / cells}
    if layers_used is not None:
        out[m.REPLAY_LAYERS] = layers_used
    out |= {m.REPLAY_DROPPED.format(reason=reason): number for reason, number in dropped.items()}
    return {key: float(value) for key, value in (out | _row_faults(views, num_experts)).items()}


def _row_faults(views: Sequence[ReplayView], num_experts: int) -> dict[str, float]:
    """Returns counts of rows that look wrong, over all views."""
    surplus = [len(view.rows) - (view.length - 1) for view in views]
    out: dict[str, float] = {
        m.REPLAY_MISSING: -sum(min(number, 0) for number in surplus),
        m.REPLAY_SURPLUS: sum(max(number, 0) for number in surplus),
        m.REPLAY_ID_ERRORS: 0,
        m.REPLAY_CONSTANT: 0,
        m.REPLAY_REPEATED: 0,
    }
    views = [view for view in views if len(view.rows)]
    if not views:
        return out
    rows = np.sort(np.concatenate([view.rows for view in views]), axis=-1)  # [sum of t-1, L, K]
    live = (rows == LIVE).all(axis=-1)
    repeated = (rows[..., 1:] == rows[..., :-1]).any(axis=-1)
    outside = (rows[..., 0] < 0) | (rows[..., -1] >= num_experts)
    out[m.REPLAY_ID_ERRORS] = int((~live & (repeated | outside)).sum())

    # A boundary between views, or a live cell, ends every run of equal rows.
    start = np.cumsum([0, *(len(view.rows) for view in views)])
    same = (rows[1:] == rows[:-1]).all(axis=-1) & ~live[1:] & ~live[:-1]  # [sum of t-1, minus 1, L]
    same[start[1:-1] - 1] = False
    constant = 0
    for first, last in pairwise(start):
        if last - first >= LONG_RUN:
            constant += int(same[first : last - 1].all(axis=0).sum())
    out[m.REPLAY_CONSTANT] = constant
    out[m.REPLAY_REPEATED] = _in_long_runs(same.all(axis=-1))
    return out


def _in_long_runs(same: np.ndarray) -> int:
    """Returns how many rows are in runs of at least LONG_RUN equal rows; `same[i]`: rows i and i+1 are equal."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
    lengths = edges[1::2] - edges[::2] + 1
    return int(lengths[lengths >= LONG_RUN].sum())
