"""One SGLang server that we start: its command line, its health, its end. It never outlives this process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from experiments.engines.sglang.client import http_client
from experiments.schema import EngineConfig, ServerConfig

log = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
POLL_S = 0.5
POLL_TIMEOUT_S = 5.0
PROGRESS_S = 20.0
STOP_S = 15.0
LOG_LINES = 12
LOG_LINE_CHARACTERS = 300
CONTEXT_SLACK = 8
"""Tokens that SGLang keeps free of its context length (0.5.23: 7); the run may use all of the model's."""

CPU_MEMORY_FRACTION = 0.05
"""Of the host's memory, SGLang's bound for weights and KV cache; `--max-total-tokens` sizes the cache itself."""


class ServerStartError(RuntimeError):
    """The server did not come up; the message has the end of its log."""


@dataclass(frozen=True)
class Launch:
    """What one start needs: `python` of the server's environment, arguments of `sglang.launch_server`, variables."""

    python: Path
    arguments: list[str]
    environment: dict[str, str]


def server_arguments(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    model: Path,
    version: int,
    on_cpu: bool,
    max_length: int,
    port: int,
    random_weights: bool = False,
) -> list[str]:
    """Returns the arguments of `python -m sglang.launch_server` for the weights in `model`, weight version `version`.

    `random_weights`: `model` has none; the server gets them before it is used.
    On CUDA everything that is not named here is SGLang's default (attention backend, CUDA graphs).
    """
    arguments = [
        *("--model-path", str(model), "--weight-version", str(version), "--dtype", engine.dtype.value),
        *("--host", server.host, "--port", str(port)),
        *("--context-length", str(max_length + CONTEXT_SLACK)),
        *("--skip-tokenizer-init", "--enable-return-routed-experts"),
        *("--max-running-requests", str(engine.max_running), "--max-prefill-tokens", str(engine.max_prefill_tokens)),
    ]
    if random_weights:
        arguments += ["--load-format", "dummy"]
    if not server.prefix_cache:
        arguments.append("--disable-radix-cache")
    if on_cpu:
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        arguments += ["--mem-fraction-static", str(CPU_MEMORY_FRACTION)]
        arguments += ["--max-total-tokens", str(engine.max_running * (max_length + CONTEXT_SLACK))]
    return arguments + list(server.extra_args)


def server_environment(base: Mapping[str, str], *, on_cpu: bool, threads: int) -> dict[str, str]:
    """Returns the variables of the server's processes. `threads`: CPU threads of torch on a host without CUDA."""
    environment = {key: value for key, value in base.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for CONTEXT_SLACK; no token gets there
    if on_cpu:
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(HERE / "cpu_support"),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(threads),
        }
    return environment


def choose_port(host: str, port: int) -> int:
    """Returns `port` if it is free, any free port for 0.

    Raises:
        ServerStartError: the port is in use, or the host is not ours.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerStartError(
                f"the SGLang server cannot listen on {host}:{port} ({error.strerror}); set engine.server.port to "
                "a free port, or 0 for any, and engine.server.host to an address of this machine"
            ) from error
        return probe.getsockname()[1]


def own_url(host: str, port: int) -> str:
    """Returns where this machine reaches a server of its own that listens on `host`, which may mean all addresses."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


class ServerProcess:
    """A running server. Create it in the main thread: the kernel kills the server when the thread that started it ends.

    Args:
        launch: what to run.
        url: where it will answer.
        log_path: file that its output is appended to.
    """

    def __init__(self, launch: Launch, url: str, log_path: Path):
        self.url, self._log_path = url, log_path
        self._ended = False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [str(launch.python), str(HERE / "server_main.py"), str(os.getpid()), *launch.arguments]
        with log_path.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=launch.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone; we end the server when its work is saved
            )

    @property
    def pid(self) -> int:
        """Process id, also that of its process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Returns how the server ended; None while it runs."""
        return self._process.poll()

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when the server answers `/health`, which it does once the model has generated a token.

        Raises:
            ServerStartError: it ended, or the time is over.
        """
        started = time.monotonic()
        next_message = started + PROGRESS_S
        log.info("SGLang server: starting on %s (imports take a minute or more); log: %s", self.url, self._log_path)
        async with http_client(self.url) as http:
            while True:
                if (code := self.exit_code()) is not None:
                    raise ServerStartError(
                        f"the SGLang server ended with exit code {code} while it started; {self.tail()}"
                    )
                if await _answers(http):
                    log.info("SGLang server: ready after %.0f s", time.monotonic() - started)
                    return
                now = time.monotonic()
                if now - started > timeout_s:
                    raise ServerStartError(
                        f"the SGLang server did not answer within engine.server.start_timeout_s={timeout_s:.0f} s; "
                        f"{self.tail()}"
                    )
                if now >= next_message:
                    next_message += PROGRESS_S
                    log.info("SGLang server: still starting, %.0f s", now - started)
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Ends the server and everything that it started. May be called twice.

        SGLang ends its own processes when its first one is asked to; whoever is left is killed.
        """
        if self.exit_code() is None:
            self._process.terminate()
        deadline = time.monotonic() + STOP_S
        while self.exit_code() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Ends the server's whole process group at once. May be called twice."""
        if self._ended:  # the group's number may be somebody else's by now
            return
        self._ended = True
        with suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self) -> str:
        """Returns where the log is and its last lines."""
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        shown = "\n".join(line[:LOG_LINE_CHARACTERS] for line in lines)
        return f"the end of {self._log_path}:\n{shown}"


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        async with asyncio.timeout(POLL_TIMEOUT_S):
            return (await http.get("/health")).status_code == httpx.codes.OK
    except (TimeoutError, httpx.RequestError):
        return False
