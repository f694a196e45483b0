"""Scores recorded rollouts under replay views, each distinct view once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.trainers.base import ReplaySequence, Score, Trainer
from strategies.base import MergeStrategy
from strategies.checks import clip, live_rows, missing, rows_used
from strategies.types import MergeError, ReplayView, Rollout


@dataclass(frozen=True, eq=False)
class ScoredViews:
    """The views of a batch and the trainer's log-probs under them.

    Attributes:
        views: per rollout, its views.
        log_probs: per rollout, per view, float32 `[t]`, NaN at 0.
    """

    views: list[list[ReplayView]]
    log_probs: list[list[NDArray[np.float32]]]

    def per_rollout(self, rollouts: Sequence[Rollout]) -> list[NDArray[np.float32]]:
        """Returns per rollout float32 `[T]`: each token's log-prob in the view that carries its loss, NaN where none
        does.
        """
        out = []
        for rollout, views, log_probs in zip(rollouts, self.views, self.log_probs, strict=True):
            values = np.full(rollout.length, np.nan, dtype=np.float32)
            for view, view_log_probs in zip(views, log_probs, strict=True):
                counted = np.flatnonzero(view.loss_mask)
                values[counted] = view_log_probs[counted]
            out.append(values)
        return out


def merge(strategy: MergeStrategy, rollouts: Sequence[Rollout]) -> list[list[ReplayView]]:
    """Returns the strategy's views of every rollout; views without a counted token are left out, as nothing would learn
    from them.

    Raises:
        MergeError: from the strategy; it names the rollout.
    """
    return [_merged(strategy, rollout) for rollout in rollouts]


def _merged(strategy: MergeStrategy, rollout: Rollout) -> list[ReplayView]:
    views = [view for view in strategy(rollout) if view.loss_mask.any()]
    if len(views) > 1:
        counted = np.zeros(rollout.length, dtype=np.int64)
        for view in views:
            counted[: view.length] += view.loss_mask
        twice = np.flatnonzero(counted > 1)
        if strategy.single_view or len(twice):
            fault = f"position {twice[0]} carries loss in two views" if len(twice) else "single_view is True"
            raise MergeError(
                f"rollout {rollout.rollout_id}: {type(strategy).__name__} gave {len(views)} views; every token may "
                f"carry loss once, and {fault}"
            )
    return views


def has_exact_rows(rollout: Rollout) -> bool:
    """Says whether the rows that every segment was sampled through are known: the engine returned them and did not mix
    them inside a call.
    """
    if any(call.mixed_rows for call in rollout.calls):
        return False
    spans = [clip(rows_used(rollout, s.call_index), 0, s.last - 1) for s in rollout.segments()]
    return all(missing(rollout, own) is None for own in spans)


def freeze_live_rows(
    trainer: Trainer, rollouts: Sequence[Rollout], views: list[list[ReplayView]]
) -> list[list[ReplayView]]:
    """Returns the views with the trainer's own routes, as they are now, in place of live rows where a view asks for it
    (R2).
    """
    wanted = [(i, j) for i, own in enumerate(views) for j, view in enumerate(own) if view.freeze_live]
    if not wanted:
        return views
    frozen = [list(own) for own in views]
    scores = trainer.score([replay_sequence(rollouts[i], views[i][j]) for i, j in wanted], routes=True)
    for (i, j), score in zip(wanted, scores, strict=True):
        assert score.rows is not None
        frozen[i][j] = ReplayView(score.rows, views[i][j].loss_mask)
    return frozen


def replay_sequence(rollout: Rollout, view: ReplayView) -> ReplaySequence:
    """Returns the trainer's input for one view."""
    return ReplaySequence(rollout.tokens[: view.length], view.rows, rollout.rollout_id)


class BatchScorer:
    """Scores a batch under several sets of views with the trainer's current weights.

    Two strategies often ask for the same forward (a rollout of one call has one view under all of them; so has the last
    segment under `replace` and `exact`); a forward that is a prefix of an identical longer one is not looked for.
    """

    def __init__(self, trainer: Trainer, rollouts: Sequence[Rollout]):
        self._trainer = trainer
        self._rollouts = rollouts
        self._cache: dict[tuple[int, int, bytes], NDArray[np.float32]] = {}
        self.forwards = 0

    def score(self, views: Mapping[str, list[list[ReplayView]]]) -> dict[str, ScoredViews]:
        """Returns the log-probs of every named set of views (`[rollout][view]`)."""
        wanted: dict[tuple[int, int, bytes], ReplaySequence] = {}
        for sets in views.values():
            for index, rollout_views in enumerate(sets):
                for view in rollout_views:
                    key = _key(index, view)
                    if key not in self._cache:
                        wanted.setdefault(key, replay_sequence(self._rollouts[index], view))
        scores = self._trainer.score(list(wanted.values())) if wanted else []
        self.forwards += len(wanted)
        for key, score in zip(wanted, scores, strict=True):
            self._cache[key] = score.log_probs
        return {
            name: ScoredViews(
                sets, [[self._cache[_key(i, view)] for view in rollout_views] for i, rollout_views in enumerate(sets)]
            )
            for name, sets in views.items()
        }

    def live(self) -> list[Score]:
        """Returns per rollout the forward through the trainer's own router over all `T` tokens, with its routes."""
        views = [ReplayView(live_rows(r, r.length - 1), r.counted()) for r in self._rollouts]
        sequences = [replay_sequence(r, view) for r, view in zip(self._rollouts, views, strict=True)]
        scores = self._trainer.score(sequences, routes=True)
        self.forwards += len(sequences)
        for index, (view, score) in enumerate(zip(views, scores, strict=True)):
            self._cache[_key(index, view)] = score.log_probs
        return scores


def _key(index: int, view: ReplayView) -> tuple[int, int, bytes]:
    """Identifies a forward: the rollout, the tokens fed and the rows by value (whatever integer type holds them)."""
    rows = np.ascontiguousarray(view.rows, dtype=np.int32)
    return index, view.length, hashlib.blake2b(rows.tobytes(), digest_size=16).digest()
