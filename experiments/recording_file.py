"""One file of a recording: safetensors with a header of ours, written atomically and checked when it is opened.

A batch of rollouts is stored in columns: ragged values one after the other, with offsets. Numbers and text only, so
that opening a file never runs code. Imports no torch: whoever analyses rollouts needs none.

Legend: `B` rollouts of an update, `C` calls of all of them, `L` layers, `K` experts per token, `E` experts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from experiments.buffer import Sample
from strategies.types import EngineCall, Rollout, Rows

FORMAT = "routemerge recording"
SCHEMA = 1
"""Raised when files of before can no longer be read."""

HEADER = "routemerge"
"""Key of safetensors' metadata that holds our header, as JSON."""

Array = NDArray[Any]


class RecordingError(ValueError):
    """A recording that is missing, truncated, foreign, incomplete or of another schema; names the file."""


def row_type(num_experts: int) -> np.dtype[Any]:
    """Returns the narrowest unsigned integer type that holds the expert ids 0..E-1."""
    return np.min_scalar_type(num_experts - 1)


def write(path: Path, kind: str, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Replaces `path` by a file of `arrays` in one step: a reader sees the old content or the new, never a part.

    Args:
        kind: what the file holds, `update` or `weights`; checked when it is read.
        facts: plain values for the header.
    """
    header = {"format": FORMAT, "schema": SCHEMA, "kind": kind, **facts}
    partial = path.with_name(f".{path.name}.partial")
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, {HEADER: json.dumps(header)})
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_header(path: Path, kind: str) -> dict[str, Any]:
    """Returns the header of a file, which is checked to be of its full length; its arrays are not read.

    Raises:
        RecordingError: no such file, truncated, foreign, of another schema or kind.
    """
    with _opened(path, kind) as (header, _):
        return header


def read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Returns the header and the arrays of a file.

    Raises:
        RecordingError: as `read_header`.
    """
    with _opened(path, kind) as (header, file):
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], Any]]:
    try:
        file = safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise RecordingError(f"{path}: expected {kind} of a recording, found no such file") from error
    except (SafetensorError, OSError) as error:
        raise RecordingError(
            f"{path}: expected a complete safetensors file with {kind} of a recording, found a truncated or foreign "
            f"one ({error})"
        ) from error
    with file as content:
        try:
            header = json.loads((content.metadata() or {}).get(HEADER, "null"))
        except json.JSONDecodeError:
            header = None
        yield checked_header(path, header, kind), content


def checked_header(path: Path, header: Any, kind: str) -> dict[str, Any]:
    """Returns the header if it is of this format, schema and kind.

    Raises:
        RecordingError: names the file, what was expected and what was found.
    """
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RecordingError(f"{path}: expected a file of format {FORMAT!r}, found another one")
    if header.get("schema") != SCHEMA:
        raise RecordingError(
            f"{path}: expected schema version {SCHEMA}, found {header.get('schema')}; another version of routemerge "
            "wrote it"
        )
    if header.get("kind") != kind:
        raise RecordingError(f"{path}: expected {kind} of a recording, found {header.get('kind')}")
    return header


# --- the rollouts of one update --------------------------------------------------------------------------------------

_SAMPLE_COLUMNS = {
    "problem_index": np.int64,
    "reward": np.float64,
    "version_started": np.int32,
    "retractions": np.int32,
}
_CALL_COLUMNS = {"input_len": np.int32, "row_start": np.int32, "kv_kept": np.bool_, "mixed_rows": np.bool_}
_CALL_TOKENS = {"output_ids": np.int32, "log_probs": np.float32, "versions": np.int32}
_OPTIONAL_ROWS = ("rows", "surplus")


def pack(samples: Sequence[Sample], advantages: NDArray[np.float32]) -> dict[str, Array]:
    """Returns the columns of a batch, by field name; `<name>.offsets` `[n+1]` cuts a ragged one.

    Columns of rollouts `[B]`: `tokens`, `rollout_id`, `dataset` (ragged), `prompt_len`, `advantage` and the fields of
    Sample; `calls.offsets` says which calls are whose. Columns of calls `[C]`: the fields of EngineCall. `rows` and
    `surplus` are `[positions, L, K]`; `rows.known` and `surplus.known` tell no row from None. Text is UTF-8 bytes.

    Raises:
        ValueError: rollouts of different models, or expert ids out of range; names the request.
    """
    rollouts = [sample.rollout for sample in samples]
    shape = shape_of(rollouts)
    calls = [call for rollout in rollouts for call in rollout.calls]
    columns = {name: np.array([getattr(s, name) for s in samples], dtype) for name, dtype in _SAMPLE_COLUMNS.items()}
    columns |= {name: np.array([getattr(c, name) for c in calls], dtype) for name, dtype in _CALL_COLUMNS.items()}
    columns["advantage"] = advantages.astype(np.float32)
    columns["prompt_len"] = np.array([rollout.prompt_len for rollout in rollouts], np.int32)
    columns["calls.offsets"] = _offsets([rollout.calls for rollout in rollouts])
    columns |= _ragged("tokens", [rollout.tokens for rollout in rollouts], np.int32)
    columns |= _text("rollout_id", [rollout.rollout_id for rollout in rollouts])
    columns |= _text("dataset", [sample.dataset for sample in samples])
    columns |= _text("request_id", [call.request_id for call in calls])
    columns |= _text("finish", [call.finish for call in calls])
    for name, dtype in _CALL_TOKENS.items():
        columns |= _ragged(name, [getattr(call, name) for call in calls], dtype)
    for name in _OPTIONAL_ROWS:
        known = [_checked_rows(call, getattr(call, name), shape) for call in calls]
        empty = np.empty((0, *shape[:2]), row_type(shape[2]))
        columns |= _ragged(name, [empty if rows is None else rows for rows in known], empty.dtype)
        columns[f"{name}.known"] = np.array([rows is not None for rows in known], np.bool_)
    return columns


