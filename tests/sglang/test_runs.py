"""Whole runs on the real server, and a server that is killed. The kill comes last: it costs a second start."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from experiments.engines.sglang.__main__ import main
from experiments.engines.sglang.engine import ServerSource
from experiments.engines.sglang.process import ServerProcess
from experiments.engines.sglang.weights import Publisher
from tests.sglang.conftest import SERVER, SharedServer
from tests.sglang.kit import CONFIG, MODEL, play, request, sglang_engine, weight_versions

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

FIXED = ("vocab_size", "rope_parameters", "norm_topk_prob")  # not keys of conf/model
SIZES = [f"model.{name}={value}" for name, value in MODEL.items() if name not in FIXED]


def test_a_whole_run_trains_on_the_servers_rollouts(smoke_run, server: ServerProcess):
    run = smoke_run("engine=sglang", f"engine.url={server.url}", "strategy=slice_concat", "steps=4", *SIZES)
    assert run.code == 0
    assert [row["loop/trainer_version"] for row in run.rows] == [0, 1, 2, 3]
    assert all(row["loop/row_bytes_per_token"] > 0 for row in run.rows)
    assert all(row["stale/version_coverage"] == 1 for row in run.rows)
    assert httpx.get(f"{server.url}/model_info").json()["weight_version"] == "4"


def test_a_whole_run_sends_its_weights_by_broadcast(smoke_run, server: ServerProcess):
    arguments = ("engine=sglang", f"engine.url={server.url}", "engine.server.transport=gloo", "strategy=exact")
    run = smoke_run(*arguments, "steps=3", "trainer.learning_rate=0", *SIZES)
    assert run.code == 0
    assert max(row["gap/abs_max"] for row in run.rows) < 1e-4
    assert httpx.get(f"{server.url}/model_info").json()["weight_version"] == "3"


def test_without_updates_of_the_weights_the_trainer_gives_every_token_the_servers_log_prob(smoke_run, server):
    run = smoke_run(
        "engine=sglang", f"engine.url={server.url}", "strategy=exact", "steps=3", "trainer.learning_rate=0", *SIZES
    )
    assert run.code == 0
    assert max(row["gap/abs_max"] for row in run.rows) < 1e-4


def test_the_probe_trusts_a_server_that_holds_the_checkpoint(server: ServerProcess, tmp_path: Path, capsys):
    publisher = Publisher(CONFIG, weight_versions(1)[0]["lm_head.weight"].dtype, tmp_path)
    folder = publisher.publish(weight_versions(1)[0], 7)
    body = {"model_path": str(folder), "weight_version": "7", "flush_cache": True}
    assert httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60).json()["success"]
    assert main(["probe", server.url, "--pauses", "--checkpoint", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "0 of 54 cells have other experts" in printed
    assert "pause retract: length" in printed
    publisher.close()


def running_in_groups(*groups: int) -> list[str]:
    """Returns /proc's line of every process in these process groups that has not ended (a zombie has)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may end while we look
            state, _, group = path.read_text().rsplit(")", 1)[1].split()[:3]
            if int(group) in groups and state != "Z":
                found.append(path.read_text())
    return found


def test_a_server_that_is_killed_is_started_again_and_the_lost_request_sent_again(shared: SharedServer):
    """The engine believes that it started the shared server, which is then killed in the midst of a response."""
    weights = weight_versions(1)[0]
    killed = shared.process

    def start(folder: Path, version: int) -> ServerProcess:
        if shared.process.exit_code() is None:
            body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
            httpx.post(f"{shared.process.url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
        else:
            shared.process = shared.start(folder, version)
        return shared.process

    async def scenario(engine):
        asked = asyncio.create_task(engine.generate(request("r0", budget=190)))
        await asyncio.sleep(0.3)
        os.kill(killed.pid, signal.SIGKILL)
        return await asked, engine.stats().restarts

    engine = sglang_engine(killed, source=ServerSource(start, None, SERVER.start_timeout_s, max_restarts=1))
    reply, restarts = play(engine, weights, 9, scenario)
    assert (reply.call.new_tokens, set(reply.call.versions.tolist()), restarts) == (190, {9}, 1)
    assert shared.process is not killed
    assert shared.process.exit_code() is not None, "the engine ended what it had started"
    deadline = time.monotonic() + 10
    while (left := running_in_groups(killed.pid, shared.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
