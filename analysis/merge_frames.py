"""The numbers of docs/merge_error.md: one function per figure; runs in, one tidy table out, or why there is none.

Runs are compared only where they differ in nothing but what the figure is about (`Study`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.load import Run
from analysis.stats import clustered_means

LEARNING_RATE = "trainer.learning_rate"
PAUSE_MODE = "schedule.pause_mode"
RESUME_ROWS = "engine.resume_rows"

REPETITION = (
    "seed",
    "experiment_name",
    "tracking",
    "resume",
    "threads",
    "checkpoint",
    "record",
    "shadow",
    "task.warm_start.cache_dir",
)
"""Keys, and groups of keys, in which repetitions of one experiment may differ."""

ROLLOUT = ("run", "rollout")
"""Columns that tell the rollouts of several runs apart."""
PARTS = ("first", "middle", "last", "only")
LAGS = ("0", "1", "2", "3-4", "5+")
_LAG_EDGES = (0, 1, 2, 3, 5)
SLOTS = ("0", "0-1%", "1-3%", "3-10%", "10-30%", "30-100%")
_SLOT_EDGES = (0.0, 0.01, 0.03, 0.1, 0.3)
BOUNDARIES = {  # labels of merge/<strategy>/abs_by_boundary (experiments/metrics) -> tokens from the boundary
    "before_64_17": "-64..-17",
    "before_16_4": "-16..-4",
    "before_3_1": "-3..-1",
    "after_0": "0",
    "after_1_3": "1..3",
    "after_4_15": "4..15",
    "after_16_63": "16..63",
    "after_64plus": "64+",
}


@dataclass(frozen=True)
class Absent:
    """Why a figure or a table has no data."""

    reason: str


@dataclass(frozen=True, eq=False)
class Study:
    """Runs, sorted by what they can be compared for. The first run given is the reference.

    Attributes:
        main: the reference and its repetitions with other seeds.
        rates: runs that differ from it in the learning rate, and `main`; empty when there is one rate only.
        modes: runs that differ from it in pause mode or resumed rows, and `main`; empty when there is one only.
        notes: one line for every run that is left out, and why.
    """

    main: tuple[Run, ...]
    rates: tuple[Run, ...]
    modes: tuple[Run, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Study:
        """Returns the study of `runs`, in the order given.

        Raises:
            ValueError: no run is complete, or two are the same run.
        """
        complete = [run for run in runs if run.summary["status"] == "completed"]
        notes = [f"left out: {run.folder}: {run.summary['status']}" for run in runs if run not in complete]
        if not complete:
            raise ValueError("; ".join(["expected at least one completed run", *notes]))
        _refuse_repeated(complete)
        reference = complete[0]
        main, rates, modes = [], [], []
        for run in complete:
            different = _differences(reference, run)
            if not different:
                main.append(run)
            if different <= {LEARNING_RATE}:
                rates.append(run)
            if different <= {PAUSE_MODE, RESUME_ROWS}:
                modes.append(run)
            if run not in rates and run not in modes:
                notes.append(
                    f"left out: {run.folder}: differs from {reference.folder} in {', '.join(sorted(different))}"
                )
        return cls(
            tuple(main),
            tuple(rates) if len(rates) > len(main) else (),
            tuple(modes) if len(modes) > len(main) else (),
            tuple(notes),
        )

    @property
    def used(self) -> tuple[Run, ...]:
        """Every run that some figure or table is made from, in the order given."""
        return tuple({id(run): run for run in (*self.main, *self.rates, *self.modes)}.values())


def ranking(study: Study) -> pd.DataFrame:
    """Returns the ranking of every main run, from its summary: `strategy`, `seed`, `mean`, `low`, `high`, `loss_frac`,
    `better_than_next`; strategies by their mean over the seeds, smallest first.
    """
    frame = _rankings(study.main)[["strategy", "seed", "mean", "low", "high", "loss_frac", "better_than_next"]]
    order = frame.groupby("strategy")["mean"].mean().sort_values(kind="stable").index
    frame["strategy"] = pd.Categorical(frame["strategy"], categories=list(order), ordered=True)
    return frame.sort_values(["strategy", "seed"], kind="stable", ignore_index=True)


def by_segment(study: Study) -> pd.DataFrame | Absent:
    """Returns the mean |merge error| by `strategy` and `bucket` (PARTS), with interval over rollouts."""
    return part_errors(_segments(study.main))


def part_errors(segments: pd.DataFrame, cluster: Sequence[str] = ROLLOUT) -> pd.DataFrame | Absent:
    """Returns the mean |merge error| by `strategy` and `bucket` (PARTS), with interval over clusters.

    Args:
        segments: segments of runs (analysis/load.py), `run` and the columns of `cluster`.
        cluster: the columns that make a cluster.
    """
    if set(segments["part"]) == {"only"}:
        return Absent("no rollout was interrupted: every one has a single segment")
    return _by_bucket(segments, segments["part"], PARTS, cluster)


def by_span(study: Study) -> pd.DataFrame | Absent:
    """Returns the mean |merge error| by `strategy` and `bucket` (LAGS): weight versions between the oldest and the
    newest segment of the rollout, over interrupted rollouts; with interval.
    """
    segments = _segments(study.main)
    segments = segments[segments["part"] != "only"]
    rollout = segments.groupby(["run", "rollout"])["lag"]
    versions = rollout.transform("max") - rollout.transform("min")
    # One segment of unknown version leaves the span of its rollout unknown.
    known = rollout.transform("count") == rollout.transform("size")
    if not known.any():
        return Absent("no interrupted rollout with known versions")
    return _by_bucket(segments[known], _version_bucket(versions[known]), LAGS)


def by_lag(study: Study) -> pd.DataFrame | Absent:
    """Returns the mean |merge error| by `strategy` and `bucket` (LAGS) of the segment's mean version lag, with
    interval over rollouts.
    """
    return lag_errors(_segments(study.main))


def lag_errors(segments: pd.DataFrame, cluster: Sequence[str] = ROLLOUT) -> pd.DataFrame | Absent:
    """Returns the mean |merge error| by `strategy` and `bucket` (LAGS) of the segment's mean version lag, with interval
    over clusters (as `part_errors`).

    A segment whose tokens have several versions is in the bucket of their mean, rounded.
    """
    segments = segments[segments["lag"].notna()]
    if segments.empty:
        return Absent("no segment has a known version lag")
    return _by_bucket(segments, _version_bucket(segments["lag"]), LAGS, cluster)


def by_slots(study: Study) -> pd.DataFrame | Absent:
    """Returns the mean |merge error| by `strategy` and `bucket` (SLOTS): the share of expert slots in which the rows of
    the segment's view differ from the exact ones, lower edge excluded; with interval.
    """
    segments = _segments(study.main)
    bucket = np.searchsorted(_SLOT_EDGES, segments["changed"].to_numpy(), side="left")
    return _by_bucket(segments, np.array(SLOTS)[bucket], SLOTS)


def by_boundary(study: Study) -> pd.DataFrame | Absent:
    """Returns the mean |merge error| by `strategy` and `bucket` (BOUNDARIES): tokens from the nearest resume boundary.

    It is a mean over the updates that had such a token, all equal (`merge/<strategy>/abs_by_boundary/*`): the run does
    not log how many tokens each update had. `updates` says how many updates these are.
    """
    rows = []
    for strategy in sorted({entry["strategy"] for run in study.main for entry in run.ranking}):
        for label, bucket in BOUNDARIES.items():
            key = f"merge/{strategy}/abs_by_boundary/{label}"
            updates = [run.statistic(key, "count") or 0 for run in study.main]
            if sum(updates):
                means = [run.statistic(key) or 0.0 for run in study.main]
                rows.append((strategy, bucket, float(np.average(means, weights=updates)), sum(updates)))
    if not rows:
        return Absent("no run logged merge/<strategy>/abs_by_boundary: no rollout was interrupted")
    frame = pd.DataFrame(rows, columns=["strategy", "bucket", "mean", "updates"])
    frame["bucket"] = pd.Categorical(frame["bucket"], categories=list(BOUNDARIES.values()), ordered=True)
    return frame


def by_learning_rate(study: Study) -> pd.DataFrame | Absent:
    """Returns, by `learning_rate`, `seed` and `strategy`, the mean |merge error| with its interval (summary.json), and
    `churn`, the run's mean `route/churn` over the updates.
    """
    if not study.rates:
        return Absent(f"every run has {LEARNING_RATE}={study.main[0].config[LEARNING_RATE]}")
    frame = _rankings(study.rates)[["learning_rate", "seed", "strategy", "mean", "low", "high", "churn"]]
    return frame.sort_values(["learning_rate", "seed", "strategy"], kind="stable", ignore_index=True)


def by_mode(study: Study) -> pd.DataFrame | Absent:
    """Returns one row per run with another pause mode or other resumed rows: `pause_mode`, `resume_rows`, `seed`,
    `excluded` (`merge/excluded_frac`), `gap` (`gap/abs`), `engine` (`decomp/engine_abs`), `ppo_kl`, `reward` (last
    fifth of the updates), and the mean |merge error| of every strategy under its name.
    """
    if not study.modes:
        return Absent(f"every run has {PAUSE_MODE}={study.main[0].config[PAUSE_MODE]} and the same {RESUME_ROWS}")
    rows = [
        {
            "pause_mode": run.config[PAUSE_MODE],
            "resume_rows": _resume_rows(run),
            "seed": run.seed,
            "excluded": run.statistic("merge/excluded_frac"),
            "gap": run.statistic("gap/abs"),
            "engine": run.statistic("decomp/engine_abs"),
            "ppo_kl": run.statistic("actor/ppo_kl"),
            "reward": run.statistic("reward/mean", "last_fifth"),
            **{entry["strategy"]: entry["mean"] for entry in run.ranking},
        }
        for run in study.modes
    ]
    return pd.DataFrame(rows).sort_values(["pause_mode", "resume_rows", "seed"], kind="stable", ignore_index=True)


def runs(study: Study) -> pd.DataFrame:
    """Returns one row per run used: `strategy` (trained with), `seed`, what it differs in, `updates`, `commit` (`+`:
    with uncommitted changes) and `command`.
    """
    return pd.DataFrame(
        {
            "strategy": run.summary["strategy"],
            "seed": run.seed,
            "learning_rate": run.config[LEARNING_RATE],
            "pause_mode": run.config[PAUSE_MODE],
            "resume_rows": _resume_rows(run),
            "updates": run.summary["steps"],
            "commit": f"{(run.summary.get('git_sha') or 'unknown')[:10]}{'+' if run.summary.get('git_dirty') else ''}",
            "command": run.summary.get("command") or "unknown",
        }
        for run in study.used
    )


def _rankings(several: Sequence[Run]) -> pd.DataFrame:
    rows = [
        {
            "seed": run.seed,
            "learning_rate": float(run.config[LEARNING_RATE]),
            "churn": run.statistic("route/churn"),
            **entry,
        }
        for run in several
        for entry in run.ranking
    ]
    numbers = ("mean", "low", "high", "loss_frac", "better_than_next", "churn")
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, np.float64))


def _segments(several: Sequence[Run]) -> pd.DataFrame:
    """Returns the segments of all runs; `run` tells equal rollout ids of two runs apart."""
    return pd.concat([run.segments.assign(run=index) for index, run in enumerate(several)], ignore_index=True)


def _by_bucket(
    segments: pd.DataFrame, bucket: Any, labels: Sequence[str], cluster: Sequence[str] = ROLLOUT
) -> pd.DataFrame:
    segments = segments.assign(bucket=pd.Categorical(bucket, categories=list(labels), ordered=True))
    return clustered_means(segments, by=("strategy", "bucket"), cluster=cluster)


def _version_bucket(versions: pd.Series) -> NDArray[np.str_]:
    """Returns the LAGS label of every number of versions, rounded, halves up."""
    return np.array(LAGS)[np.searchsorted(_LAG_EDGES, np.floor(versions.to_numpy() + 0.5), side="right") - 1]


def _differences(reference: Run, other: Run) -> set[str]:
    """Returns the keys in which two runs differ, repetitions aside."""
    first, second = ({**run.config, RESUME_ROWS: _resume_rows(run)} for run in (reference, other))
    return {
        key for key in first.keys() | second.keys() if first.get(key) != second.get(key) and not within(key, REPETITION)
    }


def within(key: str, names: Sequence[str]) -> bool:
    """Returns whether a flat configuration key is one of `names` or below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _resume_rows(run: Run) -> str:
    """Returns how a resumed prefix gets its rows; an engine without the setting routes it afresh."""
    return run.config.get(RESUME_ROWS, "recompute")


def _refuse_repeated(several: Sequence[Run]) -> None:
    for index, run in enumerate(several):
        for other in several[:index]:
            if run.seed == other.seed and not _differences(run, other):
                raise ValueError(
                    f"{other.folder} and {run.folder} have the same configuration and seed: the same rollouts would "
                    "count twice; give one of them"
                )
