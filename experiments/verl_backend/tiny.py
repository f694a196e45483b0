"""What `experiment=qwen3_moe_tiny_verl` trains: a random tiny Qwen3-MoE with a byte tokenizer, and spelling problems.

`python -m experiments.verl_backend.tiny data/tiny` writes it, in either environment. It exercises the whole cluster
back end on two GPUs within minutes; a random model learns nothing in that time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import polars as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.tasks.reasoning_gym_compat import reasoning_gym

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
}
"""As conf/model/qwen3_moe_tiny.yaml says; preflight compares the two."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns 1.0 for the right word, else 0.0. verl's custom reward function of the preset."""
    return float(solution_str.strip() == ground_truth)


def save_tokenizer(folder: Path) -> int:
    """Writes a byte-level tokenizer with Qwen's turn tokens, which verl's prompt builder needs; returns its size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[2])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    return len(fast)


def save_model(folder: Path, vocab_size: int) -> None:
    """Writes a random model, bf16, seed 0; `vocab_size` is that of the tokenizer, rounded up to 264."""
    torch.manual_seed(0)
    rounded = -(-vocab_size // 8) * 8
    config = Qwen3MoeConfig(vocab_size=rounded, bos_token_id=256, eos_token_id=258, pad_token_id=256, **SIZES)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(str(folder))


def save_problems(file: Path, count: int, seed: int) -> None:
    """Writes `count` spelling problems in verl's format."""
    data = reasoning_gym.create_dataset("spell_backward", size=count, seed=seed, min_word_len=3, max_word_len=6)
    rows = [
        {
            "data_source": "spell_backward",
            "prompt": [{"role": "user", "content": f"{entry['metadata']['word']}="}],
            "ability": "spelling",
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"index": index, "split": file.stem},
        }
        for index, entry in enumerate(data)
    ]
    pl.DataFrame(rows).write_parquet(file)


def write(folder: Path) -> None:
    """Writes model, tokenizer, train.parquet and test.parquet under `folder`."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", save_tokenizer(folder / "model"))
    save_problems(folder / "train.parquet", 512, seed=0)
    save_problems(folder / "test.parquet", 32, seed=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
