"""Reads a `.wandb` file: what an offline run would upload. wandb 0.31 ships no public reader.

The file is a LevelDB log of protobuf messages (`wandb.proto`): a 7-byte file header, then 32 KiB blocks of fragments. A
fragment has a 7-byte header (CRC-32 of type and data, length, type; little-endian) and never crosses a block; a message
is one FULL fragment or a FIRST, any MIDDLE and a LAST one; less than 7 bytes at the end of a block are padding.

A run that was killed leaves a file cut short: what is there is returned, and `truncated_at` says so. A wrong checksum
is an error.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from wandb.proto import wandb_internal_pb2 as messages

# wandb picks the generated module by the installed protobuf, which a type checker cannot follow.
_Record: Any = messages.Record  # pyright: ignore[reportAttributeAccessIssue]

_FILE_HEADER = b":W&B\xe1\xbe\x00"  # ident, magic 0xBEE1, version 0
_BLOCK = 32 * 1024
_FRAGMENT = struct.Struct("<IHB")  # CRC-32, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class WandbFile:
    """The content of one `.wandb` file.

    Attributes:
        run_id, project, entity, group, job_type, name, tags: as given to `wandb.init`; empty where not given.
        config, summary: nested plain values; for the summary, the last value of every key.
        history: one dict per logged row, in order, `_step` and the logged keys among them.
        exit_code: None when the run did not end.
        truncated_at: byte offset of a last message that is incomplete; None for a whole file.
    """

    run_id: str = ""
    project: str = ""
    entity: str = ""
    group: str = ""
    job_type: str = ""
    name: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    truncated_at: int | None = None


def read_wandb_file(path: Path) -> WandbFile:
    """Returns the content of the `.wandb` file at `path`; several files of one resumed run are read one by one.

    Raises:
        ValueError: not a `.wandb` file of version 0, or damaged before its end; the message names file and byte.
    """
    content = WandbFile()
    log = _Log(path)
    for offset, message in log.messages():
        record = _Record()
        try:
            record.ParseFromString(message)
        except DecodeError as error:
            raise ValueError(f"{path}: byte {offset}: not a message of wandb's protocol: {error}") from error
        _apply(content, record, f"{path}: byte {offset}")
    content.truncated_at = log.truncated_at
    return content


class _Log:
    """The messages of a log file; `truncated_at` is known once they have been read."""

    def __init__(self, path: Path):
        self._path = path
        self._data = path.read_bytes()
        self.truncated_at: int | None = None
        if self._data[: len(_FILE_HEADER)] != _FILE_HEADER:
            found = self._data[: len(_FILE_HEADER)]
            raise ValueError(f"{path}: expected the header {_FILE_HEADER!r} of a .wandb file, found {found!r}")

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Yields offset and bytes of every complete message."""
        parts: list[bytes] = []
        start = 0
        for offset, kind, data in self._fragments():
            if (kind in (_MIDDLE, _LAST)) != bool(parts):
                raise self._damaged(offset, f"fragment of type {kind} {'inside' if parts else 'outside'} a message")
            if not parts:
                start = offset
            parts.append(data)
            if kind in (_FULL, _LAST):
                yield start, b"".join(parts)
                parts = []
        if parts:
            self.truncated_at = start

    def _fragments(self) -> Iterator[tuple[int, int, bytes]]:
        offset, size = len(_FILE_HEADER), len(self._data)
        while offset < size:
            room = _BLOCK - offset % _BLOCK
            if room < _FRAGMENT.size:
                offset += room
                continue
            begin = offset + _FRAGMENT.size
            if begin > size:
                self.truncated_at = offset
                return
            checksum, length, kind = _FRAGMENT.unpack_from(self._data, offset)
            if kind == 0 and not any(self._data[offset:]):  # a file system may leave zeros behind a crash
                self.truncated_at = offset
                return
            if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or length > room - _FRAGMENT.size:
                raise self._damaged(offset, f"fragment of type {kind} with {length} bytes, {room} left in the block")
            if begin + length > size:
                self.truncated_at = offset
                return
            data = self._data[begin : begin + length]
            actual = zlib.crc32(data, zlib.crc32(bytes([kind])))
            if actual != checksum:
                raise self._damaged(offset, f"checksum {actual:#010x}, expected {checksum:#010x}")
            yield offset, kind, data
            offset = begin + length

    def _damaged(self, offset: int, what: str) -> ValueError:
        return ValueError(f"{self._path}: damaged at byte {offset}: {what}; only a cut-off end can be read around")


def _apply(content: WandbFile, record: Any, where: str) -> None:
    match record.WhichOneof("record_type"):
        case "run":
            run = record.run
            content.run_id, content.project, content.entity = run.run_id, run.project, run.entity
            content.group, content.job_type, content.name = run.run_group, run.job_type, run.display_name
            content.tags = tuple(run.tags)
            _update(content.config, run.config.update, where)
            _update(content.summary, run.summary.update, where)
        case "config":
            _update(content.config, record.config.update, where)
            _remove(content.config, record.config.remove)
        case "summary":
            _update(content.summary, record.summary.update, where)
            _remove(content.summary, record.summary.remove)
        case "history":
            row: dict[str, Any] = {}
            _update(row, record.history.item, where)
            row.setdefault("_step", record.history.step.num)
            content.history.append(row)
        case "exit":
            content.exit_code = record.exit.exit_code
        case _:  # telemetry, metric definitions, console output
            pass


def _path(item: Any) -> list[str]:
    return list(item.nested_key) or [item.key]


def _update(target: dict[str, Any], items: Iterable[Any], where: str) -> None:
    for item in items:
        *parents, last = _path(item)
        node = target
        for key in parents:
            node = node.setdefault(key, {})
        try:
            node[last] = json.loads(item.value_json)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: value of {'/'.join(_path(item))} is not JSON: {item.value_json!r}") from error


def _remove(target: dict[str, Any], items: Iterable[Any]) -> None:
    for item in items:
        *parents, last = _path(item)
        node = target
        for key in parents:
            node = node.get(key, {})
        node.pop(last, None)
