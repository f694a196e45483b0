"""Sufficient statistics as plain numbers, so that they survive verl's averaging over micro-batches and ranks.

verl reduces every value that a loss returns by itself: summed over micro-batches and averaged over data-parallel ranks,
or taken to its extreme. What is packed here adds up exactly under that; the trainer unpacks and finalises once per
weight sync (experiments/metrics/accumulate.py has the statistics themselves).

Legend: `N` counted tokens, d current minus old log-prob, nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.metrics.log_ratio import Float, LogRatioSums, clamp, sum_by
from experiments.metrics.metric import LAGS
from experiments.metrics.ratio_keys import GAP_ABS, PPO_KL

PREFIX = "routemerge/"

SEQUENCE_BOUND = 150.0
"""Bound on a sequence's log-ratio, nats: sums of e^(2 D) must stay finite numbers here, log-sum-exp does not add up."""

LOGS = ("log_ratio_sum", "log_square_sum", "sequence_log_square_sum")
EXTREMES = {"lowest": "min", "highest": "max"}
COUNTS = frozenset(f.name for f in fields(LogRatioSums) if f.type == "int")

EMPTY_BINS = len(LogRatioAccumulator.of(np.zeros(1), np.zeros(1, np.int64), 2.0).counts)


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """Statistics of d over some tokens; `+` merges.

    Attributes:
        ratios: of all tokens; None without tokens.
        lag_tokens, lag_kl, lag_absolute: float64 `[len(LAGS)]`, tokens, sum of -d (clamped) and of |d| by version lag.
    """

    ratios: LogRatioAccumulator | None
    lag_tokens: Float
    lag_kl: Float
    lag_absolute: Float

    @classmethod
    def of(cls, x: Float, sequence: NDArray[np.int64], lag: NDArray[np.int64], cap: float) -> StepStatistics:
        """Returns the statistics of d `[N]`, N >= 0.

        Args:
            x: d.
            sequence: `[N]`, id of each token's sequence, whole ones only.
            lag: `[N]`, index into LAGS, -1 for unknown.
            cap: C of the truncated weights.

        Raises:
            RuntimeError: d is not finite somewhere.
        """
        x = np.asarray(x, dtype=np.float64)
        size = len(LAGS)
        return cls(
            LogRatioAccumulator.of(x, sequence, cap) if x.size else None,
            sum_by(lag, np.ones_like(x), size),
            sum_by(lag, -clamp(x), size),
            sum_by(lag, np.abs(x), size),
        )

    def __add__(self, other: StepStatistics) -> StepStatistics:
        both = self.ratios + other.ratios if self.ratios and other.ratios else self.ratios or other.ratios
        return StepStatistics(
            both,
            self.lag_tokens + other.lag_tokens,
            self.lag_kl + other.lag_kl,
            self.lag_absolute + other.lag_absolute,
        )

    def ppo_metrics(self) -> dict[str, float]:
        """Returns the keys of `LogRatioAccumulator.ppo_metrics`, and `actor/ppo_kl_by_lag/...`; none without tokens."""
        out = self.ratios.ppo_metrics() if self.ratios else {}
        return out | self._by_lag(PPO_KL, self.lag_kl)

    def gap_metrics(self) -> dict[str, float]:
        """Returns the same of the gap: d of a first mini-step in bypass mode is trainer's minus engine's log-prob."""
        out = self.ratios.gap_metrics() if self.ratios else {}
        return out | self._by_lag(GAP_ABS, self.lag_absolute)

    def _by_lag(self, metric: Any, sums: Float) -> dict[str, float]:
        return {
            metric.by("lag", label): float(total / tokens)
            for label, total, tokens in zip(LAGS, sums, self.lag_tokens, strict=True)
            if tokens
        }


def pack(statistics: StepStatistics) -> dict[str, tuple[float, str]]:
    """Returns number and reduction (`sum`, `min`, `max`) by key; the same keys for every micro-batch, also without
    tokens.
    """
    ratios = statistics.ratios
    packed = {f"{PREFIX}{name}": (value, "sum") for name, value in _vectors(statistics)}
    for f in fields(LogRatioSums):
        if f.name == "cap":
            continue
        reduction = EXTREMES.get(f.name, "sum")
        empty = {"sum": 0.0, "min": np.inf, "max": -np.inf}[reduction]
        value = empty if ratios is None else getattr(ratios.sums, f.name)
        if f.name in LOGS and ratios is not None:
            value = np.exp(min(value, 2 * SEQUENCE_BOUND))
        packed[f"{PREFIX}{f.name}"] = (float(value), reduction)
    return packed


def _vectors(statistics: StepStatistics) -> list[tuple[str, float]]:
    ratios = statistics.ratios
    zeros = np.zeros(EMPTY_BINS)
    arrays = {
        "counts": zeros if ratios is None else ratios.counts,
        "k3_by_bin": zeros if ratios is None else ratios.k3_sums,
        "lag_tokens": statistics.lag_tokens,
        "lag_kl": statistics.lag_kl,
        "lag_absolute": statistics.lag_absolute,
    }
    return [(f"{name}/{i}", float(value)) for name, array in arrays.items() for i, value in enumerate(array)]


def unpack(numbers: Mapping[str, float], ranks: int, cap: float) -> StepStatistics:
    """Returns the statistics of one mini-step from verl's reduction of `pack`'s numbers over micro-batches and `ranks`
    data-parallel ranks (verl averages a sum over ranks).

    Raises:
        KeyError: a number is missing.
    """

    def vector(name: str, size: int) -> Float:
        return np.array([numbers[f"{PREFIX}{name}/{i}"] for i in range(size)]) * ranks

    values: dict[str, Any] = {"cap": cap}
    for f in fields(LogRatioSums):
        if f.name != "cap":
            number = numbers[f"{PREFIX}{f.name}"]
            values[f.name] = number if f.name in EXTREMES else number * ranks
    by_lag = [vector(name, len(LAGS)) for name in ("lag_tokens", "lag_kl", "lag_absolute")]
    if round(values["n"]) == 0:
        return StepStatistics(None, *by_lag)
    for name in COUNTS:
        values[name] = round(values[name])
    for name in LOGS:
        values[name] = float(np.log(values[name]))
    counts = np.rint(vector("counts", EMPTY_BINS)).astype(np.int64)
    ratios = LogRatioAccumulator(LogRatioSums(**values), counts, vector("k3_by_bin", EMPTY_BINS))
    return StepStatistics(ratios, *by_lag)
