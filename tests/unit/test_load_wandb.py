"""`load_runs` on what W&B keeps: offline files that wandb wrote, and a server to which wandb's own client talks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import wandb
from omegaconf import DictConfig, OmegaConf

from analysis.__main__ import main
from analysis.runs import load_runs
from experiments.tracking import Tracker
from tests.unit.wandb_server import KEY, ServerRun, WandbServer, serve

CONFIG = Path(__file__).parents[1] / "data" / "tracking_config.yaml"
STEPS = 12


def track(
    folder: Path, steps: Sequence[int], *, seed: int = 3, resume_after: int | None = None, end: Any = "completed"
):
    """Writes a run directory as a run does, W&B offline."""
    changes = {"tracking": {"mode": "offline"}, "steps": STEPS, "seed": seed}
    config = OmegaConf.merge(OmegaConf.load(CONFIG), changes)
    assert isinstance(config, DictConfig)
    tracker = Tracker(folder, config, strategy="replace", device="cpu", resume_after=resume_after, command="run.py")
    for step in steps:
        sparse = {"merge/abs": step / 7} if step % 5 == 0 else {}
        tracker.log(step, {"actor/ppo_kl": step / 3, **sparse}, {"time/train_s": step / 2})
    tracker.finish(end)
    (folder / ".hydra").mkdir(exist_ok=True)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two run directories: one whole, one interrupted after update 8, resumed from the checkpoint of update 6."""
    folder = tmp_path_factory.mktemp("recorded")
    track(folder / "whole", range(1, STEPS + 1))
    track(folder / "resumed", range(1, 9), seed=4, end="interrupted")
    track(folder / "resumed", range(7, STEPS + 1), seed=4, resume_after=6)
    return folder


def test_offline_files_give_the_table_of_the_run_directories_resumed_runs_joined_wandb_3841(recorded: Path) -> None:
    folders = load_runs(recorded)
    files = load_runs(*sorted(recorded.glob("*/wandb")))
    pd.testing.assert_frame_equal(files.history, folders.history)
    assert files.history.groupby("run", observed=True).size().tolist() == [STEPS, STEPS]
    assert files.configs == folders.configs
    for run, versions in folders.versions.items():
        peak = versions.pop("host.peak_memory_gib")  # known at the end of a run
        assert (files.versions[run], peak > 0) == (versions, True)
    assert files.runs["command"].tolist() == ["run.py", "run.py"]
    assert files.runs["seconds"].between(0, 600).all()
    columns = ["strategy", "seed", "status", "steps", "planned", "group", "tags", "wandb_id"]
    pd.testing.assert_frame_equal(files.runs[columns], folders.runs[columns])
    assert files.segments.empty


def test_a_folder_of_wandb_files_alone_is_a_source_and_so_is_one_file(recorded: Path, tmp_path: Path) -> None:
    for part in recorded.glob("*/wandb/*"):
        shutil.copytree(part, tmp_path / "runs" / part.name)
    assert load_runs(tmp_path / "runs").runs["source"].tolist() == ["wandb file"] * 2
    (file,) = recorded.glob("whole/wandb/*/*.wandb")
    assert load_runs(file).runs["where"].tolist() == [str(file)]


def test_one_run_found_as_directory_and_as_file_is_read_from_the_directory(recorded: Path) -> None:
    runs = load_runs(recorded / "whole" / "wandb", recorded / "whole")
    assert runs.runs["source"].tolist() == ["directory"]
    assert runs.excluded["reason"].tolist() == [f"the same W&B run as {recorded / 'whole'}, which is used"]


