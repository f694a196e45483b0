"""Metrics of one weight-sync cycle of verl's trainer: gathered over its updates, finalised once.

verl's own aggregator averages finished values over the updates of a cycle, which is wrong for everything non-linear.
Values that this module computes are handed over with the cycle's last update alone; verl's averages under the same
names are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.metrics.ratio_keys import PPO_KL, PPO_KL_K3
from experiments.verl_backend.merging import FLAGS
from experiments.verl_backend.statistics import StepStatistics
from strategies.types import UNKNOWN_VERSION

VERL_CORRECTION = "actor/rollout_corr/"


def lag_index(lags: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Returns the index into LAGS (0, 1, 2, 3-4, 5-8, 9 and more) of version lags >= 0."""
    return np.searchsorted([1, 2, 3, 5, 9], lags, side="right").astype(np.int64)


def lag_indices(versions: Iterable[NDArray[np.int32]], width: int, trainer_version: int) -> NDArray[np.int64]:
    """Returns int64 `[B, width]`, the index into LAGS of every response token; -1 for padding and unknown versions."""
    rows = list(versions)
    out = np.full((len(rows), width), -1, np.int64)
    for row, known in zip(out, rows, strict=True):
        here = np.asarray(known, dtype=np.int64)
        row[: len(here)] = np.where(here == UNKNOWN_VERSION, -1, lag_index(np.maximum(trainer_version - here, 0)))
    return out


class CycleMetrics:
    """Gathers statistics until the cycle ends."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._flags = np.zeros(len(FLAGS), np.int64)
        self._trajectories = 0
        self._update: StepStatistics | None = None
        self._edges: dict[str, StepStatistics] = {}
        self._gap: StepStatistics | LogRatioAccumulator | None = None

    def count_flags(self, flags: NDArray[np.integer[Any]]) -> None:
        """Adds the row counters `[B, len(FLAGS)]` of a batch."""
        self._flags += flags.sum(axis=0)
        self._trajectories += len(flags)

    def add_gap(self, gap: LogRatioAccumulator) -> None:
        """Adds trainer's minus engine's log-prob of a batch."""
        self._gap = gap if self._gap is None else self._gap + gap  # pyright: ignore[reportOperatorIssue]

    def add_update(self, mini_steps: Sequence[StepStatistics], gap_from_first: bool) -> None:
        """Adds an update. `gap_from_first` (bypass mode): the old policy is the engine's, and before the first step
        the current one is the trainer's as it scored the batch, so that d is the gap.
        """
        if not mini_steps:
            return
        for step in mini_steps:
            self._update = step if self._update is None else self._update + step
        for label, step in (("first", mini_steps[0]), ("last", mini_steps[-1])):
            self._edges[label] = self._edges[label] + step if label in self._edges else step
        if gap_from_first:
            self._gap = mini_steps[0] if self._gap is None else self._gap + mini_steps[0]  # pyright: ignore

    def finish_step(self, metrics: MutableMapping[str, Any], *, last_of_cycle: bool) -> None:
        """Replaces verl's averages in one update's `metrics`: by ours after the cycle's last, by nothing before.

        verl's other `actor/rollout_corr/*` lose the first part of their name, as in the local loop.
        """
        ours = self.values()
        for key in [key for key in metrics if key.startswith(VERL_CORRECTION)]:
            metrics[key.removeprefix("actor/")] = metrics.pop(key)
        for key in ours.keys() & metrics.keys():
            del metrics[key]
        if last_of_cycle:
            metrics.update(ours)
            self._reset()

    def values(self) -> dict[str, float]:
        """Returns everything gathered so far, finalised."""
        out: dict[str, float] = {f"replay/{flag}": float(n) for flag, n in zip(FLAGS, self._flags, strict=True)}
        out["replay/trajectories"] = float(self._trajectories)
        if self._gap is not None:
            out |= self._gap.gap_metrics()
        if self._update is not None:
            out |= self._update.ppo_metrics()
        for label, step in self._edges.items():
            if step.ratios is not None:
                ratio = step.ratios.ppo_metrics()
                out |= {metric.by("mini_step", label): ratio[metric] for metric in (PPO_KL, PPO_KL_K3)}
        return out
