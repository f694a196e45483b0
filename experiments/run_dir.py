"""A run directory and who may write to it: one process at a time, and one configuration for ever.

`job.json` in it is locked by the process that runs the job, and says how the job stands. Knows files only; torch is not
imported, so that a sweep decides within a second what is left to do.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.check import CHECKPOINT_FILE, VERL_CHECKPOINT_FILE, ConfigError
from experiments.recording import FOLDER, INDEX
from experiments.tracking.run_folder import config_hash, flatten, plain_config

JOB_FILE = "job.json"
HYDRA_FOLDER = ".hydra"

_CLAIM_TRIES, _CLAIM_PAUSE_S = 10, 0.1
"""A claim outlasts the instant in which another process asks `is_claimed`."""

_LEFT_BY_A_CRASH = (
    "summary.json",
    "metrics.jsonl",
    "timings.jsonl",
    "merge_errors.jsonl",
    "traceback.txt",
    HYDRA_FOLDER,
    "checkpoint",
    FOLDER,
    "wandb",
)


class State(Enum):
    """What a run directory holds, seen from the configuration that wants it."""

    new = "new"
    completed = "completed"
    resumable = "resumable"  # a checkpoint of this configuration
    crashed = "crashed"  # began with this configuration, and left no checkpoint
    foreign = "foreign"  # another configuration's run


@dataclass(frozen=True)
class Found:
    """State of a run directory; `reason` says what is foreign about it."""

    state: State
    reason: str = ""


def inspect(run_dir: Path, node: DictConfig) -> Found:
    """Returns what `run_dir` holds for a job whose tracked configuration is `node`.

    The plan of a run in verl (`dry_run`) leaves no file of its own: the job file says that it was printed.
    """
    ours = plain_config(node)
    summary, theirs = _read(run_dir / "summary.json"), run_dir / HYDRA_FOLDER / "config.yaml"
    if not summary and not theirs.is_file():
        printed = ours["dry_run"] and read_job(run_dir).get("status") == "completed"
        return Found(State.completed if printed else State.new)
    if summary.get("config_hash", _hash_of(theirs)) != config_hash(ours):
        return Found(State.foreign, f"{run_dir} holds the run of another configuration{_difference(theirs, ours)}")
    if summary.get("status") == "completed":
        if ours["record"] and not (run_dir / FOLDER / INDEX).is_file():
            return Found(
                State.foreign, f"{run_dir} holds the completed run without the recording that record=true asks"
            )
        return Found(State.completed)
    saved = any((run_dir / file).is_file() for file in (CHECKPOINT_FILE, VERL_CHECKPOINT_FILE))
    return Found(State.resumable if saved else State.crashed)


def _read(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one where there is none, or one cut short by a crash."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _hash_of(composed: Path) -> str | None:
    return config_hash(_load(composed)) if composed.is_file() else None


def _load(composed: Path) -> dict[str, Any]:
    node = OmegaConf.load(composed)
    assert isinstance(node, DictConfig)
    return plain_config(node)


def _difference(composed: Path, ours: Mapping[str, Any]) -> str:
    """Returns the first key in which a run directory's configuration differs, for an error message."""
    if not composed.is_file():
        return ""
    old, new = flatten(_load(composed)), flatten(ours)
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return "".join(f" ({key}={old.get(key)}, now {key}={new.get(key)})" for key in keys[:1])


class Claim:
    """The right to write to a run directory, held through a lock that the kernel releases when its holder dies."""

    def __init__(self, file: Any):
        self._file = file
        self.note("running")

    def note(self, status: str, error: str | None = None) -> None:
        """Writes how the job stands, for whoever watches the sweep."""
        text = json.dumps({"status": status, "error": error, "pid": os.getpid(), "host": socket.gethostname()})
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text + "\n")
        self._file.flush()


@contextmanager
def claim(run_dir: Path) -> Iterator[Claim | None]:
    """Yields the claim to `run_dir`, made when missing; None while another process holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / JOB_FILE).open("a", encoding="utf-8") as file:
        for _ in range(_CLAIM_TRIES):
            if _locked(file):
                yield Claim(file)
                return
            time.sleep(_CLAIM_PAUSE_S)
        yield None


def is_claimed(run_dir: Path) -> bool:
    """Says whether a living process holds the claim to `run_dir`."""
    path = run_dir / JOB_FILE
    if not path.is_file():
        return False
    with path.open("a", encoding="utf-8") as file:
        return not _locked(file)


def _locked(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_job(run_dir: Path) -> dict[str, Any]:
    """Returns how the job in `run_dir` stands: `status`, `error`, `pid`, `host`; empty before its first start."""
    return _read(run_dir / JOB_FILE)


def clear(run_dir: Path) -> None:
    """Removes what a crashed run left, so that the next start is a new run with a W&B run of its own."""
    for name in _LEFT_BY_A_CRASH:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_composition(run_dir: Path, node: DictConfig) -> None:
    """Writes `.hydra/` as Hydra would. Hydra itself writes before anyone could refuse the run (so `output_subdir` is
    null), and would leave the configuration of a refused job in another run's directory.
    """
    folder = run_dir / HYDRA_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(node, folder / "config.yaml")
    if HydraConfig.initialized():
        OmegaConf.save({"hydra": HydraConfig.get()}, folder / "hydra.yaml")
        OmegaConf.save(HydraConfig.get().overrides.task, folder / "overrides.yaml")


def claimed_elsewhere(run_dir: Path) -> ConfigError:
    """Returns the error for a run directory in which another process works."""
    job = read_job(run_dir)
    return ConfigError(f"{run_dir} is being run by process {job.get('pid')} on {job.get('host')}")
