"""One update: advantages, replay views, old log-probs, optimiser steps, metrics. It holds a strategy and a trainer by
contract only.

Legend: `B` rollouts of the batch, `T` tokens of a rollout, `t` tokens of one of its views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from experiments import ppo
from experiments.buffer import Sample
from experiments.reporting import MiniStep, UpdateRecord, update_metrics
from experiments.schema import AlgorithmConfig, OldLogProb
from experiments.scoring import BatchScorer, ScoredViews, freeze_live_rows, merge, replay_sequence
from experiments.shadow import ShadowScorer
from experiments.shadow_report import Line, ShadowReport, noise_floor
from experiments.trainers.base import Trainer, TrainSequence
from strategies.base import MergeStrategy
from strategies.types import ReplayView, Rollout


@dataclass(frozen=True, eq=False)
class Update:
    """What one update gives to the record.

    Attributes:
        metrics: by the keys of experiments/metrics.
        lines: one per scored segment when shadow scoring was due (experiments/shadow_report.py).
    """

    metrics: dict[str, float]
    lines: list[Line]


def needs_own_scores(algorithm: AlgorithmConfig) -> bool:
    """Returns whether the strategy's log-probs before the update must be computed in a pass of their own.

    A single optimiser step in bypass mode gives them for free: its own forward runs under the same weights.
    """
    return algorithm.mini_batches * algorithm.epochs > 1 or algorithm.old_log_prob is OldLogProb.decoupled


class PPOLearner:
    """Implements the loop's `Learner`.

    `reference` are the weights of the policy that the KL term keeps close to; needed only when `algorithm.kl_coef` is
    above 0.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        strategy_name: str,
        strategy: MergeStrategy,
        algorithm: AlgorithmConfig,
        max_response_tokens: int,
        shadow: ShadowScorer,
        reference: Mapping[str, torch.Tensor] | None,
    ):
        self._trainer = trainer
        self._strategy_name = strategy_name
        self._strategy = strategy
        self._algorithm = algorithm
        self._max_response_tokens = max_response_tokens
        self._shadow = shadow
        self._reference = reference

    def step(self, step: int, samples: list[Sample], version: int) -> Update:
        """Takes update `step` on `samples`; the trainer's last sync was weight version `version`.

        Raises:
            MergeError: the strategy lacks rows; names the rollout.
            AuditError: the engine's rows are not those of its weights; names the request.
            RuntimeError: a non-finite loss, gradient or metric; nothing is replaced.
        """
        rollouts = [replace(sample.rollout, trainer_version=version) for sample in samples]
        rewards = np.array([sample.reward for sample in samples])
        groups = np.array([sample.problem_index for sample in samples])
        advantages = ppo.group_advantages(rewards, groups, self._algorithm.normalize_advantages)
        views = freeze_live_rows(self._trainer, rollouts, merge(self._strategy, rollouts))
        scorer = BatchScorer(self._trainer, rollouts)
        own_views = {self._strategy_name: views}
        own = scorer.score(own_views)[self._strategy_name] if needs_own_scores(self._algorithm) else None
        scores = self._shadow.score(step, scorer, rollouts, own_views) if self._shadow.due(step) else None
        old = self._old_log_probs(rollouts, own)
        reference = self._reference_log_probs(rollouts, views)
        mini_steps = [
            self._mini_step(chunk, rollouts, views, old, advantages, reference)
            for _ in range(self._algorithm.epochs)
            for chunk in np.array_split(np.arange(len(samples)), self._algorithm.mini_batches)
        ]
        decoupled = self._algorithm.old_log_prob is OldLogProb.decoupled
        metrics = update_metrics(
            UpdateRecord(
                samples=samples,
                views=views,
                advantages=advantages,
                trainer_version=version,
                before=own.log_probs if own else mini_steps[0].log_probs,
                mini_steps=mini_steps,
                decoupled=decoupled,
            ),
            self._algorithm,
            self._max_response_tokens,
        )
        if scores is None:
            return Update(metrics, [])
        report = ShadowReport(rollouts, version, scores, advantages, decoupled, self._algorithm)
        live_after = self._shadow.live_rows(rollouts) if scores.probe else None
        metrics |= report.metrics(self._strategy_name, live_after)
        metrics |= noise_floor(scores.scored[self._strategy_name], mini_steps[0])
        return Update(metrics, report.lines())

    def _old_log_probs(self, rollouts: list[Rollout], own: ScoredViews | None) -> list[NDArray[np.float32]]:
        """Returns per rollout float32 `[T]`: the old policy's log-probs, NaN where there are none."""
        if self._algorithm.old_log_prob is OldLogProb.bypass:
            return [rollout.log_probs() for rollout in rollouts]
        assert own is not None
        return own.per_rollout(rollouts)

    def _reference_log_probs(
        self, rollouts: list[Rollout], views: list[list[ReplayView]]
    ) -> list[list[NDArray[np.float32]]] | None:
        """Returns per rollout and view float32 `[t]` under the reference policy and its own router, as verl's reference
        worker.
        """
        if self._algorithm.kl_coef == 0:
            return None
        assert self._reference is not None
        live = [[ReplayView(np.full_like(v.rows, -1), v.loss_mask) for v in own] for own in views]
        with self._trainer.using(self._reference):
            return BatchScorer(self._trainer, rollouts).score({"reference": live})["reference"].log_probs

    def _mini_step(
        self,
        chunk: NDArray[np.intp],
        rollouts: Sequence[Rollout],
        views: Sequence[Sequence[ReplayView]],
        old: Sequence[NDArray[np.float32]],
        advantages: NDArray[np.float32],
        reference: Sequence[Sequence[NDArray[np.float32]]] | None,
    ) -> MiniStep:
        """Takes one optimiser step on the rollouts `chunk`."""
        sequences = []
        for group, index in enumerate(chunk):
            rollout = rollouts[index]
            weights = self._importance_weights(rollout, old[index])
            for number, view in enumerate(views[index]):
                t = view.length
                fed = replay_sequence(rollout, view)
                sequences.append(
                    TrainSequence(
                        token_ids=fed.token_ids,
                        rows=fed.rows,
                        rollout_id=fed.rollout_id,
                        loss_mask=view.loss_mask,
                        old_log_probs=old[index][:t],
                        advantages=np.full(t, advantages[index], dtype=np.float32),
                        weights=weights[:t],
                        ref_log_probs=None if reference is None else reference[index][number],
                        group=group,
                    )
                )
        counted = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        loss = ppo.policy_loss(self._algorithm, counted)
        result = self._trainer.update(sequences, loss, entropy=self._algorithm.entropy_coef > 0)
        remaining = iter(result.log_probs)
        log_probs = [[next(remaining) for _ in views[index]] for index in chunk]
        old_by_view = [[old[index][: view.length] for view in views[index]] for index in chunk]
        kl = self._mean_kl(sequences, result.log_probs)
        return MiniStep(chunk=chunk, log_probs=log_probs, old_log_probs=old_by_view, result=result, kl=kl)

    def _mean_kl(self, sequences: Sequence[TrainSequence], log_probs: Sequence[NDArray[np.float32]]) -> float | None:
        """Returns the mean KL penalty over the counted tokens, nats; None without a KL term."""
        if self._algorithm.kl_coef == 0:
            return None
        differences = [
            (current - sequence.ref_log_probs)[sequence.loss_mask]
            for sequence, current in zip(sequences, log_probs, strict=True)
            if sequence.ref_log_probs is not None
        ]
        estimator = ppo.KL_ESTIMATORS[self._algorithm.kl_estimator]
        return float(estimator(torch.from_numpy(np.concatenate(differences))).mean())

    def _importance_weights(self, rollout: Rollout, old: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns float32 `[T]`: 1 in bypass mode, where the PPO ratio itself is against the engine's policy."""
        if self._algorithm.old_log_prob is OldLogProb.bypass:
            return np.ones(rollout.length, dtype=np.float32)
        return ppo.truncated_importance_weights(old, rollout.log_probs(), self._algorithm.importance_weight_cap)
