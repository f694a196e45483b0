"""A tiny real Qwen3-MoE, engines around it, and rollouts that are interrupted by weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig

from experiments.clock import VirtualClock, WallClock
from experiments.engines.base import Engine, PauseMode, Reply, Request
from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.sglang.broadcast import Broadcast
from experiments.engines.sglang.client import Sampling
from experiments.engines.sglang.engine import ServerSource, SGLangEngine
from experiments.engines.sglang.process import ServerProcess
from experiments.engines.sglang.transport import Disk, Transport
from experiments.engines.sglang.weights import Publisher
from strategies.types import EngineCall, Rollout
from tests.unit.engine_kit import SETTINGS, SIZES, after_a_step, model_of, one_thread

VOCAB = 114  # of the tokenizer of experiment=smoke, so that whole runs can use the same server
MODEL = SIZES | {"vocab_size": VOCAB}
CONFIG = Qwen3MoeConfig.from_dict(MODEL)
TEMPERATURE = 0.8
RESPONSE = 150
"""Tokens of a whole response; about a second of the real server."""

Weights = dict[str, torch.Tensor]


def weight_versions(count: int) -> list[Weights]:
    """Returns the weights of versions 0..count-1, each a step away from the one before."""
    model = model_of(seed=3, vocab_size=VOCAB)
    out = []
    for _ in range(count):
        out.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        model = after_a_step(model)
    return out


def transport_of(name: str) -> Transport:
    """Returns a transport of the suite's model: `disk`, or `gloo` with several broadcasts per update."""
    publisher = Publisher(CONFIG, torch.float32, None)
    return Disk(publisher) if name == "disk" else Broadcast(publisher, torch.float32, "gloo", bucket_bytes=2**14)


def sglang_engine(server: ServerProcess, transport: str = "disk", **settings: Any) -> SGLangEngine:
    """Returns an engine on a running server, not started."""
    return SGLangEngine(
        CONFIG,
        **{
            "source": ServerSource(None, server.url, start_timeout_s=5.0, max_restarts=0),
            "transport": transport_of(transport),
            "sampling": Sampling(TEMPERATURE, 1.0, []),
            "max_in_flight": 4,
            "request_timeout_s": 120.0,
            "prefix_cache": True,
            **settings,
        },
    )


def embedded_engine(stop_ids: tuple[int, ...] = ()) -> EmbeddedEngine:
    """Returns the in-process engine of the same model, not started. On the virtual clock pauses come at the same tokens
    however busy the machine is.
    """
    return EmbeddedEngine(CONFIG, clock=VirtualClock(), **SETTINGS | {"temperature": TEMPERATURE, "stop_ids": stop_ids})


def play(engine: Engine, weights: Weights, version: int, scenario: Callable[[Engine], Awaitable[Any]]) -> Any:
    """Returns what `scenario` returns, played on a started engine, which is closed afterwards."""

    async def run() -> Any:
        await engine.start(weights, version)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    clock = engine._clock if isinstance(engine, EmbeddedEngine) else WallClock()
    with one_thread():
        return clock.run_loop(run())


def request(name: str, tokens: np.ndarray | None = None, budget: int = RESPONSE, row_start: int = 0) -> Request:
    """Returns a request whose prompt of five tokens depends on the name, or one that goes on after `tokens`."""
    if tokens is None:
        tokens = np.random.default_rng(list(name.encode())).integers(0, VOCAB, 5).astype(np.int32)
    return Request(name, tokens, budget, sample_seed=len(name), row_start=row_start)


async def seconds_of_a_response(engine: Engine) -> float:
    """Returns how long a whole response takes on the engine's clock, so that pauses can come in its midst."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await engine.generate(request("timing"))
    return loop.time() - started


async def update(engine: Engine, mode: PauseMode, weights: Weights, version: int) -> None:
    await engine.pause(mode)
    await engine.load_weights(weights, version)
    await engine.resume()


@dataclass(frozen=True)
class Interruption:
    """An update to weight version `version` by way of `mode`, `share` of a response's time after the one before."""

    mode: PauseMode
    version: int
    share: float = 0.25


async def interrupted_rollouts(
    engine: Engine, weights: list[Weights], names: list[str], interruptions: list[Interruption]
) -> list[Rollout]:
    """Returns rollouts that updates came in between of; calls that were aborted are resumed."""
    whole_s = await seconds_of_a_response(engine)

    async def roll_out(name: str) -> Rollout:
        prompt = request(name).input_ids
        tokens, calls = prompt, list[EngineCall]()
        while True:
            budget = RESPONSE - (len(tokens) - len(prompt))
            if budget < 1:
                break
            reply: Reply = await engine.generate(request(f"{name}.{len(calls)}", tokens, budget))
            calls.append(reply.call)
            tokens = np.concatenate([tokens, reply.call.output_ids]).astype(np.int32)
            if reply.call.finish != "abort":
                break
        shape = (CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok, CONFIG.num_experts)
        return Rollout(name, tokens, len(prompt), tuple(calls), *shape)

    rollouts = [asyncio.create_task(roll_out(name)) for name in names]
    for interruption in interruptions:
        await asyncio.sleep(interruption.share * whole_s)
        await update(engine, interruption.mode, weights[interruption.version], interruption.version)
    return list(await asyncio.gather(*rollouts))
