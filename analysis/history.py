"""What a run logged, as a matrix: one row per update, one column per metric, NaN where a metric was not logged.

Three readers give the same matrix. A completed run leaves it as a table, `history.parquet`, which counts as long as it
is of the JSON lines beside it. polars reads regular JSON lines at some 250 MB per core-second, and refuses everything
that is not one object of plain numbers per line. What it refuses goes to the careful reader, which knows the spellings
of NaN and infinity, steps that come twice or out of order, and a last line cut short.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

STEP = "step"

_SPELLINGS = {
    "nan": math.nan,
    "inf": math.inf,
    "+inf": math.inf,
    "-inf": -math.inf,
    "infinity": math.inf,
    "+infinity": math.inf,
    "-infinity": -math.inf,
}


@dataclass(frozen=True, eq=False)
class History:
    """What one run logged.

    Attributes:
        steps: [N] int64, strictly growing: the updates that logged anything.
        columns: metric key -> [N] float64, NaN where the update did not log it.
    """

    steps: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.float64]]

    def __len__(self) -> int:
        """The number of updates."""
        return len(self.steps)

    def joined(self, other: History) -> History:
        """Returns this history with the columns of `other`, whose further steps are left out."""
        _, ours, theirs = np.intersect1d(self.steps, other.steps, assume_unique=True, return_indices=True)
        columns = dict(self.columns)
        for key, values in other.columns.items():
            columns[key] = np.full(len(self), np.nan)
            columns[key][ours] = values[theirs]
        return History(self.steps, columns)


def from_rows(rows: Iterable[Mapping[str, Any]], keys: Collection[str] | None = None) -> History:
    """Returns the history of `rows` as they were logged, each with a `step`; `keys` selects columns.

    Rows of one step become one row: of a key that comes twice the later value counts, as in a resumed run that did some
    updates again. Rows may come in any order of steps. The strings "NaN", "Infinity" and "-Infinity" are numbers (W&B
    writes them so: wandb/sweeps#32, wandb/wandb#8252); a value that is no number is left out, its row is not.

    Raises:
        ValueError: a row has no integer `step`.
    """
    merged: dict[int, dict[str, float]] = {}
    for number, row in enumerate(rows, start=1):
        step = row.get(STEP)
        if isinstance(step, bool) or not isinstance(step, int | float) or not float(step).is_integer():
            raise ValueError(f"row {number}: expected an integer {STEP!r}, got {step!r}")
        target = merged.setdefault(int(step), {})
        for key, value in row.items():
            if key != STEP and (keys is None or key in keys):
                parsed = _number(value)
                if parsed is not None:
                    target[key] = parsed
    steps = sorted(merged)
    columns = {key: np.full(len(steps), np.nan) for key in sorted({key for row in merged.values() for key in row})}
    for index, step in enumerate(steps):
        for key, value in merged[step].items():
            columns[key][index] = value
    return History(np.array(steps, dtype=np.int64), columns)


def read_history(path: Path, known: Collection[str] = (), keys: Collection[str] | None = None) -> History:
    """Returns the history in a `metrics.jsonl`, or in another file of one JSON object with a `step` per line.

    Args:
        path: the file. A last line that is cut short is left out: the run was killed while it wrote.
        known: keys that the file is expected to hold (`summary.json` has them); without them polars reads it twice.
        keys: the columns wanted; None: all.

    Raises:
        ValueError: the file cannot be read, or a line before the last is not a JSON object with an integer `step`; the
            message names file and line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected the metrics of a run") from error
    regular = _regular(data, known, keys)
    return _careful(path, data, keys) if regular is None else regular


def read_table(path: Path, files: Collection[Path], keys: Collection[str] | None = None) -> History | None:
    """Returns the history in a `history.parquet` (experiments/tracking/run_folder.py); None where there is none, it is
    damaged, or it is not of `files` as they are now: one has another size, is missing, or was written a minute or more
    after it.
    """
    try:
        sizes = pl.read_parquet_metadata(path)
        written = path.stat().st_mtime
        states = {file.name: file.stat() for file in files}
    except (FileNotFoundError, pl.exceptions.PolarsError):
        return None
    if any(sizes.get(name) != str(state.st_size) or state.st_mtime > written + 60 for name, state in states.items()):
        return None
    names = [name for name in pl.read_parquet_schema(path) if name == STEP or keys is None or name in keys]
    table = pl.read_parquet(path, columns=names)
    return History(table[STEP].to_numpy(), {name: table[name].to_numpy() for name in sorted({*names} - {STEP})})


def _regular(data: bytes, known: Collection[str], keys: Collection[str] | None) -> History | None:
    """Returns the history of a file of plain numbers with growing steps; None when it is not one."""
    names = sorted({*known} - {STEP})
    schema = {STEP: pl.Int64(), **dict.fromkeys(names, pl.Float64())} if names else None
    try:
        table = pl.read_ndjson(data, schema=schema, infer_schema_length=None)
    except pl.exceptions.PolarsError:
        return None
    if STEP not in table.columns or table[STEP].dtype != pl.Int64 or table[STEP].null_count():
        return None
    # polars passes over keys that the schema does not name: every key in the text must have become a value.
    values = table.height * table.width - sum(table.null_count().row(0))
    steps = table[STEP].to_numpy()
    if values != data.count(b'":') or not table.height or (np.diff(steps) <= 0).any():
        return None
    columns = {}
    for name in sorted(set(table.columns) - {STEP}):
        column = table[name]
        if not (column.dtype.is_numeric() or column.dtype == pl.Null):
            return None
        if column.null_count() < table.height and (keys is None or name in keys):
            columns[name] = column.cast(pl.Float64).to_numpy()
    return History(steps.astype(np.int64), columns)


def _careful(path: Path, data: bytes, keys: Collection[str] | None) -> History:
    rows = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or STEP not in row:
                raise ValueError(f"expected an object with a {STEP!r}")
        except ValueError as error:
            if number == len(lines):  # no newline behind it: a write cut short
                break
            raise ValueError(f"{path}:{number}: {error}, got {line[:80]!r}; restore the file") from error
        rows.append(row)
    try:
        return from_rows(rows, keys)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _number(value: Any) -> float | None:
    """Returns `value` as a float; None when it is no number. null is NaN: it was logged."""
    if value is None:
        return math.nan
    if isinstance(value, bool | int | float):
        return float(value)
    return _SPELLINGS.get(value.lower()) if isinstance(value, str) else None
