"""Starting and ending the server process, and building its environment. The program started here is a stand-in for
`sglang.launch_server`: a module of that name that answers /health.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from experiments.engines.sglang import environment
from experiments.engines.sglang.build import check_nccl
from experiments.engines.sglang.process import (
    Launch,
    ServerProcess,
    ServerStartError,
    choose_port,
    own_url,
    server_arguments,
    server_environment,
)
from experiments.schema import DType, EngineConfig, ServerConfig
from tests.conftest import ROOT

STAND_IN = """
import http.server, signal, subprocess, sys, time
mode, port = sys.argv[1], int(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if mode == "fails":
    sys.exit("no such model")
if mode == "hangs":
    time.sleep(600)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)

    def start(mode: str) -> ServerProcess:
        port = choose_port("127.0.0.1", 0)
        launch = Launch(Path(sys.executable), [mode, str(port)], {**os.environ, "PYTHONPATH": str(tmp_path)})
        return ServerProcess(launch, f"http://127.0.0.1:{port}", tmp_path / "logs" / "server.log")

    return start


def child_of(folder: Path, within_s: float = 20) -> int:
    log = folder / "logs" / "server.log"
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if log.is_file() and log.read_text().startswith("child "):
            return int(log.read_text().split()[1])
        time.sleep(0.05)
    raise AssertionError(f"the stand-in wrote nothing to {log}")


