"""Where the log-ratio between trainer and engine comes from: staleness, merge error, engine mismatch.

    l(now, strategy's rows) - mu =   l(now, exact rows) - l(generating, exact rows)        staleness, with exact rows
                                   + l(now, strategy's rows) - l(now, exact rows)          merge error
                                   + l(generating, exact rows) - mu                        engine mismatch

The parts add up per token. The order is fixed: staleness measured with the strategy's rows would give another split.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from experiments.metrics import route_keys as m
from experiments.metrics.log_ratio import Float
from experiments.metrics.merge_error import merge_errors
from experiments.metrics.tokens import TokenTable


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The parts of D per token, float64 `[n]`, nats, for the tokens whose generating weights were at hand.

    Attributes:
        stale, merge, engine: the parts.
        residual: D minus their sum: rounding alone.
        coverage: n over the strategy's tokens.
    """

    stale: Float
    merge: Float
    engine: Float
    residual: Float
    coverage: float


def decompose(strategy: TokenTable, exact: TokenTable, generating: TokenTable) -> Decomposition:
    """Returns the decomposition of D of the strategy's tokens.

    Args:
        strategy: the strategy's views under the current weights.
        exact: exact views under the current weights.
        generating: exact views, each token scored under the weights that sampled it; may lack tokens.

    Raises:
        RuntimeError: the strategy counts a token that the exact views do not.
    """
    index, known = generating.locate(strategy)
    kept = strategy.select(known)
    merge = merge_errors(kept, exact)
    current_exact = kept.log_probs - merge
    then = generating.log_probs[index[known]]
    stale, engine = current_exact - then, then - kept.rollout_log_probs
    total = kept.log_probs - kept.rollout_log_probs
    coverage = kept.size / strategy.size if strategy.size else 1.0
    return Decomposition(stale, merge, engine, total - (stale + merge + engine), coverage)


def decomposition_metrics(parts: Decomposition) -> dict[str, float]:
    """Returns `decomp/*`; only the coverage when no token has its generating weights.

    mean(D^2) = sum of the parts' `_sq` + 2 * sum of the `cov_*`, exactly: the cross terms are means of products, not
    centred.
    """
    out: dict[str, float] = {m.DECOMP_COVERAGE: parts.coverage}
    if not parts.stale.size:
        return out
    values = {"stale": parts.stale, "merge": parts.merge, "engine": parts.engine}
    for name, value in values.items():
        out[m.DECOMP_MEAN.format(part=name)] = float(value.mean())
        out[m.DECOMP_ABS.format(part=name)] = float(np.abs(value).mean())
        out[m.DECOMP_SQ.format(part=name)] = float((value * value).mean())
    for a, b in combinations(values, 2):
        out[m.DECOMP_COV.format(pair=f"{a}_{b}")] = float((values[a] * values[b]).mean())
    out[m.DECOMP_RESIDUAL] = float(np.abs(parts.residual).max())
    return out


def rest_metrics(strategy: TokenTable, exact: TokenTable) -> dict[str, float]:
    """Returns `decomp/rest_*`: staleness plus engine mismatch, all that is known without the old weights."""
    if not strategy.size:
        return {}
    rest = strategy.log_probs - strategy.rollout_log_probs - merge_errors(strategy, exact)
    return {
        m.DECOMP_REST_MEAN: float(rest.mean()),
        m.DECOMP_REST_ABS: float(np.abs(rest).mean()),
        m.DECOMP_REST_SQ: float((rest * rest).mean()),
    }
