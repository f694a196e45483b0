"""A tiny real Qwen3-MoE, an engine around it on the virtual clock, and the forward that it must agree with."""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.clock import VirtualClock
from experiments.engines.base import PauseMode, Reply, Request
from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.sampling import sampled_log_probs
from experiments.qwen3_moe import build_qwen3_moe
from experiments.schema import CostConfig, ResumeRows

CPU = torch.device("cpu")
VOCAB = 32
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 200,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "norm_topk_prob": True,
}
SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "max_running": 4,
    "max_prefill_tokens": 40,
    "temperature": 0.8,
    "top_p": 1.0,
    "stop_ids": (),
    "resume_rows": ResumeRows.recompute,
    "cost": CostConfig(decode_step_s=1.0, prefill_token_s=0.125, update_s=0.0, sync_s=0.0),
    "device": CPU,
}
Scenario = Callable[[EmbeddedEngine], Coroutine[Any, Any, Any]]


def model_of(seed: int, dtype: torch.dtype = torch.float32, **sizes: Any) -> Qwen3MoeForCausalLM:
    return build_qwen3_moe(Qwen3MoeConfig.from_dict(SIZES | sizes), dtype=dtype, device=CPU, seed=seed)


def after_a_step(model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    """Returns a copy whose weights moved a little: most routes are the same, some are not."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return moved


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(model: Qwen3MoeForCausalLM, scenario: Scenario, clock: Any = None, **settings: Any) -> Any:
    """Returns what `scenario` returns, played on an engine that holds `model` as version 0."""
    clock = clock or VirtualClock()
    engine = EmbeddedEngine(model.config, clock=clock, **SETTINGS | settings)

    async def play() -> Any:
        await engine.start(model.state_dict(), version=0)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    with one_thread():
        return clock.run_loop(play())


def request(index: int, length: int = 5, budget: int = 12, **fields: Any) -> Request:
    ids = np.random.default_rng(index).integers(0, VOCAB, length).astype(np.int32)
    return Request(f"r{index}", ids, budget, sample_seed=100 + index, **fields)


def together(*requests: Request) -> Scenario:
    async def scenario(engine: EmbeddedEngine) -> list[Reply]:
        return await asyncio.gather(*(engine.generate(item) for item in requests))

    return scenario


def crowd(count: int = 11) -> list[Request]:
    """Requests of many lengths and budgets, one of a single token."""
    rng = np.random.default_rng(5)
    return [request(i, int(rng.integers(1, 17)), int(rng.integers(1, 30))) for i in range(count)]


def interrupted(
    item: Request, mode: PauseMode, weights: Qwen3MoeForCausalLM | None, version: int = 1, after: int = 5
) -> Scenario:
    """Generates `item`, pauses once `after` tokens are sampled, loads `weights` (None: nothing) and resumes."""

    async def scenario(engine: EmbeddedEngine) -> Reply:
        task = asyncio.create_task(engine.generate(item))
        # The prefill samples the first token after length/8 s, and each decode step another after 1 s.
        await asyncio.sleep(len(item.input_ids) / 8 + after - 1.5)
        await engine.pause(mode)
        if weights is not None:
            await engine.load_weights(weights.state_dict(), version)
        await engine.resume()
        return await task

    return scenario


def tokens_of(item: Request, reply: Reply) -> np.ndarray:
    return np.concatenate([item.input_ids, reply.call.output_ids])


def teacher_forced(
    model: Qwen3MoeForCausalLM, tokens: np.ndarray, temperature: float = 0.8, top_p: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probs `[T-1]` of tokens 1.. and rows `[T-1, L, K]` of one plain forward without a cache."""
    with torch.no_grad(), one_thread():
        out = model(torch.from_numpy(tokens[None, :-1]).long(), output_router_logits=True)
    table = sampled_log_probs(out.logits[0], temperature, top_p)
    log_probs = table.gather(-1, torch.from_numpy(tokens[1:, None]).long())[:, 0].numpy()
    top_k = model.config.num_experts_per_tok
    rows = torch.stack([torch.topk(layer.softmax(-1), top_k).indices for layer in out.router_logits], dim=1)
    return log_probs, rows.numpy()


def assert_as_teacher_forced(model: Qwen3MoeForCausalLM, item: Request, reply: Reply, **sampling: float) -> None:
    tokens, first = tokens_of(item, reply), len(item.input_ids)
    log_probs, rows = teacher_forced(model, tokens, **sampling)
    np.testing.assert_allclose(reply.call.log_probs, log_probs[first - 1 :], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(reply.call.rows, rows)
