"""Advantages, importance weights and the clipped policy loss of PPO: pure functions.

The definitions are those of verl 0.9.1 (`verl/trainer/ppo/core_algos.py`), so that a loss or a metric means the same
in both back ends. Log-prob roles are never mixed: `rollout_log_probs` (engine), `old_log_probs` (denominator of the
PPO ratio), `log_probs` (current). Nothing here averages over micro-batches: a loss is a sum over counted tokens divided
by the number of counted tokens of the whole mini-batch.

Legend: `B` rollouts, `n` counted tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.metrics.log_ratio import LOG_RATIO_BOUND, SEQUENCE_LOG_RATIO_MAX
from experiments.schema import AlgorithmConfig, RatioLevel
from experiments.trainers.base import PolicyLoss, TokenBatch

ADVANTAGE_EPSILON = 1e-6
"""Added to the group's standard deviation; verl `compute_grpo_outcome_advantage`."""

K3_MAX = 10.0
"""Upper clamp of the per-token k3 penalty; verl `kl_penalty_forward`."""


def group_advantages(
    rewards: NDArray[np.floating[Any]], group_ids: NDArray[np.integer[Any]], normalize: bool
) -> NDArray[np.float32]:
    """Returns float32 `[B]`: each reward minus its group's mean, over the group's standard deviation if asked.

    A = (r - mean) / (std + 1e-6), std unbiased, computed in float64. A group of one, or of equal rewards, carries no
    signal and gives exactly 0. (verl leaves the raw reward as the advantage of a group of one.)

    Args:
        rewards: `[B]`, finite.
        group_ids: `[B]`, rollouts of one problem share an id.
        normalize: False leaves the division out (Dr. GRPO, arXiv 2503.20783).

    Raises:
        ValueError: shapes differ, or a reward is not finite.

    Source: GRPO, arXiv 2402.03300; verl `compute_grpo_outcome_advantage`.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    group_ids = np.asarray(group_ids)
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"advantages: expected rewards and group_ids of one shape [B], got {rewards.shape} and {group_ids.shape}"
        )
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        raise ValueError(f"advantages: {bad.size} of {rewards.size} rewards are not finite, first at index {bad[0]}")
    _, group = np.unique(group_ids, return_inverse=True)
    size = np.bincount(group)
    centred = rewards - (np.bincount(group, weights=rewards) / size)[group]
    # Equal rewards may differ from their rounded mean in the last bit, which the division below would blow up.
    order = np.lexsort((rewards, group))
    first = np.cumsum(size) - size
    spread = rewards[order][first + size - 1] - rewards[order][first]
    centred[spread[group] == 0.0] = 0.0
    if normalize:
        variance = np.bincount(group, weights=centred**2) / np.maximum(size - 1, 1)
        centred = centred / (np.sqrt(variance)[group] + ADVANTAGE_EPSILON)
    return centred.astype(np.float32)


def truncated_importance_weights(
    old_log_probs: NDArray[np.floating[Any]], rollout_log_probs: NDArray[np.floating[Any]], cap: float
) -> NDArray[np.float32]:
    """Returns float32 of the inputs' shape: min(exp(old - rollout), cap), the log-ratio clamped to +-20.

    They correct the decoupled loss for tokens sampled by the engine's policy. Elementwise: where an input is NaN
    (prompt, tokens without an engine log-prob) the weight is NaN too, never 1 and never 0.

    Raises:
        ValueError: shapes differ, or `cap` is not positive.

    Source: truncated importance sampling; verl `compute_rollout_correction_weights` at token level.
    """
    if np.shape(old_log_probs) != np.shape(rollout_log_probs):
        raise ValueError(
            f"importance weights: expected log-probs of one shape, got old {np.shape(old_log_probs)} "
            f"and rollout {np.shape(rollout_log_probs)}"
        )
    if not cap > 0:
        raise ValueError(f"importance weights: expected a positive cap (algorithm.importance_weight_cap), got {cap}")
    log_ratio = np.asarray(old_log_probs, dtype=np.float64) - np.asarray(rollout_log_probs, dtype=np.float64)
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return np.minimum(ratio, cap).astype(np.float32)


def policy_loss(settings: AlgorithmConfig, counted_tokens: int) -> PolicyLoss:
    """Returns the loss of one mini-batch, a callable that gives a micro-batch's share of it (float32 scalar, nats).

    loss = mean over the mini-batch's counted tokens of  w_t * clipped_t + kl_coef * kl_t - entropy_coef * H_t. A
    share is the sum over the micro-batch's tokens divided by `counted_tokens`, so the shares of any partition of the
    mini-batch add up to the loss.

    Gradient flows through `log_probs` and `entropy` alone; old and reference log-probs, advantages and importance
    weights are stopped. The KL term penalises KL(policy || reference) by `kl_estimator`; x = log_prob - ref_log_prob:

    - k1 = x has the KL as its mean but a gradient of mean 0: as a loss it does nothing.
    - k2 = x^2 / 2 is the one whose gradient is unbiased for that of the KL, on tokens sampled from the current policy.
    - k3 = e^-x - 1 + x estimates the KL with low variance; its gradient is that of KL(reference || policy).

    Args:
        settings: clip_low, clip_high, dual_clip, ratio_level, kl_coef, kl_estimator, entropy_coef are read.
        counted_tokens: tokens with loss in the whole mini-batch.

    Raises:
        ValueError: a setting is impossible; on a call, a reference or entropy that the settings need is missing.

    Source: verl `compute_policy_loss_vanilla`, `compute_policy_loss_gspo`, `kl_penalty`, `agg_loss` (token-mean).
    """
    if counted_tokens < 1:
        raise ValueError(f"policy loss: expected a mini-batch with counted tokens, got {counted_tokens}")
    if not settings.dual_clip > 1.0:
        raise ValueError(f"policy loss: algorithm.dual_clip must exceed 1, got {settings.dual_clip}")
    if settings.kl_coef and settings.kl_estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"policy loss: algorithm.kl_estimator must be one of {sorted(KL_ESTIMATORS)}, got {settings.kl_estimator!r}"
        )
    clipped = sequence_level_loss if settings.ratio_level is RatioLevel.sequence else token_level_loss

    def share(batch: TokenBatch) -> torch.Tensor:
        per_token = clipped(batch, settings) * batch.weights.detach()  # [n]
        if settings.kl_coef:
            if batch.ref_log_probs is None:
                raise ValueError(
                    f"policy loss: algorithm.kl_coef is {settings.kl_coef}, but the batch has no ref_log_probs"
                )
            log_ratio = batch.log_probs - batch.ref_log_probs.detach()
            per_token = per_token + settings.kl_coef * KL_ESTIMATORS[settings.kl_estimator](log_ratio)
        if settings.entropy_coef:
            if batch.entropy is None:
                raise ValueError(
                    f"policy loss: algorithm.entropy_coef is {settings.entropy_coef}, but the batch has no entropy"
                )
            per_token = per_token - settings.entropy_coef * batch.entropy
        return per_token.sum() / counted_tokens

    return share


def token_level_loss(batch: TokenBatch, settings: AlgorithmConfig) -> torch.Tensor:
    """Returns float32 `[n]`: max(-A r, -A clip(r)), for A < 0 at most -A * dual_clip.

    r = exp(log_prob - old), the log-ratio clamped to +-20.

    Source: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; verl `compute_policy_loss_vanilla`.
    """
    advantages = batch.advantages.detach()
    log_ratio = (batch.log_probs - batch.old_log_probs.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    loss = _clipped(log_ratio.exp(), advantages, settings)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * settings.dual_clip), loss)


def sequence_level_loss(batch: TokenBatch, settings: AlgorithmConfig) -> torch.Tensor:
    """Returns float32 `[n]`: the clipped loss with the ratio of the whole response at every token.

    s = exp(mean_t(log_prob - old)). The value of the ratio is s at every token; its gradient is s * d(log_prob_t), as
    s_t = sg[s] * p_t / sg[p_t]. No
    dual clip. All counted tokens of a rollout (`batch.group`) must be in this micro-batch.

    Source: GSPO-token, arXiv 2507.18071 section 4.3; verl `compute_policy_loss_gspo`.
    """
    advantages = batch.advantages.detach()
    log_ratio = (batch.log_probs - batch.old_log_probs).detach()
    _, group = torch.unique(batch.group, return_inverse=True)
    total = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=log_ratio.dtype, device=log_ratio.device)
    length = torch.zeros_like(total).index_add(0, group, torch.ones_like(log_ratio))
    mean = total.index_add(0, group, log_ratio) / length  # [groups]
    straight_through = batch.log_probs - batch.log_probs.detach()
    sequence_log_ratio = (mean[group] + straight_through).clamp(max=SEQUENCE_LOG_RATIO_MAX)
    return _clipped(sequence_log_ratio.exp(), advantages, settings)


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmConfig) -> torch.Tensor:
    """Returns the larger (worse) of the plain and the clipped surrogate loss, `[n]`."""
    inside = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.maximum(-advantages * ratio, -advantages * inside)


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns e^-x - 1 + x through expm1: the plain difference loses every digit for small x."""
    negative = (-log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.expm1(negative) - negative).clamp(max=K3_MAX)


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": _k3,
}
"""Per-token estimators of KL(policy || reference) from x = log_prob - ref_log_prob (Schulman,
joschu.net/blog/kl-approx.html).
"""
