"""Figures and tables of merge error: numbers equal those worked out by hand, from small run directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.load import read_run
from analysis.markdown import fill
from analysis.merge_error import SECTIONS
from analysis.merge_frames import BOUNDARIES, Absent, Study, by_lag, by_segment, by_slots, by_span, ranking
from analysis.stats import LEVEL, MIN_CLUSTERS, RESAMPLES, clustered_means
from experiments import decision
from experiments.metrics import metric
from tests.unit.analysis_kit import LINES, line, write_run


def draw(out: Path, *runs: Path, write: Path | None = None) -> int:
    return main(["merge-error", *map(str, runs), "--out", str(out), *(["--write", str(write)] if write else [])])


def numbers(out: Path, name: str, *index: str) -> dict[object, float]:
    frame = pd.read_csv(out / f"merge_{name}.csv", dtype={"bucket": str})
    return frame.set_index(list(index or ("strategy", "bucket")))["mean"].to_dict()


def means(frame: pd.DataFrame | Absent) -> dict[object, float]:
    assert isinstance(frame, pd.DataFrame)
    return frame.set_index(["strategy", "bucket"])["mean"].to_dict()


def test_the_error_by_segment_is_the_sum_over_the_tokens_of_each_part(tmp_path: Path) -> None:
    assert draw(tmp_path / "out", write_run(tmp_path / "run")) == 0
    assert numbers(tmp_path / "out", "segments") == {
        ("replace", "first"): 0.2,
        ("replace", "last"): 0.0,
        ("replace", "only"): 0.0,
        ("slice_concat", "first"): 0.0,
        ("slice_concat", "last"): 0.05,
        ("slice_concat", "only"): 0.0,
    }


def test_the_error_by_lag_uses_the_segment_and_by_span_the_whole_interrupted_rollout(tmp_path: Path) -> None:
    study = Study.of([read_run(write_run(tmp_path / "run"))])
    lag, span = means(by_lag(study)), means(by_span(study))
    assert lag["replace", "2"] == 0.2
    assert lag["slice_concat", "0"] == 0.05
    assert span == {("replace", "2"): pytest.approx(0.8 / 6), ("slice_concat", "2"): pytest.approx(0.1 / 6)}


@pytest.mark.parametrize(("lag", "bucket"), [(0.4, "0"), (0.5, "1"), (2.4, "2"), (3, "3-4"), (4, "3-4"), (5, "5+")])
def test_a_lag_falls_into_its_bucket(tmp_path: Path, lag: float, bucket: str) -> None:
    run = write_run(tmp_path / "run", [line("a", 0, 1, lag, live=[0.4, 2, 1.0])])
    assert means(by_lag(Study.of([read_run(run)]))) == {("live", bucket): 0.2}


def test_a_segment_of_unknown_version_has_no_lag_but_still_a_part(tmp_path: Path) -> None:
    lines = [line("a", 0, 2, None, live=[0.4, 2, 1.0]), line("a", 1, 2, 0.0, live=[0.2, 2, 1.0])]
    study = Study.of([read_run(write_run(tmp_path / "run", lines))])
    assert means(by_lag(study)) == {("live", "0"): 0.1}
    assert means(by_segment(study)) == {("live", "first"): 0.2, ("live", "last"): 0.1}
    assert by_span(study) == Absent("no interrupted rollout with known versions")


@pytest.mark.parametrize(("changed", "bucket"), [(0.0, "0"), (0.01, "0-1%"), (0.011, "1-3%"), (1.0, "30-100%")])
def test_a_share_of_changed_slots_falls_into_its_bucket(tmp_path: Path, changed: float, bucket: str) -> None:
    run = write_run(tmp_path / "run", [line("a", 0, 1, 0.0, live=[0.4, 2, changed])])
    assert means(by_slots(Study.of([read_run(run)]))) == {("live", bucket): 0.2}


def test_runs_that_differ_in_the_seed_alone_are_pooled_though_their_rollouts_share_ids(tmp_path: Path) -> None:
    other = [line("a", 0, 2, 2.0, replace=[0.0, 12, 0.0]), line("a", 1, 2, 0.0, replace=[0.0, 2, 0.0])]
    runs = [write_run(tmp_path / "0"), write_run(tmp_path / "1", other, seed=1)]
    study = Study.of([read_run(run) for run in runs])
    table = by_segment(study)
    assert means(table)["replace", "first"] == pytest.approx(0.8 / 16)
    assert isinstance(table, pd.DataFrame)
    assert table.set_index(["strategy", "bucket"]).loc[("replace", "first"), "rollouts"] == 2
    assert ranking(study).set_index(["strategy", "seed"]).loc[("replace", 1), "mean"] == 0.0


def test_the_boundary_figure_is_the_mean_over_updates_by_key(tmp_path: Path) -> None:
    keys = {"merge/replace/abs_by_boundary/before_3_1": 0.3, "merge/replace/abs_by_boundary/after_0": 0.0}
    assert draw(tmp_path / "out", write_run(tmp_path / "run", metrics=keys)) == 0
    assert numbers(tmp_path / "out", "boundary") == {("replace", "-3..-1"): 0.3, ("replace", "0"): 0.0}


def test_the_boundary_labels_are_those_that_runs_log() -> None:
    assert tuple(BOUNDARIES) == metric.BOUNDARIES


def test_merge_error_and_churn_are_drawn_against_the_learning_rate(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "low", metrics={"route/churn": 0.01}),
        write_run(
            tmp_path / "high",
            [line("a", 0, 2, 1.0, replace=[8.0, 10, 0.5])],
            metrics={"route/churn": 0.2},
            trainer__learning_rate=1e-3,
        ),
    ]
    assert draw(tmp_path / "out", *runs) == 0
    frame = pd.read_csv(tmp_path / "out" / "merge_learning_rate.csv").set_index(["learning_rate", "strategy"])
    assert frame["mean"].to_dict() == {(1e-4, "replace"): 0.08, (1e-4, "slice_concat"): 0.01, (1e-3, "replace"): 0.8}
    assert frame.loc[(1e-3, "replace"), "churn"] == 0.2
    # The other figures are about the first run alone.
    assert numbers(tmp_path / "out", "segments")["replace", "first"] == 0.2


def test_pause_modes_and_resumed_rows_are_compared_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {
        "merge/excluded_frac": 0.25,
        "gap/abs": 0.013,
        "decomp/engine_abs": 0.02,
        "actor/ppo_kl": -0.002,
        "reward/mean": 0.5,
    }
    runs = [
        write_run(tmp_path / "abort"),
        write_run(tmp_path / "retract", metrics=metrics, schedule__pause_mode="retract"),
        write_run(tmp_path / "pinned", engine__resume_rows="pinned"),
    ]
    assert draw(tmp_path / "out", *runs) == 0
    frame = pd.read_csv(tmp_path / "out" / "merge_modes.csv").set_index(["pause_mode", "resume_rows"])
    assert list(frame.index) == [("abort", "pinned"), ("abort", "recompute"), ("retract", "recompute")]
    columns = ["excluded", "gap", "engine", "ppo_kl", "reward", "replace"]
    assert frame.loc[("retract", "recompute"), columns].tolist() == [0.25, 0.013, 0.02, -0.002, 0.5, 0.08]
    assert "| retract | recompute | 0 | 0.25 | 0.013 | 0.02 | -2.0e-3 | 0.5 | 0.08 | 0.01 |" in capsys.readouterr().out


def test_a_run_that_differs_otherwise_and_an_unfinished_one_are_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        write_run(tmp_path / "run"),
        write_run(tmp_path / "experts", model__num_experts=8),
        write_run(tmp_path / "crashed", status="failed", seed=1),
    ]
    assert draw(tmp_path / "out", *runs) == 0
    said = capsys.readouterr().out
    assert f"left out: {runs[1]}: differs from {runs[0]} in model.num_experts" in said
    assert f"left out: {runs[2]}: failed" in said
    assert len(pd.read_csv(tmp_path / "out" / "merge_runs.csv")) == 1


def test_a_figure_without_data_is_left_out_said_and_an_old_one_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert draw(out, write_run(tmp_path / "first")) == 0
    assert (out / "merge_segments.svg").exists()
    uninterrupted = write_run(tmp_path / "second", [LINES[2]])
    assert draw(out, uninterrupted) == 0
    assert not (out / "merge_segments.svg").exists()
    assert "segments: no figure: no rollout was interrupted" in capsys.readouterr().out
    assert isinstance(by_segment(Study.of([read_run(uninterrupted)])), Absent)


def test_figures_are_the_same_bytes_twice_small_and_undated(tmp_path: Path) -> None:
    keys = {f"merge/{name}/abs_by_boundary/after_0": 0.1 for name in ("replace", "slice_concat")}
    runs = [write_run(tmp_path / "0", metrics=keys), write_run(tmp_path / "1", trainer__learning_rate=1e-3)]
    for out in ("one", "two"):
        assert draw(tmp_path / out, *runs) == 0
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert [name for name in files if name.endswith(".svg")] == [
        f"merge_{name}.svg" for name in ("boundary", "lag", "learning_rate", "ranking", "segments", "slots", "span")
    ]
    for name in files:
        content = (tmp_path / "one" / name).read_bytes()
        assert content == (tmp_path / "two" / name).read_bytes()
        assert len(content) < 100_000
        assert b"<dc:date>" not in content


def test_intervals_are_those_of_the_run_summary() -> None:
    generator = np.random.default_rng(1)
    lines = [
        line(f"r{index}", 0, 1, 0.0, live=[float(generator.exponential()), int(generator.integers(1, 9)), 1.0])
        for index in range(MIN_CLUSTERS)
    ]
    frame = pd.DataFrame(
        [(each["rollout"], "live", *each["errors"]["live"][:2]) for each in lines],
        columns=["rollout", "strategy", "total", "count"],
    )
    (mine,) = clustered_means(frame, ["strategy"], ["rollout"]).to_dict("records")
    decided = decision.decide(lines)
    assert decided is not None
    (theirs,) = decided["ranking"]
    assert (mine["mean"], mine["low"], mine["high"]) == pytest.approx((theirs["mean"], theirs["low"], theirs["high"]))
    assert (RESAMPLES, LEVEL, MIN_CLUSTERS) == (decision.RESAMPLES, decision.LEVEL, decision.MIN_ROLLOUTS)


def test_fewer_rollouts_than_an_interval_needs_give_a_mean_without_one(tmp_path: Path) -> None:
    frame = by_segment(Study.of([read_run(write_run(tmp_path / "run"))]))
    assert isinstance(frame, pd.DataFrame)
    assert frame["mean"].notna().all()
    assert frame[["low", "high"]].isna().all(axis=None)


def score_nothing(run: Path) -> None:
    (run / "merge_errors.jsonl").write_text("", encoding="utf-8")


def cut_the_last_line(run: Path) -> None:
    path = run / "merge_errors.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")


def forget_a_field(run: Path) -> None:
    (run / "merge_errors.jsonl").write_text('{"step": 1, "rollout": "a"}\n', encoding="utf-8")


def no_summary(run: Path) -> None:
    (run / "summary.json").unlink()


def foreign_config(run: Path) -> None:
    (run / ".hydra" / "config.yaml").write_text("- a list\n", encoding="utf-8")


def no_shadow(run: Path) -> None:
    (run / "merge_errors.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (score_nothing, "merge_errors.jsonl: no merge errors"),
        (cut_the_last_line, "merge_errors.jsonl:3: not JSON"),
        (forget_a_field, "merge_errors.jsonl:1: expected step, rollout, segment"),
        (no_summary, "summary.json: cannot be read"),
        (foreign_config, "config.yaml: expected the composed configuration"),
        (no_shadow, "merge_errors.jsonl: missing; run with shadow.every=1"),
    ],
)
def test_a_damaged_run_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage, said: str
) -> None:
    run = write_run(tmp_path / "run")
    damage(run)
    assert draw(tmp_path / "out", run) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there_and_the_same_run_twice_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draw(tmp_path / "out", tmp_path / "nowhere") == 2
    assert "nowhere: expected the directory of a run, found nothing" in capsys.readouterr().err
    run = write_run(tmp_path / "run")
    assert draw(tmp_path / "out", run, run) == 2
    assert "the same rollouts would count twice" in capsys.readouterr().err


def test_the_tables_of_a_document_are_replaced_and_its_prose_is_kept(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text(
        "# Title\n<!-- table: segments -->\nold\n<!-- end -->\nprose\n<!-- table: modes -->\n<!-- end -->\n",
        encoding="utf-8",
    )
    run = write_run(tmp_path / "run")
    assert draw(tmp_path / "out", run, write=document) == 0
    once = document.read_text(encoding="utf-8")
    assert once == (
        "# Title\n<!-- table: segments -->\n"
        "| strategy | first | last | only |\n| --- | ---: | ---: | ---: |\n"
        "| replace | 0.2 | 0 | 0 |\n| slice_concat | 0 | 0.05 | 0 |\n"
        "<!-- end -->\nprose\n<!-- table: modes -->\n"
        "*Not measured: every run has schedule.pause_mode=abort and the same engine.resume_rows.*\n<!-- end -->\n"
    )
    assert draw(tmp_path / "out", run, write=document) == 0
    assert document.read_text(encoding="utf-8") == once


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no place\n", "no '<!-- table: NAME -->' found"),
        ("<!-- table: nonsense -->\n<!-- end -->\n", "unknown table nonsense; known names: ranking"),
        ("<!-- table: lag -->\n<!-- table: slots -->\n<!-- end -->\n", "has no '<!-- end -->'"),
    ],
)
def test_a_document_that_cannot_be_filled_is_an_error_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    document = tmp_path / "doc.md"
    document.write_text(text, encoding="utf-8")
    assert draw(tmp_path / "out", write_run(tmp_path / "run"), write=document) == 2
    assert said in capsys.readouterr().err
    assert document.read_text(encoding="utf-8") == text
    assert not (tmp_path / "out").exists()


def test_the_document_of_the_project_has_a_place_for_every_table_and_shows_every_figure() -> None:
    text = (Path(__file__).parents[2] / "docs" / "merge_error.md").read_text(encoding="utf-8")
    filled = fill(text, {section.name: f"table {section.name}" for section in SECTIONS})
    for section in SECTIONS:
        assert f"\ntable {section.name}\n" in filled
        assert (section.draw is not None) == (f"(figures/merge_{section.name}.svg)" in text)
