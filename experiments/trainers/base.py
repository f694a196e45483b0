"""The contract between the loop and a trainer. A trainer replays rows and takes optimiser steps; it does not know
strategies.

Legend: `t` tokens of one sequence, `L` layers, `K` experts per token, `n` counted tokens of one micro-batch. Per-token
arrays of a
sequence are aligned with its token ids: entry i belongs to token i; entry 0 has no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class ReplaySequence:
    """One forward: the first `t - 1` ids are fed, tokens 1..t-1 are predicted.

    Attributes:
        token_ids: int32 `[t]`, t >= 2.
        rows: integer `[t-1, L, K]`; rows of -1 (whole cells) are live.
        rollout_id: named in errors.
    """

    token_ids: NDArray[np.int32]
    rows: NDArray[np.integer[Any]]
    rollout_id: str


@dataclass(frozen=True, eq=False)
class TrainSequence(ReplaySequence):
    """A forward that carries loss.

    Attributes (all `[t]`, read where `loss_mask` is True, finite there):
        loss_mask: bool.
        old_log_probs: float32, log-probs of the old policy (denominator of the PPO ratio).
        advantages: float32.
        weights: float32, truncated importance weights (1 in bypass mode), detached.
        ref_log_probs: float32 or None, log-probs of the reference policy for the KL term.
        group: int, index of the rollout in its mini-batch; views of one rollout share it (sequence-level ratios).
    """

    loss_mask: NDArray[np.bool_]
    old_log_probs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    ref_log_probs: NDArray[np.float32] | None
    group: int


@dataclass(frozen=True, eq=False)
class Score:
    """Log-probs of one sequence, without gradient.

    Attributes:
        log_probs: float32 `[t]`, NaN at 0.
        entropy: float32 `[t]`, entropy of the distribution that predicts token i, NaN at 0; None unless asked for.
        rows: int16 `[t-1, L, K]`, the rows that the forward really used; None unless asked for.
        margins: float32 `[t-1, L]`, k-th minus (k+1)-th router score; None unless rows were asked for.
    """

    log_probs: NDArray[np.float32]
    entropy: NDArray[np.float32] | None
    rows: NDArray[np.int16] | None
    margins: NDArray[np.float32] | None


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The counted tokens of one micro-batch, flattened; what a policy loss sees.

    Attributes: float32 `[n]` tensors; `log_probs` and `entropy` carry gradient; `group` is int64 `[n]`.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    ref_log_probs: torch.Tensor | None
    group: torch.Tensor


PolicyLoss = Callable[[TokenBatch], "torch.Tensor"]
"""Returns the micro-batch's share of the loss, a scalar: the shares of all micro-batches add up to the loss of the
mini-batch.
"""


@dataclass(frozen=True)
class ReplayCounts:
    """Cells (position, layer) of fed, non-padding positions, by how they were routed, and faults that were found.

    `replayed` used the installed ids, `live` the trainer's own router. `mismatched` cells used other ids than
    installed: must be 0.
    """

    replayed: int
    live: int
    mismatched: int

    def __add__(self, other: ReplayCounts) -> ReplayCounts:
        return ReplayCounts(self.replayed + other.replayed, self.live + other.live, self.mismatched + other.mismatched)


@dataclass(frozen=True, eq=False)
class UpdateResult:
    """One optimiser step.

    Attributes:
        loss: value of the policy loss, nats.
        grad_norm: global L2 norm of the gradient before clipping.
        log_probs: per sequence float32 `[t]` under the weights *before* the step, NaN where the token carries no loss.
        entropy: mean entropy over the counted tokens, nats; None when the loss did not ask for it.
        replay: how the forwards were routed.
    """

    loss: float
    grad_norm: float
    log_probs: list[NDArray[np.float32]]
    entropy: float | None
    replay: ReplayCounts


class Trainer(Protocol):
    """A trainer of one MoE policy."""

    def score(self, sequences: Sequence[ReplaySequence], *, entropy: bool = False, routes: bool = False) -> list[Score]:
        """Returns log-probs under the current weights with the sequences' rows replayed; `routes` also records the rows
        used.
        """
        ...

    def update(self, sequences: Sequence[TrainSequence], loss: PolicyLoss, *, entropy: bool) -> UpdateResult:
        """Takes one optimiser step over all sequences (micro-batched by a token budget) and returns what it saw."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns detached copies of the weights in the layout of transformers' `Qwen3MoeForCausalLM.state_dict()`."""
        ...

    def using(self, weights: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Scores under other weights inside the `with` block and restores the trainer's own exactly on leaving."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values that `load_state_dict` restores bit for bit."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict()`."""
        ...
