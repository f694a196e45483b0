"""Puts together what is logged about one update, shadow scoring aside; the formulas are in experiments/metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from experiments.buffer import Sample
from experiments.metrics.ratio_keys import ENTROPY, GRAD_NORM, KL_LOSS, PG_LOSS
from experiments.metrics.ratios import best_shift, gap_metrics, ppo_metrics
from experiments.metrics.replay import replay_metrics
from experiments.metrics.rewards import reward_metrics
from experiments.metrics.route_keys import ROW_BYTES
from experiments.metrics.routes import churn, churn_metrics
from experiments.metrics.staleness import staleness_metrics
from experiments.metrics.tokens import TokenTable
from experiments.schema import AlgorithmConfig
from experiments.trainers.base import UpdateResult
from strategies.types import ReplayView, Rollout

FULL_REWARD = 1.0
"""Reward of a solved problem, reasoning-gym's convention."""


@dataclass(frozen=True, eq=False)
class MiniStep:
    """One optimiser step on the rollouts `chunk` (indices into the batch).

    `kl`: mean KL penalty over the counted tokens before its coefficient, nats; None without a KL term.
    `log_probs` and `old_log_probs`: per rollout of the chunk, per view, float32 `[t]`; the former under the weights
    before the step.
    """

    chunk: NDArray[np.intp]
    log_probs: list[list[NDArray[np.float32]]]
    old_log_probs: list[list[NDArray[np.float32]]]
    result: UpdateResult
    kl: float | None


@dataclass(frozen=True, eq=False)
class UpdateRecord:
    """What one update saw and did.

    Attributes:
        samples: the batch, `[B]`; `views`, `advantages`: per rollout.
        trainer_version: the trainer's weight version.
        before: per rollout and view, the trainer's log-probs under the weights before the update.
        mini_steps: in order.
        decoupled: the old log-probs are the trainer's; in bypass mode they are the engine's.
    """

    samples: Sequence[Sample]
    views: list[list[ReplayView]]
    advantages: NDArray[np.float32]
    trainer_version: int
    before: list[list[NDArray[np.float32]]]
    mini_steps: Sequence[MiniStep]
    decoupled: bool


def update_metrics(record: UpdateRecord, algorithm: AlgorithmConfig, max_response_tokens: int) -> dict[str, float]:
    """Returns the metrics of one update, by the keys of experiments/metrics/registry.py.

    Raises:
        RuntimeError: a value is not finite; names key, count and rollouts.
    """
    rollouts = [sample.rollout for sample in record.samples]
    table = _table(record, rollouts, record.views, record.before)
    results = [step.result for step in record.mini_steps]
    out = reward_metrics(
        np.array([sample.reward for sample in record.samples]),
        np.array([sample.problem_index for sample in record.samples]),
        np.array([rollout.length - rollout.prompt_len for rollout in rollouts]),
        FULL_REWARD,
        max_response_tokens,
    )
    out |= gap_metrics(table, algorithm.importance_weight_cap) | best_shift(table)
    out |= ppo_metrics([_mini_step_table(record, rollouts, step) for step in record.mini_steps], algorithm)
    out |= staleness_metrics(rollouts, record.trainer_version, _retractions(record))
    out |= churn_metrics(churn(rollouts))
    out |= replay_metrics(
        reduce(add, (result.replay for result in results)),
        [view for own in record.views for view in own],
        algorithm.epochs,
        rollouts[0].num_experts,
        dropped={},
    )
    out |= _loss_terms(record.mini_steps, algorithm) | _row_bytes(record)
    return {str(key): value for key, value in out.items()}


def _loss_terms(mini_steps: Sequence[MiniStep], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Returns gradient norm and terms of the loss, means over mini-steps; `actor/pg_loss` is the policy term alone."""
    kl = [step.kl for step in mini_steps if step.kl is not None]
    entropy = [step.result.entropy for step in mini_steps if step.result.entropy is not None]
    loss = _mean([step.result.loss for step in mini_steps])
    out: dict[str, float] = {GRAD_NORM: _mean([step.result.grad_norm for step in mini_steps])}
    if kl:
        out[KL_LOSS] = _mean(kl)
        loss -= algorithm.kl_coef * _mean(kl)
    if entropy:
        out[ENTROPY] = _mean(entropy)
        loss += algorithm.entropy_coef * _mean(entropy)
    return out | {PG_LOSS: loss}


def _row_bytes(record: UpdateRecord) -> dict[str, float]:
    counted = sum(int(view.loss_mask.sum()) for own in record.views for view in own)
    return {ROW_BYTES: sum(sample.row_bytes for sample in record.samples) / counted} if counted else {}


def _table(
    record: UpdateRecord,
    rollouts: list[Rollout],
    views: list[list[ReplayView]],
    log_probs: list[list[NDArray[np.float32]]],
) -> TokenTable:
    return TokenTable.from_views(
        rollouts,
        views,
        log_probs,
        old_log_probs=log_probs if record.decoupled else None,
        advantages=record.advantages,
        trainer_version=record.trainer_version,
    )


def _mini_step_table(record: UpdateRecord, rollouts: list[Rollout], step: MiniStep) -> TokenTable:
    return TokenTable.from_views(
        [rollouts[i] for i in step.chunk],
        [record.views[i] for i in step.chunk],
        step.log_probs,
        old_log_probs=step.old_log_probs if record.decoupled else None,
        advantages=record.advantages[step.chunk],
        trainer_version=record.trainer_version,
    )


def _retractions(record: UpdateRecord) -> int:
    return sum(sample.retractions for sample in record.samples)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
