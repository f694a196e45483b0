"""How far a sweep is: one line when a job starts and one when it ends, read from the run directories.

`python -m experiments.sweep_progress FOLDER` shows the state of every job below a folder, from any terminal.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from experiments.command_line import PlannedJob
from experiments.run_dir import JOB_FILE, is_claimed, read_job
from experiments.summary import read_summary

POLL_S = 1.0


def label(job: PlannedJob, jobs: Sequence[PlannedJob]) -> str:
    """Returns what tells the job from the others of its sweep, e.g. `slice_concat seed1`: two folder names or more."""
    shared = len(Path(os.path.commonpath([other.run_dir for other in jobs])).parts)
    parts = job.run_dir.parts
    return " ".join(parts[min(shared, len(parts) - 2) :])


def duration(seconds: float) -> str:
    """Returns e.g. `12 s`, `2 min 12 s`, `1 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@dataclass
class Estimate:
    """When the sweep will end, from the jobs that this start of it ran.

    Attributes:
        began: start of the running jobs by number, seconds on any clock.
        took: seconds of the jobs that completed.
        at_once: the most jobs that ran at the same time.
    """

    began: dict[int, float] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)
    at_once: int = 1

    def start(self, number: int, now: float) -> None:
        """Notes that a job began."""
        self.began[number] = now
        self.at_once = max(self.at_once, len(self.began))

    def end(self, number: int, now: float, *, completed: bool) -> float:
        """Notes that a job ended and returns how long it took."""
        seconds = now - self.began.pop(number, now)
        if completed:
            self.took.append(seconds)
        return seconds

    def left(self, waiting: int, now: float) -> float | None:
        """Returns the seconds until `waiting` jobs and the running ones are done; None before one has completed.

        Formula: (waiting * mean + sum over running jobs of max(0, mean - age)) / at_once.
        """
        if not self.took:
            return None
        mean = sum(self.took) / len(self.took)
        running = sum(max(0.0, mean - (now - began)) for began in self.began.values())
        return (waiting * mean + running) / self.at_once


class Watch:
    """Polls the jobs' files in a thread and prints a line on stderr for every change, whatever runs the jobs."""

    def __init__(self, jobs: Sequence[PlannedJob], todo: Sequence[PlannedJob]):
        self._jobs, self._waiting = jobs, {job.number: job for job in todo}
        self._running: dict[int, PlannedJob] = {}
        self._seen = {job.number: _written(job) for job in todo}
        self._begun: set[int] = set()
        self._estimate = Estimate()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sweep-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.poll()

    def say(self, line: str) -> None:
        """Prints a line without breaking a progress bar."""
        tqdm.write(line, file=sys.stderr)

    def has_begun(self, job: PlannedJob) -> bool:
        """Says whether the job was started by anyone since the sweep began."""
        self.poll()
        return job.number in self._begun

    def _loop(self) -> None:
        while not self._ended.wait(POLL_S):
            self.poll()

    def poll(self) -> None:
        """Prints what changed since the last call."""
        with self._lock:
            now = time.monotonic()
            for job in [*self._running.values(), *self._waiting.values()]:
                written = _written(job)
                if written != self._seen[job.number]:
                    self._seen[job.number] = written
                    self._changed(job, read_job(job.run_dir), now)

    def _changed(self, job: PlannedJob, state: Mapping[str, Any], now: float) -> None:
        status = state.get("status")
        if status is None:
            return  # read between two writes; the next poll sees the rest
        name = f"[{job.number + 1}/{len(self._jobs)}] {label(job, self._jobs)}"
        if job.number in self._waiting:
            del self._waiting[job.number]
            self._running[job.number] = job
            self._begun.add(job.number)
            self._estimate.start(job.number, now)
            if status == "running":
                self.say(f"{name}: started")
        if status != "running":
            del self._running[job.number]
            took = self._estimate.end(job.number, now, completed=status == "completed")
            left = self._estimate.left(len(self._waiting), now)
            rest = f"; about {duration(left)} left" if left and (self._waiting or self._running) else ""
            self.say(f"{name}: {status} after {duration(took)}{rest}")


def _written(job: PlannedJob) -> int:
    path = job.run_dir / JOB_FILE
    return path.stat().st_mtime_ns if path.is_file() else 0


def states(folder: Path) -> list[tuple[str, str, int]]:
    """Returns run directory, state and number of updates of every run below `folder`, sorted.

    A run that somebody holds is `starting` before it has a summary. One that says it is running and that nobody holds
    has crashed.
    """
    found = []
    for run_dir in sorted({path.parent for name in (JOB_FILE, "summary.json") for path in folder.rglob(name)}):
        begun = (run_dir / "summary.json").is_file()
        status = str((read_summary(run_dir) if begun else read_job(run_dir)).get("status", "unknown"))
        if is_claimed(run_dir):
            status = "running" if begun else "starting"
        elif status == "running":
            status = "crashed"
        metrics = run_dir / "metrics.jsonl"
        updates = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        found.append((str(run_dir.relative_to(folder)), status, updates))
    return found


def main() -> int:
    """Prints the state of the runs below the folder on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.sweep_progress", description="How far a sweep is.")
    parser.add_argument("folder", type=Path, help="folder of a sweep, e.g. outputs/pr6046")
    rows = states(parser.parse_args().folder)
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = (f"{name:<{width}}  {status:<11}  {updates} updates" for name, status, updates in rows)
    print("\n".join(lines) or "no runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