def shape_of(rollouts: Sequence[Rollout]) -> tuple[int, int, int]:
    """Returns (`L`, `K`, `E`) of a batch.

    Raises:
        ValueError: there is no rollout, or they differ.
    """
    shapes = {(rollout.num_layers, rollout.top_k, rollout.num_experts) for rollout in rollouts}
    if len(shapes) != 1:
        raise ValueError(f"a batch of one model is expected, (layers, experts per token, experts) are {sorted(shapes)}")
    return shapes.pop()


def unpack(path: Path, columns: Mapping[str, Array], shape: tuple[int, int, int], version: int) -> list[Sample]:
    """Returns what `pack` was given; rows have the narrowest type, and every rollout the trainer's `version`.

    Raises:
        RecordingError: columns that are missing or do not fit each other; `path` names the file.
    """
    reader = _Columns(path, columns)
    offsets = reader.plain("calls.offsets", None)
    number = len(offsets) - 1
    per_call = int(offsets[-1])
    fields = {name: reader.plain(name, per_call).tolist() for name in _CALL_COLUMNS}
    fields |= {name: reader.text(name, per_call) for name in ("request_id", "finish")}
    fields |= {name: reader.ragged(name, per_call) for name in _CALL_TOKENS}
    for name in _OPTIONAL_ROWS:
        known = reader.plain(f"{name}.known", per_call)
        signed = np.result_type(row_type(shape[2]), np.int8)  # a strategy may mark live rows with -1 in a copy
        rows = [r.astype(signed) for r in reader.ragged(name, per_call)]
        fields[name] = [r if k else None for r, k in zip(rows, known, strict=True)]
    calls = [EngineCall(**{name: values[i] for name, values in fields.items()}) for i in range(per_call)]
    owned = [tuple(calls[start:end]) for start, end in pairwise(offsets.tolist())]
    ids, tokens = reader.text("rollout_id", number), reader.ragged("tokens", number)
    prompts = reader.plain("prompt_len", number).tolist()
    rollouts = [Rollout(ids[b], tokens[b], prompts[b], owned[b], *shape, version) for b in range(number)]
    facts = {name: reader.plain(name, number).tolist() for name in _SAMPLE_COLUMNS}
    facts["dataset"] = reader.text("dataset", number)
    return [Sample(rollouts[b], **{name: values[b] for name, values in facts.items()}) for b in range(number)]


class _Columns:
    """The columns of one file, each checked for its length."""

    def __init__(self, path: Path, columns: Mapping[str, Array]):
        self._path = path
        self._columns = columns

    def plain(self, name: str, length: int | None) -> Array:
        if name not in self._columns:
            raise RecordingError(f"{self._path}: expected an array {name!r}, found {sorted(self._columns)}")
        values = self._columns[name]
        if length is not None and len(values) != length:
            raise RecordingError(f"{self._path}: {name!r}: expected {length} entries, found {len(values)}")
        return values

    def ragged(self, name: str, length: int) -> list[Array]:
        offsets = self.plain(f"{name}.offsets", length + 1)
        values = self.plain(name, int(offsets[-1]))
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise RecordingError(f"{self._path}: '{name}.offsets': expected growing offsets from 0, found others")
        return [values[start:end] for start, end in pairwise(offsets.tolist())]

    def text(self, name: str, length: int) -> list[str]:
        return [part.tobytes().decode("utf-8") for part in self.ragged(name, length)]


def _offsets(parts: Sequence[Any]) -> Array:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)


def _ragged(name: str, parts: Sequence[Array], dtype: Any) -> dict[str, Array]:
    return {name: np.concatenate(parts).astype(dtype), f"{name}.offsets": _offsets(parts)}


def _text(name: str, texts: Sequence[str]) -> dict[str, Array]:
    return _ragged(name, [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts], np.uint8)


def _checked_rows(call: EngineCall, rows: Rows | None, shape: tuple[int, int, int]) -> Rows | None:
    if rows is None:
        return None
    layers, top_k, experts = shape
    if rows.shape[1:] != (layers, top_k) or (rows.size and not 0 <= rows.min() <= rows.max() < experts):
        raise ValueError(
            f"request {call.request_id}: rows [positions, {layers}, {top_k}] of ids 0..{experts - 1} are expected, "
            f"shape {list(rows.shape)} of ids {rows.min(initial=0)}..{rows.max(initial=0)} came"
        )
    return rows
