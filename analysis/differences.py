"""What the arms of a study differ in beside their strategy: a comparison of such arms is confounded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.runs import Runs

# What an arm is about, what tells repetitions apart, and where a run writes or what it measures besides; none of it
# changes an update.
_NOT_COMPARED = (
    "strategy",
    "seed",
    "experiment_name",
    "tracking",
    "resume",
    "record",
    "checkpoint",
    "shadow",
    "task.warm_start.cache_dir",
    "engine.server.cache_dir",
    "engine.server.publish_dir",
)
# Facts of a run that differ from run to run on one machine.
_NOT_A_VERSION = ("cpus", "peak_memory_gib", "seconds", "command", "folder")


def differences(runs: Runs, arms: Sequence[str]) -> pd.DataFrame:
    """Returns what differs between the runs of `arms` of one seed, in any seed: `key`, `kind` (`configuration` or
    `version`) and one column per arm with its values as text (several, when they vary with the seed).
    """
    chosen = runs.runs[runs.runs["strategy"].isin(list(arms))]
    facts = {str(run): _facts(runs, str(run)) for run in chosen.index}
    by_key: dict[tuple[str, str], dict[str, list[str]]] = {}
    for _, group in chosen.groupby("seed"):
        own = {str(run): str(arm) for run, arm in group["strategy"].items()}
        for key in {key for run in own for key in facts[run]}:
            known = [run for run in own if key[0] == "configuration" or runs.versions.get(run)]
            values = {run: facts[run].get(key, "not set") for run in known}
            if len(set(values.values())) > 1 and len({own[run] for run in known}) > 1:
                for run, value in values.items():
                    seen = by_key.setdefault(key, {}).setdefault(own[run], [])
                    if value not in seen:
                        seen.append(value)
    rows = [
        {"key": key, "kind": kind, **{arm: ", ".join(values.get(arm, ["-"])) for arm in arms}}
        for (kind, key), values in sorted(by_key.items())
    ]
    return pd.DataFrame(rows, columns=["key", "kind", *arms])


def varying(runs: Runs, arms: Sequence[str]) -> list[str]:
    """Returns the settings and versions that are not the same in all runs of `arms`, whatever their seeds."""
    chosen = runs.runs.index[runs.runs["strategy"].isin(list(arms))]
    facts = [own for run in chosen if (own := _facts(runs, str(run)))]
    keys = {key for own in facts for key in own}
    return sorted(key[1] for key in keys if len({own[key] for own in facts if key in own}) > 1)


def _facts(runs: Runs, run: str) -> dict[tuple[str, str], str]:
    configuration = {
        ("configuration", key): _text(value)
        for key, value in runs.configs.get(run, {}).items()
        if not any(key == name or key.startswith(f"{name}.") for name in _NOT_COMPARED)
    }
    versions = {
        ("version", key): str(value)
        for key, value in _flat(runs.versions.get(run, {}))
        if key.split(".")[-1] not in _NOT_A_VERSION
    }
    return configuration | versions


def _text(value: Any) -> str:
    """Returns a setting as text, the same whatever the order in which its source holds keys."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else repr(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
