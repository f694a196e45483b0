"""megatron-core's `SequentialMLP` with one autograd node for all experts of a layer instead of about ten per expert.

The parameters, their names and the mathematics are those of the base class: y = W2 (silu(gate) * up * p) with (gate,
up) = W1 x. Upstream runs a module per expert; with small experts most of its time goes into the bookkeeping of tiny
operations. Here only the matrix products are per expert, and everything element-wise runs once over all of them.

Legend: `M` (token, expert) pairs sorted by expert, `H` hidden size, `F` expert width, `E` experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from experiments.trainers.upstream import SequentialMLP


class FusedSequentialMLP(SequentialMLP):
    """The experts of one layer: SwiGLU without biases, the only kind that a Qwen3-MoE has."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Returns `[M, H]` and no bias, for inputs `[M, H]`, counts `[E]` and router weights `[M]`."""
        experts: list[Any] = list(self.local_experts)
        first = [expert.linear_fc1.weight for expert in experts]  # [2F, H] each
        second = [expert.linear_fc2.weight for expert in experts]  # [H, F] each
        counts = tokens_per_expert.tolist()
        return _SwiGLU.apply(permuted_local_hidden_states, permuted_probs, counts, *first, *second), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, probs: torch.Tensor, counts: list[int], *weights: torch.Tensor
    ) -> torch.Tensor:
        first, second = weights[: len(counts)], weights[len(counts) :]
        gate_up = _grouped(inputs, [weight.t() for weight in first], counts)  # [M, 2F]
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate).mul_(up).mul_(probs[:, None])  # [M, F]
        ctx.counts = counts
        ctx.save_for_backward(inputs, probs, gate_up, hidden, *weights)
        return _grouped(hidden, [weight.t() for weight in second], counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, probs, gate_up, hidden, *weights = ctx.saved_tensors
        counts = ctx.counts
        first, second = weights[: len(counts)], weights[len(counts) :]
        output = gradients[0].contiguous()
        d_hidden = _grouped(output, second, counts)
        gate, up = gate_up.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
        d_probs = (d_hidden * activated * up).sum(-1)
        d_hidden.mul_(probs[:, None])
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(d_hidden, activated, out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(d_hidden.mul_(up), gate))
        d_inputs = _grouped(d_gate_up, first, counts)
        d_first, d_second = _outer(d_gate_up, inputs, counts), _outer(output, hidden, counts)
        return d_inputs, d_probs, None, *d_first, *d_second


def _grouped(rows: torch.Tensor, matrices: Sequence[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Returns each expert's rows times its matrix, `[M, columns]`."""
    out = rows.new_empty(rows.shape[0], matrices[0].shape[1])
    for part, matrix, target in zip(rows.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(part, matrix, out=target)
    return out


def _outer(left: torch.Tensor, right: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Returns one weight gradient per expert: the sum over its rows of left row times right row."""
    return [torch.mm(a.t(), b) for a, b in zip(left.split(counts), right.split(counts), strict=True)]
