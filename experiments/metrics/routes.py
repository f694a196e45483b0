"""Agreement between two sources of routes. Cells are compared as sets: the order of the K slots carries no meaning.

Legend: `N` positions, `L` layers, `K` experts per token, `E` experts; a cell is (position, layer); o = |A and B|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics import route_keys as m
from experiments.metrics.log_ratio import Float
from strategies.types import LIVE, ReplayView, Rollout, Rows

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RouteAgreement:
    """Counts of agreeing cells; two of them add up. Cells that are live in either source are not compared.

    Attributes:
        top_k: `K`.
        cells: int64 `[L]`, cells compared.
        overlap: int64 `[L]`, sum of o.
        identical, one_slot, disjoint: int64 `[L]`, cells with o = K, o = K - 1, o = 0.
        positions: positions with at least one compared cell.
        differing: of these, positions with a differing set in some layer.
    """

    top_k: int
    cells: Counts
    overlap: Counts
    identical: Counts
    one_slot: Counts
    disjoint: Counts
    positions: int
    differing: int

    def __add__(self, other: RouteAgreement) -> RouteAgreement:
        if self.top_k != other.top_k or self.cells.shape != other.cells.shape:
            raise ValueError(
                f"route agreement: cannot add top-{self.top_k} of {self.cells.size} layers "
                f"and top-{other.top_k} of {other.cells.size} layers"
            )
        return RouteAgreement(
            self.top_k,
            self.cells + other.cells,
            self.overlap + other.overlap,
            self.identical + other.identical,
            self.one_slot + other.one_slot,
            self.disjoint + other.disjoint,
            self.positions + other.positions,
            self.differing + other.differing,
        )

    @property
    def overlap_frac(self) -> float:
        """Mean o / K over cells."""
        return float(self.overlap.sum() / (self.top_k * self.cells.sum()))

    @property
    def overlap_by_layer(self) -> Float:
        """float64 `[L]`: mean o / K; NaN in a layer without compared cells."""
        with np.errstate(invalid="ignore"):
            return self.overlap / (self.top_k * self.cells)

    @property
    def set_mismatch(self) -> float:
        """Share of cells with A != B."""
        return float(1.0 - self.identical.sum() / self.cells.sum())


def compare_rows(a: Rows, b: Rows) -> RouteAgreement:
    """Returns how far the rows `a` and `b`, integer `[N, L, K]`, agree.

    Raises:
        ValueError: shapes differ or are not `[N, L, K]`.
    """
    if a.shape != b.shape or a.ndim != 3:
        raise ValueError(f"route agreement: expected two arrays of one shape [N, L, K], got {a.shape} and {b.shape}")
    top_k = a.shape[2]
    compared = (a[..., 0] != LIVE) & (b[..., 0] != LIVE)  # [N, L]
    shared = np.where(compared, overlap(a, b), -1)  # [N, L]
    differs = compared & (shared != top_k)
    return RouteAgreement(
        top_k=top_k,
        cells=compared.sum(axis=0),
        overlap=np.where(compared, shared, 0).sum(axis=0),
        identical=(shared == top_k).sum(axis=0),
        one_slot=(shared == top_k - 1).sum(axis=0),
        disjoint=(shared == 0).sum(axis=0),
        positions=int(compared.any(axis=1).sum()),
        differing=int(differs.any(axis=1).sum()),
    )


def agreement_metrics(agreement: RouteAgreement, source: str | None = None) -> dict[str, float]:
    """Returns `route/*` of an agreement; empty when no cell was compared.

    Args:
        source: None for the strategy's rows against the exact view; `live_before`, `live_after` for those against
            the trainer's live router before and after the update.
    """
    cells = int(agreement.cells.sum())
    if not cells:
        return {}
    values = {
        m.ROUTE_OVERLAP: agreement.overlap_frac,
        m.ROUTE_MISMATCH: agreement.set_mismatch,
        m.ROUTE_TOKEN_ANY: agreement.differing / agreement.positions,
        m.ROUTE_LAYERS: float((cells - agreement.identical.sum()) / agreement.positions),
        m.ROUTE_ZERO: float(agreement.disjoint.sum() / cells),
        m.ROUTE_IDENTICAL: float(agreement.identical.sum() / cells),
        m.ROUTE_ONE_SLOT: float(agreement.one_slot.sum() / cells),
    }
    return {metric if source is None else metric.by("source", source): value for metric, value in values.items()}


def churn(rollouts: Sequence[Rollout]) -> RouteAgreement | None:
    """Returns the agreement of consecutive calls of each rollout on the positions that both returned; None without any.

    Calls that returned no rows are passed over. Delta replies with a kept KV cache share no position with the call
    before.
    """
    before: list[Rows] = []
    after: list[Rows] = []
    for rollout in rollouts:
        calls = [call for call in rollout.calls if call.rows is not None]
        for old, new in pairwise(calls):
            if old.rows is None or new.rows is None:
                continue
            first = max(old.row_start, new.row_start)
            last = min(old.row_start + len(old.rows), new.row_start + len(new.rows))
            if first < last:
                before.append(old.rows[first - old.row_start : last - old.row_start])
                after.append(new.rows[first - new.row_start : last - new.row_start])
    return compare_rows(np.concatenate(before), np.concatenate(after)) if before else None


def churn_metrics(agreement: RouteAgreement | None) -> dict[str, float]:
    """Returns `route/churn` and `route/churn_layer/<l>`; empty when no position was returned twice."""
    if agreement is None or not agreement.cells.sum():
        return {}
    out: dict[str, float] = {m.ROUTE_CHURN: 1.0 - agreement.overlap_frac}
    for layer, overlap in enumerate(agreement.overlap_by_layer):
        if agreement.cells[layer]:
            out[m.ROUTE_CHURN_LAYER.format(layer=layer)] = float(1.0 - overlap)
    return out


def against_exact(
    views: Sequence[Sequence[ReplayView]], exact: Sequence[Sequence[ReplayView]]
) -> RouteAgreement | None:
    """Returns the agreement of a strategy's rows with the exact ones, over all positions; None without any.

    The exact view of a segment is compared with the view of the strategy that carries loss in it, prefix included: a
    changed prefix row reaches later tokens through attention. Segments without loss under the strategy are left out.

    Args:
        views, exact: per rollout, the views of the strategy and of `exact`.
    """
    ours: list[Rows] = []
    theirs: list[Rows] = []
    for own, reference in zip(views, exact, strict=True):
        for target in reference:
            for view in own:
                shared = min(view.length, target.length)
                if (view.loss_mask[:shared] & target.loss_mask[:shared]).any():
                    ours.append(view.rows[: shared - 1])
                    theirs.append(target.rows[: shared - 1])
    return compare_rows(np.concatenate(ours), np.concatenate(theirs)) if ours else None


def audit_metrics(agreement: RouteAgreement | None) -> dict[str, float]:
    """Returns `route/audit_mismatch`: recorded rows of exact views against the generating live router."""
    if agreement is None or not agreement.cells.sum():
        return {}
    return {m.ROUTE_AUDIT: agreement.set_mismatch}


def margin_metrics(margins: Sequence[NDArray[np.floating[Any]]]) -> dict[str, float]:
    """Returns `route/margin_p5` of the live router's margins, per sequence `[t-1, L]`.

    Raises:
        RuntimeError: a margin is not finite.
    """
    values = np.concatenate([margin.ravel() for margin in margins]) if margins else np.zeros(0)
    if not values.size:
        return {}
    if not np.isfinite(values).all():
        raise RuntimeError(
            f"{m.ROUTE_MARGIN}: {int((~np.isfinite(values)).sum())} of {values.size} margins are not finite"
        )
    return {m.ROUTE_MARGIN: float(np.percentile(values, 5.0))}


def overlap(a: Rows, b: Rows) -> Counts:
    """Returns int64 `[N, L]`: |A and B|, 0 where either is live; through bit sets of 64 experts per word."""
    highest = int(max(a.max(initial=0), b.max(initial=0)))
    total = np.zeros(a.shape[:2], dtype=np.int64)
    for word in range(highest // 64 + 1):
        total += np.bitwise_count(_bits(a, word) & _bits(b, word))
    total[(a[..., 0] == LIVE) | (b[..., 0] == LIVE)] = 0
    return total


def _bits(rows: Rows, word: int) -> NDArray[np.uint64]:
    """Returns uint64 `[N, L]`: bit i is set when expert 64 * word + i is in the cell."""
    out = np.zeros(rows.shape[:2], dtype=np.uint64)
    for slot in range(rows.shape[2]):
        expert = rows[..., slot]
        bit = np.left_shift(np.uint64(1), (expert & 63).astype(np.uint64))
        out |= bit if word == 0 and expert.max(initial=0) < 64 else np.where(expert >> 6 == word, bit, np.uint64(0))
    return out
