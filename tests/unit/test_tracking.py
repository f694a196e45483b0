"""The run directory: what a run leaves behind, and that a wrong number, a second run or a damaged file cannot pass."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.tracking import Tracker
from experiments.tracking.run_folder import config_hash, git_state, statistics

CONFIG = Path(__file__).parents[1] / "data" / "tracking_config.yaml"


def config(**tracking: object) -> DictConfig:
    loaded = OmegaConf.load(CONFIG)
    loaded.tracking.update(tracking)
    assert isinstance(loaded, DictConfig)
    return loaded


def open_tracker(folder: Path, *, resume_after: int | None = None, **tracking: object) -> Tracker:
    return Tracker(
        folder,
        config(**tracking),
        strategy="replace",
        device="cpu",
        resume_after=resume_after,
        command="python run.py strategy=x",
    )


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_the_same_bytes_whatever_the_time_and_the_order_of_keys(tmp_path: Path) -> None:
    for name, seconds, order in (("a", 1.0, 1), ("b", 2.0, -1)):
        tracker = open_tracker(tmp_path / name)
        for step in (1, 2):
            items = [("reward/mean", np.float32(0.1) * step), ("actor/ppo_kl", 1e-5 * step), ("n", np.int64(step))]
            tracker.log(step, dict(items[::order]), {"time/train_s": seconds})
        tracker.finish("completed")
    first, second = (tmp_path / name / "metrics.jsonl" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert first.read_text().splitlines()[0] == (
        '{"step": 1, "actor/ppo_kl": 1e-05, "n": 1, "reward/mean": 0.10000000149011612}'
    )
    assert rows(tmp_path / "b" / "timings.jsonl") == [{"step": s, "time/train_s": 2.0} for s in (1, 2)]


def test_a_row_is_on_disk_before_log_returns(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(1, {"actor/ppo_kl": 0.5}, {})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "actor/ppo_kl": 0.5}]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "running"
    tracker.finish("interrupted")


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_a_value_that_is_not_finite_stops_the_run_by_name_and_writes_nothing(tmp_path: Path, value: float) -> None:
    tracker = open_tracker(tmp_path)
    with pytest.raises(RuntimeError, match=r"step 1: .*gap/abs="):
        tracker.log(1, {"actor/ppo_kl": 0.1, "gap/abs": value}, {})
    with pytest.raises(RuntimeError, match="time/train_s"):
        tracker.log(1, {"actor/ppo_kl": 0.1}, {"time/train_s": value})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_timing_among_the_metrics_and_a_metric_among_the_timings_are_refused(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    with pytest.raises(RuntimeError, match="time/x"):
        tracker.log(1, {"time/x": 1.0}, {})
    with pytest.raises(RuntimeError, match="gap/abs"):
        tracker.log(1, {}, {"gap/abs": 1.0})
    with pytest.raises(TypeError, match="'note'"):
        tracker.log(1, {"note": "high"}, {})  # pyright: ignore[reportArgumentType]


def test_steps_must_grow(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(1, {}, {})
    with pytest.raises(RuntimeError, match="step 1 was logged after step 1"):
        tracker.log(1, {}, {})


def test_the_summary_says_what_ran_and_how_it_went(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    for step in range(1, 12):
        tracker.log(step, {"reward/mean": step / 10}, {"time/train_s": 0.5})
    tracker.log(12, {"actor/ppo_kl": 2.0}, {})
    returned = tracker.finish("failed", error="the engine is gone")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == returned
    assert (summary["status"], summary["error"], summary["steps"]) == ("failed", "the engine is gone", 12)
    assert (summary["strategy"], summary["seed"], summary["experiment"]) == ("replace", 3, "unit")
    assert summary["versions"]["hydra-core"] == "1.3.8"
    assert summary["versions"]["python"].startswith("3.12")
    assert summary["host"]["device"] == "cpu"
    assert 0.01 < summary["host"]["peak_memory_gib"] < 64
    assert summary["wandb_run_id"] is None
    assert summary["metrics"]["reward/mean"]["mean"] == pytest.approx(0.6)
    assert summary["metrics"]["time/train_s"]["count"] == 11
    assert summary["metrics"]["actor/ppo_kl"]["last"] == 2.0


def test_statistics_interpolate_the_percentile_and_average_the_fifths() -> None:
    values = [float(v) for v in range(11)]  # position 0.95 * 10 = 9.5 lies between 9 and 10; ceil(11/5) = 3
    assert statistics([values[i] for i in (3, 1, 2, 0, 4, 5, 6, 10, 8, 9, 7)]) == {
        "count": 11,
        "last": 7.0,
        "mean": 5.0,
        "p95": 9.5,
        "max": 10.0,
        "first_fifth": 2.0,
        "last_fifth": 8.0,
    }


def test_resuming_cuts_the_files_to_the_checkpoint_and_drops_a_line_cut_short(tmp_path: Path) -> None:
    first = open_tracker(tmp_path)
    for step in range(1, 6):
        first.log(step, {"actor/ppo_kl": float(step)}, {"time/train_s": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "actor/p')
    second = open_tracker(tmp_path, resume_after=3)
    second.log(4, {"actor/ppo_kl": 40.0}, {"time/train_s": 1.0})
    summary = second.finish("completed")
    assert [row["actor/ppo_kl"] for row in rows(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 40.0]
    assert [row["step"] for row in rows(tmp_path / "timings.jsonl")] == [1, 2, 3, 4]
    assert summary["steps"] == 4
    assert summary["metrics"]["actor/ppo_kl"]["mean"] == 11.5


def test_resuming_needs_every_row_up_to_the_checkpoint(tmp_path: Path) -> None:
    open_tracker(tmp_path).log(1, {}, {})
    with pytest.raises(ValueError, match=r"expected a row of step 3, .* is 1"):
        open_tracker(tmp_path, resume_after=3)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(1, {}, {})
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        open_tracker(tmp_path, resume_after=3)


def test_a_second_run_never_overwrites_a_first(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log(1, {"actor/ppo_kl": 1.0}, {})
    tracker.finish("completed")
    with pytest.raises(ValueError, match="holds a run already"):
        open_tracker(tmp_path)
    assert len(rows(tmp_path / "metrics.jsonl")) == 1


def test_a_run_is_finished_once(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.finish("completed")
    with pytest.raises(RuntimeError, match="finished already"):
        tracker.finish("failed")


def test_the_hash_sees_what_changes_numbers_and_nothing_else(tmp_path: Path) -> None:
    def hash_of(*overrides: str) -> str:
        merged = OmegaConf.merge(config(), OmegaConf.from_dotlist(list(overrides)))
        return config_hash(OmegaConf.to_container(merged))  # pyright: ignore[reportArgumentType]

    base = hash_of()
    assert hash_of("tracking.mode=online", "task.warm_start.cache_dir=elsewhere", "resume=outputs/x") == base
    assert hash_of("schedule.sync_interval=3") != base
    assert hash_of("seed=4") != base


def test_the_commit_is_that_of_the_project_and_of_no_repository_around_it(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "t"]):
        subprocess.run([*git, *command], check=True)
    sha, dirty = git_state(tmp_path)
    assert sha is not None
    assert (len(sha), dirty) == (40, False)
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == (sha, True)
    (tmp_path / "export").mkdir()
    assert git_state(tmp_path / "export") == (None, None)


def test_a_disabled_run_never_imports_wandb(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from omegaconf import OmegaConf
from experiments.tracking import Tracker
tracker = Tracker(Path({str(tmp_path / "run")!r}), OmegaConf.load({str(CONFIG)!r}), strategy="live", device="cpu",
                  resume_after=None, command="python run.py strategy=x")
tracker.log(1, {{}}, {{}})
tracker.finish("completed")
assert not {{"wandb", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_without_a_terminal_a_line_tells_every_tenth_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="experiments.tracking")
    tracker = open_tracker(tmp_path, progress=True)
    for step in range(1, 21):
        tracker.log(step, {"actor/ppo_kl": 1e-4, "reward/mean": 0.5, "stale/age_mean": 0.25}, {})
    tracker.finish("completed")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "update 1/20  ppo_kl 1.0e-04  reward 0.500  lag 0.25  partial -"
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [*range(1, 21, 2), 20]


def test_progress_can_be_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    tracker = open_tracker(tmp_path, progress=False)
    tracker.log(1, {}, {})
    tracker.finish("completed")
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
