"""Scripted engines for verl's real clients. A row shows where it comes from: expert ids (position % 8, 8 + version)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

from experiments.verl_backend.merging import Merging
from strategies import SliceConcat

LAYERS, TOP_K, EXPERTS, PROMPT = 2, 2, 32, 5
CONFIG = {
    "actor_rollout_ref": {"rollout": {"name": "sglang", "response_length": 64}},
    "async_training": {"partial_rollout": True},
}


def rows_of(count: int, version: int) -> np.ndarray:
    """Returns int32 `[count, L, K]`."""
    rows = np.empty((max(count, 0), LAYERS, TOP_K), np.int32)
    rows[..., 0] = (np.arange(max(count, 0)) % 8)[:, None]
    rows[..., 1] = 8 + version
    return rows


@dataclass
class Reply:
    """One scripted answer: `n` tokens under `version`; `extra` rows more (or less) than s + n - 1; None: no rows.
    `unscored`: the index of a token whose log-prob is NaN.
    """

    n: int
    version: int
    finish: str = "abort"
    extra: int | None = 0
    log_probs: bool = True
    read_only: bool = False
    first_id: int | None = None
    unscored: int | None = None


class Remote:
    """What `handle.method` of a Ray actor offers."""

    def __init__(self, function: Any):
        self.remote = function


class Server:
    """An engine that answers from a script."""

    def __init__(self, script: list[Reply]):
        self.script, self.generate = list(script), Remote(self._generate)

    async def _generate(self, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        reply = self.script.pop(0)
        total = len(prompt_ids) + reply.n
        rows = None if reply.extra is None else rows_of(total - 1 + reply.extra, reply.version)
        if rows is not None and reply.first_id is not None:
            rows[0, 0, 0] = reply.first_id
        if rows is not None and reply.read_only:
            rows.setflags(write=False)
        scores = [float("nan") if index == reply.unscored else -1.0 for index in range(reply.n)]
        return TokenOutput(
            token_ids=list(range(len(prompt_ids), total)),
            log_probs=scores if reply.log_probs else None,
            routed_experts=rows,
            stop_reason=reply.finish,
            extra_fields={"global_steps": reply.version},
        )


class Balancer:
    """A load balancer with one server."""

    def __init__(self, server: Server):
        async def acquire(**kwargs: Any) -> tuple[str, Server]:
            return "server", server

        async def fields() -> list[str]:
            return []

        self.acquire_server, self.release_server = Remote(acquire), Remote(lambda **kwargs: None)
        self.require_acquire_fields = self.require_release_fields = Remote(fields)


def upstream_client(script: list[Reply]) -> llm_server.FullyAsyncLLMServerClient:
    """Returns verl's client on a scripted engine, without its pause of a second between attempts."""

    async def at_once(seconds: float) -> None:
        return None

    llm_server.asyncio = SimpleNamespace(gather=asyncio.gather, sleep=at_once)
    return llm_server.FullyAsyncLLMServerClient(
        config=OmegaConf.create(CONFIG), load_balancer_handle=Balancer(Server(script))
    )


def merging(strategy: Any = None, on_missing_rows: Any = "raise", **changes: Any) -> Merging:
    """Returns the run's merging with few experts."""
    values = {
        "strategy": strategy or SliceConcat(),
        "num_layers": LAYERS,
        "top_k": TOP_K,
        "num_experts": EXPERTS,
        "records_rows": True,
        "on_missing_rows": on_missing_rows,
        "live_rows": False,
        "max_empty_aborts": 3,
        "in_trainer": False,
        "keeps_rows": False,
    }
    return Merging(**(values | changes))


def positions(rows: np.ndarray) -> list[int]:
    """Returns the position that every row shows."""
    return rows[:, 0, 0].tolist()


def versions(rows: np.ndarray) -> list[int]:
    """Returns the version that every row shows."""
    return (rows[:, 0, 1] - 8).tolist()
