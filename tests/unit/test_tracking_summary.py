"""The tables: every number of the summary at its place, `-` where there is none, and a command to go on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.summary import closing_table, comparison_table, main, read_summary


def values(mean: float, **other: float) -> dict[str, float]:
    return {"count": 10, "last": mean, "mean": mean, "p95": mean, "max": mean, "first_fifth": mean} | other


def summary(**changes: Any) -> dict[str, Any]:
    phases = {"generate": 4.0, "score": 1.0, "train": 3.0, "sync": 0.5, "other": 1.5, "models": 7.0, "wall": 10.0}
    return {
        "status": "completed",
        "error": None,
        "steps": 10,
        "strategy": "replace",
        "seed": 1,
        "engine": "embedded",
        "old_log_prob": "bypass",
        "command": "python run.py strategy=replace seed=1 hydra.run.dir=/somewhere",
        "host": {"device": "cpu", "peak_memory_gib": 1.5},
        "seconds": 100.2,
        "folder": "outputs/x",
        "metrics": {
            "actor/ppo_kl": values(1.24e-4, p95=3e-4, max=9e-4, last=-2e-4),
            "merge/replace/abs": values(2.9e-3),
            "merge/exact/abs": values(0.0),
            "reward/mean": values(0.4, first_fifth=0.25, last_fifth=0.55),
            **{f"time/{name}_s": values(value) for name, value in phases.items()},
            "time/startup_s": values(20.0, count=1),
        },
        **changes,
    }


def line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_the_closing_table_shows_every_statistic_and_a_dash_for_what_was_not_logged() -> None:
    text = closing_table(summary())
    assert line(text, "ppo_kl").split() == ["ppo_kl", "1.24e-04", "3.00e-04", "9.00e-04", "-2.00e-04"]
    assert line(text, "|merge error|").split() == ["|merge", "error|", *["0.002900"] * 4]
    assert line(text, "clip fraction").split() == ["clip", "fraction", "-", "-", "-", "-"]
    assert "first fifth of the updates 0.2500, last fifth 0.5500" in text
    assert "replace, seed 1: completed after 10 updates in 100 s" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_time_split_is_in_shares_of_the_wall_time_with_the_start_up() -> None:
    text = closing_table(summary())
    assert line(text, "time") == "time     startup 17%, generate 33%, score 8%, train 25%, sync 4%, other 12%"
    assert line(text, "models") == "models   58% of the 120 s in the two models' forwards and backwards"
    rarely = summary()
    rarely["metrics"]["time/sync_s"] |= {"mean": 5.0, "count": 1}  # a sync of 5 s in one of ten updates
    assert "sync 4%" in closing_table(rarely)


@pytest.mark.parametrize(
    ("strategy", "status", "command", "expected"),
    [
        ("replace", "completed", "python run.py strategy=replace seed=1", "python run.py strategy=slice_concat seed=1"),
        ("slice_concat", "completed", "python run.py steps=9", "python run.py steps=9 strategy=exact"),
        (
            "live",
            "failed",
            "python run.py -m strategy=live,exact",
            "python run.py -m strategy=slice_concat",
        ),
        (
            "exact",
            "interrupted",
            "python run.py strategy=exact resume=a hydra.run.dir=a",
            "python run.py strategy=exact resume=outputs/x",
        ),
    ],
)
def test_the_next_command_keeps_the_overrides(strategy: str, status: str, command: str, expected: str) -> None:
    text = closing_table(summary(strategy=strategy, status=status, command=command))
    assert line(text, "next") == f"next     {expected}"


def test_the_next_command_of_a_run_in_verl_is_one_that_verl_takes() -> None:
    command = "python run.py experiment=verl_pr6046 strategy=slice_concat hydra.run.dir=a"
    of_verl = summary(engine="verl", strategy="slice_concat", command=command)
    ahead = "next     python run.py experiment=verl_pr6046 strategy="
    assert line(closing_table(of_verl), "next") == f"{ahead}replace"
    goes_on = "slice_concat backend.verl.trainer.resume_mode=auto hydra.run.dir=outputs/x"
    assert line(closing_table(of_verl | {"status": "interrupted"}), "next") == ahead + goes_on


def test_a_failure_and_the_blindness_of_decoupled_mode_are_said() -> None:
    assert "error: no rows" in closing_table(summary(status="failed", error="no rows"))
    assert "blind" in closing_table(summary(old_log_prob="decoupled"))
    assert "blind" not in closing_table(summary())


def test_several_runs_are_rows_of_one_table_with_their_commands() -> None:
    exact = summary(strategy="exact", status="failed", command="python run.py strategy=exact")
    text = comparison_table([summary(), exact])
    assert line(text, "replace").split()[:5] == ["replace", "1", "1.2e-04", "3.0e-04", "9.0e-04"]
    assert line(text, "exact (failed)").split()[-3:] == ["0", "0.250", "0.550"]
    assert line(text, "exact, seed 1").endswith("python run.py strategy=exact")
    assert max(map(len, text.splitlines())) <= 100


def test_a_folder_without_a_summary_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no summary.json in {tmp_path}"):
        read_summary(tmp_path)


def test_a_scored_recording_is_shown_as_its_ranking_and_not_compared_with_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"strategy": "replace", "mean": 0.5, "low": 0.4, "high": 0.6, "loss_frac": 1.0, "better_than_next": None}
    decision = {"ranking": [entry], "rollouts": 20, "interval": "95% bootstrap", "verdict": "replace: 0.5 nats"}
    for name, changes in (("scored", {"mode": "score", "decision": decision}), ("trained", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary(**changes)))
    monkeypatch.setattr("sys.argv", ["summary", str(tmp_path / "scored")])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "replace: 0.5 nats"
    monkeypatch.setattr("sys.argv", ["summary", str(tmp_path / "scored"), str(tmp_path / "trained")])
    with pytest.raises(SystemExit):
        main()
    assert "trained nothing: give it alone" in capsys.readouterr().err
