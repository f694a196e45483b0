"""Whole runs with engine=sglang whose server fails. The server is a stand-in (tests/unit/sglang_kit.py): its tokens and
rows come from no model, but the loop, the trainer and the checkpoints are real.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.engines.sglang import build
from tests.unit.sglang_kit import loopback_server
from tests.unit.test_sglang_process import STAND_IN, child_of, gone

pytestmark = pytest.mark.slow


@pytest.fixture
def server():
    with loopback_server() as running:
        running.layers = 2  # of experiment=smoke
        yield running


@pytest.mark.parametrize(
    ("path", "fault", "message", "held"),
    [
        ("/update_weights_from_disk", (400, {"message": "no space"}), "update to weight version 3", "2"),
        ("/pause_generation", "drop", r"pause \(abort\)", "2"),
        ("/continue_generation", (500, {"message": "no"}), "resume", "3"),
    ],
)
def test_a_failed_sync_ends_the_run_with_a_checkpoint_and_the_run_can_go_on(
    smoke_run, server, capsys, path, fault, message, held
):
    arguments = ("engine=sglang", f"engine.url={server.url}", "strategy=slice_concat", "shadow.every=0")
    arguments += ("schedule.staleness_threshold=0",)  # nothing is ready for the next update before this sync is made
    server.faults[path] = [None, None, None, fault]  # the start, syncs 1 and 2, sync 3
    failed = smoke_run(*arguments)
    assert failed.code == 1
    assert [row["loop/trainer_version"] for row in failed.rows] == [0, 1, 2]
    printed = capsys.readouterr().err
    assert re.search(f"EngineLost: (the engine has ended: )?{message}", printed)  # whoever noticed first
    assert f"The newest checkpoint can be continued with resume={failed.folder}" in printed
    assert server.version == held

    resumed = smoke_run(*arguments, f"resume={failed.folder}")
    assert resumed.code == 0
    assert [row["loop/trainer_version"] for row in resumed.rows] == list(range(8))
    assert server.version == "8"


def test_a_lost_server_ends_the_run_after_the_update_in_progress_with_a_checkpoint(smoke_run, server, capsys):
    server.faults |= {"/generate": [None] * 60 + ["drop"], "/health": [None, (503, {})]}
    failed = smoke_run("engine=sglang", f"engine.url={server.url}", "strategy=slice_concat", "shadow=off")
    assert failed.code == 1
    assert "EngineLost: request r" in capsys.readouterr().err
    assert (failed.folder / "checkpoint" / "state.pt").is_file()
    assert failed.summary["status"] == "failed"
    with loopback_server() as other:  # the run goes on wherever the next server is
        other.layers = 2
        arguments = ("engine=sglang", f"engine.url={other.url}", "strategy=slice_concat", "shadow=off")
        assert smoke_run(*arguments, f"engine.server.publish_dir={failed.folder}", f"resume={failed.folder}").code == 0
        assert other.version == "8"


def test_a_reply_that_breaks_the_contract_ends_the_run_with_a_checkpoint_and_the_run_can_go_on(
    smoke_run, server, capsys
):
    server.token_s = 0.02  # several calls are under way when the bad reply comes
    arguments = ("engine=sglang", f"engine.url={server.url}", "strategy=slice_concat", "shadow.every=0")
    reply, replies = server.reply, []

    def one_of_them_lacks_a_log_prob(*args):
        answer = reply(*args)
        replies.append(answer)
        if len(replies) == 100:
            answer["meta_info"]["output_token_logprobs"].pop()
        return answer

    server.reply = one_of_them_lacks_a_log_prob
    failed = smoke_run(*arguments)
    assert failed.code == 1
    printed = capsys.readouterr().err
    assert "ReplyError: request r" in printed
    assert f"The newest checkpoint can be continued with resume={failed.folder}" in printed
    before = len(failed.rows)
    assert 0 < before < 8

    resumed = smoke_run(*arguments, f"resume={failed.folder}")
    assert resumed.code == 0
    assert [row["loop/trainer_version"] for row in resumed.rows] == list(range(8))
    assert server.version == "8"


def test_weights_can_go_to_the_server_by_broadcast(smoke_run, server):
    arguments = ("engine=sglang", f"engine.url={server.url}", "strategy=slice_concat", "shadow=off", "steps=3")
    run = smoke_run(*arguments, "engine.server.transport=gloo")
    assert run.code == 0
    assert server.version == "3"
    assert len(server.broadcasts) == 4
    assert "/update_weights_from_disk" not in server.calls


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_the_server_starts_ends_the_run_and_the_server_at_once(
    smoke_run, tmp_path: Path, monkeypatch, capsys, number
):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN.replace("sys.argv[1], int(sys.argv[2])", "'hangs', 0"))
    monkeypatch.setattr(build, "server_python", lambda cache_dir: Path(sys.executable))
    monkeypatch.setattr(build, "server_environment", lambda *_, **__: {**os.environ, "PYTHONPATH": str(tmp_path)})
    monkeypatch.setattr(build, "LOG_FILE", "logs/server.log")
    asked: list[float] = []
    started: list[int] = []

    def press() -> None:
        started.append(child_of(tmp_path / "run", within_s=120))
        asked.append(time.monotonic())
        os.kill(os.getpid(), number)

    presser = threading.Thread(target=press)
    presser.start()
    run = smoke_run("engine=sglang", "strategy=slice_concat", "shadow=off", "engine.server.start_timeout_s=120")
    took = time.monotonic() - asked[0]
    presser.join()
    assert run.code == 130
    assert took < 5
    assert gone(started[0])
    assert "stopped without a checkpoint" in capsys.readouterr().err
    assert run.summary["status"] == "interrupted"


def test_delta_rows_make_resumed_calls_cheaper_and_only_where_nothing_else_looks_at_the_rows(smoke_run, server):
    server.token_s = 0.05  # slower than updates, so that syncs interrupt
    # The stand-in's rows are no router's: the audit of a scored run would stop it.
    arguments = ("engine=sglang", f"engine.url={server.url}", "steps=4", "shadow.audit_limit.float32=1.0")
    for strategy, every, delta in (("slice_concat", 0, True), ("slice_concat", 2, False), ("replace", 0, False)):
        server.bodies.clear()
        run = smoke_run(*arguments, f"strategy={strategy}", f"shadow.every={every}", folder=f"{strategy}{every}")
        assert run.code == 0
        assert all(row["loop/row_bytes_per_token"] > 0 for row in run.rows)
        assert any(body["routed_experts_start_len"] > 0 for body in server.bodies) is delta
