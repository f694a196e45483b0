"""What shadow scoring says: metrics of the batch, and one line per segment for statistics over rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.generating import GeneratingScores
from experiments.metrics.decomposition import decompose, decomposition_metrics, rest_metrics
from experiments.metrics.merge_error import NOISE, merge_errors, merge_metrics
from experiments.metrics.ratios import floor_metrics, shadow_metrics
from experiments.metrics.route_keys import MERGE_EXCLUDED
from experiments.metrics.routes import (
    RouteAgreement,
    against_exact,
    agreement_metrics,
    audit_metrics,
    compare_rows,
    margin_metrics,
    overlap,
)
from experiments.metrics.tokens import UNKNOWN_LAG, TokenTable
from experiments.reporting import MiniStep
from experiments.schema import AlgorithmConfig
from experiments.scoring import ScoredViews, has_exact_rows
from experiments.shadow import EXACT, ShadowScores, Views
from strategies.types import ReplayView, Rollout, Rows

Line = dict[str, Any]
"""One segment: `rollout`, `segment` (index), `segments` of its rollout, `tokens`, `lag` (mean of its tokens; None when
unknown), `errors`: by strategy [sum of |merge error| in nats, its counted tokens, share of expert slots in which its
rows differ from the exact ones].
"""


@dataclass(frozen=True, eq=False)
class ShadowReport:
    """Reports one scored batch.

    Attributes:
        rollouts: the batch, `[B]`.
        trainer_version: weight version of the trainer when it scored them.
        scores: what was scored.
        advantages: float `[B]`.
        decoupled: the old log-probs are the trainer's, not the engine's.
        algorithm: clip ranges and the like, of the would-be ratios.
    """

    rollouts: Sequence[Rollout]
    trainer_version: int
    scores: ShadowScores
    advantages: NDArray[np.floating[Any]]
    decoupled: bool
    algorithm: AlgorithmConfig

    @cached_property
    def tables(self) -> dict[str, TokenTable]:
        """The counted tokens of every scored strategy."""
        return {name: self._table(scored) for name, scored in self.scores.scored.items()}

    def metrics(self, strategy: str, live_after: list[Rows] | None) -> dict[str, float]:
        """Returns merge errors and would-be ratios of every scored strategy, and for `strategy`, which must be one of
        them, the agreement of its routes and, when the batch was probed, the decomposition of its log-ratio.

        Args:
            strategy: the run's own.
            live_after: the trainer's own routes after the update, per rollout; None where they are not known.
        """
        out: dict[str, float] = {}
        exact = self.tables[EXACT]
        excluded = float(np.mean([not has_exact_rows(rollout) for rollout in self.rollouts]))
        for name, table in self.tables.items():
            out |= merge_metrics(table, exact, name, floor=NOISE)
            # The run's own ratios are over all its rollouts: where some are left out here, they cannot be compared.
            if name != strategy or excluded:
                out |= shadow_metrics(table, self.algorithm, name)
        out[MERGE_EXCLUDED] = excluded
        own = self.scores.scored[strategy].views
        out |= _agreement(None, against_exact(own, self.scores.scored[EXACT].views))
        probe = self.scores.probe
        if probe is not None:
            out |= self._decomposition(self.tables[strategy], probe.generating)
            out |= audit_metrics(probe.generating.audited) | margin_metrics(probe.margins)
            out |= _agreement("live_before", _against_live(own, probe.live_rows))
        if live_after is not None:
            out |= _agreement("live_after", _against_live(own, live_after))
        return {str(key): value for key, value in out.items()}

    def lines(self) -> list[Line]:
        """Returns one line per segment that the exact views count."""
        exact = self.tables[EXACT]
        stride = 1 + int(exact.segment.max(initial=0))
        keys, first, inverse = np.unique(exact.rollout * stride + exact.segment, return_index=True, return_inverse=True)
        lines: list[Line] = []
        tokens, known = np.bincount(inverse), np.bincount(inverse, weights=exact.lag != UNKNOWN_LAG)
        lag = np.bincount(inverse, weights=exact.lag) / tokens
        for index, key in enumerate(keys.tolist()):
            lines.append(
                {
                    "rollout": exact.rollout_ids[key // stride],
                    "segment": key % stride,
                    "segments": int(exact.segments[first[index]]),
                    "tokens": int(tokens[index]),
                    "lag": float(lag[index]) if known[index] == tokens[index] else None,
                    "errors": {},
                }
            )
        for name, table in self.tables.items():
            if name == EXACT:
                continue
            at = np.searchsorted(keys, table.rollout * stride + table.segment)
            total = np.bincount(at, weights=np.abs(merge_errors(table, exact)), minlength=len(keys))
            count = np.bincount(at, minlength=len(keys))
            counted, start = np.unique(at, return_index=True)
            where = list(zip(table.rollout[start].tolist(), table.position[start].tolist(), strict=True))
            for index, changed in zip(counted, self._changed(name, where), strict=True):
                lines[index]["errors"][name] = [float(total[index]), int(count[index]), changed]
        return lines

    def _changed(self, name: str, where: Sequence[tuple[int, int]]) -> list[float]:
        """Returns, for every (rollout, position), the share of expert slots in which the rows of strategy `name` differ
        from the exact ones, over the view that carries that token; live rows count as changed: the engine's were not
        used.
        """
        pairs = [
            (_view_of(self.scores.scored[name].views[owner], position).rows, exact.rows)
            for owner, position in where
            for exact in [_view_of(self.scores.scored[EXACT].views[owner], position)]
        ]
        lengths = [min(len(mine), len(exact)) for mine, exact in pairs]
        if not lengths:
            return []
        mine = np.concatenate([rows[:n] for (rows, _), n in zip(pairs, lengths, strict=True)])
        exact = np.concatenate([rows[:n] for (_, rows), n in zip(pairs, lengths, strict=True)])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)
        kept = np.add.reduceat(overlap(mine, exact).sum(axis=1), starts)
        slots = exact[0].size * np.array(lengths)
        return (1.0 - kept / slots).tolist()

    def _decomposition(self, table: TokenTable, generating: GeneratingScores) -> dict[str, float]:
        views = self.scores.scored[EXACT].views
        known = [
            [ReplayView(v.rows, v.loss_mask & ~np.isnan(values[: v.length])) for v in own]
            for own, values in zip(views, generating.log_probs, strict=True)
        ]
        log_probs = [[values[: v.length] for v in own] for own, values in zip(views, generating.log_probs, strict=True)]
        then = self._table(ScoredViews(known, log_probs))
        parts = decompose(table, self.tables[EXACT], then)
        out = decomposition_metrics(parts)
        if parts.coverage < 1.0:
            out |= rest_metrics(table, self.tables[EXACT])
        return out

    def _table(self, scored: ScoredViews) -> TokenTable:
        return TokenTable.from_views(
            self.rollouts,
            scored.views,
            scored.log_probs,
            old_log_probs=scored.log_probs if self.decoupled else None,
            advantages=self.advantages,
            trainer_version=self.trainer_version,
        )


def noise_floor(scored: ScoredViews, mini_step: MiniStep) -> dict[str, float]:
    """Returns `gap/floor_*`: the run's own views were scored, and then trained on under the same weights; nothing where
    no view of the mini-step was scored.

    Args:
        scored: the run's own views.
        mini_step: the first of the update.
    """
    pairs = [
        (before[view.loss_mask], then[view.loss_mask])
        for index, log_probs in zip(mini_step.chunk, mini_step.log_probs, strict=True)
        if scored.views[index]  # not where the engine mixed rows
        for view, before, then in zip(scored.views[index], scored.log_probs[index], log_probs, strict=True)
    ]
    if not pairs:
        return {}
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return {str(key): value for key, value in floor_metrics(first, second).items()}


def _agreement(source: str | None, agreement: RouteAgreement | None) -> dict[str, float]:
    return {} if agreement is None else agreement_metrics(agreement, source)


def _view_of(views: Sequence[ReplayView], position: int) -> ReplayView:
    return next(view for view in views if position < view.length and view.loss_mask[position])


def _against_live(views: Views, live: Sequence[Rows]) -> RouteAgreement | None:
    """Returns the agreement of the views' rows with the trainer's own routes; None without a view."""
    ours = [view.rows for own in views for view in own]
    theirs = [rows[: view.length - 1] for own, rows in zip(views, live, strict=True) for view in own]
    return compare_rows(np.concatenate(ours), np.concatenate(theirs)) if ours else None
