"""transformers' Qwen3-MoE and megatron-core's GPTModel hold the same weights in two layouts; this module maps one onto
the other.

Both directions only rearrange: no value is computed, so a round trip is exact and the optimiser's moments convert like
the weights.

Legend: `G` query groups (= key/value heads), `q` query heads per group, `D` head dim, `H` hidden size, `F` expert
width, `E` experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import Qwen3MoeConfig

from experiments.trainers.upstream import TransformerConfig

_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Tensors of one layer that are equal in both layouts: megatron's name -> transformers' name."""


def check_supported(config: Qwen3MoeConfig) -> None:
    """Refuses settings of a Qwen3-MoE that the trainer's model does not have.

    Raises:
        ValueError: names the setting, its value and what is supported.
    """
    rope = config.rope_parameters or {}
    partial = rope.get("partial_rotary_factor", 1.0)
    rules: list[tuple[str, object, bool, str]] = [
        ("mlp_only_layers", config.mlp_only_layers, not config.mlp_only_layers, "[] (every layer is MoE)"),
        ("decoder_sparse_step", config.decoder_sparse_step, config.decoder_sparse_step == 1, "1 (every layer is MoE)"),
        ("use_sliding_window", config.use_sliding_window, not config.use_sliding_window, "false"),
        ("attention_bias", config.attention_bias, not config.attention_bias, "false"),
        ("attention_dropout", config.attention_dropout, config.attention_dropout == 0.0, "0.0"),
        ("hidden_act", config.hidden_act, config.hidden_act == "silu", "silu"),
        ("rope_type", rope.get("rope_type"), rope.get("rope_type", "default") == "default", "default (no scaling)"),
        ("partial_rotary_factor", partial, partial == 1.0, "1.0"),
        (
            "num_key_value_heads",
            config.num_key_value_heads,
            config.num_attention_heads % config.num_key_value_heads == 0,
            f"a divisor of num_attention_heads={config.num_attention_heads}",
        ),
        (
            "num_experts_per_tok",
            config.num_experts_per_tok,
            1 <= config.num_experts_per_tok <= config.num_experts,
            f"1..num_experts={config.num_experts}",
        ),
        (
            "norm_topk_prob",
            config.norm_topk_prob,
            not (config.norm_topk_prob and config.num_experts_per_tok == 1),
            "false when num_experts_per_tok is 1 (a normalised single weight is 1 and its router learns nothing)",
        ),
    ]
    for name, value, supported, expected in rules:
        if not supported:
            raise ValueError(
                f"Qwen3MoeConfig.{name}={value!r} is not supported by the megatron trainer: expected {expected}"
            )


def megatron_config(config: Qwen3MoeConfig, *, recompute_activations: bool) -> TransformerConfig:
    """Returns megatron-core's configuration of the same fp32 model.

    Router: transformers takes the softmax over all experts, keeps the top-k and, with `norm_topk_prob`, divides by
        their sum. That equals
    a softmax over the top-k logits, megatron's post-softmax router; without `norm_topk_prob` it is megatron's
    `moe_router_pre_softmax`. The allgather dispatcher and sequential experts are the ones that run without CUDA
    streams.

    Raises:
        ValueError: `check_supported`.
    """
    check_supported(config)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        ffn_hidden_size=config.intermediate_size,
        num_moe_experts=config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_router_dtype="fp32",
        moe_router_score_function="softmax",
        moe_router_pre_softmax=not config.norm_topk_prob,
        moe_router_load_balancing_type="none",
        moe_enable_routing_replay=True,
        moe_token_dispatcher_type="allgather",
        moe_grouped_gemm=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        **(recompute if recompute_activations else {}),
    )


