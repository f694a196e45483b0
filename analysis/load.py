"""Run directories, as their files say: configuration, summary, and the merge errors of shadow scoring.

Refuses what it cannot read; whether a run is fit for a comparison is for the caller to say.

Legend: a *segment* is what one engine call generated; `m` is the merge error of a token, nats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

SEGMENT_COLUMNS = ("step", "rollout", "part", "lag", "strategy", "total", "count", "changed")


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory.

    Attributes:
        folder: where it is.
        config: the composed configuration, flat: `trainer.learning_rate` -> 1e-4.
        summary: content of `summary.json`.
        segments: `merge_errors.jsonl`, one row per segment and strategy: `step`, `rollout`; `part` (`first`, `middle`,
            `last`, or `only` for a rollout of one segment); `lag` (mean version lag of its tokens, NaN when unknown);
            `strategy`; `total` (sum of |m| over its tokens, nats); `count` (tokens that the strategy counts);
            `changed` (share of expert slots in which the strategy's rows differ from the exact ones).
    """

    folder: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    segments: pd.DataFrame

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def ranking(self) -> list[dict[str, Any]]:
        """The strategies by mean |merge error|, as `summary.json` has them (experiments/decision.py)."""
        return self.summary["decision"]["ranking"]

    def statistic(self, key: str, name: str = "mean") -> float | None:
        """Returns a statistic of a metric over the updates that logged it (`mean`, `count`, `last_fifth`, ...); None
        where no update did.
        """
        values = self.summary["metrics"].get(key)
        return None if values is None else values[name]


def read_run(folder: Path) -> Run:
    """Returns the run in `folder`.

    Raises:
        ValueError: a file is missing, cannot be read or is empty; the message names it and says what to do.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: expected the directory of a run, found {'a file' if folder.exists() else 'nothing'}"
        )
    summary = _json(folder / "summary.json", _text(folder / "summary.json"))
    if summary.get("mode") == "score":
        raise ValueError(f"{folder} scored a recording, whose settings are those of the recorded run; give that run")
    config = _config(folder / ".hydra" / "config.yaml")
    path = folder / "merge_errors.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: missing; run with shadow.every=1 'shadow.strategies=[replace,slice_concat]'")
    rows = list(segment_rows(path))
    missing = [key for key in ("status", "metrics", "decision", "steps", "strategy") if key not in summary]
    if missing:
        raise ValueError(
            f"{folder / 'summary.json'}: no {', '.join(map(repr, missing))}: not a summary of this project"
        )
    if summary["status"] == "completed" and not (rows and summary["decision"]):
        raise ValueError(f"{path}: no merge errors; the run scored no strategy (shadow.strategies) or no rollout")
    return Run(folder, config, summary, pd.DataFrame(rows, columns=list(SEGMENT_COLUMNS)))


def segment_rows(path: Path) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of `merge_errors.jsonl`, values in the order of SEGMENT_COLUMNS.

    Raises:
        ValueError: a line is not of one segment; the message names file and line.
    """
    for number, text in enumerate(_text(path).splitlines(), start=1):
        line = _json(path, text, number)
        try:
            part = _part(line["segment"], line["segments"])
            lag = float("nan") if line["lag"] is None else float(line["lag"])
            for strategy, (total, count, changed) in line["errors"].items():
                yield line["step"], line["rollout"], part, lag, strategy, total, count, changed
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}:{number}: expected step, rollout, segment, segments, lag and errors of one segment "
                f"(experiments/shadow_report.py), got {text[:80]!r}"
            ) from error


def _part(segment: int, segments: int) -> str:
    if segments == 1:
        return "only"
    if segment == 0:
        return "first"
    return "last" if segment == segments - 1 else "middle"


def _config(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected the composed configuration of a run, got {type(tree).__name__}")
    config = dict(flat(tree))
    missing = [key for key in ("seed", "trainer.learning_rate", "schedule.pause_mode") if key not in config]
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)}: not the configuration of a run of this project")
    return config


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nested configuration: `trainer.learning_rate`, 1e-4. An empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected a file of a run directory") from error


def _json(path: Path, text: str, line: int | None = None) -> dict[str, Any]:
    where = path if line is None else f"{path}:{line}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); the file is cut short or not of a run") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
