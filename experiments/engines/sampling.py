"""Sampling whose random numbers belong to positions, not to batches.

A token depends on its rollout's seed, its position and its logits alone.

Legend: `R` running requests, `V` vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns splitmix64's output function of the state `z`."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns float64 `[R]` in (0, 1): number `positions[r]` of the random stream of `seeds[r]`, without any state.

    Formula: (floor(mix(mix(seed) + (i + 1) gamma) / 2^16) + 1/2) / 2^48. 48 bits keep u < 1, and u * total < total
    after rounding to float64.
    Source: splitmix64 (Steele, Lea and Flood, OOPSLA 2014), entered at step i of the stream that starts at mix(seed).
    """
    bits = _mix(_mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return ((bits >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def sampled_log_probs(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Returns float32 `[R, V]`, the log-probs of the distribution that is sampled from; -inf outside the nucleus.

    softmax(logits / temperature), cut to the smallest set of tokens whose mass reaches `top_p` (ties: lower id first)
    and renormalised.

    Source: nucleus sampling (Holtzman et al., arXiv 1904.09751).
    """
    scaled = logits.float() / temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    if top_p == 1.0:
        return log_probs
    ordered, ids = torch.sort(log_probs, dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    outside = torch.empty_like(probs, dtype=torch.bool)
    outside.scatter_(-1, ids, probs.cumsum(dim=-1) - probs >= top_p)
    return torch.log_softmax(scaled.masked_fill(outside, -torch.inf), dim=-1)


def draw(log_probs: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int64 `[R]` tokens and their float32 `[R]` log-probs, by inverting the cumulative distribution.

    The cumulative runs in vocabulary order: a small change of the weights moves few tokens.

    Args:
        log_probs: float32 `[R, V]`.
        numbers: float64 `[R]` in (0, 1). A token of probability 0 is never drawn.
    """
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    target = numbers[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    # Logits that are not finite give a cumulative without order: the clamp keeps the gather in bounds, and the caller
    # sees the NaN.
    tokens = tokens.clamp_(max=log_probs.shape[-1] - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]