def to_megatron(weights: Mapping[str, torch.Tensor], config: Qwen3MoeConfig) -> dict[str, torch.Tensor]:
    """Returns the weights in GPTModel's layout, keyed like its `named_parameters()`; contiguous, same dtype and device.

    Attention: `linear_qkv` `[G * (q + 2) * D, H]` holds, group by group, the group's query heads, its key and its
        value.
    Experts: `gate_up_proj` `[E, 2F, H]` and `down_proj` `[E, H, F]` become one matrix per expert (gate above up in both
        layouts).

    Raises:
        ValueError: a key is missing or unknown, a shape is wrong, or tied tensors differ; the first eight faults are
            named.
    """
    _check(weights, config)
    groups, hidden = config.num_key_value_heads, config.hidden_size
    out = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        out["output_layer.weight"] = weights["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for megatron_name, name in _PLAIN.items():
            out[target + megatron_name] = weights[source + name]
        parts = [weights[f"{source}self_attn.{kind}_proj.weight"].reshape(groups, -1, hidden) for kind in "qkv"]
        out[target + "self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).reshape(-1, hidden)
        for expert in range(config.num_experts):
            prefix = f"{target}mlp.experts.local_experts.{expert}."
            out[prefix + "linear_fc1.weight"] = weights[source + "mlp.experts.gate_up_proj"][expert]
            out[prefix + "linear_fc2.weight"] = weights[source + "mlp.experts.down_proj"][expert]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def to_huggingface(state: Mapping[str, torch.Tensor], config: Qwen3MoeConfig) -> dict[str, torch.Tensor]:
    """Returns the inverse of `to_megatron`: the layout and key order of transformers'
    `Qwen3MoeForCausalLM.state_dict()`.

    With tied embeddings `lm_head.weight` is the same tensor as `model.embed_tokens.weight`, as in transformers.

    Raises:
        ValueError: a key is missing.
    """
    groups, dim, hidden = config.num_key_value_heads, head_dim(config), config.hidden_size
    per_group = config.num_attention_heads // groups
    parts: dict[str, torch.Tensor] = {}

    def get(name: str) -> torch.Tensor:
        if name not in state:
            raise ValueError(f"megatron state has no {name!r}; it has {len(state)} tensors, e.g. {sorted(state)[:3]}")
        return state[name]

    for layer in range(config.num_hidden_layers):
        source, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for megatron_name, name in _PLAIN.items():
            parts[target + name] = get(source + megatron_name)
        packed = get(source + "self_attention.linear_qkv.weight").reshape(groups, (per_group + 2) * dim, hidden)
        split = packed.split([per_group * dim, dim, dim], dim=1)
        for kind, tensor in zip("qkv", split, strict=True):
            parts[f"{target}self_attn.{kind}_proj.weight"] = tensor.reshape(-1, hidden)
        for name, megatron_name in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            experts = [
                get(f"{source}mlp.experts.local_experts.{e}.{megatron_name}.weight") for e in range(config.num_experts)
            ]
            parts[f"{target}mlp.experts.{name}"] = torch.stack(experts)
    parts["model.embed_tokens.weight"] = get("embedding.word_embeddings.weight")
    parts["model.norm.weight"] = get("decoder.final_layernorm.weight")
    tied = config.tie_word_embeddings
    parts["lm_head.weight"] = parts["model.embed_tokens.weight"] if tied else get("output_layer.weight")
    return {name: parts[name] for name in huggingface_shapes(config)}


def huggingface_shapes(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every tensor of transformers' Qwen3-MoE state dict, in its order."""
    hidden, dim, width = config.hidden_size, head_dim(config), config.moe_intermediate_size
    heads, groups, experts = config.num_attention_heads, config.num_key_value_heads, config.num_experts
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    per_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * dim, hidden),
        "self_attn.k_proj.weight": (groups * dim, hidden),
        "self_attn.v_proj.weight": (groups * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
        "mlp.gate.weight": (experts, hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def head_dim(config: Qwen3MoeConfig) -> int:
    """Returns `D`; transformers leaves the attribute out of a config that never set it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check(weights: Mapping[str, torch.Tensor], config: Qwen3MoeConfig) -> None:
    shapes = huggingface_shapes(config)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = config.tie_word_embeddings
    # A checkpoint of a tied model leaves the head out; a state dict of one holds it twice.
    faults = [f"missing {name}" for name in shapes if name not in weights and not (tied and name == head)]
    faults += [f"unknown {name}" for name in weights if name not in shapes]
    faults += [
        f"{name} has shape {list(weights[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if not faults and tied and head in weights and not torch.equal(weights[head], weights[embedding]):
        faults.append(f"{head} differs from {embedding}, but the configuration ties them")
    if faults:
        raise ValueError(f"weights do not fit the model configuration: {'; '.join(faults[:8])} ({len(faults)} faults)")
