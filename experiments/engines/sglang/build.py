"""Builds the engine of a run from its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig

from experiments.engines.sglang.client import Sampling
from experiments.engines.sglang.engine import ServerSource, SGLangEngine
from experiments.engines.sglang.environment import server_python
from experiments.engines.sglang.process import (
    Launch,
    ServerProcess,
    choose_port,
    server_arguments,
    server_environment,
)
from experiments.engines.sglang.weights import Publisher
from experiments.schema import EngineConfig, Pause, SamplingConfig, ServerConfig

LOG_FILE = "sglang_server.log"


def build_engine(
    model: Qwen3MoeConfig,
    *,
    engine: EngineConfig,
    sampling: SamplingConfig,
    pause_mode: Pause,
    stop_ids: list[int],
    run_dir: Path,
    threads: int,
) -> SGLangEngine:
    """Returns an engine that is not started; builds the server's environment first where it is to be started by us.

    Raises:
        EnvironmentBuildError: that failed.
    """
    server = engine.server
    assert server is not None
    return SGLangEngine(
        model,
        source=ServerSource(
            start=None if engine.url else _starter(model, engine, server, run_dir, threads),
            url=engine.url,
            start_timeout_s=server.start_timeout_s,
            max_restarts=server.max_restarts,
        ),
        publisher=Publisher(
            model,
            getattr(torch, engine.dtype.value),
            None if server.publish_dir is None else Path(server.publish_dir).expanduser(),
        ),
        sampling=Sampling(sampling.temperature, sampling.top_p, stop_ids),
        max_in_flight=engine.max_running,
        request_timeout_s=server.request_timeout_s,
        prefix_cache=pause_mode is not Pause.in_place,
    )


def _starter(
    model: Qwen3MoeConfig, engine: EngineConfig, server: ServerConfig, run_dir: Path, threads: int
) -> Callable[[Path, int], ServerProcess]:
    """Returns a function that starts a server on the weights in a folder, as a weight version."""
    python = server_python(server.cache_dir)
    on_cpu = server.device == "cpu" or (server.device == "auto" and not torch.cuda.is_available())
    environment = server_environment(os.environ, on_cpu=on_cpu, threads=threads or os.cpu_count() or 1)

    def start(folder: Path, version: int) -> ServerProcess:
        port = choose_port(server.host, server.port)
        arguments = server_arguments(
            engine,
            server,
            model=folder,
            version=version,
            on_cpu=on_cpu,
            max_length=model.max_position_embeddings,
            port=port,
        )
        reached = "127.0.0.1" if server.host == "0.0.0.0" else server.host
        return ServerProcess(Launch(python, arguments, environment), f"http://{reached}:{port}", run_dir / LOG_FILE)

    return start
