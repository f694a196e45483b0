"""A run as a source holds it, before anyone decides whether to use it; and the runs in run directories."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.history import History, read_history, read_table
from analysis.load import SEGMENT_COLUMNS, flat, segment_rows

type ReadHistory = Callable[[Collection[str] | None], History]

# What a run directory keeps beside a run, never another run.
_NOT_WALKED = frozenset({"wandb", "checkpoint", "rollouts", ".hydra"})

# Where a run writes and what it calls itself in W&B does not change its numbers.
_NOT_COMPARED = ("tracking", "resume", "record", "task.warm_start.cache_dir", "backend.verl.trainer.resume_mode")

_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, eq=False)
class Found:
    """One run of a source.

    Attributes:
        where: the folder, the file or the W&B path.
        source: `directory`, `wandb file` or `wandb`.
        strategy, seed: arm and pair; W&B holds them as job type and in the configuration.
        status: `completed`, `running`, `failed`, `interrupted`, `crashed`: the run's own word where it has one.
        planned: updates that the configuration asks for; None when it does not say.
        written: when it was last written, seconds since 1970; decides which of two equal runs is the newer.
        wandb_id: id of the run in W&B; empty without one.
        config: the configuration, flat.
        facts: further columns of `Runs.runs`.
        versions: packages, commit and host.
        read: returns the history; reading it may take a while.
        segments: returns the merge errors, `SEGMENT_COLUMNS`.
    """

    where: str
    source: str
    strategy: str
    seed: int
    status: str
    planned: int | None
    experiment: str
    tags: tuple[str, ...]
    written: float
    wandb_id: str
    config: dict[str, Any]
    read: ReadHistory
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    segments: Callable[[], pd.DataFrame] = lambda: pd.DataFrame(columns=list(SEGMENT_COLUMNS))

    @property
    def planned_rows(self) -> int | None:
        """Rows of a complete history: one per update; in verl one per weight sync and one for the rest."""
        if self.planned is None or self.config.get("backend.name") != "verl":
            return self.planned
        return math.ceil(self.planned / self.config["schedule.sync_interval"])

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration without what does not change the numbers; equal settings are the same experiment."""
        return {
            key: value
            for key, value in self.config.items()
            if not any(key == name or key.startswith(f"{name}.") for name in _NOT_COMPARED)
        }


@dataclass(frozen=True)
class Unusable:
    """A run that cannot be read.

    Attributes:
        where: as in `Found`.
        reason: what is wrong with it.
    """

    where: str
    reason: str


def run_directories(folder: Path) -> Iterator[Found | Unusable]:
    """Yields the runs in `folder` and below it, in the order of their paths."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_WALKED)
        if "summary.json" in files or "metrics.jsonl" in files:
            yield _run_directory(Path(root))


def _run_directory(folder: Path) -> Found | Unusable:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        config = _config(folder / ".hydra" / "config.yaml")
        if summary.get("mode") == "score":
            return Unusable(str(folder), "scored a recording and trained nothing: give the recorded run")
        strategy, seed, status = summary["strategy"], int(summary["seed"]), summary["status"]
    except FileNotFoundError as error:
        return Unusable(str(folder), f"no {Path(error.filename).name}: the run never started, or the folder is cut")
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())  # YAML's errors have several lines
        return Unusable(str(folder), f"summary.json or .hydra/config.yaml cannot be read: {said}")
    except (KeyError, TypeError, AttributeError) as error:
        return Unusable(str(folder), f"summary.json is none of this project: {type(error).__name__} {error}")
    parts = [summary.get(key) or {} for key in ("host", "versions", "metrics")]
    if not (isinstance(strategy, str) and isinstance(status, str) and all(isinstance(part, dict) for part in parts)):
        return Unusable(str(folder), "summary.json is none of this project: strategy, status, host or metrics")
    if not isinstance(config.get("steps"), int | None):
        return Unusable(str(folder), f".hydra/config.yaml: steps: expected a whole number, got {config['steps']!r}")
    facts = (
        "error",
        "config_hash",
        "git_sha",
        "git_dirty",
        "seconds",
        "engine",
        "pause_mode",
        "old_log_prob",
        "command",
    )
    return Found(
        where=str(folder),
        source="directory",
        strategy=strategy,
        seed=seed,
        status=status,
        planned=config.get("steps"),
        experiment=summary.get("experiment") or "",
        tags=tuple(tag for tag in (strategy, summary.get("engine"), summary.get("pause_mode")) if tag),
        written=(folder / "summary.json").stat().st_mtime,
        wandb_id=summary.get("wandb_run_id") or "",
        config=config,
        facts={key: summary.get(key) for key in facts},
        versions=provenance(summary),
        read=lambda keys: _history(folder, summary.get("metrics") or {}, keys),
        segments=lambda: _segments(folder / "merge_errors.jsonl"),
    )


def provenance(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns packages, commit and host in one mapping, from their parts in `facts`; empty where there is none."""
    packages, host = ({} if not isinstance(part, dict) else part for part in map(facts.get, ("versions", "host")))
    commit = {key: facts[key] for key in ("git_sha", "git_dirty") if key in facts}
    return {**packages, **commit, **{f"host.{key}": value for key, value in host.items()}}


def _config(path: Path) -> dict[str, Any]:
    """Returns the flat configuration; empty when the folder has none."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        tree = yaml.load(file, Loader=_YAML_LOADER)  # a safe loader in either case
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected the composed configuration of a run, got {type(tree).__name__}")
    return dict(flat(tree))


def _history(folder: Path, known: Collection[str], keys: Collection[str] | None) -> History:
    """Returns metrics and timings, as W&B has them in one row; the steps are those of the metrics."""
    files = [folder / "metrics.jsonl", folder / "timings.jsonl"]
    table = read_table(folder / "history.parquet", files, keys)
    if table is not None:
        return table
    metrics = read_history(files[0], [key for key in known if not key.startswith("time/")], keys)
    if not files[1].is_file() or not (keys is None or any(key.startswith("time/") for key in keys)):
        return metrics
    return metrics.joined(read_history(files[1], [key for key in known if key.startswith("time/")], keys))


def _segments(path: Path) -> pd.DataFrame:
    rows = segment_rows(path) if path.is_file() else ()
    return pd.DataFrame(rows, columns=list(SEGMENT_COLUMNS))
