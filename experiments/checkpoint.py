"""The newest complete checkpoint of a run: one file of tensors and plain values, replaced atomically.

`torch.load(weights_only=True)` reads it, so that opening a checkpoint never runs code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.buffer import Sample
from experiments.check import CHECKPOINT_FILE
from experiments.rollout import OpenGroup, OpenRollout
from strategies.types import EngineCall, Rollout

FORMAT = 2
FILE = CHECKPOINT_FILE


class CheckpointError(ValueError):
    """A checkpoint that is missing, truncated, foreign, or of another configuration."""


def save(run_dir: Path, state: Mapping[str, Any]) -> None:
    """Writes `state` (tensors, arrays, plain values) as the newest checkpoint of `run_dir`; an older one stays until it
    is complete.
    """
    path = run_dir / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"format": FORMAT, **_plain(state)}, partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load(run_dir: Path) -> dict[str, Any]:
    """Returns what `save` wrote.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = run_dir / FILE
    if not path.is_file():
        raise CheckpointError(
            f"no checkpoint at {path}; a run saves one every `checkpoint.every` syncs and when interrupted"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a damaged file; all mean the same to the reader
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}): truncated or not a checkpoint"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} has format {found}, expected {FORMAT}")
    return state


def _plain(value: Any) -> Any:
    """Returns `value` with arrays as tensors, which are what a weights-only load accepts."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value).copy())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _arrays(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item.numpy() if isinstance(item, torch.Tensor) else item for key, item in value.items()}


def _shallow(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def pack_groups(groups: list[OpenGroup]) -> list[dict[str, Any]]:
    """Returns unfinished groups as plain values."""
    return [
        {
            "problem_index": group.problem_index,
            "rollouts": [
                {**_shallow(rollout), "calls": [_shallow(call) for call in rollout.calls]} for rollout in group.rollouts
            ],
        }
        for group in groups
    ]


def unpack_groups(state: list[dict[str, Any]]) -> list[OpenGroup]:
    """Inverse of `pack_groups`."""
    return [
        OpenGroup(
            group["problem_index"],
            [
                OpenRollout(**{**_arrays(r), "calls": [EngineCall(**_arrays(call)) for call in r["calls"]]})
                for r in group["rollouts"]
            ],
        )
        for group in state
    ]


def pack_samples(groups: list[list[Sample]]) -> list[list[dict[str, Any]]]:
    """Returns the queue as plain values."""
    return [
        [
            {
                **_shallow(sample),
                "rollout": {
                    **_shallow(sample.rollout),
                    "calls": [_shallow(call) for call in sample.rollout.calls],
                },
            }
            for sample in group
        ]
        for group in groups
    ]


def unpack_samples(state: list[list[dict[str, Any]]]) -> list[list[Sample]]:
    """Inverse of `pack_samples`."""
    return [
        [
            Sample(
                **{
                    **s,
                    "rollout": Rollout(
                        **{
                            **_arrays(s["rollout"]),
                            "calls": tuple(EngineCall(**_arrays(call)) for call in s["rollout"]["calls"]),
                        }
                    ),
                }
            )
            for s in group
        ]
        for group in state
    ]
