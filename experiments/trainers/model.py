"""Builds megatron-core's GPTModel for a Qwen3-MoE configuration, with attention and experts that are fast on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import Qwen3MoeConfig

from experiments.trainers.convert import megatron_config, to_megatron
from experiments.trainers.experts import FusedSequentialMLP
from experiments.trainers.upstream import GPTModel, MegatronModule, get_gpt_layer_local_spec, quiet


class CausalAttention(MegatronModule):
    """Causal attention by torch's fused kernel, in the place of megatron-core's unfused `DotProductAttention`.

    Same mathematics; it neither materialises the `[b, heads, s, s]` scores nor needs a mask.
    """

    def __init__(self, config: Any, *_: Any, **__: Any):
        super().__init__(config)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, **_: Any
    ) -> torch.Tensor:
        """Returns `[s, b, heads * D]` for query `[s, b, heads, D]`, key and value `[s, b, groups, D]`."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, D]
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


def build_model(
    config: Qwen3MoeConfig,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    recompute_activations: bool,
) -> GPTModel:
    """Returns a GPTModel on `device` in fp32 that holds `weights` (transformers' layout).

    Needs megatron's process groups (`runtime.process_groups`).

    Raises:
        ValueError: an unsupported configuration, or weights that do not fit it.
    """
    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.num_experts, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=True
    )
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    moe = spec.submodules.mlp.keywords["submodules"]
    moe.experts = partial(FusedSequentialMLP, **moe.experts.keywords)
    rope: Any = config.rope_parameters
    with quiet():  # notices about megatron-core's own deprecations
        layout = megatron_config(config, recompute_activations=recompute_activations)
        model = GPTModel(
            layout,
            spec,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=rope["rope_theta"],
            share_embeddings_and_output_weights=config.tie_word_embeddings,
        )
    model.load_state_dict(to_megatron(weights, config), strict=True)
    return model.to(device)
