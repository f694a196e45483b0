"""Two arms of a study compared over paired seeds, and many arms described: pure functions on `scalars` of runs.

With fewer than MIN_SEEDS values nothing is claimed: no interval, no p. Figures and words are for others.

Sources: rliable, arXiv 2108.13264 (interquartile mean, probability of improvement, performance profile); Fisher, The
Design of Experiments, 1935, section 21 (sign-flip test); Holm, Scand. J. Statist. 6, 1979; Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, chapter 13 (percentile interval).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from analysis.scalars import Direction, direction

type Float = NDArray[np.float64]

MIN_SEEDS = 3
CONFIRMATORY_SEEDS = 6
NARROW_BELOW = 8
LEVEL = 0.95
RESAMPLES = 50_000
"""rliable's suggestion."""
_ENUMERATED = 16
"""Up to this many pairs all 2^n sign patterns are enumerated; beyond it as many random ones are drawn."""

Standing = Literal["too few seeds", "screening", "confirmatory"]


@dataclass(frozen=True, eq=False)
class PairedDifference:
    """`a` minus `b` of a scalar over the seeds that both arms have.

    Attributes:
        metric, reduce: the scalar.
        a, b: the arms.
        n, seeds: the pairs.
        differences: `[n]`, a - b of every seed, in the unit of the metric.
        left_out: one sentence for every seed that is not a pair, and why.
        mean_a, mean_b: means of the arms over the same seeds.
        mean, low, high: mean difference, with percentile bootstrap interval over the seeds.
        p: two-sided, of the exact sign-flip test; NaN below MIN_SEEDS.
        smallest_p: the smallest one attainable with these pairs.
        d_z: mean / sd of the differences; NaN where they are all equal.
        floor: size below which a difference is noise (`gap/floor_abs`); NaN where no floor was measured.
    """

    metric: str
    reduce: str
    a: str
    b: str
    seeds: tuple[int, ...]
    differences: Float
    left_out: tuple[str, ...]
    mean_a: float
    mean_b: float
    mean: float
    low: float
    high: float
    p: float
    smallest_p: float
    d_z: float
    floor: float = math.nan

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.seeds)

    @property
    def sd(self) -> float:
        """Unbiased standard deviation of the differences; NaN below two pairs."""
        return float(np.std(self.differences, ddof=1)) if self.n > 1 else math.nan

    @property
    def standing(self) -> Standing:
        """What the number of pairs allows."""
        return standing(self.n)

    @property
    def below_floor(self) -> bool:
        """Whether the mean difference is smaller than the measured noise floor."""
        return abs(self.mean) < self.floor


def standing(n: int) -> Standing:
    """Returns what `n` seeds allow: nothing below MIN_SEEDS, screening below CONFIRMATORY_SEEDS."""
    if n < MIN_SEEDS:
        return "too few seeds"
    return "screening" if n < CONFIRMATORY_SEEDS else "confirmatory"


def paired(scalars: pd.DataFrame, a: str, b: str, floor: float = math.nan) -> PairedDifference:
    """Returns `a` minus `b` over the seeds of `scalars` for which both arms have exactly one run and a finite value."""
    metric, reduce = (str(scalars[column].iloc[0]) if len(scalars) else "" for column in ("metric", "reduce"))
    cells: dict[int, dict[str, list[_Cell]]] = {}
    columns = (scalars[name] for name in ("strategy", "seed", "run", "value", "reason"))
    for strategy, seed, run, value, reason in zip(*columns, strict=True):
        if strategy in (a, b):
            cells.setdefault(int(seed), {a: [], b: []})[strategy].append(_Cell(str(run), float(value), reason))
    seeds, left_out, values = [], [], []
    for seed, found in sorted(cells.items()):
        problems = [problem for arm, own in found.items() if (problem := _not_one(own, arm))]
        if problems:
            left_out.append(f"seed {seed}: {'; '.join(problems)}")
            continue
        seeds.append(seed)
        values.append([found[arm][0].value for arm in (a, b)])
    both = np.array(values, dtype=np.float64).reshape(-1, 2)  # [n, 2]
    differences = both[:, 0] - both[:, 1]
    n = len(seeds)
    low, high = interval(differences)
    sd = float(np.std(differences, ddof=1)) if n > 1 else 0.0
    enough = n >= MIN_SEEDS
    return PairedDifference(
        metric=metric,
        reduce=reduce,
        a=a,
        b=b,
        seeds=tuple(seeds),
        differences=differences,
        left_out=tuple(left_out),
        mean_a=float(both[:, 0].mean()) if n else math.nan,
        mean_b=float(both[:, 1].mean()) if n else math.nan,
        mean=float(differences.mean()) if n else math.nan,
        low=low,
        high=high,
        p=sign_flip(differences) if enough else math.nan,
        smallest_p=smallest_p(int(np.count_nonzero(differences))),
        d_z=float(differences.mean()) / sd if sd > 0 else math.nan,
        floor=floor,
    )


class _Cell(NamedTuple):
    run: str
    value: float
    reason: str


def _not_one(own: Sequence[_Cell], arm: str) -> str:
    if not own:
        return f"no run of {arm}"
    if len(own) > 1:
        return f"{len(own)} runs of {arm} ({', '.join(cell.run for cell in own)}); give one"
    return f"{arm} {own[0].reason}" if own[0].reason else ""


