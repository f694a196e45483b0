"""How to reproduce the runs of a report."""

from __future__ import annotations

import shlex

import pytest

from analysis.report.commands import commands
from experiments import command_line


def of(*words: str) -> list[str]:
    return [f"python run.py {each}" for each in words]


def test_a_whole_grid_is_one_sweep() -> None:
    jobs = of(
        *(f"experiment=smoke seed={seed} strategy={arm} threads=1" for seed in (2, 10) for arm in ("live", "exact"))
    )
    (sweep,) = commands(jobs)
    assert sweep == "python run.py -m experiment=smoke seed=2,10 strategy=live,exact threads=1"
    command_line.register()
    planned = command_line.precheck(shlex.split(sweep)[2:])
    assert planned is not None
    assert len(planned.jobs) == len(jobs)


def test_words_that_are_no_overrides_and_lists_stay_as_they_are() -> None:
    jobs = of(*(f"--config-dir 'my conf' seed={seed} 'shadow.strategies=[replace,live]'" for seed in (0, 1)))
    assert commands(jobs) == of("-m --config-dir 'my conf' seed=0,1 'shadow.strategies=[replace,live]'")


@pytest.mark.parametrize(
    "jobs",
    [
        of("seed=0 strategy=replace"),
        of("seed=0 strategy=replace", "seed=1 strategy=replace", "seed=0 strategy=exact"),
        of("seed=0 strategy=replace", "strategy=exact seed=0 steps=3"),
        of("seed=0 a=1 a=2", "seed=1 a=1 a=2"),
        ["python run.py seed=0", "my own script"],
        ["python run.py seed=0 'x", "python run.py seed=1 'x"],
    ],
    ids=["one run", "a run is missing", "other keys", "a key twice", "no command of run.py", "no command of a shell"],
)
def test_what_is_no_whole_grid_is_listed_run_by_run(jobs: list[str]) -> None:
    assert commands(jobs) == jobs
    assert commands(jobs * 2) == jobs
