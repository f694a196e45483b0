# pyright: reportMissingImports=false
"""Shadow scoring inside verl: the same trajectories, weights and tokens under other strategies' rows.

Every view is one extra log-prob pass of verl's actor with its rows in the batch. The reference is `exact`; the merge
error is a strategy's log-prob minus the exact one, so that staleness and engine mismatch cancel.

Legend: `B` trajectories, `R` response tokens (padded), `t` tokens of a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl import DataProto

from experiments.metrics import route_keys as m
from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.metrics.metric import under_strategy
from strategies.types import ReplayView

REFERENCE = "exact"

ViewsByName = Mapping[str, list[ReplayView]]


def score_shadows(
    batch: DataProto, views: Iterable[ViewsByName], log_probs: Callable[[DataProto], torch.Tensor], cap: float
) -> dict[str, float]:
    """Returns `merge/<strategy>/...` and `gap/<strategy>/...` of every strategy that some trajectory has views of.

    Args:
        batch: verl's batch `[B]` with left-padded prompts; its rows and mask are as before afterwards.
        views: per trajectory, the views by strategy name.
        log_probs: `[B, R]` log-probs of a batch under the current weights, with its rows replayed.
        cap: C of the truncated weights.
    """
    rows = list(views)
    names = sorted({name for of in rows for name in of})
    scores = {name: _score(batch, [of.get(name, []) for of in rows], log_probs) for name in names}
    engine = batch.batch["rollout_log_probs"].double().numpy()
    sequence = np.broadcast_to(np.arange(len(rows))[:, None], engine.shape)
    out: dict[str, float] = {}
    for name, score in scores.items():
        scored = ~np.isnan(score)
        if not scored.any():
            continue
        gap = LogRatioAccumulator.of((score - engine)[scored], sequence[scored], cap)
        out |= under_strategy(gap.gap_metrics(), name)
        common = scored & ~np.isnan(scores.get(REFERENCE, np.full_like(score, np.nan)))
        if common.any():
            out |= _merge_error(name, (score - scores[REFERENCE])[common])
    return out


def _merge_error(name: str, error: NDArray[np.float64]) -> dict[str, float]:
    """Returns `merge/<strategy>/...` of errors `[N]`, N > 0; those of the reference are 0 by construction."""
    p99, p999 = np.percentile(np.abs(error), [99.0, 99.9])
    values = {
        m.MERGE_MEAN: error.mean(),
        m.MERGE_ABS: np.abs(error).mean(),
        m.MERGE_P99: p99,
        m.MERGE_P999: p999,
        m.MERGE_MAX: np.abs(error).max(),
    }
    return {key.format(strategy=name): float(value) for key, value in values.items()}


def _score(
    batch: DataProto, views: list[list[ReplayView]], log_probs: Callable[[DataProto], torch.Tensor]
) -> NDArray[np.float64]:
    """Returns float64 `[B, R]`, each token's log-prob under the view that carries its loss; NaN where none does."""
    original_rows, original_mask = batch.batch["routed_experts"], batch.batch["response_mask"]
    prompt_width = batch.batch["prompts"].shape[1]
    score = np.full(tuple(original_mask.shape), np.nan)
    try:
        for index in range(max((len(of) for of in views), default=0)):
            rows, carried = original_rows.clone(), np.zeros(score.shape, bool)
            for b, of in enumerate(views):
                if index < len(of):
                    prompt_len = int(batch.batch["attention_mask"][b, :prompt_width].sum())
                    _put(rows[b], carried[b], of[index], prompt_width - prompt_len, prompt_len)
            batch.batch["routed_experts"] = rows
            values = log_probs(batch).double().numpy()
            score[carried] = values[carried]
    finally:
        batch.batch["routed_experts"], batch.batch["response_mask"] = original_rows, original_mask
    return score


def _put(rows: torch.Tensor, carried: NDArray[Any], view: ReplayView, start: int, prompt_len: int) -> None:
    """Writes the view's rows at `start` of one trajectory's rows `[S, L, K]`, and marks its loss tokens in `[R]`.

    Rows behind a shorter view stay as they were: they come after every token that the view scores.
    """
    rows[start : start + len(view.rows)] = torch.from_numpy(view.rows.astype(np.int16))
    carried[: view.length - prompt_len] = view.loss_mask[prompt_len:]
