"""Small run directories with known merge errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.decision import decide

CONFIG: dict[str, Any] = {
    "seed": 0,
    "trainer": {"learning_rate": 1e-4},
    "schedule": {"pause_mode": "abort"},
    "engine": {"name": "embedded"},
    "model": {"num_experts": 16},
    "strategy": {"_target_": "strategies.Replace"},
}


def line(rollout: str, segment: int, segments: int, lag: float | None, **errors: Sequence[float]) -> dict[str, Any]:
    """Returns one line of merge_errors.jsonl: `errors` by strategy, [sum of |m|, tokens, share of changed slots]."""
    tokens = max(int(count) for _, count, _ in errors.values())
    return {
        "step": 1,
        "rollout": rollout,
        "segment": segment,
        "segments": segments,
        "tokens": tokens,
        "lag": lag,
        "errors": {name: list(values) for name, values in errors.items()},
    }


# Two rollouts: one interrupted between versions 0 and 2, trained on at version 2; one in a single segment.
LINES = [
    line("a", 0, 2, 2.0, replace=[0.8, 4, 0.2], slice_concat=[0.0, 4, 0.0]),
    line("a", 1, 2, 0.0, replace=[0.0, 2, 0.0], slice_concat=[0.1, 2, 0.02]),
    line("b", 0, 1, 1.0, replace=[0.0, 4, 0.0], slice_concat=[0.0, 4, 0.0]),
]


def write_run(
    folder: Path,
    lines: Sequence[dict[str, Any]] = LINES,
    metrics: dict[str, float] | None = None,
    status: str = "completed",
    **changes: Any,
) -> Path:
    """Returns `folder`, now a run directory; `changes` are dotted keys of the configuration, `.` written as `__`."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *parents, name = key.split("__")
        node = config
        for parent in parents:
            node = node[parent]
        node[name] = value
    statistics = {key: {"count": 2, "mean": value, "last_fifth": value} for key, value in (metrics or {}).items()}
    summary = {
        "status": status,
        "strategy": "replace",
        "steps": 2,
        "git_sha": "0123456789abcdef",
        "git_dirty": False,
        "command": f"python run.py seed={config['seed']}",
        "decision": decide(lines),
        "metrics": statistics,
    }
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "merge_errors.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return folder
