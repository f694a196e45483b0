"""Runs as `load_runs` returns them, from curves written in a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.runs import Runs


def one_run(
    strategy: str,
    seed: int,
    curves: Mapping[str, Sequence[float] | float],
    steps: int = 10,
    planned: int | None = None,
    config: Mapping[str, Any] | None = None,
    versions: Mapping[str, Any] | None = None,
    name: str | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Returns a run for `make_runs`; a curve given as a number is constant, NaN in it is an update that did not log."""
    return {
        "name": name or f"{strategy}-s{seed}",
        "curves": {key: np.broadcast_to(np.asarray(curve, dtype=np.float64), steps) for key, curve in curves.items()},
        "steps": steps,
        "config": {"strategy._target_": strategy, "seed": seed, "trainer.learning_rate": 1e-4, **(config or {})},
        "versions": {"torch": "2.11.0", **(versions or {})},
        "facts": {
            "strategy": strategy,
            "seed": seed,
            "status": "completed",
            "steps": steps,
            "planned": steps if planned is None else planned,
            **facts,
        },
    }


def make_runs(*runs: Mapping[str, Any], excluded: Sequence[tuple[str, str, str]] = ()) -> Runs:
    """Returns the runs as one table, in the shape of `load_runs`."""
    parts = [
        pd.DataFrame(
            {
                "run": run["name"],
                "strategy": run["facts"]["strategy"],
                "seed": run["facts"]["seed"],
                "step": np.arange(1, run["steps"] + 1),
                **run["curves"],
            }
        )
        for run in runs
    ]
    columns = ["run", "strategy", "seed", "step"]
    history = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    names = sorted(history["run"].unique())
    history["run"] = pd.Categorical(history["run"], categories=names)
    return Runs(
        history=history.sort_values(["run", "step"], ignore_index=True),
        runs=pd.DataFrame(
            [run["facts"] for run in runs],
            index=pd.Index([run["name"] for run in runs], name="run"),
            columns=None if runs else ["strategy", "seed", "status", "steps", "planned"],
        ).astype({"planned": "Int64"}),
        configs={run["name"]: dict(run["config"]) for run in runs},
        versions={run["name"]: dict(run["versions"]) for run in runs},
        segments=pd.DataFrame(),
        excluded=pd.DataFrame(list(excluded), columns=["run", "where", "reason"]),
    )


METRIC = "gap/abs_by_versions/multi"


def two_arms(differences: Sequence[float], base: float = 1.0, **changes: Any) -> Runs:
    """Returns runs of slice_concat and replace, one pair per seed, whose mean METRIC differs by `differences`."""
    pairs = [
        run
        for seed, difference in enumerate(differences)
        for run in (
            one_run("slice_concat", seed, {METRIC: base + seed + difference, "reward/mean": 0.5}, **changes),
            one_run("replace", seed, {METRIC: base + seed, "reward/mean": 0.5}),
        )
    ]
    return make_runs(*pairs)
