"""Shadow scoring: the same rollouts under every strategy, without training on them.

Training runs compare strategies through noise: after the first update the arms see different rollouts. Here every
strategy is scored on the same tokens under the same weights, so that the differences are the rules' alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.generating import AuditPlan, GeneratingScores, score_generating
from experiments.scoring import BatchScorer, ScoredViews, has_exact_rows, merge
from experiments.trainers.base import Trainer
from experiments.weight_history import WeightHistory
from strategies.base import MergeStrategy
from strategies.types import ReplayView, Rollout, Rows

EXACT = "exact"
"""Name of the reference views in merge metrics."""

Views = list[list[ReplayView]]


@dataclass(frozen=True)
class ShadowPlan:
    """Every `every` updates (0: never) the batch is also scored under `strategies` (name -> strategy) and the exact
    views; those of them whose number is a multiple of `probe_every` (0: none) are probed too.
    """

    every: int
    probe_every: int
    strategies: Mapping[str, MergeStrategy]
    exact: MergeStrategy
    audit: AuditPlan

    def due(self, step: int) -> bool:
        """Says whether update `step`, counted from 0, is scored."""
        return self.every > 0 and step % self.every == 0

    def probes(self, step: int) -> bool:
        """Says whether update `step`, counted from 0, is probed if it is scored."""
        return self.probe_every > 0 and step % self.probe_every == 0


@dataclass(frozen=True, eq=False)
class Probe:
    """Where the log-ratio comes from and whether the rows are right, for one batch; costs three more forwards.

    Attributes:
        generating: under the weights that sampled each token, with exact rows, and the audit of the rows.
        live_rows: per rollout `[T-1, L, K]`, the trainer's own router before the update.
        margins: per rollout float32 `[T-1, L]`, k-th minus (k+1)-th score of that router.
    """

    generating: GeneratingScores
    live_rows: list[Rows]
    margins: list[NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class ShadowScores:
    """A batch, scored under the weights before the update.

    Attributes:
        scored: by strategy name, its views and their log-probs; `EXACT` is always there.
        probe: None when the update was not probed.
    """

    scored: Mapping[str, ScoredViews]
    probe: Probe | None


class ShadowScorer:
    """Scores batches as a plan says, with one trainer."""

    def __init__(self, trainer: Trainer, plan: ShadowPlan, history: WeightHistory):
        self._trainer = trainer
        self._plan = plan
        self._history = history

    def due(self, step: int) -> bool:
        """Says whether update `step`, counted from 0, is scored."""
        return self._plan.due(step)

    def score(self, step: int, scorer: BatchScorer, rollouts: list[Rollout], own: Mapping[str, Views]) -> ShadowScores:
        """Returns the scores of `rollouts` under the trainer's present weights.

        Args:
            step: number of the update that follows, counted from 0.
            scorer: of the same rollouts; forwards that it has made already are not made again.
            own: by name, views that the run made itself.

        Raises:
            MergeError: a strategy lacks rows; names the rollout.
            AuditError: the engine's rows are not those of its weights; names the request.
        """
        probe = self._probe(scorer, rollouts) if self._plan.probes(step) else None
        return ShadowScores(scorer.score(self._views(rollouts, own)), probe)

    def _probe(self, scorer: BatchScorer, rollouts: list[Rollout]) -> Probe:
        live = scorer.live()
        rows: list[Rows] = [score.rows for score in live if score.rows is not None]
        margins = [score.margins for score in live if score.margins is not None]
        return Probe(score_generating(self._trainer, self._history, rollouts, self._plan.audit), rows, margins)

    def live_rows(self, rollouts: Sequence[Rollout]) -> list[Rows]:
        """Returns per rollout `[T-1, L, K]`: what the trainer's own router chooses under its present weights."""
        return [score.rows for score in BatchScorer(self._trainer, rollouts).live() if score.rows is not None]

    def _views(self, rollouts: list[Rollout], own: Mapping[str, Views]) -> dict[str, Views]:
        """Returns per strategy name the views to compare, `[rollout][view]`.

        A rollout whose rows the engine mixed inside a call, or did not return, has no exact view, so that nothing can
        be said about it: it has no views here under any strategy, and is counted.
        """
        whole = [has_exact_rows(rollout) for rollout in rollouts]
        kept = [rollout for rollout, is_whole in zip(rollouts, whole, strict=True) if is_whole]
        rules = {EXACT: self._plan.exact, **self._plan.strategies}  # the reference first: a rule might write into rows
        named = {name: iter(_merge(name, rule, kept)) for name, rule in rules.items() if name not in own}
        compared = {name: [next(rest) if is_whole else [] for is_whole in whole] for name, rest in named.items()}
        for name, views in own.items():
            compared[name] = [list(v) if is_whole else [] for v, is_whole in zip(views, whole, strict=True)]
        return compared


def _merge(name: str, rule: MergeStrategy, rollouts: list[Rollout]) -> Views:
    try:
        return merge(rule, rollouts)
    except Exception as error:  # a user's class may raise anything; of many rules, the reader must know which
        raise RuntimeError(f"shadow scoring, strategy {name}: {type(error).__name__}: {error}") from error
