"""The counted tokens of a batch as flat arrays: what every statistic is computed from, once per update.

A token that no view counts is not in the table: nothing is masked, padded or multiplied by zero afterwards.

Legend: `N` counted tokens, `B` rollouts, `t` tokens of a view, `T` of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics import ratio_keys as m
from experiments.metrics.log_ratio import Float
from strategies.types import UNKNOWN_VERSION, ReplayView, Rollout

Int = NDArray[np.integer[Any]]

UNKNOWN_LAG = -1
"""Lag of a token whose generating weights are not known; such a token is in no lag bucket."""

NO_BOUNDARY = np.iinfo(np.int64).max
"""Distance of a token in a rollout without a resume boundary; such a token is in no boundary bucket."""


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Counted tokens `[N]`, ordered by rollout, then position. Log-probs in nats, float64; integers int64.

    Attributes:
        rollout_log_probs: the engine's; finite (tokens without one are left out and counted in `missing`).
        log_probs: the trainer's, under the strategy's rows.
        old_log_probs: denominator of the PPO ratio: the engine's in bypass mode, the trainer's before the update in
            decoupled mode.
        advantages: float64.
        rollout: index into `rollout_ids`.
        position: absolute token position.
        segment, segments: index of the token's segment among the segments of its rollout, and their number.
        version: weight version that sampled the token, or UNKNOWN_VERSION.
        lag: `trainer_version - version`, or UNKNOWN_LAG.
        boundary: signed distance to the nearest resume boundary, the first token of a segment after the first: 0 at
            that token, -1 just before it; of two equally near, the one before the token. NO_BOUNDARY in a rollout of
            one segment.
        multi_version: bool, the rollout's generated tokens come from two or more known versions.
        trainer_version: weight version of the trainer when it scored the tokens.
        rollout_ids: names of the rollouts, for errors.
        missing: counted tokens that were left out because the engine returned no log-prob (NaN).

    Raises:
        RuntimeError: a log-prob or an advantage is not finite; names the key, how many and which rollouts.
    """

    rollout_log_probs: Float
    log_probs: Float
    old_log_probs: Float
    advantages: Float
    rollout: Int
    position: Int
    segment: Int
    segments: Int
    version: Int
    lag: Int
    boundary: Int
    multi_version: NDArray[np.bool_]
    trainer_version: int
    rollout_ids: tuple[str, ...]
    missing: int = 0

    def __post_init__(self) -> None:
        for name, ratio in _FINITE.items():
            self.require_finite(getattr(self, name), m.RATIO_NONFINITE.format(ratio=ratio), name)

    @property
    def size(self) -> int:
        """`N`."""
        return self.rollout.size

    def require_finite(self, values: Float, key: str, name: str) -> None:
        """Fails the step unless all of `values` `[N]` are finite.

        Raises:
            RuntimeError: names `key`, `name`, the count and the rollouts.
        """
        if values.shape != self.rollout.shape:
            raise ValueError(f"metrics: expected {name} of shape {self.rollout.shape}, got {values.shape}")
        bad = ~np.isfinite(values)
        if bad.any():
            ids = [self.rollout_ids[index] for index in np.unique(self.rollout[bad])]
            shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
            raise RuntimeError(
                f"{key}: {name} is NaN or infinite at {int(bad.sum())} of {bad.size} counted tokens, "
                f"in rollouts {shown}; the step is not usable and nothing was replaced"
            )

    @classmethod
    def from_views(
        cls,
        rollouts: Sequence[Rollout],
        views: Sequence[Sequence[ReplayView]],
        log_probs: Sequence[Sequence[NDArray[np.floating[Any]]]],
        *,
        old_log_probs: Sequence[Sequence[NDArray[np.floating[Any]]]] | None,
        advantages: NDArray[np.floating[Any]] | None,
        trainer_version: int,
    ) -> TokenTable:
        """Returns the tokens that the views count.

        Args:
            rollouts: `[B]`.
            views: per rollout, its views.
            log_probs: per rollout and view, `[t]`: the trainer's, aligned with the view's tokens (entry 0 is not read).
            old_log_probs: the same; None in bypass mode: the engine's are the old ones.
            advantages: `[B]`, one per rollout; None where there are none (scoring only): taken as 0.
            trainer_version: weight version under which `log_probs` were computed.

        Raises:
            ValueError: lengths do not match; names the rollout.
            RuntimeError: a counted log-prob is NaN or infinite, or a view counts a token that no call generated.
        """
        _check_lengths(rollouts, views, log_probs, old_log_probs)
        counted, rollout, position = _counted(views)
        generated = _Generated.of(rollouts)
        index = generated.index(rollout, position, rollouts)
        known = ~np.isnan(generated.log_probs[index])
        counted, rollout, position, index = (column[known] for column in (counted, rollout, position, index))
        mu = generated.log_probs[index]
        old = mu if old_log_probs is None else _flat([a for own in old_log_probs for a in own], np.float64)[counted]
        scale = np.zeros(len(rollouts)) if advantages is None else np.asarray(advantages, dtype=np.float64)
        version = generated.versions[index]
        return cls(
            rollout_log_probs=mu,
            log_probs=_flat([a for own in log_probs for a in own], np.float64)[counted],
            old_log_probs=old,
            advantages=scale[rollout],
            rollout=rollout,
            position=position,
            segment=generated.segment[index],
            segments=generated.segments[rollout],
            version=version,
            lag=_lags(version, trainer_version),
            boundary=generated.boundary[index],
            multi_version=generated.multi_version[rollout],
            trainer_version=trainer_version,
            rollout_ids=tuple(r.rollout_id for r in rollouts),
            missing=int(known.size - known.sum()),
        )

    @classmethod
    def concatenate(cls, tables: Sequence[TokenTable]) -> TokenTable:
        """Returns one table of all tokens; a rollout in two tables (epochs) counts as two sequences."""
        if len(tables) == 1:
            return tables[0]
        offsets = np.cumsum([0, *(len(table.rollout_ids) for table in tables)])
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in _COLUMNS}
        columns["rollout"] = np.concatenate([t.rollout + offset for t, offset in zip(tables, offsets, strict=False)])
        return cls(
            **columns,
            trainer_version=max(table.trainer_version for table in tables),
            rollout_ids=tuple(name for table in tables for name in table.rollout_ids),
            missing=sum(table.missing for table in tables),
        )

    def select(self, keep: NDArray[Any]) -> TokenTable:
        """Returns the tokens at `keep` (bool `[N]` or indices in order); `missing` is kept."""
        return replace(self, **{name: getattr(self, name)[keep] for name in _COLUMNS})

    def locate(self, other: TokenTable) -> tuple[Int, NDArray[np.bool_]]:
        """Returns, for every token of `other` `[n]`, its index in this table and whether it is here.

        Raises:
            ValueError: the tables are not over the same rollouts.
        """
        if self.rollout_ids != other.rollout_ids:
            raise ValueError("metrics: the two tables are not over the same rollouts in the same order")
        stride = 1 + max(self.position.max(initial=0), other.position.max(initial=0))
        mine, theirs = self.rollout * stride + self.position, other.rollout * stride + other.position
        index = np.minimum(np.searchsorted(mine, theirs), max(mine.size - 1, 0))
        return index, (mine[index] == theirs) if mine.size else np.zeros(theirs.size, dtype=bool)

    def per_sequence_mean(self, values: Float) -> Float:
        """Returns float64 `[M]`: the mean of `values` `[N]` over each rollout that has counted tokens."""
        count = np.bincount(self.rollout, minlength=1)
        present = count > 0
        return np.bincount(self.rollout, weights=values, minlength=1)[present] / count[present]


