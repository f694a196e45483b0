"""Builds the engine of a run from its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import torch
import torch.cuda.nccl
from transformers import Qwen3MoeConfig

from experiments.engines.sglang.broadcast import Broadcast
from experiments.engines.sglang.client import Sampling
from experiments.engines.sglang.engine import ServerSource, SGLangEngine
from experiments.engines.sglang.environment import server_python
from experiments.engines.sglang.process import (
    Launch,
    ServerProcess,
    choose_port,
    own_url,
    server_arguments,
    server_environment,
)
from experiments.engines.sglang.transport import Disk, Transport
from experiments.engines.sglang.weights import Publisher
from experiments.schema import EngineConfig, Pause, SamplingConfig, ServerConfig, WeightTransport

LOG_FILE = "sglang_server.log"


def build_engine(
    model: Qwen3MoeConfig,
    *,
    engine: EngineConfig,
    transport: WeightTransport,
    sampling: SamplingConfig,
    pause_mode: Pause,
    stop_ids: list[int],
    run_dir: Path,
    threads: int,
) -> SGLangEngine:
    """Returns an engine that is not started; builds the server's environment first where it is to be started by us.

    `transport`: as `experiments.check.weight_transport` says.

    Raises:
        EnvironmentBuildError: that failed.
        RuntimeError: our NCCL and that of the server do not talk to each other.
    """
    server = engine.server
    assert server is not None
    dtype = getattr(torch, engine.dtype.value)
    folder = None if server.publish_dir is None else Path(server.publish_dir).expanduser().absolute()
    publisher = Publisher(model, dtype, folder)
    weights: Transport = Disk(publisher)
    if transport in (WeightTransport.gloo, WeightTransport.nccl):
        weights = Broadcast(publisher, dtype, "gloo" if transport is WeightTransport.gloo else "nccl")
    return SGLangEngine(
        model,
        source=ServerSource(
            start=None if engine.url else _starter(model, engine, server, transport, run_dir, threads),
            url=engine.url,
            start_timeout_s=server.start_timeout_s,
            max_restarts=server.max_restarts,
        ),
        transport=weights,
        sampling=Sampling(sampling.temperature, sampling.top_p, stop_ids),
        max_in_flight=engine.max_running,
        request_timeout_s=server.request_timeout_s,
        prefix_cache=pause_mode is not Pause.in_place,
        dtype=engine.dtype.value,
    )


def _starter(
    model: Qwen3MoeConfig,
    engine: EngineConfig,
    server: ServerConfig,
    transport: WeightTransport,
    run_dir: Path,
    threads: int,
) -> Callable[[Path, int], ServerProcess]:
    """Returns a function that starts a server from a folder of the transport, as a weight version."""
    python = server_python(server.cache_dir)
    if transport is WeightTransport.nccl:
        check_nccl(python)
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
            random_weights=transport is not WeightTransport.disk,
            max_length=model.max_position_embeddings,
            port=port,
        )
        launch = Launch(python, arguments, environment)
        return ServerProcess(launch, own_url(server.host, port), run_dir / LOG_FILE)

    return start


def check_nccl(python: Path) -> None:
    """Raises unless the server's environment has our NCCL: a group of two versions is refused by NCCL itself
    (ncclInvalidUsage, "Mismatched NCCL version detected"), at the first weight sync.

    Raises:
        RuntimeError: names both versions and how to make them one.
    """
    ours = ".".join(map(str, torch.cuda.nccl.version()))
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    theirs = {d.name: d.version for d in distributions(path=[str(packages)]) if d.name.startswith("nvidia-nccl")}
    if ours not in theirs.values():
        found = ", ".join(f"{name}=={version}" for name, version in theirs.items()) or "none"
        raise RuntimeError(
            f"engine.server.transport=nccl: the trainer has NCCL {ours}, the server's environment {found}, and NCCL "
            f"joins no group of two versions; `uv pip install {found}` and start with `uv run --no-sync`, or use "
            "engine.server.transport=gloo"
        )
