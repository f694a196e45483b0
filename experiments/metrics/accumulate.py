"""Statistics of log-ratios where no process sees the whole batch: accumulate per micro-batch or rank, add, finalise.

Averaging finished statistics over micro-batches is wrong for everything non-linear (percentiles, ESS, chi-square,
extremes). An accumulator holds sums that add exactly and a histogram with fixed bins, and gives the same keys as the
whole-batch functions.

Bins of x: one for |x| < 1e-6; 64 per decade for 1e-6 <= |x| <= 20 on each side; one overflow bin per side. A percentile
of x is then right within 4 % relative, and one beyond 20 is reported as 20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.log_ratio import LOG_RATIO_BOUND, Float, LogRatioSums, k3, sum_by
from experiments.metrics.ratios import gap_statistics, ppo_statistics

BINS_PER_DECADE = 64
SMALLEST = 1e-6
_SIDE = int(np.ceil(BINS_PER_DECADE * np.log10(LOG_RATIO_BOUND / SMALLEST)))
_EDGES = np.minimum(SMALLEST * 10.0 ** (np.arange(_SIDE + 1) / BINS_PER_DECADE), LOG_RATIO_BOUND)
_CENTRES = np.concatenate(([0.0], np.sqrt(_EDGES[1:] * _EDGES[:-1]), [LOG_RATIO_BOUND]))
"""|x| that stands for a bin: 0, geometric centres, 20 for the overflow."""


@dataclass(frozen=True, eq=False)
class LogRatioAccumulator:
    """Sums and histogram of a log-ratio. `+` merges two; no sequence may be split between them.

    Attributes:
        sums: exact sufficient statistics.
        counts: int64 `[2 * bins + 1]`, tokens by bin of x, from the most negative bin to the most positive.
        k3_sums: float64, sum of e^x - 1 - x by the same bins.
    """

    sums: LogRatioSums
    counts: NDArray[np.int64]
    k3_sums: Float

    @classmethod
    def of(cls, x: Float, sequence: NDArray[np.integer[Any]], cap: float) -> LogRatioAccumulator:
        """Returns the accumulator of x `[N]`, N > 0, nats.

        Args:
            x: log-ratios.
            sequence: `[N]`, id of each token's sequence, of which all tokens must be here.
            cap: C of the truncated weights.

        Raises:
            RuntimeError: x is not finite somewhere.
        """
        x = np.asarray(x, dtype=np.float64)
        if not np.isfinite(x).all():
            raise RuntimeError(f"log-ratio: {int((~np.isfinite(x)).sum())} of {x.size} values are NaN or infinite")
        size = np.abs(x)
        level = np.where(
            size > LOG_RATIO_BOUND, _SIDE + 1, np.minimum(np.searchsorted(_EDGES, size, side="right"), _SIDE)
        )
        index = _SIDE + 1 + np.where(x < 0, -level, level)
        bins = 2 * _SIDE + 3
        counts = np.bincount(index, minlength=bins)
        return cls(LogRatioSums.of(x, sequence, cap), counts, sum_by(index, k3(x), bins))

    def __add__(self, other: LogRatioAccumulator) -> LogRatioAccumulator:
        return LogRatioAccumulator(self.sums + other.sums, self.counts + other.counts, self.k3_sums + other.k3_sums)

    def gap_metrics(self) -> dict[str, float]:
        """Returns the keys of `ratios.gap_statistics`, x = trainer's minus engine's log-prob."""
        return gap_statistics(self.sums, self)

    def ppo_metrics(self) -> dict[str, float]:
        """Returns the keys of `ratios.ppo_statistics`, x = current minus old log-prob."""
        return ppo_statistics(self.sums, self)

    def percentiles(self, q: NDArray[np.float64]) -> Float:
        """Returns the q-th percentiles of x, within 4 %."""
        return _percentiles(np.concatenate((-_CENTRES[:0:-1], _CENTRES)), self.counts, q)

    def absolute_percentiles(self, q: NDArray[np.float64]) -> Float:
        """Returns the q-th percentiles of |x|, within 4 %."""
        middle = _SIDE + 1
        folded = self.counts[middle:].copy()
        folded[1:] += self.counts[middle - 1 :: -1]
        return _percentiles(_CENTRES, folded, q)

    def largest_k3(self, tokens: int) -> float:
        """Returns the sum of e^x - 1 - x over the `tokens` tokens where it is largest; a cut bin is shared evenly."""
        filled = np.flatnonzero(self.counts)
        mean = self.k3_sums[filled] / self.counts[filled]
        order = filled[np.argsort(-mean)]
        taken = np.minimum(
            np.maximum(tokens - np.cumsum(self.counts[order]) + self.counts[order], 0), self.counts[order]
        )
        return float((self.k3_sums[order] * taken / self.counts[order]).sum())


def _percentiles(centres: Float, counts: NDArray[np.int64], q: NDArray[np.float64]) -> Float:
    """Returns percentiles by linear interpolation between order statistics, each taken as the centre of its bin."""
    cumulative = np.cumsum(counts)
    rank = q / 100.0 * (cumulative[-1] - 1)
    below = np.floor(rank)
    lower = centres[np.searchsorted(cumulative, below, side="right")]
    upper = centres[np.searchsorted(cumulative, np.ceil(rank), side="right")]
    return lower + (rank - below) * (upper - lower)
