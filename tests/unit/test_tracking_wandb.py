"""W&B: names and ids, one run per directory, silence, no process left behind. Real wandb, offline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from analysis.wandb_file import read_wandb_file
from experiments.tracking import Tracker
from experiments.tracking.run_folder import read_json_lines
from experiments.verl_backend.recorder import Recorder

CONFIG = Path(__file__).parents[1] / "data" / "tracking_config.yaml"


def open_tracker(folder: Path, *, mode: str = "offline", resume_after: int | None = None) -> Tracker:
    config = OmegaConf.merge(OmegaConf.load(CONFIG), {"tracking": {"mode": mode}})
    assert isinstance(config, DictConfig)
    return Tracker(
        folder,
        config,
        strategy="slice_concat",
        device="cpu",
        resume_after=resume_after,
        command="python run.py strategy=x",
    )


def wandb_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def own_children() -> list[str]:
    """Returns the command lines of the processes that this one started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(stat.with_name("cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
    return found


def test_an_offline_run_carries_its_names_and_leaves_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(1, {"actor/ppo_kl": 0.5}, {"time/train_s": 2.0})
    summary = tracker.finish("completed")
    (path,) = wandb_files(tmp_path)
    run = read_wandb_file(path)
    assert (run.project, run.group, run.job_type, run.name) == ("routemerge", "unit", "slice_concat", "slice_concat-s3")
    assert run.tags == ("slice_concat", "embedded", "abort")
    assert run.run_id == summary["wandb_run_id"]
    assert run.config["schedule"] == {"pause_mode": "abort", "sync_interval": 2}
    assert run.history[0].items() >= {"step": 1, "_step": 1, "actor/ppo_kl": 0.5, "time/train_s": 2.0}.items()
    assert run.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "history.parquet",
        "merge_errors.jsonl",
        "metrics.jsonl",
        "summary.json",
        "timings.jsonl",
        "wandb",
    ]
    assert list((tmp_path / "wandb").iterdir()) == [path.parent]  # no `latest-run`, no `debug.log` beside it
    assert capfd.readouterr() == ("", "")


def test_a_cluster_run_shows_verls_own_values_in_wandb_alone(tmp_path: Path) -> None:
    recorder = Recorder(lambda: open_tracker(tmp_path))
    recorder.log(4, {"actor/ppo_kl": 0.5, "perf/mfu": 0.25, "timing_s/gen": 2.0}, [])
    recorder.finish("completed", None)
    (row,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert row == {"step": 4, "actor/ppo_kl": 0.5}
    (path,) = wandb_files(tmp_path)
    shown = read_wandb_file(path).history[0]
    assert shown.items() >= {"step": 4, "actor/ppo_kl": 0.5, "perf/mfu": 0.25, "time/generate_s": 2.0}.items()


def test_a_resumed_run_continues_its_id_and_a_repeated_one_gets_its_own(tmp_path: Path) -> None:
    def run(folder: str, first: int, last: int, resume_after: int | None) -> str:
        tracker = open_tracker(tmp_path / folder, resume_after=resume_after)
        for step in range(first, last + 1):
            tracker.log(step, {"actor/ppo_kl": step / 10}, {})
        return tracker.finish("interrupted")["wandb_run_id"]

    first, resumed, repeated = run("a", 1, 3, None), run("a", 4, 5, 3), run("b", 1, 1, None)
    assert first == resumed != repeated
    parts = [read_wandb_file(path) for path in sorted(wandb_files(tmp_path / "a"), key=lambda p: p.stat().st_mtime)]
    assert [[row["step"] for row in part.history] for part in parts] == [[1, 2, 3], [4, 5]]
    assert {part.run_id for part in parts} == {first}
    assert parts[0].exit_code == 130


def test_an_online_run_without_credentials_fails_before_work_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    # A closed port of this machine: should credentials be found all the same, nothing leaves it.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"Nothing was trained: use tracking.mode=offline"):
        open_tracker(tmp_path / "run", mode="online")


@pytest.fixture(autouse=True)
def no_process_is_left_behind():
    yield
    assert [line for line in own_children() if "wandb-core" in line] == []
