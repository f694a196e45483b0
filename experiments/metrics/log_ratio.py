"""Numerically safe pieces for statistics of log-ratios, and their sufficient statistics.

Everything is float64. Log-ratios are clamped to +-20 where, and only where, they enter an exponential; clamped tokens
are counted.

Legend: `N` counted tokens, `M` sequences, x log-ratio in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.floating[Any]]

LOG_RATIO_BOUND = 20.0
"""Bound on a log-ratio inside an exponential, nats; verl's `SAFETY_BOUND` and the clamp of its policy losses."""

SEQUENCE_LOG_RATIO_MAX = 10.0
"""Upper bound on the log-ratio of a sequence inside an exponential; verl `compute_policy_loss_gspo`."""

SERIES_BELOW = 1e-4
"""Below this |x| the k3 estimator uses its series: expm1(x) - x has lost half its digits there."""


def clamp(x: Float) -> Float:
    """Returns x within +-20, same shape."""
    return np.clip(x, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k3(x: Float) -> Float:
    """Returns e^x - 1 - x >= 0 per token, nats, x clamped to +-20; x^2/2 + x^3/6 where |x| < 1e-4.

    Its mean estimates KL(q || p) for x = log p - log q on tokens sampled from q.
    Source: Schulman, joschu.net/blog/kl-approx.html.
    """
    x = clamp(x)
    return np.where(np.abs(x) < SERIES_BELOW, x * x * (0.5 + x / 6.0), np.expm1(x) - x)


def log_sum_exp(x: Float) -> float:
    """Returns ln(sum(e^x)) of a non-empty array without overflow."""
    peak = float(x.max())
    return peak + float(np.log(np.exp(x - peak).sum()))


def sum_by(index: NDArray[np.integer[Any]], values: Float, size: int) -> Float:
    """Returns float64 `[size]`: sums of `values` `[N]` by their `index` `[N]`; negative indices are left out."""
    keep = index >= 0
    return np.bincount(index[keep], weights=values[keep], minlength=size).astype(np.float64)


@dataclass(frozen=True)
class LogRatioSums:
    """Sufficient statistics of the log-ratios of `n` > 0 tokens. Two of them merge exactly (`+`).

    Attributes:
        n: tokens.
        total, clamped_total, absolute, square, k3_total: sums of x, clamped x, |x|, x^2, e^x - 1 - x.
        ratio_abs: sum of e^|x|.
        log_ratio_sum, log_square_sum: log-sum-exp of x and of 2x, x clamped.
        lowest, highest: extremes of x, unclamped.
        over_2, over_5: tokens with |x| > ln 2, > ln 5.
        clamped: tokens with |x| > 20.
        cap: C of the truncated weights min(e^x, C).
        high, low: tokens with e^x > C, < 1/C.
        excess, excess_square: sums of e^x - 1 and of its square (around 1, so that a tiny spread keeps its digits).
        weight_excess, weight_excess_square: the same of the truncated weights.
        sequences: M.
        sequence_log_square_sum: log-sum-exp over sequences of 2 D, D the sum of x over a sequence, unclamped.
        sequence_square: sum over sequences of e^(2 D), D clamped to +-20.
    """

    n: int
    total: float
    clamped_total: float
    absolute: float
    square: float
    k3_total: float
    ratio_abs: float
    log_ratio_sum: float
    log_square_sum: float
    lowest: float
    highest: float
    over_2: int
    over_5: int
    clamped: int
    cap: float
    high: int
    low: int
    excess: float
    excess_square: float
    weight_excess: float
    weight_excess_square: float
    sequences: int
    sequence_log_square_sum: float
    sequence_square: float

    @classmethod
    def of(cls, x: Float, sequence: NDArray[np.integer[Any]], cap: float) -> LogRatioSums:
        """Returns the statistics of x `[N]`, N > 0; `sequence` `[N]`: id of each token's whole sequence."""
        bounded = clamp(x)
        absolute = np.abs(x)
        excess = np.expm1(bounded)
        weight_excess = np.minimum(excess, cap - 1.0)
        ids, inverse = np.unique(sequence, return_inverse=True)
        drift = sum_by(inverse, x, ids.size)  # [M]
        return cls(
            n=x.size,
            total=float(x.sum()),
            clamped_total=float(bounded.sum()),
            absolute=float(absolute.sum()),
            square=float(x @ x),
            k3_total=float(k3(x).sum()),
            ratio_abs=float(np.exp(np.abs(bounded)).sum()),
            log_ratio_sum=log_sum_exp(bounded),
            log_square_sum=log_sum_exp(2.0 * bounded),
            lowest=float(x.min()),
            highest=float(x.max()),
            over_2=int(np.count_nonzero(absolute > np.log(2.0))),
            over_5=int(np.count_nonzero(absolute > np.log(5.0))),
            clamped=int(np.count_nonzero(absolute > LOG_RATIO_BOUND)),
            cap=cap,
            high=int(np.count_nonzero(x > np.log(cap))),
            low=int(np.count_nonzero(x < -np.log(cap))),
            excess=float(excess.sum()),
            excess_square=float(excess @ excess),
            weight_excess=float(weight_excess.sum()),
            weight_excess_square=float(weight_excess @ weight_excess),
            sequences=ids.size,
            sequence_log_square_sum=log_sum_exp(2.0 * drift),
            sequence_square=float(np.exp(2.0 * clamp(drift)).sum()),
        )

    def __add__(self, other: LogRatioSums) -> LogRatioSums:
        """Returns the statistics of both sets of tokens; no sequence may have tokens in both."""
        if self.cap != other.cap:
            raise ValueError(f"log-ratio statistics: caps of truncated weights differ, {self.cap} and {other.cap}")
        combine = {
            "log_ratio_sum": np.logaddexp,
            "log_square_sum": np.logaddexp,
            "sequence_log_square_sum": np.logaddexp,
            "lowest": min,
            "highest": max,
            "cap": min,
        }
        merged = {}
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            merged[name] = type(mine)(combine[name](mine, theirs)) if name in combine else mine + theirs
        return LogRatioSums(**merged)

    @property
    def ess(self) -> float:
        """Effective sample size of the untruncated ratios over n: (sum e^x)^2 / (n sum e^2x), in (0, 1]."""
        return float(np.exp(2.0 * self.log_ratio_sum - self.log_square_sum - np.log(self.n)))

    @property
    def ess_truncated(self) -> float:
        """Effective sample size of the truncated weights over n."""
        mean, square = self.weight_excess / self.n, self.weight_excess_square / self.n
        return (1.0 + mean) ** 2 / (1.0 + 2.0 * mean + square)

    @property
    def chi2(self) -> float:
        """Mean of e^2x minus 1, through log-sum-exp."""
        return float(np.expm1(self.log_square_sum - np.log(self.n)))

    @property
    def ratio_std(self) -> float:
        """Standard deviation (biased, as verl's) of e^x."""
        return _std(self.excess / self.n, self.excess_square / self.n)

    @property
    def weight_std(self) -> float:
        """Standard deviation (biased, as verl's) of the truncated weights."""
        return _std(self.weight_excess / self.n, self.weight_excess_square / self.n)


def _std(mean: float, square: float) -> float:
    return float(np.sqrt(max(square - mean**2, 0.0)))