def test_a_killed_run_and_a_damaged_file_are_left_out_loudly(recorded: Path, tmp_path: Path) -> None:
    (whole,) = recorded.glob("whole/wandb/*/*.wandb")
    data = whole.read_bytes()
    middle = len(data) // 2
    damaged = data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
    for name, content in (("cut", data[: len(data) * 2 // 3]), ("bad", damaged), ("ok", data)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.wandb").write_bytes(content)
    with pytest.raises(ValueError, match=r"cut/run.wandb: running; states=.* takes it"):
        load_runs(tmp_path / "cut")
    assert load_runs(tmp_path / "cut", states=["running"]).runs["steps"].between(4, STEPS).all()
    left_out = load_runs(tmp_path / "bad", tmp_path / "ok").excluded.loc[0]
    assert left_out["where"].endswith("bad/run.wandb")
    assert "checksum" in left_out["reason"]


def rows(steps: Sequence[int]) -> list[dict[str, Any]]:
    """Returns W&B history rows: a dense metric, a sparse one, W&B's own keys."""
    return [
        {"_step": k, "step": k, "_runtime": 1.5, "_timestamp": 1.7e9, "a": k / 2, **({"b": k} if k % 5 == 0 else {})}
        for k in steps
    ]


def settings(seed: int, steps: int, **more: Any) -> dict[str, Any]:
    return {"seed": seed, "steps": steps, "trainer": {"learning_rate": 1e-4}, **more}


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A W&B server without runs, and this process logged in to it."""
    with serve() as server:
        for name, value in {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": KEY,
            "WANDB_DIR": str(tmp_path),
            "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        yield server
        wandb.teardown()  # ends the client's service process, which keeps the address


def test_a_project_is_read_whole_not_the_500_rows_of_history_wandb_5994(online: WandbServer) -> None:
    steps = range(1, 2401)
    online.runs += [
        ServerRun("live", config=settings(0, 2400), rows=rows(steps)),
        ServerRun("exported", config=settings(1, 2400), rows=rows(steps), exported=2400),
        ServerRun("both", config=settings(2, 2400), rows=rows(steps), exported=1500),
    ]
    runs = load_runs("team/study")
    assert runs.runs["where"].tolist() == ["team/study/live", "team/study/exported", "team/study/both"]
    for _, table in runs.history.groupby("run", observed=True):
        np.testing.assert_array_equal(table["step"], steps)
        np.testing.assert_array_equal(table["a"], np.arange(1, 2401) / 2)
        # keys= of scan_history would return only the rows that have every key (wandb#1742, #5391).
        np.testing.assert_array_equal(table["b"].dropna(), np.arange(5, 2401, 5))
    assert list(runs.history.columns) == ["run", "strategy", "seed", "step", "a", "b"]
    assert "SampledHistoryPage" not in online.operations()
    pages = [v for name, v in online.requests if name == "HistoryPage" and v["run"] == "live"]
    assert [page["minStep"] for page in pages] == [0, 1000, 2000]


def test_every_page_of_a_project_is_read(online: WandbServer) -> None:
    online.runs += [
        ServerRun(f"r{seed}", config=settings(seed, 2), rows=rows([1, 2]), tags=["last"] if seed == 119 else [])
        for seed in range(120)
    ]
    runs = load_runs("team/study", tags=["last"])
    assert runs.runs["seed"].tolist() == [119]
    assert len(runs.excluded) == 119
    assert [v["cursor"] for name, v in online.requests if name == "Runs"] == [None, "50", "100"]
    assert online.operations().count("HistoryPage") == 1


def test_server_runs_carry_names_tags_and_configuration(online: WandbServer) -> None:
    internal = {"python_version": "3.12.1", "cli_version": "0.31.0"}
    online.runs.append(
        ServerRun("r", "exact", settings(7, 2, _wandb=internal), rows([1, 2]), group="unit", tags=["exact", "abort"])
    )
    runs = load_runs("team/study", groups=["unit"], tags=["abort"], strategies=["exact"])
    assert runs.runs.loc["exact-s7", ["group", "tags", "source", "wandb_id"]].tolist() == [
        "unit", ("exact", "abort"), "wandb", "r",
    ]  # fmt: skip
    assert runs.configs["exact-s7"] == {"seed": 7, "steps": 2, "trainer.learning_rate": 1e-4}


@pytest.mark.parametrize("exported", [0, 3])
def test_nan_and_infinity_on_a_server_are_numbers_and_keep_their_rows_wandb_8252(
    online: WandbServer, exported: int
) -> None:
    values = ["NaN", "Infinity", "-Infinity"]
    history = [{"_step": k, "step": k, "a": value} for k, value in enumerate(values, start=1)]
    online.runs.append(ServerRun("r", config=settings(0, 3), rows=history, exported=exported))
    np.testing.assert_array_equal(load_runs("team/study").history["a"], [math.nan, math.inf, -math.inf])


def test_a_project_and_offline_files_make_a_report(
    online: WandbServer, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"versions": {"torch": "2.11.0"}, "git_sha": "0123abc", "git_dirty": False, "host": {"device": "cpu"}}
    history = [{"_step": k, "step": k, "gap/abs": k / 2} for k in (1, 2)]
    for arm in ("replace", "exact"):
        made = {"provenance": {**known, "command": f"python run.py strategy={arm}"}}
        online.runs.append(ServerRun(arm, arm, settings(0, 2, **made), history, seconds=150.0))
    assert main(["report", "team/study", "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "python run.py -m strategy=" in text
    assert "| 2.5 |" in text  # minutes
    assert "| torch | 2.11.0 |" in text
    assert "every other setting, version and commit is the same" in text
    assert "are not known" not in text
    for run in online.runs:
        del run.config["provenance"]
    assert main(["report", "team/study", "--out", str(tmp_path / "out")]) == 0
    assert "| all | not known: the source of the runs lacks them |" in (tmp_path / "out" / "summary.md").read_text()
    online.runs[0].config["provenance"] = {"versions": 3}
    online.runs[1].config["provenance"] = known
    assert main(["report", "team/study", "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "every other setting is the same" in text
    assert "Versions and commit of 1 of 2 runs are not known" in text
    capsys.readouterr()
    assert main(["report", *map(str, recorded.glob("*/wandb")), "--out", str(tmp_path / "out")]) == 0
    assert "2 complete runs of replace" in capsys.readouterr().out


def test_media_and_text_are_no_metrics(online: WandbServer) -> None:
    histogram = {"_type": "histogram", "values": [1], "bins": [0, 1]}
    history = [{"_step": 1, "step": 1, "a": 1, "h": histogram, "note": "text", "flag": True}]
    online.runs.append(ServerRun("r", config=settings(0, 1), rows=history))
    assert load_runs("team/study").history.iloc[0, 4:].to_dict() == {"a": 1.0, "flag": 1.0}


def test_a_run_without_our_step_is_told_by_that_of_wandb(online: WandbServer) -> None:
    history = [{"_step": 4, "a": 1}, {"_step": 9, "a": 2}]
    online.runs.append(ServerRun("r", config=settings(0, 2), rows=history))
    assert load_runs("team/study").history["step"].tolist() == [4, 9]


def test_finished_on_the_server_is_not_completed_unless_every_update_is_there(online: WandbServer) -> None:
    online.runs += [
        ServerRun("ok", config=settings(0, 2), rows=rows([1, 2])),
        ServerRun("short", config=settings(1, 9), rows=rows([1, 2])),
        ServerRun("crashed", config=settings(2, 2), rows=rows([1, 2]), state="crashed"),
        ServerRun("empty", config=settings(3, 2)),
        ServerRun("foreign", job_type=None, config={"lr": 1}, rows=rows([1])),
    ]
    runs = load_runs("team/study")
    assert runs.runs["wandb_id"].tolist() == ["ok"]
    reasons = {row.where.rsplit("/")[-1]: row.reason for row in runs.excluded.itertuples()}
    assert reasons.keys() == {"short", "crashed", "empty", "foreign"}
    assert reasons["short"].startswith("incomplete: 2 of 9 rows")
    assert reasons["crashed"].startswith("crashed; states=")
    assert reasons["empty"].startswith("incomplete: 0 of 2 rows")
    assert "not of this project" in reasons["foreign"]
    asked = [v["run"] for name, v in online.requests if name == "HistoryPage"]
    assert "crashed" not in asked  # its history would not be used


def test_a_run_uploaded_twice_counts_once_the_newer_upload_wandb_2858(online: WandbServer) -> None:
    online.runs += [
        ServerRun("first", config=settings(0, 2), rows=rows([1, 2]), heartbeat="2026-11-01T01:00:00Z"),
        ServerRun("again", config=settings(0, 2), rows=rows([1, 2]), heartbeat="2026-11-02T01:00:00Z"),
    ]
    runs = load_runs("team/study")
    assert runs.runs["wandb_id"].tolist() == ["again"]
    assert "the same settings and seed as team/study/again" in runs.excluded.loc[0, "reason"]


def test_a_whole_run_is_preferred_to_a_newer_upload_that_lacks_updates_wandb_2971(online: WandbServer) -> None:
    online.runs += [
        ServerRun("whole", config=settings(0, 2), rows=rows([1, 2]), heartbeat="2026-11-01T01:00:00Z"),
        ServerRun("short", config=settings(0, 2), rows=rows([2]), heartbeat="2026-11-02T01:00:00Z"),
    ]
    runs = load_runs("team/study")
    assert runs.runs["wandb_id"].tolist() == ["whole"]
    assert runs.excluded["reason"].str.startswith("incomplete: 1 of 2 rows").all()


def test_a_server_that_fails_for_a_moment_is_asked_again(online: WandbServer) -> None:
    online.runs.append(ServerRun("r", config=settings(0, 2), rows=rows([1, 2])))
    online.failures = [502, 503]
    assert len(load_runs("team/study").history) == 2
    assert online.operations().count("Runs") == 3


def test_an_unknown_project_and_a_refused_key_say_what_to_do(
    online: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"team/absent: no such folder here, .* W&B project: Could not find .*absent"):
        load_runs("team/absent")
    monkeypatch.setenv("WANDB_API_KEY", KEY[::-1])
    with pytest.raises(ValueError, match=r"team/study: no such folder here, .* not logged in.*`wandb login` logs in"):
        load_runs("team/study")
