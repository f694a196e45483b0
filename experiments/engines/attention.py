"""Attention of a decode step over a view of the slots, through transformers' attention interface.

transformers' sdpa repeats the keys and values of every group for each query head, a copy of the whole occupied cache
per layer and step. One token per sequence needs no copy: the query heads of a group stand where query positions would.

Legend: `R` sequences, `A` query heads, `H` key-value heads, `S` query tokens, `W` keys, `D` head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, Qwen3MoeForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "routemerge_slots"


def use_slot_attention(model: Qwen3MoeForCausalLM) -> None:
    """Makes `model` attend through `slot_attention`."""
    AttentionInterface.register(_NAME, slot_attention)
    model.set_attn_implementation(_NAME)


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Returns attention `[R, S, A, D]`; the softmax is float32, as in transformers' eager attention.

    Args:
        query: `[R, A, S, D]`; several query tokens (a prefill) go to transformers' sdpa.
        key, value: `[R, H, W, D]`.
        attention_mask: additive, `[1 or R, 1, S, W]`.
    """
    count, heads, length, dim = query.shape
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = (query * scaling).view(count, key.shape[1], -1, dim)  # [R, H, A/H, D]
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(attention_mask)  # [R, H, A/H, W]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).view(count, 1, heads, dim), None