def sign_flip(differences: Float) -> float:
    """Returns the two-sided p of the exact sign-flip test of a zero mean: the share of all 2^n sign patterns whose
    |mean| is at least the observed one.

    A zero difference stays zero under both signs, and patterns that tie with the observed one count. Above
    _ENUMERATED pairs the patterns are drawn, the observed one among them.
    """
    observed = float(differences.sum())
    sums = math.copysign(1.0, observed) * (differences @ sign_patterns(len(differences)))
    drawn = len(differences) > _ENUMERATED
    rounding = 1e-13 * np.abs(differences).sum()  # of the terms, not of their sum: they may cancel
    as_large = np.count_nonzero(sums >= abs(observed) - rounding) + drawn
    return min(1.0, 2 * as_large / (len(sums) + drawn))


@cache
def sign_patterns(n: int) -> Float:
    """Returns `[n, patterns]`: all 2^n patterns of 1 and -1, above _ENUMERATED so many random ones."""
    if n > _ENUMERATED:
        pairs = np.tile([1.0, -1.0], (2**_ENUMERATED, n, 1))
        return np.random.default_rng(0).permuted(pairs, axis=-1)[..., 0].T.copy()
    return 1.0 - 2.0 * (np.arange(2**n) >> np.arange(n)[:, None] & 1)


def smallest_p(n: int) -> float:
    """Returns 2^(1-n), the smallest two-sided p of a sign-flip test on `n` differences other than zero."""
    return min(1.0, 2.0 ** (1 - n))


def bearable_tests(n: int, alpha: float) -> int:
    """Returns how many tests on `n` pairs Holm can bear: the largest m with 2^(1-n) <= alpha / m. In a larger family
    nothing can be rejected.
    """
    return math.floor(alpha / smallest_p(n) * (1 + 1e-12))


def holm(p: Sequence[float], alpha: float) -> tuple[Float, NDArray[np.bool_]]:
    """Returns Holm's adjusted p-values `[m]` and which hypotheses are rejected at the family-wise level `alpha`.

    Adjusted: the running maximum over the sorted p of (m - i + 1) p_i, at most 1. A NaN (a test that could not be
    made) stays in the family, unadjusted and not rejected.
    """
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values)  # NaN last
    factors = len(values) - np.arange(len(values))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * values[order]), 1)
    return adjusted, adjusted <= alpha


def interval(values: Float, statistic: Callable[..., Float] = np.mean) -> tuple[float, float]:
    """Returns the LEVEL percentile bootstrap interval of `statistic(values, axis=)`; NaN below MIN_SEEDS values.

    `values` `[n]` are one per seed (differences, or the runs of an arm), resampled whole.
    """
    if len(values) < MIN_SEEDS:
        return math.nan, math.nan
    return _bootstrap((values,), statistic)


def _bootstrap(samples: tuple[Float, ...], statistic: Callable[..., Float]) -> tuple[float, float]:
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        batch=max(1, 2**20 // math.prod(map(len, samples))),
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def interval_coverage(n: int) -> float:
    """Returns how often the percentile interval of a mean of `n` normal values holds the true mean.

    It is about z sqrt((n-1)/n) standard errors wide on each side, where t with n - 1 degrees of freedom would be right.

    Source: Hesterberg, What Teachers Should Know about the Bootstrap, The American Statistician 69, 2015, section 4.
    """
    half = stats.norm.ppf((1 + LEVEL) / 2) * math.sqrt((n - 1) / n)
    return float(1 - 2 * stats.t.sf(half, n - 1))


def iqm(values: Float, axis: int = -1) -> Float:
    """Returns the interquartile mean: the mean without the floor(n/4) smallest and largest (with 3 values, the mean).

    Source: rliable, metrics.aggregate_iqm, with one task.
    """
    return stats.trim_mean(values, 0.25, axis=axis)


def probability_of_improvement(x: Float, y: Float, better: Direction) -> tuple[float, float, float]:
    """Returns P(X better than Y) + P(X = Y) / 2 over all pairs of runs, with percentile bootstrap interval.

    The runs of either arm are resampled on their own (rliable: stratified). `better="none"` reads as `lower`. The
    interval is NaN where an arm has fewer than MIN_SEEDS runs, everything where it has none; an interval [1, 1] says
    only that the runs of the arms do not overlap.

    Source: rliable, metrics.probability_of_improvement, with one task.
    """
    if not (len(x) and len(y)):
        return math.nan, math.nan, math.nan
    sign = 1.0 if better == "higher" else -1.0

    def share(first: Float, second: Float, axis: int = -1) -> Float:
        wins = np.sign(sign * (first[..., :, None] - second[..., None, :]))
        return 0.5 + wins.mean(axis=(-2, -1)) / 2

    value = float(share(np.asarray(x, np.float64), np.asarray(y, np.float64)))
    if min(len(x), len(y)) < MIN_SEEDS:
        return value, math.nan, math.nan
    return value, *_bootstrap((x, y), share)


def performance_profile(scalars: pd.DataFrame, points: int = 101) -> pd.DataFrame:
    """Returns `strategy`, `tau`, `share`: the share of an arm's runs whose score is at most tau, or above tau where
    higher is better; on a grid from the smallest to the largest score of all arms.

    A run without a value (not completed, not finite) counts as one that never does it.

    Source: rliable, section 4.2 and library.create_performance_profile.
    """
    finite = scalars["value"].dropna()
    if finite.empty:
        return pd.DataFrame({"strategy": [], "tau": [], "share": []})
    taus = np.linspace(finite.min(), finite.max(), points)
    higher = direction(scalars["metric"].iloc[0], scalars["reduce"].iloc[0]) == "higher"
    parts = []
    for strategy, own in scalars.groupby("strategy", sort=False, observed=True):
        values = own["value"].to_numpy(np.float64)[:, None]  # [runs, 1]; NaN compares as false
        share = (values > taus if higher else values <= taus).mean(axis=0)
        parts.append(pd.DataFrame({"strategy": strategy, "tau": taus, "share": share}))
    return pd.concat(parts, ignore_index=True)
