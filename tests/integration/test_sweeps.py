"""Whole sweeps: started again, killed, interrupted, started twice at once; in one process and in several."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.run_dir import is_claimed
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

SMOKE = ("experiment=smoke", "threads=1", "shadow=off", "tracking=disabled")
TIMEOUT_S = 600


def start(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, "run.py", "-m", *SMOKE, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives it
        **kwargs,
    )


def sweep(*arguments):
    process = start(*arguments)
    printed, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, printed, errors


def summary(folder: Path):
    return json.loads((folder / "summary.json").read_text())


def wait_for(condition, what):
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    pytest.fail(f"waited {TIMEOUT_S} s for {what}")


def processes_of(group: int):
    """Returns the process ids of a process group that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_the_launcher_changes_no_number_and_what_is_there_is_neither_repeated_nor_overwritten(tmp_path):
    jobs = ("steps=2", "strategy=replace,exact")
    code, printed, errors = sweep(*jobs, f"hydra.sweep.dir={tmp_path / 'a'}")
    assert code == 0, errors
    assert "[2/2] exact" in errors
    assert "2 of 2 jobs completed" in errors
    assert "kl mean" in printed
    assert "python -m analysis report" in printed
    code, printed, errors = sweep(*jobs, f"hydra.sweep.dir={tmp_path / 'b'}", "hydra/launcher=joblib")
    assert code == 0, errors
    files = sorted(path.relative_to(tmp_path / "a") for path in tmp_path.glob("a/**/metrics.jsonl"))
    assert [str(file.parent) for file in files] == [
        f"smoke/{rule}/seed0/shadow=off,steps=2,threads=1" for rule in ("exact", "replace")
    ]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file.with_name(".hydra") / "config.yaml").is_file()
    before = {file: (tmp_path / "b" / file).stat().st_mtime_ns for file in files}
    code, printed, errors = sweep(*jobs, f"hydra.sweep.dir={tmp_path / 'b'}")
    assert (code, errors.count("completed before, skipped")) == (0, 2)
    assert {file: (tmp_path / "b" / file).stat().st_mtime_ns for file in files} == before

    taken = tmp_path / "a" / files[0].parent
    kept = {file: file.read_bytes() for file in taken.rglob("*") if file.is_file()}
    code, printed, errors = sweep("steps=3", f"hydra.sweep.dir={taken.parent}", f"hydra.sweep.subdir='{taken.name}'")
    assert (code, printed) == (2, "")
    assert "holds the run of another configuration (steps=2, now steps=3)" in errors
    assert {file: file.read_bytes() for file in taken.rglob("*") if file.is_file()} == kept


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_failing_job_does_not_end_the_sweep_and_its_next_start_is_a_new_run(tmp_path, launcher):
    jobs = (
        "strategy._target_=tests.integration.failing_strategy.AlwaysFails,strategies.Replace",
        "steps=1",
        "tracking=offline",
        f"hydra.sweep.dir={tmp_path}",
        "hydra.sweep.subdir=${hydra:job.num}",
        f"hydra/launcher={launcher}",
    )
    code, _, errors = sweep(*jobs)
    assert code == 1
    assert "1 of 2 jobs completed; 1 failed" in errors
    first = [summary(tmp_path / number) for number in "01"]
    assert [s["status"] for s in first] == ["failed", "completed"]
    code, _, errors = sweep(*jobs)
    assert code == 1
    assert errors.count("completed before, skipped") == 1
    second = [summary(tmp_path / number) for number in "01"]
    assert first[1]["wandb_run_id"] == second[1]["wandb_run_id"] != first[0]["wandb_run_id"]
    assert second[0]["wandb_run_id"] != first[0]["wandb_run_id"]
    assert len(list((tmp_path / "0" / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.parametrize(("launcher", "to_group"), [("basic", True), ("joblib", True), ("joblib", False)])
def test_an_interrupted_sweep_saves_checkpoints_leaves_no_process_and_goes_on(tmp_path, launcher, to_group):
    """A terminal sends SIGINT to the whole process group; `kill` sends SIGTERM to one process."""
    two_at_once = ("hydra.launcher.n_jobs=2",) if launcher == "joblib" else ()
    jobs = ("seed=0,1,2", "steps=400", "tracking=offline", f"hydra.sweep.dir={tmp_path}", f"hydra/launcher={launcher}")
    process = start(*jobs, *two_at_once)
    running = 2 if two_at_once else 1

    def trained():
        return sum(path.stat().st_size > 0 for path in tmp_path.glob("**/metrics.jsonl")) == running

    wait_for(trained, "the first updates")
    if to_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    wait_for(lambda: not processes_of(process.pid), "the end of every process")
    stopped = {path.parent: summary(path.parent) for path in tmp_path.glob("**/summary.json")}
    assert [s["status"] for s in stopped.values()] == ["interrupted"] * running, "no further job started"
    assert all((folder / "checkpoint" / "state.pt").is_file() for folder in stopped)
    assert not list(tmp_path.glob("**/.stop-*"))

    again = start(*jobs, *two_at_once)

    def gone_on():
        return all(
            (folder / "metrics.jsonl").read_text().count("\n") > before["steps"] for folder, before in stopped.items()
        )

    wait_for(gone_on, "the resumed runs")
    os.killpg(again.pid, signal.SIGINT)
    again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 130
    for folder, before in stopped.items():
        assert summary(folder)["wandb_run_id"] == before["wandb_run_id"]


def test_two_starts_at_once_share_no_folder_and_a_killed_one_is_taken_over(tmp_path):
    jobs = ("seed=0", "steps=400", f"hydra.sweep.dir={tmp_path}")
    first = start(*jobs)
    folder = tmp_path / "smoke" / "replace" / "seed0" / "shadow=off,steps=400,threads=1"
    wait_for(lambda: (folder / "metrics.jsonl").is_file(), "the run")
    code, _, errors = sweep(*jobs)
    assert code == 1
    assert f"is being run by process {first.pid} on" in errors
    assert is_claimed(folder)
    first.kill()
    first.communicate()
    assert not is_claimed(folder)
    assert summary(folder)["status"] == "running"
    again = start(*jobs)
    wait_for(lambda: is_claimed(folder), "the next start")
    os.killpg(again.pid, signal.SIGINT)
    again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 130