def gone(pid: int) -> bool:
    """Waits until a process has ended (a zombie that nobody reaps has)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("mode", ["serves", "stubborn"])
def test_a_stopped_server_leaves_no_process_behind(stand_in, tmp_path, monkeypatch, mode):
    monkeypatch.setattr("experiments.engines.sglang.process.STOP_S", 0.5)
    server = stand_in(mode)

    async def play():
        await server.wait_ready(30)
        assert server.exit_code() is None
        await server.stop()
        await server.stop()

    asyncio.run(play())
    assert gone(server.pid)
    assert gone(child_of(tmp_path))


def test_a_server_that_fails_to_start_says_why(stand_in):
    server = stand_in("fails")
    with pytest.raises(ServerStartError, match=r"(?s)ended with exit code 1 while it started; .*no such model"):
        asyncio.run(server.wait_ready(30))
    asyncio.run(server.stop())


def test_a_server_that_does_not_answer_in_time_is_given_up(stand_in):
    server = stand_in("hangs")
    with pytest.raises(ServerStartError, match=r"did not answer within engine.server.start_timeout_s=1 s"):
        asyncio.run(server.wait_ready(1))
    asyncio.run(server.stop())
    assert gone(server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kernels end a child when its parent is killed")
def test_a_server_dies_with_a_parent_that_is_killed(stand_in, tmp_path):
    program = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from experiments.engines.sglang.process import Launch, ServerProcess
        import os, sys
        environment = {{**os.environ, "PYTHONPATH": {str(tmp_path)!r}}}
        launch = Launch(Path(sys.executable), ["hangs", "0"], environment)
        server = ServerProcess(launch, "http://127.0.0.1:0", Path({str(tmp_path / "logs" / "server.log")!r}))
        print(server.pid, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = child_of(tmp_path)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(pid)
    os.kill(child, signal.SIGKILL)  # the stand-in's own child does not watch its parent, SGLang's do


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServerStartError, match=rf"cannot listen on 127.0.0.1:{port} .* set engine.server.port"):
            choose_port("127.0.0.1", port)
    assert choose_port("127.0.0.1", port) == port
    assert choose_port("127.0.0.1", 0) > 0


def test_a_host_that_is_not_ours_is_named():
    with pytest.raises(
        ServerStartError, match=r"cannot listen on 192\.0\.2\.1:0 .* engine.server.host to an address of"
    ):
        choose_port("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("node7", "http://node7:7"),
        ("::1", "http://[::1]:7"),
        ("::", "http://[::1]:7"),
    ],
)
def test_the_url_of_a_server_of_ours_leads_to_it(host, url):
    assert own_url(host, 7) == url


def arguments(*, on_cpu: bool, random_weights: bool = False, **server) -> str:
    engine = EngineConfig(name="sglang", dtype=DType.bfloat16, max_running=8, max_prefill_tokens=64)
    options = ServerConfig(**{"host": "127.0.0.1", "prefix_cache": True, "extra_args": [], **server})
    fixed = {"model": Path("m"), "version": 3, "max_length": 100, "port": 1}
    return " ".join(server_arguments(engine, options, on_cpu=on_cpu, random_weights=random_weights, **fixed))


def test_a_host_without_cuda_gets_what_it_needs_and_one_with_cuda_the_servers_defaults():
    assert "--device cpu --attention-backend torch_native" in arguments(on_cpu=True)
    assert "--max-total-tokens 864" in arguments(on_cpu=True)
    for option in ("--device", "--attention-backend", "--mem-fraction-static", "--max-total-tokens", "cuda-graph"):
        assert option not in arguments(on_cpu=False)
    base = {"PATH": "/bin", "PYTHONPATH": "mine", "VIRTUAL_ENV": "mine"}
    assert server_environment(base, on_cpu=False, threads=1).keys() == {
        "PATH",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    }
    cpu = server_environment(base, on_cpu=True, threads=3)
    assert (cpu["SGLANG_USE_CPU_ENGINE"], cpu["OMP_NUM_THREADS"]) == ("1", "3")
    assert (Path(cpu["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").is_file()


def test_the_server_always_returns_rows_and_listens_where_it_is_told():
    line = arguments(on_cpu=True, prefix_cache=False, extra_args=["--tp-size", "4"])
    assert "--enable-return-routed-experts" in line
    assert "--skip-tokenizer-init" in line
    assert "--host 127.0.0.1 --port 1" in line
    assert "--weight-version 3 --dtype bfloat16" in line
    assert line.endswith("--disable-radix-cache --device cpu --attention-backend torch_native --mem-fraction-static "
                         "0.05 --max-total-tokens 864 --tp-size 4")  # fmt: skip


def test_the_environment_is_built_once_and_again_after_a_build_was_cut_short(tmp_path, monkeypatch, caplog):
    built = []
    monkeypatch.setattr(environment, "_build", lambda folder, wanted: (built.append(folder), folder.mkdir()))
    first = environment.server_python(str(tmp_path))
    assert environment.server_python(str(tmp_path)) == first
    assert first == built[0] / "bin" / "python"
    assert len(built) == 1
    (built[0] / environment.COMPLETE).unlink()
    environment.server_python(str(tmp_path))
    assert len(built) == 2
    monkeypatch.setattr(environment, "pins", lambda: {"requirements": ["sglang==9"]})
    assert environment.server_python(str(tmp_path)) != first


def test_the_pins_are_those_of_the_project():
    assert environment.pins()["requirements"] == ["sglang==0.5.23"]


def test_a_failed_build_shows_what_uv_said(tmp_path, monkeypatch):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho no space left\nexit 2\n")
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))
    with pytest.raises(environment.EnvironmentBuildError, match=r"(?s)failed with exit code 2:\nno space left"):
        environment.server_python(str(tmp_path / "cache"))


def test_two_versions_of_nccl_are_refused_with_the_command_that_makes_them_one(tmp_path):
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    info = packages / "nvidia_nccl_cu13-2.99.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: nvidia-nccl-cu13\nVersion: 2.99.1\n")
    python = tmp_path / "bin" / "python"
    with pytest.raises(RuntimeError, match=r"NCCL \d[\d.]+, .* nvidia-nccl-cu13==2.99.1, .*uv pip install nvidia-nccl"):
        check_nccl(python)
    ours = ".".join(map(str, torch.cuda.nccl.version()))
    (info / "METADATA").write_text(f"Name: nvidia-nccl-cu13\nVersion: {ours}\n")
    check_nccl(python)


def test_a_server_that_gets_its_weights_by_broadcast_starts_with_random_ones():
    assert "--load-format dummy" in arguments(on_cpu=True, random_weights=True)
    assert "--load-format" not in arguments(on_cpu=True)
