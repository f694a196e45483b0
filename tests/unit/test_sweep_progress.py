"""The lines that show how far a sweep is."""

import json

import pytest
from omegaconf import OmegaConf

from experiments.command_line import PlannedJob
from experiments.run_dir import claim
from experiments.sweep_progress import Estimate, Watch, duration, label, states


@pytest.fixture
def jobs(tmp_path):
    names = [f"{rule}/seed{seed}" for seed in range(2) for rule in ("replace", "exact")]
    return [PlannedJob(number, (), OmegaConf.create(), tmp_path / "pr" / name) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (59.7, "1 min 0 s"), (132, "2 min 12 s"), (3900, "1 h 5 min")]
)
def test_durations_are_written_for_people(seconds, text):
    assert duration(seconds) == text


def test_the_estimate_counts_waiting_and_running_jobs_and_how_many_run_at_once():
    estimate = Estimate()
    assert estimate.left(4, now=0.0) is None
    estimate.start(0, now=0.0)
    estimate.start(1, now=0.0)
    assert estimate.end(0, now=100.0, completed=True) == 100.0
    assert estimate.left(4, now=100.0) == (4 * 100.0 + 0.0) / 2
    estimate.start(2, now=100.0)
    assert estimate.end(1, now=140.0, completed=False) == 140.0
    assert estimate.left(3, now=140.0) == (3 * 100.0 + 60.0) / 2


def test_a_job_is_called_by_what_tells_it_from_the_others(jobs):
    assert [label(job, jobs) for job in jobs][:2] == ["replace seed0", "exact seed0"]
    assert label(jobs[1], jobs[1:2]) == "exact seed0"


def test_a_line_when_a_job_starts_and_one_when_it_ends(jobs, capsys):
    watch = Watch(jobs, jobs[1:])
    with claim(jobs[1].run_dir) as claimed:
        watch.poll()
        watch.poll()
        assert capsys.readouterr().err == "[2/4] exact seed0: started\n"
        assert claimed is not None
        claimed.note("completed")
    watch.poll()
    assert capsys.readouterr().err.startswith("[2/4] exact seed0: completed after 0 s")
    assert (watch.has_begun(jobs[1]), watch.has_begun(jobs[2])) == (True, False)


def test_the_state_of_a_sweep_can_be_read_from_any_terminal(jobs, tmp_path):
    for job, status in zip(jobs, ("completed", "running", "running", "failed"), strict=True):
        job.run_dir.mkdir(parents=True)
        (job.run_dir / "summary.json").write_text(json.dumps({"status": status, "steps": 0}))
    (jobs[0].run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    fifth = tmp_path / "pr" / "live" / "seed0"
    with claim(jobs[1].run_dir), claim(fifth):
        rows = {name: (status, updates) for name, status, updates in states(tmp_path / "pr")}
    assert rows == {
        "replace/seed0": ("completed", 2),
        "exact/seed0": ("running", 0),
        "replace/seed1": ("crashed", 0),
        "exact/seed1": ("failed", 0),
        "live/seed0": ("starting", 0),
    }
