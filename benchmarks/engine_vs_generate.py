"""Tokens per second of the embedded engine and of transformers' `generate`: same model and batch, interleaved.

The engine also records rows and log-probs; `generate` is asked for tokens only, with the fastest settings found: left
padding, KV cache, sdpa attention, grouped_mm experts, nothing returned but ids, no stop token to look for. Two batches:
equal budgets (32 new tokens each), where continuous batching gains nothing, and ragged budgets, where `generate`
decodes until the longest is done and only the tokens asked for count.

Usage: python -m benchmarks.engine_vs_generate [--rounds 5] [--threads 2] [--dtype float32] [--device cpu]
Prints one line per batch; the exit status is 1 when a ratio is below 1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.clock import VirtualClock
from experiments.engines.base import Reply, Request
from experiments.engines.embedded import EmbeddedEngine, EngineStats
from experiments.qwen3_moe import build_qwen3_moe, qwen3_moe_config
from experiments.schema import CostConfig, ModelConfig, ResumeRows

VOCAB_SIZE = 64
REQUESTS = 128
TEMPERATURE = 1.0
TOP_P = 1.0
MODEL_YAML = Path(__file__).parent.parent / "conf/model/tiny_moe.yaml"


def model_config() -> Qwen3MoeConfig:
    """Returns the configuration of conf/model/tiny_moe.yaml with 64 token ids."""
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(MODEL_YAML))
    model = OmegaConf.to_object(merged)
    assert isinstance(model, ModelConfig)
    return qwen3_moe_config(model, VOCAB_SIZE)


def run_engine(
    model: Qwen3MoeForCausalLM, prompts: list[NDArray[np.int32]], budgets: list[int]
) -> tuple[float, EngineStats]:
    """Returns seconds between the first request and the last reply, and the engine's totals."""
    clock = VirtualClock()
    engine = EmbeddedEngine(
        model.config,
        dtype=model.dtype,
        max_running=REQUESTS,
        max_prefill_tokens=8192,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        stop_ids=[],
        resume_rows=ResumeRows.recompute,
        clock=clock,
        cost=CostConfig(decode_step_s=1.0, prefill_token_s=0.0, update_s=0.0, sync_s=0.0),
        device=model.device,
    )
    requests = [Request(f"r{i}", prompts[i], budgets[i], sample_seed=i) for i in range(len(prompts))]

    async def main() -> tuple[float, list[Reply]]:
        await engine.start(model.state_dict(), version=0)
        started = time.perf_counter()
        replies = await asyncio.gather(*(engine.generate(request) for request in requests))
        elapsed = time.perf_counter() - started
        await engine.close()
        return elapsed, replies

    elapsed, replies = clock.run_loop(main())
    assert [reply.call.new_tokens for reply in replies] == budgets
    assert all(reply.call.rows is not None for reply in replies)
    return elapsed, engine.stats()


def run_generate(model: Qwen3MoeForCausalLM, prompts: list[NDArray[np.int32]], budgets: list[int]) -> float:
    """Returns the seconds that `generate` takes for the batch, padded to the longest prompt and the largest budget."""
    width, longest = max(map(len, prompts)), max(budgets)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, width - len(prompt) :] = 1
    settings = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_p=TOP_P, top_k=0, max_new_tokens=longest, pad_token_id=0
    )
    ids, mask = ids.to(model.device), mask.to(model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        # The protocol that transformers types `generate` with does not admit its own models.
        out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids=ids, attention_mask=mask, generation_config=settings
        )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    assert tuple(out.shape) == (len(prompts), width + longest)
    return time.perf_counter() - started


def compare(model: Qwen3MoeForCausalLM, name: str, budgets: list[int], rounds: int) -> float:
    """Prints medians over `rounds` interleaved rounds, after one that warms up; returns the ratio engine / generate."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, rng.integers(6, 17)).astype(np.int32) for _ in budgets]
    engine_rates, generate_rates, shares = [], [], []
    for index in range(rounds + 1):
        engine_s, stats = run_engine(model, prompts, budgets)
        generate_s = run_generate(model, prompts, budgets)
        if index:
            engine_rates.append(sum(budgets) / engine_s)
            generate_rates.append(sum(budgets) / generate_s)
            shares.append(stats.forward_s / engine_s)
    ratio = statistics.median(e / g for e, g in zip(engine_rates, generate_rates, strict=True))
    print(
        f"{name}: engine {statistics.median(engine_rates):.0f} tokens/s ({statistics.median(shares):.0%} in forwards), "
        f"generate {statistics.median(generate_rates):.0f} tokens/s, ratio {ratio:.2f}",
        flush=True,
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build_qwen3_moe(model_config(), dtype=getattr(torch, args.dtype), device=torch.device(args.device), seed=0)
    model.set_experts_implementation("grouped_mm")
    ragged = np.random.default_rng(1).integers(4, 61, REQUESTS).tolist()
    ratios = [
        compare(model, "equal budgets (32)", [32] * REQUESTS, args.rounds),
        compare(model, "ragged budgets (4-60)", ragged, args.rounds),
    ]
    return 0 if min(ratios) >= 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
