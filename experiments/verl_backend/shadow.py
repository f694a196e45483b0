# pyright: reportMissingImports=false
"""Shadow scoring inside verl: the local loop's own, with log-prob passes of verl's actor for its forwards.

A pass takes a batch of verl with other rows in it; several views of a rollout take several of its places.

Legend: `B` trajectories, `R` response tokens (padded), `P` prompt tokens of one trajectory, `t` tokens of a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl import DataProto

from experiments.generating import AuditPlan
from experiments.schema import AlgorithmConfig, OldLogProb
from experiments.scoring import BatchScorer
from experiments.shadow import ShadowPlan, ShadowScorer
from experiments.shadow_report import Line, ShadowReport
from experiments.trainers.base import ReplaySequence, Score
from experiments.verl_backend.settings import ShadowRules
from experiments.weight_history import WeightHistory
from strategies import Exact
from strategies.types import ReplayView, Rollout

LogProbs = Callable[[DataProto], torch.Tensor]
"""Log-probs `[B, R]` of a batch under the present weights, with its rows replayed."""


class VerlTrainer:
    """The scoring half of the local loop's trainer, on one batch of verl."""

    def __init__(self, batch: DataProto, rollouts: Sequence[Rollout], log_probs: LogProbs):
        """`batch` `[B]`: those rollouts, in order, prompts padded on the left, responses on the right."""
        self._batch = batch
        self._index = {rollout.rollout_id: index for index, rollout in enumerate(rollouts)}
        self._prompts = [rollout.prompt_len for rollout in rollouts]
        self._log_probs = log_probs

    def score(self, sequences: Sequence[ReplaySequence], *, routes: bool = False) -> list[Score]:
        """Returns log-probs, NaN on the prompt, which verl does not give.

        Raises:
            RuntimeError: `routes` were asked for.
        """
        if routes:
            raise RuntimeError("shadow scoring in verl: the actor returns no routes; set shadow.probe_every=0")
        size = len(self._batch)  # the size that divides over verl's ranks: a short last pass repeats its first sequence
        out: list[Score] = []
        for start in range(0, len(sequences), size):
            chunk = list(sequences[start : start + size])
            scores = self._pass([*chunk, *[chunk[0]] * (size - len(chunk))])
            out += scores[: len(chunk)]
        return out

    def _pass(self, sequences: Sequence[ReplaySequence]) -> list[Score]:
        places = np.array([self._index[sequence.rollout_id] for sequence in sequences])
        part = self._batch.select_idxs(places)
        width = part.batch["prompts"].shape[1]
        rows = part.batch["routed_experts"].clone()
        for of, place, sequence in zip(rows, places, sequences, strict=True):
            start = width - self._prompts[place]
            # Rows behind a shorter view stay as they were: they come after every token that the view scores.
            of[start : start + len(sequence.rows)] = torch.from_numpy(sequence.rows.astype(np.int16))
        part.batch["routed_experts"] = rows
        # verl replays nothing of a trajectory without loss, and a dropped one has none.
        part.batch["response_mask"] = part.batch["attention_mask"][:, width:].to(part.batch["response_mask"].dtype)
        values = self._log_probs(part).float().cpu().numpy()
        return [
            Score(_aligned(value, self._prompts[place], len(sequence.token_ids)), None, None, None)
            for value, place, sequence in zip(values, places, sequences, strict=True)
        ]


def _aligned(values: NDArray[np.float32], prompt_len: int, length: int) -> NDArray[np.float32]:
    """Returns float32 `[t]` of response values `[R]`."""
    out = np.full(length, np.nan, np.float32)
    out[prompt_len:] = values[: length - prompt_len]
    return out


def own_views(batch: DataProto, rollouts: Sequence[Rollout]) -> list[list[ReplayView]]:
    """Returns per rollout the view that the batch holds; none where it carries no loss."""
    width = batch.batch["prompts"].shape[1]
    views: list[list[ReplayView]] = []
    for rollout, rows, carried in zip(
        rollouts, batch.batch["routed_experts"], batch.batch["response_mask"].bool(), strict=True
    ):
        start = width - rollout.prompt_len
        mask = np.zeros(rollout.length, bool)
        mask[rollout.prompt_len :] = carried[: rollout.length - rollout.prompt_len].numpy()
        own = rows[start : start + rollout.length - 1].numpy()
        views.append([ReplayView(own, mask)] if mask.any() else [])
    return views


def score_shadows(
    batch: DataProto,
    rollouts: Sequence[Rollout],
    log_probs: LogProbs,
    rules: ShadowRules,
    algorithm: AlgorithmConfig,
    trainer_version: int,
) -> tuple[dict[str, float], list[Line]]:
    """Returns the metrics of shadow scoring and a line per segment, as the local loop's.

    Args:
        batch: verl's `[B]`, with advantages, before the update; it is not changed.
        rollouts: its trajectories with the rows of all calls.
        trainer_version: weight version of the last sync.

    Raises:
        RuntimeError: a rule cannot merge a rollout of which all rows are known.
    """
    named = [replace(rollout, trainer_version=trainer_version) for rollout in rollouts]
    trainer: Any = VerlTrainer(batch, named, log_probs)
    scorer = BatchScorer(trainer, named)
    scores = _shadow_scorer(trainer, rules).score(0, scorer, named, {rules.own: own_views(batch, named)})
    advantages = batch.batch["advantages"]
    carried = batch.batch["response_mask"].bool()
    per_rollout = np.array([float(a[c][0]) if c.any() else 0.0 for a, c in zip(advantages, carried, strict=True)])
    decoupled = algorithm.old_log_prob is OldLogProb.decoupled
    report = ShadowReport(named, trainer_version, scores, per_rollout, decoupled, algorithm)
    return report.metrics(rules.own, None), report.lines()


def _shadow_scorer(trainer: Any, rules: ShadowRules) -> ShadowScorer:
    """Returns the local loop's scorer, without probes: they need old weights and the live router's routes, which verl's
    actor does not give.
    """
    plan = ShadowPlan(rules.every, 0, rules.strategies, Exact(), AuditPlan(limit=1.0, pinned=False))
    return ShadowScorer(trainer, plan, WeightHistory({}))
