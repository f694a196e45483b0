"""Metrics of one weight-sync cycle of verl's trainer: gathered over its updates, finalised once.

verl's own aggregator averages finished values over the updates of a cycle, which is wrong for everything non-linear.
What this module computes takes the place of verl's averages under the same names. Imports no verl.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics import route_keys as m
from experiments.metrics.ratio_keys import GAP_MISSING
from experiments.metrics.registry import undeclared
from experiments.metrics.rewards import reward_metrics
from experiments.metrics.staleness import staleness_metrics
from experiments.verl_backend.merging import FLAGS, without_rows
from experiments.verl_backend.statistics import RatioStatistics
from strategies.types import Rollout

VERL_CORRECTION = "actor/rollout_corr/"

DURATIONS = {
    "time/wall_s": ("timing_s/step",),
    "time/generate_s": ("timing_s/gen",),
    "time/score_s": ("timing_s/old_log_prob", "timing_s/shadow"),
    "time/train_s": ("timing_s/update_actor",),
    "time/sync_s": ("timing_s/timing_s/param_sync",),
}
"""Our timings and the sums of verl's that they are. Of generation, only what the trainer waited for."""


class CycleMetrics:
    """Gathers the updates between two weight syncs."""

    def __init__(self, max_response_tokens: int) -> None:
        """`max_response_tokens`: the length limit."""
        self._max_response_tokens = max_response_tokens
        self._reset()

    def _reset(self) -> None:
        self._flags = np.zeros(len(FLAGS), np.int64)
        self._rollouts: list[Rollout] = []
        self._rewards: list[float] = []
        self._groups: list[Any] = []
        self._trainer_version = 0
        self._counted = 0
        self._update: RatioStatistics | None = None
        self._edges: dict[str, RatioStatistics] = {}
        self._gap: RatioStatistics | None = None
        self._other: dict[str, float] = {}

    def add_batch(
        self, rollouts: Sequence[Rollout], rewards: Iterable[float], groups: Iterable[Any], trainer_version: int
    ) -> None:
        """Adds the rollouts of an update, with their rewards and the ids of their groups."""
        self._rollouts += [without_rows(rollout) for rollout in rollouts]
        self._rewards += map(float, rewards)
        self._groups += groups
        self._trainer_version = trainer_version

    def count_flags(self, flags: NDArray[np.integer[Any]]) -> None:
        """Adds row counters `[B, len(FLAGS)]` of a batch."""
        self._flags += flags.sum(axis=0)

    def add_gap(self, gap: RatioStatistics) -> None:
        """Adds trainer's minus engine's log-prob of a batch."""
        self._gap = gap if self._gap is None else self._gap + gap

    def add_update(self, mini_steps: Sequence[RatioStatistics], gap_from_first: bool) -> None:
        """Adds the mini-steps of an update, at least one. `gap_from_first` (bypass mode): the old policy is the
        engine's, and before the first step the current one is the trainer's as it scored the batch, so that d is the
        gap.
        """
        for step in mini_steps:
            self._update = step if self._update is None else self._update + step
            self._counted += step.ratios.sums.n if step.ratios else 0
        for label, step in (("first", mini_steps[0]), ("last", mini_steps[-1])):
            self._edges[label] = self._edges[label] + step if label in self._edges else step
        if gap_from_first:
            self.add_gap(mini_steps[0])

    def add_values(self, values: dict[str, float]) -> None:
        """Adds finished values of an update; of several, the last ones stay."""
        self._other |= values

    def take_over(self, metrics: MutableMapping[str, Any]) -> None:
        """Removes from one update's `metrics` what this module computes. verl's other `actor/rollout_corr/*` lose the
        first part of their name, as in the local loop.
        """
        for key in [key for key in metrics if key.startswith(VERL_CORRECTION)]:
            metrics[key.removeprefix("actor/")] = metrics.pop(key)
        for key in self.values().keys() & metrics.keys():
            del metrics[key]

    def finish(self) -> dict[str, float]:
        """Returns everything gathered, finalised, and starts anew."""
        values = self.values()
        self._reset()
        return values

    def values(self) -> dict[str, float]:
        """Returns everything gathered so far, finalised; empty without a rollout."""
        if not self._rollouts:
            return {}
        out: dict[str, float] = {name: float(n) for name, n in zip(FLAGS.values(), self._flags, strict=True)}
        generated = [rollout.generated() for rollout in self._rollouts]
        missing = sum(int((g & ~r.counted()).sum()) for g, r in zip(generated, self._rollouts, strict=True))
        out |= {
            m.REPLAY_ROLLOUTS: float(len(self._rollouts)),
            m.TRAINER_VERSION: float(self._trainer_version),
            m.COUNTED_TOKENS: float(self._counted),
            GAP_MISSING: float(missing),
        }
        out |= self._rollout_metrics(np.array([g.sum() for g in generated]))
        if self._gap is not None:
            out |= self._gap.gap_metrics()
        if self._update is not None:
            out |= self._update.ppo_metrics()
        for label, step in self._edges.items():
            out |= step.mini_step_metrics(label)
        return {str(key): value for key, value in (out | self._other).items()}

    def _rollout_metrics(self, lengths: NDArray[np.int64]) -> dict[str, float]:
        _, groups = np.unique(np.array(self._groups, dtype=str), return_inverse=True)
        out = reward_metrics(np.array(self._rewards), groups, lengths, np.inf, self._max_response_tokens)
        del out[m.REWARD_SOLVED]  # what a full reward is, verl's reward functions do not say
        out |= staleness_metrics(self._rollouts, self._trainer_version, retractions=0)
        del out[m.STALE_RETRACTIONS]  # not in verl's answers
        return out


def sort_values(values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Returns verl's and our values of one sync as metrics of the registry, timings, and the rest (verl's alone)."""
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float | np.number)}
    unknown = set(undeclared(numbers))
    metrics = {key: value for key, value in numbers.items() if key not in unknown}
    timings = {
        ours: sum(numbers.get(key, 0.0) for key in theirs)
        for ours, theirs in DURATIONS.items()
        if any(key in numbers for key in theirs)
    }
    return metrics, timings, {key: numbers[key] for key in sorted(unknown)}
