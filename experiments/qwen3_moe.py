"""The one Qwen3-MoE that engine, trainer and task share, built from `conf/model/`.

Hugging Face's configuration and `state_dict` layout are the exchange format between the parts; nothing here knows an
engine or a trainer.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.schema import ModelConfig


def qwen3_moe_config(model: ModelConfig, vocab_size: int) -> Qwen3MoeConfig:
    """Returns transformers' configuration of `model` with `vocab_size` token ids; a checkpoint's own when one is given.

    `norm_topk_prob` is on, as in the released Qwen3-MoE: the weights of the chosen experts add up to 1, which is
    megatron-core's softmax over the chosen logits.

    Raises:
        ValueError: the checkpoint is no Qwen3-MoE, or its vocabulary is smaller than the tokenizer's.
    """
    if model.checkpoint is not None:
        config = Qwen3MoeConfig.from_pretrained(Path(model.checkpoint).expanduser())
        if config.model_type != "qwen3_moe":
            raise ValueError(f"model.checkpoint={model.checkpoint}: a qwen3_moe is expected, {config.model_type} came")
        if config.vocab_size < vocab_size:
            raise ValueError(
                f"model.checkpoint={model.checkpoint}: {vocab_size} token ids at least are expected (the tokenizer's), "
                f"{config.vocab_size} came"
            )
        return config
    # `from_dict`, because the configuration declares no head_dim field: it takes further keys as they come.
    sizes = {
        "vocab_size": vocab_size,
        "num_hidden_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "moe_intermediate_size": model.moe_intermediate_size,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.initializer_range,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig.from_dict(sizes)


def build_qwen3_moe(
    config: Qwen3MoeConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Qwen3MoeForCausalLM:
    """Returns a randomly initialised model in eval mode; the same `seed` gives the same weights on any device.

    torch's global generator is left as found. Only parameters take `dtype`: the rotary frequencies stay float32, as in
    a model that transformers loads itself.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(
            copy.deepcopy(config)
        )  # a model writes its choice of kernels into its configuration
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    torch.nn.Module.to(model, device)
    return model.eval()