_COLUMNS = tuple(f.name for f in fields(TokenTable) if f.name not in ("trainer_version", "rollout_ids", "missing"))
_FINITE = {
    "rollout_log_probs": "gap_ratio",
    "log_probs": "gap_ratio",
    "old_log_probs": "ppo_ratio",
    "advantages": "ppo_ratio",
}


@dataclass(frozen=True, eq=False)
class _Generated:
    """Every generated token of the batch, `[G]`, in the order of rollouts and positions; per rollout `[B]`."""

    log_probs: Float
    versions: Int
    segment: Int
    boundary: Int
    lookup: Int  # index of (rollout, position) at offsets[rollout] + position, -1 where no call generated the token
    offsets: Int  # [B]
    segments: Int  # [B]
    multi_version: NDArray[np.bool_]  # [B]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> _Generated:
        owner, first, last, number, log_probs, versions, segments = [], [], [], [], [], [], []
        for b, rollout in enumerate(rollouts):
            index = -1
            for index, segment in enumerate(rollout.segments()):
                call = rollout.calls[segment.call_index]
                owner.append(b)
                first.append(segment.first)
                last.append(segment.last)
                number.append(index)
                kept = segment.last - segment.first
                log_probs.append(call.log_probs[:kept])
                versions.append(call.versions[:kept])
            segments.append(index + 1)
        lengths = np.array([rollout.length for rollout in rollouts], dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        count = np.array(segments, dtype=np.int64)
        at, start, stop = (np.array(values, dtype=np.int64) for values in (owner, first, last))
        size = stop - start
        token_of = np.repeat(np.arange(at.size), size)  # [G], segment (over the batch) of each token
        position = np.arange(token_of.size) - np.repeat(np.cumsum(size) - size, size) + start[token_of]
        lookup = np.full(int(lengths.sum()), -1, dtype=np.int64)
        lookup[offsets[at[token_of]] + position] = np.arange(token_of.size)
        known = _flat(versions, np.int64)
        lowest = np.full(len(rollouts), np.iinfo(np.int64).max)
        highest = np.full(len(rollouts), UNKNOWN_VERSION)
        mask = known != UNKNOWN_VERSION
        np.minimum.at(lowest, at[token_of[mask]], known[mask])
        np.maximum.at(highest, at[token_of[mask]], known[mask])
        segment = np.array(number, dtype=np.int64)[token_of]
        return cls(
            log_probs=_flat(log_probs, np.float64),
            versions=known,
            segment=segment,
            boundary=_boundary(position, segment, count[at[token_of]], start, token_of),
            lookup=lookup,
            offsets=offsets,
            segments=count,
            multi_version=highest > lowest,
        )

    def index(self, rollout: Int, position: Int, rollouts: Sequence[Rollout]) -> Int:
        """Returns the indices `[N]` of the tokens; raises when a token was generated by no call."""
        index = self.lookup[self.offsets[rollout] + position]
        wrong = np.flatnonzero(index < 0)
        if wrong.size:
            name = rollouts[int(rollout[wrong[0]])].rollout_id
            raise RuntimeError(
                f"metrics: rollout {name}: a view carries loss at position {int(position[wrong[0]])}, "
                "which no call generated"
            )
        return index


def _counted(views: Sequence[Sequence[ReplayView]]) -> tuple[Int, Int, Int]:
    """Returns int64 `[N]` thrice, by rollout and position: index into the views laid end to end, rollout, position."""
    owner = np.repeat(np.arange(len(views)), [len(own) for own in views])  # [V]
    masks = [view.loss_mask for own in views for view in own]
    lengths = np.array([mask.size for mask in masks], dtype=np.int64)
    if (lengths == 0).any():
        raise ValueError("metrics: a view has no tokens at all")
    start = np.cumsum(lengths) - lengths
    counted = np.flatnonzero(_flat(masks, bool))
    view = np.searchsorted(start, counted, side="right") - 1
    position, rollout = counted - start[view], owner[view]
    order = np.lexsort((position, rollout))
    return counted[order], rollout[order], position[order]


def _lags(version: Int, trainer_version: int) -> Int:
    """Returns int64 `[N]`: trainer version minus token version; UNKNOWN_LAG for an unknown version."""
    newest = int(version.max(initial=UNKNOWN_VERSION))
    if newest > trainer_version:
        raise RuntimeError(f"metrics: tokens carry weight version {newest}, newer than the trainer's {trainer_version}")
    return np.where(version == UNKNOWN_VERSION, UNKNOWN_LAG, trainer_version - version)


def _boundary(position: Int, segment: Int, segments: Int, start: Int, token_of: Int) -> Int:
    """Returns int64 `[G]`: the signed distance to the nearest first token of a segment after the first."""
    after = np.where(segment > 0, position - start[token_of], NO_BOUNDARY)
    following = np.minimum(token_of + 1, start.size - 1)
    before = np.where(segment + 1 < segments, start[following] - position, NO_BOUNDARY)
    return np.where(after <= before, after, -before)


def _flat(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype=dtype)


def _check_lengths(
    rollouts: Sequence[Rollout],
    views: Sequence[Sequence[ReplayView]],
    *scores: Sequence[Sequence[NDArray[Any]]] | None,
) -> None:
    """Raises ValueError unless there is one score of the view's length for every view of every rollout."""
    for score in (views, *(s for s in scores if s is not None)):
        if len(score) != len(rollouts):
            raise ValueError(f"metrics: expected views and log-probs of {len(rollouts)} rollouts, got {len(score)}")
    for score in (s for s in scores if s is not None):
        for rollout, own, values in zip(rollouts, views, score, strict=True):
            expected = [view.loss_mask.size for view in own]
            came = [np.shape(v)[0] for v in values]
            if expected != came:
                raise ValueError(
                    f"metrics: rollout {rollout.rollout_id}: expected log-probs of lengths {expected}, got {came}"
                )
            if expected and max(expected) > rollout.length:
                raise ValueError(
                    f"metrics: rollout {rollout.rollout_id}: a view has {max(expected)} tokens, it has {rollout.length}"
                )
