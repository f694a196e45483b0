"""What a study of n paired seeds could have seen: the smallest difference that its sign-flip test finds often enough.

Source: Colas, Sigaud and Oudeyer, How Many Random Seeds?, arXiv 1806.08295, section 4, with the sign-flip test in place
of Welch's.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy import optimize, stats

from analysis.compare import MIN_SEEDS, PairedDifference, sign_patterns, smallest_p
from analysis.markdown import number

POWER = 0.8
_SIMULATED = 10
"""Up to so many pairs the power is simulated; beyond it that of the t-test, which the sign-flip test approaches."""
_STUDIES = 2000


@cache
def detectable_effect(n: int, alpha: float, power: float = POWER) -> float:
    """Returns the mean difference, in standard deviations of the paired differences, that the exact sign-flip test at
    `alpha` on `n` pairs finds with probability `power`, if the differences are normal; inf where it can reject nothing.
    """
    if n < MIN_SEEDS or smallest_p(n) > alpha:
        return math.inf
    found = optimize.root_scalar(lambda effect: _power(n, alpha, effect) - power, bracket=(0.0, 3.0), xtol=1e-4)
    return float(found.root)


def _power(n: int, alpha: float, effect: float) -> float:
    if n > _SIMULATED:
        critical, shift = stats.t.ppf(1 - alpha / 2, n - 1), effect * math.sqrt(n)
        return float(stats.nct.sf(critical, n - 1, shift))  # the other tail is nothing at a power worth having
    noise, signs = _noise(n)
    differences = noise + effect
    sums = np.abs(differences @ signs)  # [studies, 2^(n-1)], the other half has equal sizes
    as_large = sums >= np.abs(differences.sum(axis=1, keepdims=True)) * (1 - 1e-12)
    return float((as_large.mean(axis=1) <= alpha).mean())


@cache
def _noise(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the differences of `_STUDIES` studies without an effect, the same for every effect, and sign patterns."""
    signs = sign_patterns(n)[:, : 2 ** (n - 1)]  # the last sign is 1
    return np.random.default_rng(0).standard_normal((_STUDIES, n)), signs


def statement(result: PairedDifference, alpha: float) -> str:
    """Returns what the pairs of `result` could have seen at `alpha`, as a sentence."""
    n = result.n
    if smallest_p(n) > alpha or n < MIN_SEEDS:
        return (
            f"With {n} paired seed{'s' * (n != 1)} no difference, however large, could have been significant: the "
            f"smallest two-sided p is {number(smallest_p(n))}, and {number(alpha)} is needed."
        )
    if not result.sd > 0:
        return f"The {n} paired differences are all equal: they say nothing about what could have been seen."
    effect = detectable_effect(n, alpha)
    return (
        f"With {n} paired seeds this study could have seen a difference of {number(effect * result.sd)} "
        f"({number(effect)} sd of the paired differences, sd {number(result.sd)}) with {POWER:.0%} power at "
        f"{number(alpha)}."
    )
