"""Which merge rule errs least on the rollouts that a run saw: the ranking of summary.json, from merge_errors.jsonl.

Tokens of one rollout share its interruptions and its rows, so that they are no independent observations: intervals come
from resampling whole rollouts (cluster bootstrap; Davison and Hinkley, Bootstrap Methods and their Application, 1997,
section 3.8; percentile interval). The intervals speak of the rollouts of this run, one seed; they say nothing of other
runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.merge_error import NOISE

RESAMPLES = 2000
LEVEL = 0.95
MIN_ROLLOUTS = 10
"""An interval from fewer clusters means nothing."""


def decide(lines: Sequence[Mapping[str, Any]], excluded_frac: float = 0.0) -> dict[str, Any] | None:
    """Returns the ranking by mean |merge error|, smallest first; None without a scored strategy.

    Every strategy is judged on the tokens that it counts; `loss_frac` says which share of all that is. One that masks
    some is listed, but not compared: it is judged on easier tokens. `better_than_next` is the share of resamples in
    which a strategy's mean was below that of the next one that counts all tokens, both on the same rollouts.

    Args:
        lines: of merge_errors.jsonl (experiments/shadow_report.py).
        excluded_frac: share of the scored rollouts that have no exact view and are in no line (`merge/excluded_frac`).
    """
    names = sorted({name for line in lines for name in line["errors"]})
    if not names:
        return None
    rollouts, owner = np.unique([line["rollout"] for line in lines], return_inverse=True)
    tokens = np.bincount(owner, weights=[line["tokens"] for line in lines])
    sums = np.zeros((len(names), len(rollouts)))
    counts = np.zeros((len(names), len(rollouts)))
    for line, cluster in zip(lines, owner, strict=True):
        for name, (total, count, _) in line["errors"].items():
            sums[names.index(name), cluster] += total
            counts[names.index(name), cluster] += count
    means = sums.sum(axis=1) / counts.sum(axis=1)
    resampled = _resample(sums, counts) if len(rollouts) >= MIN_ROLLOUTS else None
    order = [int(index) for index in np.argsort(means, kind="stable")]
    loss_frac = counts.sum(axis=1) / tokens.sum()
    whole = [index for index in order if loss_frac[index] == 1.0]
    following = dict(itertools.pairwise(whole))
    ranking = [
        {
            "strategy": names[index],
            "mean": float(means[index]),
            **_interval(resampled, index),
            "loss_frac": float(loss_frac[index]),
            "better_than_next": _share_below(resampled, index, following.get(index)),
        }
        for index in order
    ]
    decision = {
        "measure": "mean |merge error| per token, nats",
        "interval": f"{LEVEL:.0%} cluster bootstrap over rollouts, {RESAMPLES} resamples",
        "rollouts": len(rollouts),
        "interrupted": int(np.unique(owner[[line["segments"] > 1 for line in lines]]).size),
        "excluded_frac": excluded_frac,
        "tokens": int(tokens.sum()),
        "ranking": ranking,
    }
    return decision | {"verdict": _verdict(decision)}


def _resample(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns float64 `[RESAMPLES, strategies]`: means over resampled rollouts, the same ones for every strategy."""
    generator = np.random.default_rng(0)
    size = sums.shape[1]
    out = np.empty((RESAMPLES, len(sums)))
    for row in out:
        weights = np.bincount(generator.integers(0, size, size), minlength=size)
        with np.errstate(invalid="ignore"):  # a strategy that counts few segments may be absent from a resample
            row[:] = (sums @ weights) / (counts @ weights)
    return out


def _interval(resampled: NDArray[np.float64] | None, index: int) -> dict[str, float | None]:
    if resampled is None or np.isnan(resampled[:, index]).any():
        return {"low": None, "high": None}
    low, high = np.quantile(resampled[:, index], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"low": float(low), "high": float(high)}


def _share_below(resampled: NDArray[np.float64] | None, index: int, following: int | None) -> float | None:
    """Returns the share of resamples in which `index` is below `following`; equal ones count half."""
    if resampled is None or following is None:
        return None
    mine, other = resampled[:, index], resampled[:, following]
    return float((mine < other).mean() + 0.5 * (mine == other).mean())


def _verdict(decision: Mapping[str, Any]) -> str:
    """Returns the ranking of the rules that count all tokens in one sentence, and no more than it supports."""
    rollouts = f"these {decision['rollouts']} rollouts"
    if decision["excluded_frac"] > 0:
        rollouts += f" ({decision['excluded_frac']:.0%} more have no exact rows and were left out)"
    ranking = [entry for entry in decision["ranking"] if entry["loss_frac"] == 1.0]
    if not decision["interrupted"]:
        return f"none of {rollouts} was interrupted: there was nothing to merge"
    if not ranking:
        return "no scored rule counts all tokens: nothing to compare"
    best = ranking[0]
    if best["mean"] < NOISE:
        exact = [entry["strategy"] for entry in ranking if entry["mean"] < NOISE]
        return f"{', '.join(exact)}: no merge error on {rollouts}"
    if len(ranking) == 1:
        return f"{best['strategy']}: mean |merge error| {best['mean']:.2g} nats on {rollouts}"
    share, following = best["better_than_next"], ranking[1]
    if share is None:
        return f"{rollouts} are too few to rank strategies; {MIN_ROLLOUTS} are needed"
    if share < LEVEL:
        return f"{best['strategy']} and {following['strategy']} are not told apart by {rollouts}"
    factor = following["mean"] / best["mean"]
    return f"{best['strategy']} errs least on {rollouts}, {factor:.1f} times less than the next"


def decision_table(decision: Mapping[str, Any]) -> list[str]:
    """Returns the ranking as lines of text."""
    lines = [f"{'merge rule':<16}{'mean |merge error|':>20}{'interval':>24}{'tokens':>9}{'below next':>12}"]
    for entry in decision["ranking"]:
        low, high, below = entry["low"], entry["high"], entry["better_than_next"]
        interval = "-" if low is None else f"{low:.2e} .. {high:.2e}"
        share = "-" if below is None else f"{below:.1%}"
        lines.append(
            f"{entry['strategy']:<16}{entry['mean']:>20.3e}{interval:>24}{entry['loss_frac']:>9.0%}{share:>12}"
        )
    lines.append(f"{decision['rollouts']} rollouts; {decision['interval']}; exact is the reference")
    if any(entry["loss_frac"] < 1.0 for entry in decision["ranking"]):
        lines.append("a rule that counts fewer than all tokens is judged on easier ones, and not compared")
    return [*lines, decision["verdict"]]
