"""`load_runs` on run directories: the table, what is left out and why, and files as crashes and resumes leave them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from analysis.history import History, from_rows, read_history
from analysis.runs import load_runs
from experiments.tracking.run_folder import JsonLines, write_table


def write(
    folder: Path,
    strategy: str = "replace",
    seed: int = 0,
    rows: Iterable[dict[str, Any]] | str = ({"step": 1, "a": 0.5}, {"step": 2, "a": 1.5}),
    status: str = "completed",
    steps: int = 2,
    experiment: str = "unit",
    **settings: Any,
) -> Path:
    """Returns `folder`, now a run directory of `steps` planned updates."""
    config = {"seed": seed, "steps": steps, "strategy": {"_target_": strategy}, "tracking": {"mode": "offline"}}
    summary = {
        "status": status,
        "strategy": strategy,
        "seed": seed,
        "experiment": experiment,
        "engine": "embedded",
        "pause_mode": "abort",
        "wandb_run_id": None,
        "versions": {"torch": "2.11.0"},
        "host": {"cpus": 2},
        "git_sha": "abc",
        "metrics": {},
    }
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump({**config, **settings}), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def history_of(tmp_path: Path, text: str, known: Iterable[str] = ()) -> History:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_history(path, list(known))


def test_the_recorded_study_is_one_row_per_run_and_update_with_the_numbers_of_its_files(study_folder: Path) -> None:
    runs = load_runs(study_folder)
    assert list(runs.runs.index) == [f"{arm}-s{s}" for arm in ("exact", "naive_concat", "replace", "slice_concat")
                                     for s in range(3)]  # fmt: skip
    assert len(runs.history) == 12 * 10
    assert list(runs.history.columns[:4]) == ["run", "strategy", "seed", "step"]
    assert set(runs.history.dtypes.iloc[4:]) == {np.dtype(np.float64)}
    lines = [json.loads(line) for line in (study_folder / "replace/seed1/metrics.jsonl").read_text().splitlines()]
    ours = runs.history[runs.history["run"] == "replace-s1"]
    for line, (_, row) in zip(lines, ours.iterrows(), strict=True):
        logged = row.dropna()
        assert {key for key in logged.index[4:] if not key.startswith("time/")} == line.keys() - {"step"}
        assert all(row[key] == value for key, value in line.items())
    assert runs.configs["exact-s2"]["seed"] == 2
    assert runs.versions["exact-s2"]["torch"] == "2.11.0"
    assert runs.runs.loc["exact-s2", ["steps", "planned", "group", "source"]].tolist() == [10, 10, "study", "directory"]
    assert runs.excluded.empty


def test_segments_of_shadow_scoring_carry_their_run(study_folder: Path) -> None:
    segments = load_runs(study_folder, strategies=["exact"]).segments
    lines = (study_folder / "exact/seed0/merge_errors.jsonl").read_text().splitlines()
    assert (segments["run"] == "exact-s0").sum() == sum(len(json.loads(line)["errors"]) for line in lines)


def test_filters_name_every_run_that_they_leave_out(tmp_path: Path) -> None:
    write(tmp_path / "a", "replace")
    write(tmp_path / "b", "exact")
    write(tmp_path / "c", "live", experiment="other")
    kept = load_runs(tmp_path, strategies=["replace", "live"], groups=["unit"], tags=["abort", "none"])
    assert list(kept.runs.index) == ["replace-s0"]
    assert set(kept.excluded["reason"]) == {
        "strategy 'exact' is none of ['live', 'replace']",
        "group 'other' is none of ['unit']",
    }
    assert kept.describe().splitlines() == [
        "1 run: replace, seeds 0",
        f"not used: {tmp_path}/b: strategy 'exact' is none of ['live', 'replace']",
        f"not used: {tmp_path}/c: group 'other' is none of ['unit']",
    ]
    with pytest.raises(ValueError, match=r"no run to use in .*\n.*tags \['replace', 'embedded', 'abort'\]: none of"):
        load_runs(tmp_path / "a", tags=["retract"])


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_is_left_out_loudly_and_taken_when_asked_for(tmp_path: Path, status: str) -> None:
    write(tmp_path / "a", status=status, seed=1, steps=9)
    write(tmp_path / "b")
    runs = load_runs(tmp_path)
    assert list(runs.runs.index) == ["replace-s0"]
    assert runs.excluded.loc[0].tolist() == [
        "replace-s1", str(tmp_path / "a"), f"{status}; states={sorted({'completed', status})} takes it",
    ]  # fmt: skip
    asked = load_runs(tmp_path, states=("completed", status))
    assert asked.runs["status"].tolist() == ["completed", status]
    assert asked.runs["planned"].tolist() == [2, 9]


def test_completed_with_too_few_updates_is_incomplete_whatever_its_summary_says(tmp_path: Path) -> None:
    write(tmp_path, steps=3)
    with pytest.raises(ValueError, match="incomplete: 2 of 3 rows"):
        load_runs(tmp_path)
    assert load_runs(tmp_path, states=["incomplete"]).runs["status"].tolist() == ["incomplete"]


def test_a_run_in_verl_is_complete_with_a_row_per_weight_sync_and_one_for_the_rest(tmp_path: Path) -> None:
    settings = {"backend": {"name": "verl"}, "schedule": {"sync_interval": 4}}
    rows = [{"step": 4, "a": 0.5}, {"step": 6, "a": 1.5}]
    write(tmp_path / "whole", rows=rows, steps=6, **settings)
    write(tmp_path / "cut", rows=rows[:1], steps=6, seed=1, **settings)
    runs = load_runs(tmp_path)
    assert list(runs.runs["seed"]) == [0]
    assert "1 of 2 rows" in runs.excluded["reason"].item()


def test_broken_folders_are_named_and_do_not_stop_the_others(tmp_path: Path) -> None:
    write(tmp_path / "good")
    (write(tmp_path / "cut") / "summary.json").write_text('{"status": ')
    (write(tmp_path / "foreign") / "summary.json").write_text('{"status": "completed"}')
    (write(tmp_path / "started") / "summary.json").unlink()
    (write(tmp_path / "empty", seed=1) / "metrics.jsonl").unlink()
    write(tmp_path / "damaged", seed=2, rows='{"step": 1}\n{"st\n{"step": 3}\n')
    scored = write(tmp_path / "scored") / "summary.json"
    scored.write_text(json.dumps({**json.loads(scored.read_text()), "mode": "score"}))
    runs = load_runs(tmp_path)
    assert list(runs.runs.index) == ["replace-s0"]
    reasons = {Path(row.where).name: row.reason for row in runs.excluded.itertuples()}
    assert reasons.keys() == {"cut", "foreign", "started", "empty", "damaged", "scored"}
    assert "cannot be read" in reasons["cut"]
    assert "none of this project" in reasons["foreign"]
    assert "no summary.json" in reasons["started"]
    assert "metrics.jsonl: cannot be read" in reasons["empty"]
    assert "metrics.jsonl:2:" in reasons["damaged"]
    assert "scored a recording" in reasons["scored"]


def test_of_equal_runs_the_newest_completed_one_is_used(tmp_path: Path) -> None:
    for name, status, age in (("old", "completed", 100), ("new", "completed", 50), ("crashed", "failed", 0)):
        write(tmp_path / name, status=status, tracking={"mode": name})
        os.utime(tmp_path / name / "summary.json", (1e9 - age, 1e9 - age))
    runs = load_runs(tmp_path, states=["completed", "failed"])
    assert runs.runs["where"].tolist() == [str(tmp_path / "new")]
    assert dict(zip(runs.excluded["where"], runs.excluded["reason"], strict=True)) == {
        str(tmp_path / name): f"the same settings and seed as {tmp_path / 'new'}, which is used"
        for name in ("old", "crashed")
    }
    assert load_runs(tmp_path, tmp_path, f"{tmp_path}/").runs.index.tolist() == ["replace-s0"]


def test_two_configurations_of_one_arm_and_seed_are_refused_and_the_difference_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a", trainer={"learning_rate": 1e-4})
    write(tmp_path / "b", trainer={"learning_rate": 1e-3}, tracking={"mode": "online"})
    with pytest.raises(ValueError, match=r"are both replace-s0 and differ in trainer.learning_rate: load one"):
        load_runs(tmp_path)


def test_a_source_that_is_nothing_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    for source, message in (
        (tmp_path, "no run directory"),
        (tmp_path / "absent", "no such file or folder, and not the name of a W&B project"),
    ):
        with pytest.raises(ValueError, match=message):
            load_runs(source)
    with pytest.raises(ValueError, match="got nothing"):
        load_runs()


def test_keys_select_columns_and_timings_are_columns_too(tmp_path: Path) -> None:
    write(tmp_path, rows=[{"step": 1, "a": 1.0, "b": 2.0}, {"step": 2, "a": 3.0}])
    (tmp_path / "timings.jsonl").write_text('{"step": 2, "time/train_s": 7.5}\n{"step": 3, "time/train_s": 9}\n')
    table = load_runs(tmp_path).history
    assert list(table.columns[4:]) == ["a", "b", "time/train_s"]
    assert table["time/train_s"].fillna(-1).tolist() == [-1, 7.5]
    assert list(load_runs(tmp_path, keys=["b"]).history.columns[4:]) == ["b"]


def test_curves_of_different_length_and_sparse_keys_keep_every_update(tmp_path: Path) -> None:
    write(tmp_path / "a", rows=[{"step": k, "a": k, **({"sparse": k} if k % 5 == 0 else {})} for k in range(1, 11)])
    write(tmp_path / "b", seed=1, rows=[{"step": k, "other": 1} for k in range(1, 4)])
    table = load_runs(tmp_path).history.set_index(["run", "step"])
    assert len(table) == 13
    assert table.loc["replace-s0", "sparse"].dropna().to_dict() == {5: 5.0, 10: 10.0}
    assert table.loc["replace-s1", "a"].isna().all()


@pytest.mark.parametrize("spelling", ["NaN", '"NaN"', "null"])
def test_nan_is_a_value_and_never_shortens_a_curve_wandb_sweeps_32(tmp_path: Path, spelling: str) -> None:
    history = history_of(tmp_path, f'{{"step": 1, "a": 1}}\n{{"step": 2, "a": {spelling}}}\n{{"step": 3, "a": 3}}\n')
    assert history.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(history.columns["a"], [1, math.nan, 3])


def test_infinity_is_infinite_as_number_and_as_string(tmp_path: Path) -> None:
    history = history_of(tmp_path, '{"step": 1, "a": Infinity}\n{"step": 2, "a": "-Infinity"}\n{"step": 3, "a": "x"}\n')
    np.testing.assert_array_equal(history.columns["a"], [math.inf, -math.inf, math.nan])


@pytest.mark.parametrize("tail", ['{"step": 3, "a": 0.', '{"st', "{"])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, tail: str) -> None:
    assert history_of(tmp_path, '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n' + tail).steps.tolist() == [1, 2]


def test_a_step_logged_twice_counts_once_and_the_later_value_wins_wandb_5865(tmp_path: Path) -> None:
    history = history_of(tmp_path, "".join(
        json.dumps({"step": step, key: value}) + "\n"
        for step, key, value in [(1, "a", 1), (3, "a", 3), (2, "a", 2), (3, "a", 30), (3, "b", 5), (2, "a", "NaN")]
    ))  # fmt: skip
    assert history.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(history.columns["a"], [1, math.nan, 30])
    np.testing.assert_array_equal(history.columns["b"], [math.nan, math.nan, 5])


def test_both_readers_give_the_same_matrix(study_folder: Path, tmp_path: Path) -> None:
    path = study_folder / "naive_concat" / "seed2" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    careful, with_keys, without = from_rows(rows), read_history(path, list(rows[0])), read_history(path)
    for fast in (with_keys, without):
        assert fast.steps.tolist() == careful.steps.tolist()
        pd.testing.assert_frame_equal(pd.DataFrame(fast.columns), pd.DataFrame(careful.columns))


def test_a_key_that_the_summary_does_not_name_is_read_all_the_same(tmp_path: Path) -> None:
    history = history_of(tmp_path, '{"step": 1, "a": 1.5}\n{"step": 2, "late": 2.5}\n', known=["a"])
    np.testing.assert_array_equal(history.columns["late"], [math.nan, 2.5])


@pytest.mark.parametrize("row", ["[1]", "3", '{"a": 1}', '{"step": "x"}', '{"step": 1.5}', '{"step": Infinity}'])
def test_a_line_without_a_step_is_an_error_that_names_the_file(tmp_path: Path, row: str) -> None:
    with pytest.raises(ValueError, match=r"metrics.jsonl: ?.*2"):
        history_of(tmp_path, f'{{"step": 1, "a": 1}}\n{row}\n')


def tabulated(folder: Path) -> Path:
    """Returns a run directory with `history.parquet`, as a completed run leaves it."""
    write(folder, steps=3)
    metrics, timings = (JsonLines(folder / f"{name}.jsonl", None) for name in ("metrics", "timings"))
    for step, values in enumerate([{"a": 1, "b": 0.1}, {"a": 0.25}, {"b": 1 / 3}], start=1):
        metrics.append(step, values)
        timings.append(step, {"time/train_s": step / 7})
    for file in (metrics, timings):
        file.close()
    write_table(folder / "history.parquet", metrics, timings)
    return folder


def test_the_table_that_a_completed_run_leaves_holds_the_numbers_of_its_lines(tmp_path: Path) -> None:
    folder = tabulated(tmp_path)
    fast, few = load_runs(folder).history, load_runs(folder, keys=["b"]).history
    (folder / "history.parquet").unlink()
    pd.testing.assert_frame_equal(load_runs(folder).history, fast)
    pd.testing.assert_frame_equal(load_runs(folder, keys=["b"]).history, few)
    assert fast["a"].dropna().tolist() == [1, 0.25]


@pytest.mark.parametrize("change", ["another size", "edited later", "table cut short", "file gone"])
def test_a_table_that_is_not_of_its_lines_is_not_used(tmp_path: Path, change: str) -> None:
    folder = tabulated(tmp_path)
    path, table = folder / "metrics.jsonl", folder / "history.parquet"
    text = path.read_text()
    match change:
        case "another size":
            path.write_text(text.replace("0.25", "0.375"))
        case "edited later":
            path.write_text(text.replace("0.25", "0.75"))
            os.utime(table, (1e9, 1e9))
        case "table cut short":
            table.write_bytes(table.read_bytes()[:-20])
        case "file gone":
            (folder / "timings.jsonl").unlink()
    expected = {"another size": 0.375, "edited later": 0.75}.get(change, 0.25)
    assert load_runs(folder).history["a"].tolist()[1] == expected
