"""What a run directory holds, seen from the configuration that wants it; and who may write to it."""

import json
import subprocess
import sys

import pytest

from experiments import run_dir
from experiments.run_dir import State
from experiments.tracking.run_folder import config_hash, plain_config
from tests.conftest import ROOT, compose


@pytest.fixture(scope="module")
def node():
    return compose("experiment=smoke")


def write_summary(folder, node, status):
    folder.mkdir(parents=True, exist_ok=True)
    summary = {"status": status, "config_hash": config_hash(plain_config(node))}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_an_empty_folder_is_new(tmp_path, node):
    assert run_dir.inspect(tmp_path, node).state is State.new
    assert run_dir.inspect(tmp_path / "missing", node).state is State.new


def test_a_run_is_completed_resumable_or_crashed(tmp_path, node):
    write_summary(tmp_path, node, "completed")
    assert run_dir.inspect(tmp_path, node).state is State.completed
    write_summary(tmp_path, node, "running")
    assert run_dir.inspect(tmp_path, node).state is State.crashed
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "state.pt").touch()
    assert run_dir.inspect(tmp_path, node).state is State.resumable


def test_a_run_that_died_before_its_summary_is_known_by_its_configuration(tmp_path, node):
    run_dir.write_composition(tmp_path, node)
    assert run_dir.inspect(tmp_path, node).state is State.crashed
    assert run_dir.inspect(tmp_path, compose("experiment=smoke", "seed=1")).state is State.foreign


def test_a_printed_plan_leaves_only_the_job_file_and_is_not_a_run(tmp_path, node):
    with run_dir.claim(tmp_path) as claimed:
        assert claimed is not None
        claimed.note("completed")
    plan = compose("experiment=smoke", "dry_run=true")
    assert run_dir.inspect(tmp_path, plan).state is State.completed
    assert run_dir.inspect(tmp_path, node).state is State.new


def test_a_run_in_verl_is_resumable_from_verls_checkpoint_whatever_its_resume_mode(tmp_path):
    arguments = ("experiment=qwen3_moe_tiny_verl", "strategy=replace")
    write_summary(tmp_path, compose(*arguments), "failed")
    assert run_dir.inspect(tmp_path, compose(*arguments)).state is State.crashed
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    assert run_dir.inspect(tmp_path, compose(*arguments)).state is State.resumable
    resuming = compose(*arguments, "backend.verl.trainer.resume_mode=auto")
    assert run_dir.inspect(tmp_path, resuming).state is State.resumable


def test_what_does_not_change_the_numbers_does_not_make_another_run(tmp_path, node):
    write_summary(tmp_path, node, "completed")
    same = compose("experiment=smoke", "tracking=disabled", "task.warm_start.cache_dir=x")
    assert run_dir.inspect(tmp_path, same).state is State.completed


def test_another_configuration_is_foreign_and_the_reason_names_the_key(tmp_path, node):
    write_summary(tmp_path, node, "completed")
    run_dir.write_composition(tmp_path, node)
    found = run_dir.inspect(tmp_path, compose("experiment=smoke", "algorithm.clip_low=0.1"))
    assert found.state is State.foreign
    assert "(algorithm.clip_low=0.2, now algorithm.clip_low=0.1)" in found.reason


def test_a_completed_run_without_the_recording_that_is_asked_for_is_not_taken(tmp_path, node):
    write_summary(tmp_path, node, "completed")
    assert run_dir.inspect(tmp_path, compose("experiment=smoke", "record=true")).state is State.foreign


def test_a_folder_has_one_owner_at_a_time_and_a_dead_one_is_none(tmp_path):
    assert not run_dir.is_claimed(tmp_path)
    hold = "import sys, time, pathlib; from experiments.run_dir import claim\n"
    hold += "with claim(pathlib.Path(sys.argv[1])) as c:\n    print('held', flush=True)\n    time.sleep(100)"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert run_dir.is_claimed(tmp_path)
    with run_dir.claim(tmp_path) as claimed:
        assert claimed is None
    assert f"process {holder.pid} on" in str(run_dir.claimed_elsewhere(tmp_path))
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert not run_dir.is_claimed(tmp_path)
    with run_dir.claim(tmp_path) as claimed:
        assert claimed is not None
        claimed.note("failed", "why")
    assert (run_dir.read_job(tmp_path)["status"], run_dir.read_job(tmp_path)["error"]) == ("failed", "why")


def test_clearing_leaves_what_the_crashed_run_did_not_write(tmp_path, node):
    write_summary(tmp_path, node, "running")
    write_summary(tmp_path / "steps=2", node, "completed")
    (tmp_path / "wandb" / "offline-run").mkdir(parents=True)
    (tmp_path / "run.log").touch()
    run_dir.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.log", "steps=2"]
    assert run_dir.inspect(tmp_path / "steps=2", node).state is State.completed
