"""Scores tokens under the weights that sampled them, and audits the engine's rows with the same forwards.

Under the generating weights the trainer's own router must choose what the engine returned. Every shape and range check
passes on rows that are shifted, stale or corrupt; this comparison does not. Where both agree, one forward serves both
purposes: its log-probs are those of the returned rows.

Legend: `T` tokens of a rollout, `s` input tokens of a call, `L` layers, `K` experts per token; a cell is (position,
layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.routes import RouteAgreement, compare_rows
from experiments.trainers.base import ReplaySequence, Trainer
from experiments.weight_history import WeightHistory
from strategies.checks import clip, gather, missing, row_dtype, rows_used
from strategies.types import LIVE, UNKNOWN_VERSION, Rollout, Rows

MIN_CELLS = 8
"""Fewer differing cells never stop a run: a near tie that two kernels break differently also moves a few cells after
it.
"""


REQUEST_FACTOR = 10.0


class AuditError(RuntimeError):
    """The engine returned rows that are not those of its weights; names the request."""


@dataclass(frozen=True)
class AuditPlan:
    """How rows are audited.

    Attributes:
        limit: largest share of differing cells of a batch. One request, its prefilled or its decoded rows, may reach
            REQUEST_FACTOR times that, at most half.
        pinned: resumed prefixes were routed through their recorded rows: the router did not choose there.
    """

    limit: float
    pinned: bool


@dataclass(frozen=True, eq=False)
class GeneratingScores:
    """What the generating weights say about a batch.

    Attributes:
        log_probs: per rollout float32 `[T]`, under the rows that the token's own call used and the weights that sampled
            it; NaN where those weights are not kept, and where there is no generated token.
        audited: agreement of returned rows with the router, over all audited calls; None without any.
    """

    log_probs: list[NDArray[np.float32]]
    audited: RouteAgreement | None


@dataclass(frozen=True, eq=False)
class _Piece:
    """The kept tokens `first..last-1` of one call; `rows` `[last-1, L, K]` are what the call was routed through."""

    index: int
    call: int
    first: int
    last: int
    rows: Rows
    audit_from: int | None  # first position that the call routed itself; None: its rows are of several versions


def score_generating(
    trainer: Trainer, history: WeightHistory, rollouts: Sequence[Rollout], plan: AuditPlan
) -> GeneratingScores:
    """Returns log-probs under the generating weights, and the audit.

    Rollouts whose rows the engine mixed inside a call, and calls that returned no full rows, are left out.

    Raises:
        AuditError: the rows of the batch, or of one request, differ from the router's by more than the plan allows.
    """
    log_probs = [np.full(rollout.length, np.nan, dtype=np.float32) for rollout in rollouts]
    returned: list[Rows] = []
    chosen: list[Rows] = []
    differing: dict[str, int] = {}
    by_version: dict[int, list[_Piece]] = {}
    for index, rollout in enumerate(rollouts):
        for piece in _pieces(index, rollout, plan.pinned):
            versions = rollout.calls[piece.call].versions[: piece.last - piece.first]
            for version in np.unique(versions).tolist():
                by_version.setdefault(version, []).append(piece)
    for version in sorted(by_version):
        weights = history.get(version)
        if weights is None:
            continue
        with trainer.using(weights):
            audited = [piece for piece in by_version[version] if piece.audit_from is not None]
            replayed = [piece for piece in by_version[version] if piece.audit_from is None]
            scores = trainer.score([_live_from(rollouts, piece) for piece in audited], routes=True) if audited else []
            for piece, score in zip(audited, scores, strict=True):
                assert score.rows is not None
                own = slice(piece.audit_from, None)
                returned.append(piece.rows[own])
                chosen.append(score.rows[own])
                call = rollouts[piece.index].calls[piece.call]
                differing[call.request_id] = _differing(rollouts[piece.index], piece, score.rows, plan.limit)
                if not differing[call.request_id]:
                    _store(log_probs, rollouts, piece, version, score.log_probs)
                else:
                    replayed.append(piece)
            scores = trainer.score([_replay(rollouts, piece) for piece in replayed]) if replayed else []
            for piece, score in zip(replayed, scores, strict=True):
                _store(log_probs, rollouts, piece, version, score.log_probs)
    agreement = compare_rows(np.concatenate(returned), np.concatenate(chosen)) if returned else None
    if agreement is not None:
        _check_batch(agreement, differing, plan.limit)
    return GeneratingScores(log_probs, agreement)


def _check_batch(agreement: RouteAgreement, differing: dict[str, int], limit: float) -> None:
    """Raises AuditError when the rows of the whole batch differ too much: rows of neighbouring weights differ little in
    any one request.
    """
    cells = int(agreement.cells.sum())
    count = cells - int(agreement.identical.sum())
    if count >= MIN_CELLS and count > limit * cells:
        worst = max(differing, key=lambda name: differing[name])
        raise AuditError(
            f"{count} of {cells} cells of the batch's rows ({count / cells:.2%}) are not what the trainer's router "
            f"chooses under the weights that generated them, at most {limit:.2%} may differ (shadow.audit_limit); in "
            f"{sum(n > 0 for n in differing.values())} of {len(differing)} requests, most in request {worst} "
            f"({differing[worst]} cells). {_ADVICE}"
        )


def _pieces(index: int, rollout: Rollout, pinned: bool) -> list[_Piece]:
    if any(call.mixed_rows for call in rollout.calls):
        return []
    pieces = []
    for segment in rollout.segments():
        call = rollout.calls[segment.call_index]
        spans = clip(rows_used(rollout, segment.call_index), 0, segment.last - 1)
        if missing(rollout, spans) is not None:
            continue
        single = len(set(call.versions.tolist())) == 1 and UNKNOWN_VERSION not in call.versions
        whole = single and not call.kv_kept and call.row_start == 0
        resumed = pinned and segment.call_index > 0
        start = (call.input_len - 1 if resumed else 0) if whole else None
        rows = gather(rollout, spans, row_dtype(rollout))
        pieces.append(_Piece(index, segment.call_index, segment.first, segment.last, rows, start))
    return pieces


def _replay(rollouts: Sequence[Rollout], piece: _Piece) -> ReplaySequence:
    rollout = rollouts[piece.index]
    return ReplaySequence(rollout.tokens[: piece.last], piece.rows, rollout.rollout_id)


def _live_from(rollouts: Sequence[Rollout], piece: _Piece) -> ReplaySequence:
    rollout = rollouts[piece.index]
    rows = piece.rows.astype(row_dtype(rollout, signed=True))
    rows[piece.audit_from :] = LIVE
    return ReplaySequence(rollout.tokens[: piece.last], rows, rollout.rollout_id)


def _store(
    log_probs: list[NDArray[np.float32]],
    rollouts: Sequence[Rollout],
    piece: _Piece,
    version: int,
    values: NDArray[np.float32],
) -> None:
    own = slice(piece.first, piece.last)
    sampled = rollouts[piece.index].calls[piece.call].versions[: piece.last - piece.first] == version
    log_probs[piece.index][own][sampled] = values[own][sampled]


def _differing(rollout: Rollout, piece: _Piece, chosen: Rows, limit: float) -> int:
    """Returns in how many cells the call's rows are not the router's, as sets.

    Raises:
        AuditError: too many, in the prefilled or in the decoded positions.
    """
    assert piece.audit_from is not None
    differs = (np.sort(piece.rows, axis=-1) != np.sort(chosen, axis=-1)).any(axis=-1)  # [last-1, L]
    call, most = rollout.calls[piece.call], max(limit, min(REQUEST_FACTOR * limit, 0.5))
    for name, part in (
        ("prefilled", slice(piece.audit_from, call.input_len)),
        ("decoded", slice(call.input_len, None)),
    ):
        count, cells = int(differs[part].sum()), differs[part].size
        if count >= MIN_CELLS and count > most * cells:
            position, layer = (int(i) for i in np.argwhere(differs[part])[0])
            position += part.start
            raise AuditError(
                f"request {call.request_id} (weight version {int(call.versions[0])}): {count} of {cells} cells of its "
                f"{name} rows are not what the trainer's router chooses under the weights that generated them, at most "
                f"{most:.1%} may differ ({REQUEST_FACTOR:.0f} times shadow.audit_limit); first at position {position}, "
                f"layer {layer}: {piece.rows[position, layer].tolist()} returned, {chosen[position, layer].tolist()} "
                f"chosen. {_ADVICE}"
            )
    return int(differs[piece.audit_from :].sum())


_ADVICE = (
    "The engine's rows are shifted, stale or corrupt, or its numerics differ more than the limit allows: check the "
    "engine, or raise the limit if the difference is understood"
)
