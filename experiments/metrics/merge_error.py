"""Merge error: what a strategy's rows change, with everything else equal.

m = log-prob under the strategy's rows minus log-prob under the exact view's rows, same weights, same token:
staleness and engine mismatch cancel. Positive: the strategy's rows make the sampled token more likely than the rows
that the engine used.
"""

from __future__ import annotations

import numpy as np

from experiments.metrics import route_keys as m
from experiments.metrics.buckets import Buckets
from experiments.metrics.log_ratio import Float, k3
from experiments.metrics.route_keys import MERGE_SPLITS
from experiments.metrics.tokens import TokenTable

NOISE = 1e-6
"""|m| up to this is rounding, nats: a forward over a longer view is padded and added up otherwise."""


def merge_errors(strategy: TokenTable, exact: TokenTable) -> Float:
    """Returns float64 `[N]`, nats: m of every token that the strategy counts.

    Args:
        strategy, exact: tables over the same rollouts, scored under the same weights.

    Raises:
        RuntimeError: the strategy counts a token that the exact views do not.
    """
    index, found = exact.locate(strategy)
    if not found.all():
        first = int(np.flatnonzero(~found)[0])
        raise RuntimeError(
            f"merge error: {int((~found).sum())} tokens carry loss under the strategy, but in no exact view; "
            f"first: {strategy.rollout_ids[int(strategy.rollout[first])]}, position {int(strategy.position[first])}"
        )
    return strategy.log_probs - exact.log_probs[index]


def merge_metrics(strategy: TokenTable, exact: TokenTable, name: str, floor: float) -> dict[str, float]:
    """Returns `merge/<name>/*`; empty when the strategy counts no token.

    Args:
        strategy, exact: tables over the same rollouts, scored under the same weights.
        name: name of the strategy, in the keys.
        floor: |m| up to this is noise, nats (`gap/floor_abs_max` of two equal forwards; 0 when forwards repeat bit
            for bit).
    """
    if not strategy.size:
        return {}
    error = merge_errors(strategy, exact)
    size, square = np.abs(error), k3(error)
    p99, p999 = np.percentile(size, [99.0, 99.9])
    buckets = Buckets.of(strategy, (*MERGE_SPLITS, "prob"))
    out: dict[str, float] = {
        m.MERGE_MEAN: float(error.mean()),
        m.MERGE_ABS: float(size.mean()),
        m.MERGE_P99: float(p99),
        m.MERGE_P999: float(p999),
        m.MERGE_MAX: float(size.max()),
        m.MERGE_K3: float(square.mean()),
        m.MERGE_F2: float((size > np.log(2.0)).mean()),
        m.MERGE_NONZERO: float((size > floor).mean()),
        m.MERGE_LOSS_FRAC: strategy.size / exact.size,
    }
    out |= buckets.means(m.MERGE_MEAN, error) | buckets.means(m.MERGE_ABS, size) | buckets.means(m.MERGE_K3, square)
    out |= buckets.percentiles(m.MERGE_P99, size, 99.0)
    return {key.format(strategy=name): value for key, value in out.items()}
