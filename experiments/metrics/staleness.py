"""How old the tokens of a batch are, how often their rollouts were interrupted, and what that cost.

Over all generated tokens of the batch's rollouts, whether a strategy counts them or not: equal for all strategies on
equal rollouts. The unit is the weight version; an unknown version is neither 0 nor the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.metrics import route_keys as m
from strategies.types import UNKNOWN_VERSION, Rollout


def staleness_metrics(rollouts: Sequence[Rollout], trainer_version: int, retractions: int) -> dict[str, float]:
    """Returns `stale/*` and `fully_async/*`.

    Args:
        rollouts: the batch, at least one.
        trainer_version: weight version of the trainer at the update.
        retractions: requests put back into the engine's queue, over the batch's calls; rollouts do not record them.

    Raises:
        ValueError: no rollout.
        RuntimeError: a token is newer than the trainer.
    """
    if not rollouts:
        raise ValueError("staleness: expected at least one rollout")
    segments = np.zeros(len(rollouts), dtype=np.int64)
    pieces, owners = [], []
    for index, rollout in enumerate(rollouts):
        for segment in rollout.segments():
            segments[index] += 1
            pieces.append(rollout.calls[segment.call_index].versions[: segment.last - segment.first])
            owners.append(index)
    version = np.concatenate([*pieces, np.zeros(0, np.int64)]).astype(np.int64)  # [G] generated tokens
    owner = np.repeat(np.array(owners, dtype=np.int64), [len(piece) for piece in pieces])
    known = version != UNKNOWN_VERSION
    age = trainer_version - version[known]
    if (age < 0).any():
        name = rollouts[int(owner[known][age.argmin()])].rollout_id
        raise RuntimeError(
            f"staleness: rollout {name} has a token of version {version.max()}, the trainer is at {trainer_version}"
        )
    newest, oldest = np.full(len(rollouts), -1), np.full(len(rollouts), np.iinfo(np.int64).max)
    np.maximum.at(newest, owner[known], version[known])
    np.minimum.at(oldest, owner[known], version[known])
    span = np.maximum(newest - oldest, 0)  # [B]
    partial = int(np.count_nonzero(span))
    out: dict[str, float] = {
        m.PARTIAL_RATIO: partial / len(rollouts),
        m.PARTIAL_TOTAL: partial,
        m.PARTIAL_SPAN: int(span.max()),
        m.STALE_RETRACTIONS: retractions,
    }
    if version.size:
        out |= {m.STALE_COVERAGE: float(known.mean()), m.STALE_MULTI_TOKENS: float((span[owner] > 0).mean())}
    if age.size:
        out |= {m.STALE_AGE_MEAN: float(age.mean()), m.STALE_AGE_MAX: int(age.max())}
    for number in (1, 2, 3):
        out[m.STALE_SEGMENTS.format(segments=number)] = int((segments == number).sum())
    out[m.STALE_SEGMENTS.format(segments="4plus")] = int((segments >= 4).sum())
    return {key: float(value) for key, value in (out | _call_counts(rollouts)).items()}


def _call_counts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns what the calls themselves tell of interruptions and their cost."""
    empty = mixed = resumed = fed_again = 0
    for rollout in rollouts:
        generated = fed = 0
        for index, call in enumerate(rollout.calls):
            if index:
                resumed += generated
                fed_again += 0 if call.kv_kept else min(fed, call.input_len)
            empty += call.finish == "abort" and call.new_tokens == 0
            mixed += call.mixed_rows or bool(call.new_tokens and (call.versions != call.versions[0]).any())
            generated += call.new_tokens
            fed = max(fed, call.end - 1) if call.new_tokens else fed
    return {
        m.STALE_EMPTY_ABORTS: empty,
        m.STALE_MIXED_CALLS: mixed,
        m.STALE_RESUMED: resumed,
        m.STALE_REPREFILL: fed_again,
    }
