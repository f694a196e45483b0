"""One real SGLang server for the whole suite. The first run builds its environment (minutes, gigabytes)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from experiments.engines.sglang.environment import server_python
from experiments.engines.sglang.process import (
    Launch,
    ServerProcess,
    choose_port,
    server_arguments,
    server_environment,
)
from experiments.engines.sglang.weights import Publisher
from experiments.schema import DType, EngineConfig, ServerConfig
from tests.sglang.kit import CONFIG, weight_versions

ENGINE = EngineConfig(name="sglang", dtype=DType.float32, max_running=8, max_prefill_tokens=4096)
SERVER = ServerConfig(device="cpu", host="127.0.0.1", port=0, prefix_cache=True, extra_args=[], start_timeout_s=1800)


def start_server(folder: Path, version: int, log: Path) -> ServerProcess:
    """Returns a server of this suite's model, started on the weights in `folder`."""
    port = choose_port(SERVER.host, SERVER.port)
    arguments = server_arguments(
        ENGINE,
        SERVER,
        model=folder,
        version=version,
        on_cpu=True,
        max_length=CONFIG.max_position_embeddings,
        port=port,
    )
    launch = Launch(server_python(None), arguments, server_environment(os.environ, on_cpu=True, threads=1))
    return ServerProcess(launch, f"http://{SERVER.host}:{port}", log)


class SharedServer:
    """The server that runs now; a test that kills it leaves another one behind."""

    def __init__(self, process: ServerProcess, start: Callable[[Path, int], ServerProcess]):
        self.process, self.start = process, start


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    publisher = Publisher(CONFIG, torch.float32, None)
    folder = publisher.publish(weight_versions(1)[0], 0)
    server = SharedServer(start_server(folder, 0, log), lambda model, version: start_server(model, version, log))
    try:
        asyncio.run(server.process.wait_ready(SERVER.start_timeout_s))
        yield server
    finally:
        asyncio.run(server.process.stop())
        publisher.close()


@pytest.fixture
def server(shared: SharedServer) -> ServerProcess:
    return shared.process
