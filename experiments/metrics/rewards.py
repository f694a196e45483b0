"""Rewards and lengths of a batch. Legend: `B` rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics import route_keys as m


def reward_metrics(
    rewards: NDArray[np.floating[Any]],
    group_ids: NDArray[np.integer[Any]],
    response_lengths: NDArray[np.integer[Any]],
    full_reward: float,
    max_response_tokens: int,
) -> dict[str, float]:
    """Returns `reward/*` and `response_length/*`.

    Args:
        rewards, group_ids, response_lengths: `[B]`, B > 0.
        full_reward: reward of a solved problem.
        max_response_tokens: the length limit.

    Raises:
        RuntimeError: a reward is not finite.
    """
    if not np.isfinite(rewards).all():
        raise RuntimeError(
            f"{m.REWARD_MEAN}: {int((~np.isfinite(rewards)).sum())} of {rewards.size} rewards are not finite"
        )
    _, group = np.unique(group_ids, return_inverse=True)
    size = np.bincount(group)
    lowest, highest = np.full(size.size, np.inf), np.full(size.size, -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    return {
        m.REWARD_MEAN: float(rewards.mean(dtype=np.float64)),
        m.REWARD_STD: float(rewards.std(dtype=np.float64)),
        m.REWARD_MIN: float(rewards.min()),
        m.REWARD_MAX: float(rewards.max()),
        m.REWARD_SOLVED: float((rewards >= full_reward).mean()),
        m.REWARD_FLAT_GROUPS: float((lowest == highest).mean()),
        m.LENGTH_MEAN: float(response_lengths.mean()),
        m.LENGTH_MAX: float(response_lengths.max()),
        m.LENGTH_MIN: float(response_lengths.min()),
        m.LENGTH_CLIP: float((response_lengths >= max_response_tokens).mean()),
    }
