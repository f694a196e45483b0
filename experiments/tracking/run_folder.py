"""The files of a run: `metrics.jsonl`, `timings.jsonl`, both as a table in `history.parquet`, and `summary.json`.

The first never holds anything that depends on the machine, so that equal seeds give byte-identical files. Nothing here
knows W&B or the loop.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

type Row = dict[str, Any]

PROJECT_ROOT = Path(__file__).resolve().parents[2]

TIME_PREFIX = "time/"
"""Prefix of every key whose value depends on the machine: seconds, tokens per second."""

PROVENANCE = "provenance"
"""Key beside the configuration in W&B: command, commit, versions and host of a run (analysis/wandb_runs.py)."""

_RECORDED_PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "numpy",
    "hydra-core",
    "wandb",
    "reasoning-gym",
    "verl",
    "sglang",
)

# Where a run writes and what it calls itself in W&B does not change its numbers.
NOT_HASHED = (
    ("tracking",),
    ("resume",),
    ("record",),
    ("task", "warm_start", "cache_dir"),
    ("backend", "verl", "trainer", "resume_mode"),
)


def clean_row(step: int, metrics: Mapping[str, float]) -> Row:
    """Returns `metrics` as plain Python numbers, keys sorted.

    Raises:
        TypeError: a value is not a real number.
        RuntimeError: a value is NaN or infinite. JSON has neither, and a step that produced one must stop the run.
    """
    row: Row = {}
    for key in sorted(metrics):
        value = metrics[key]
        if not isinstance(value, Real | np.bool_):
            raise TypeError(f"metric {key!r} at step {step}: expected a number, got {type(value).__name__} {value!r}")
        row[key] = int(value) if isinstance(value, int | np.integer | np.bool_) else float(value)
    bad = [f"{key}={value}" for key, value in row.items() if not math.isfinite(value)]
    if bad:
        raise RuntimeError(f"step {step}: metrics that are not finite: {', '.join(bad)}; the run cannot be trusted")
    return row


class JsonLines:
    """An append-only file of one JSON object per update, each line flushed as it is written."""

    def __init__(self, path: Path, resume_after: int | None):
        """Opens `path`, new for `resume_after=None`, else cut to the rows of steps `<= resume_after`.

        The cut goes through a temporary file, so that a crash in the middle leaves the old file whole.

        Raises:
            ValueError: a line other than a truncated last one is not a JSON object with an integer `step`.
        """
        self.path = path
        self.rows: list[Row] = []
        if resume_after is not None and path.exists():
            self.rows = [row for row in read_json_lines(path) if row["step"] <= resume_after]
            write_atomically(path, "".join(_line(row) for row in self.rows))
        self._file = path.open("a" if self.rows else "w", encoding="utf-8")

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one row, `step` first, then the keys as they come."""
        row: Row = {"step": step, **values}
        self._file.write(_line(row))
        self._file.flush()
        self.rows.append(row)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()


def read_json_lines(path: Path) -> list[Row]:
    """Returns the rows of a `metrics.jsonl` or `timings.jsonl`.

    A last line without its newline is a write cut short; it is left out.

    Raises:
        ValueError: another line is not a JSON object with an integer `step`; the message names file and line.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}: not a JSON object ({error}); restore the file or start afresh"
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}:{number}: expected an object with an integer 'step', got {line[:80]!r}")
        rows.append(row)
    return rows


def write_table(path: Path, *files: JsonLines) -> None:
    """Writes the rows of `files`, joined by step, as one Parquet table: the same numbers in a form that loads fast.

    Columns: `step` (int64), then every key (float64, null where it was not logged). The table's metadata hold the size
    in bytes of each file, by name, so that a reader sees when a file has changed since.
    """
    import polars as pl

    joined: dict[int, Row] = {}
    for file in files:
        for row in file.rows:
            joined.setdefault(row["step"], {}).update(row)
    rows = [joined[step] for step in sorted(joined)]
    keys = sorted({key for row in rows for key in row} - {"step"})
    columns = [pl.Series("step", [row["step"] for row in rows], dtype=pl.Int64)]
    columns += [pl.Series(key, [row.get(key) for row in rows], dtype=pl.Float64, strict=False) for key in keys]
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    sizes = {file.path.name: str(file.path.stat().st_size) for file in files}
    pl.DataFrame(columns).write_parquet(temporary, metadata=sizes)
    temporary.replace(path)


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Returns `count`, `last`, `mean`, `p95`, `max`, `first_fifth` and `last_fifth` of a key over its updates.

    The fifths are means over the first and the last ceil(n/5) updates. `p95` interpolates linearly between order
    statistics, at position 0.95 (n - 1) of the sorted values.

    Source: Hyndman and Fan 1996, type 7; numpy's method `linear`.
    """
    array = np.asarray(values, dtype=np.float64)  # [n]
    fifth = math.ceil(len(array) / 5)
    return {
        "count": len(array),
        "last": float(array[-1]),
        "mean": float(array.mean()),
        "p95": float(np.percentile(array, 95)),
        "max": float(array.max()),
        "first_fifth": float(array[:fifth].mean()),
        "last_fifth": float(array[-fifth:].mean()),
    }


def summarise(*files: JsonLines) -> dict[str, dict[str, float]]:
    """Returns `statistics` of every key in the files, sorted by key; a key counts the updates that logged it."""
    columns: dict[str, list[float]] = {}
    for file in files:
        for row in file.rows:
            for key, value in row.items():
                columns.setdefault(key, []).append(value)
    columns.pop("step", None)
    return {key: statistics(columns[key]) for key in sorted(columns)}


def plain_config(config: DictConfig) -> dict[str, Any]:
    """Returns the composed configuration resolved to plain JSON values, which is what `config_hash` reads.

    Raises:
        MissingMandatoryValue: a value is missing.
    """
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True, throw_on_missing=True)
    return json.loads(json.dumps(plain))


def flatten(config: Any, path: str = "") -> dict[str, str]:
    """Returns nested mappings as `dotted.key: text`."""
    if not isinstance(config, Mapping) or not config:
        return {path: str(config)}
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{path}.{key}" if path else str(key))
    return flat


def config_hash(config: Mapping[str, Any]) -> str:
    """Returns 16 hex digits of the SHA-256 of the resolved configuration without paths and tracking, as sorted JSON."""
    kept = json.loads(json.dumps(config))
    for path in NOT_HASHED:
        node = kept
        for key in path[:-1]:
            node = node.get(key) or {}  # `backend.verl` is null in a local run
        node.pop(path[-1], None)
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def git_state(root: Path = PROJECT_ROOT) -> tuple[str | None, bool | None]:
    """Returns the commit of `root` and whether tracked files differ from it; None, None outside a git checkout."""
    head = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if head is None:
        return None, None
    top, commit = head.splitlines()
    # An export unpacked inside another repository must not report that repository's commit.
    if Path(top).resolve() != root.resolve():
        return None, None
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if status is None else bool(status)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def package_versions() -> dict[str, str | None]:
    """Returns the versions that decide a run's numbers, None where not installed. Reads metadata, imports nothing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _RECORDED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def host_facts(device: str) -> dict[str, Any]:
    """Returns what matters of the machine: usable CPU cores, architecture, device, peak resident memory in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS and in KiB on Linux
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "peak_memory_gib": round(peak * unit / 2**30, 3),
    }
