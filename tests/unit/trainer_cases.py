"""A small Qwen3-MoE, its settings and random sequences for the trainer's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.schema import TrainerConfig
from experiments.trainers.base import TokenBatch, TrainSequence
from strategies.types import LIVE


def model_config(**changes: Any) -> Qwen3MoeConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 23,
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**(sizes | changes))


def transformers_model(config: Qwen3MoeConfig, seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():  # norms start at 1: make every tensor count in a comparison
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def settings(**changes: Any) -> TrainerConfig:
    values: dict[str, Any] = {
        "name": "megatron",
        "device": "cpu",
        "max_tokens_per_micro_batch": 256,
        "recompute_activations": False,
        "learning_rate": 1e-2,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
    return TrainerConfig(**(values | changes))


def live_rows(config: Qwen3MoeConfig, fed: int) -> NDArray[np.int16]:
    return np.full((fed, config.num_hidden_layers, config.num_experts_per_tok), LIVE, np.int16)


def random_rows(config: Qwen3MoeConfig, fed: int, rng: np.random.Generator) -> NDArray[np.int16]:
    scores = rng.random((fed, config.num_hidden_layers, config.num_experts))
    return scores.argsort(-1)[..., : config.num_experts_per_tok].astype(np.int16)


def train_sequences(
    config: Qwen3MoeConfig, lengths: list[int], *, live: bool = False, seed: int = 1
) -> list[TrainSequence]:
    """Returns one sequence per length; the second half of each carries loss."""
    rng = np.random.default_rng(seed)
    sequences = []
    for index, length in enumerate(lengths):
        sequences.append(
            TrainSequence(
                token_ids=rng.integers(0, config.vocab_size, length).astype(np.int32),
                rows=live_rows(config, length - 1) if live else random_rows(config, length - 1, rng),
                rollout_id=f"r{index}",
                loss_mask=np.arange(length) >= max(1, length // 2),
                old_log_probs=rng.normal(-2, 1, length).astype(np.float32),
                advantages=rng.normal(size=length).astype(np.float32),
                weights=np.ones(length, np.float32),
                ref_log_probs=None,
                group=index,
            )
        )
    return sequences


def token_mean_loss(sequences: list[TrainSequence]):
    """Returns a policy loss with the mean over all counted tokens of the mini-batch."""
    counted = sum(int(sequence.loss_mask.sum()) for sequence in sequences)

    def loss(batch: TokenBatch) -> torch.Tensor:
        ratio = (batch.log_probs - batch.old_log_probs).exp().clamp(max=3.0)
        return -(ratio * batch.advantages * batch.weights).sum() / counted

    return loss
