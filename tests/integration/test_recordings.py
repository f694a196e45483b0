"""A recorded run is the run without recording, and scoring its recording gives the numbers that it wrote."""

import json

import pytest

from experiments import check
from experiments.recording import read_recording
from tests.conftest import compose

FAST = ("trainer.learning_rate=2e-3", "threads=1")
SHADOWS = "[replace,slice_concat,naive_concat,recompute]"


def score_recording(run, folder, *overrides):
    """Scores the recording of `run` in this process; returns the exit code."""
    from experiments.launch import Job
    from experiments.score import score

    node = compose("mode=score", f"recording={run.folder}", "tracking.progress=false", *overrides)
    return score(Job(check.load(node), node, "replace", folder, started=0.0, command="python run.py mode=score"))


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize(
    "settings",
    [
        ["strategy=replace"],
        ["strategy=recompute", "schedule.sync_interval=2", "shadow.every=1"],
        ["strategy=replace", "algorithm.old_log_prob=decoupled", "algorithm.mini_batches=2"],
        ["strategy=slice_concat", "engine.resume_rows=pinned"],
    ],
    ids=" ".join,
)
def test_scoring_a_recording_reproduces_the_shadow_numbers_of_the_run(smoke_run, tmp_path, capsys, settings):
    run = smoke_run(*FAST, *settings, f"shadow.strategies={SHADOWS}", "record=true")
    shadowed = sorted({line["step"] for line in lines(run.folder, "merge_errors.jsonl")})
    capsys.readouterr()
    assert score_recording(run, tmp_path / "s", f"strategies={SHADOWS}", f"score.updates={shadowed}") == 0
    assert (tmp_path / "s" / "merge_errors.jsonl").read_bytes() == (run.folder / "merge_errors.jsonl").read_bytes()
    rows = {row["step"]: row for row in run.rows}
    shadow_keys = 0
    for row in lines(tmp_path / "s", "metrics.jsonl"):
        shared = row.keys() & rows[row["step"]].keys()
        shadow_keys += len(shared)
        assert {key: row[key] for key in shared} == {key: rows[row["step"]][key] for key in shared}
    assert shadow_keys > 100
    summary = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert summary["decision"] == run.summary["decision"]
    assert (summary["mode"], summary["status"], summary["steps"]) == ("score", "completed", len(shadowed))
    assert summary["decision"]["verdict"] in capsys.readouterr().out


def test_recording_does_not_change_the_run_with_or_without_shadow_scoring(smoke_run):
    for shadow in ("shadow.every=2", "shadow.every=0"):
        without = smoke_run(*FAST, shadow, folder=f"without {shadow}")
        recorded = smoke_run(*FAST, shadow, "record=true", folder=f"with {shadow}")
        assert recorded.metrics_bytes == without.metrics_bytes
        assert not (without.folder / "rollouts").exists()
        assert read_recording(recorded.folder).steps == tuple(range(1, 9))


def test_a_resumed_run_continues_its_recording(smoke_run):
    whole = smoke_run(*FAST, "record=true", folder="whole")
    part = smoke_run(*FAST, "record=true", "steps=4", folder="part")
    smoke_run(*FAST, "record=true", f"resume={part.folder}", folder="part")
    files = [
        {path.name: path.read_bytes() for path in (run.folder / "rollouts").rglob("*.safetensors")}
        for run in (whole, part)
    ]
    assert len(files[0]) == 16
    assert files[0] == files[1]


def test_other_weights_and_other_strategies_give_other_errors_on_the_same_rollouts(smoke_run, tmp_path):
    run = smoke_run(*FAST, "record=true", "shadow=off")
    decisions = {}
    for weights in ("trainer", "newest", "0"):
        assert score_recording(run, tmp_path / weights, "strategies=[slice_concat]", f"score.weights={weights}") == 0
        decisions[weights] = json.loads((tmp_path / weights / "summary.json").read_text())["decision"]
    assert len({str(d["ranking"]) for d in decisions.values()}) == 3
    assert len({d["tokens"] for d in decisions.values()}) == 1


def test_a_run_resumed_without_its_recording_is_refused(smoke_run):
    part = smoke_run(*FAST, "steps=4", "record=true", folder="part")
    (part.folder / "rollouts" / "index.json").unlink()
    with pytest.raises(ValueError, match="whose recording this run would continue"):
        smoke_run(*FAST, "record=true", f"resume={part.folder}", folder="part")
