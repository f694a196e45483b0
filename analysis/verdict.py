"""What a declared comparison allows to be said: one sentence that claims no more than its numbers support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis import markdown
from analysis.compare import (
    CONFIRMATORY_SEEDS,
    LEVEL,
    MIN_SEEDS,
    NARROW_BELOW,
    PairedDifference,
    bearable_tests,
    holm,
    interval_coverage,
)
from analysis.markdown import number
from analysis.power import statement

Outcome = Literal[
    "supported", "not supported", "not distinguishable", "cannot be tested", "too few seeds", "no pairs", "confounded"
]


@dataclass(frozen=True)
class Verdict:
    """What one declared comparison came to.

    Attributes:
        outcome: in two words.
        sentence: for the reader who reads nothing else.
        result: the numbers.
        p_holm: adjusted over the declared family; NaN where there is no p.
    """

    outcome: Outcome
    sentence: str
    result: PairedDifference
    p_holm: float


def verdicts(results: Sequence[PairedDifference], confounds: Sequence[Sequence[str]], alpha: float) -> list[Verdict]:
    """Returns one verdict per result; `results` are the whole declared family, `confounds[i]` the configuration keys
    in which the arms of `results[i]` differ beside their strategy.
    """
    adjusted, rejected = holm([result.p for result in results], alpha)
    return [
        _verdict(result, keys, _Test(float(p), bool(reject), _obstacle(result, results, alpha), len(results), alpha))
        for result, keys, p, reject in zip(results, confounds, adjusted, rejected, strict=True)
    ]


def family_warning(results: Sequence[PairedDifference], alpha: float) -> str:
    """Returns that the declared family is larger than its seeds bear, to be read before any result; empty if not."""
    most, family = max((result.n for result in results), default=0), len(results)
    borne = bearable_tests(most, alpha) if most >= MIN_SEEDS else 0
    if borne >= family:
        return ""
    tests = f"{borne or 'no'} test{'s' * (borne != 1)}"
    return (
        f"{_seeds(most)} bear{'s' * (most == 1)} {tests} at {number(alpha)}, the plan declares {family}: "
        "none can be rejected."
    )


def interval_warning(results: Sequence[PairedDifference]) -> str:
    """Returns that the bootstrap intervals are too narrow at these numbers of seeds; empty where they are not."""
    fewest = min((result.n for result in results if result.n >= MIN_SEEDS), default=NARROW_BELOW)
    if fewest >= NARROW_BELOW:
        return ""
    return (
        f"{LEVEL:.0%} bootstrap intervals from {fewest} seeds are too narrow: of normal differences they would hold "
        f"the true mean about {interval_coverage(fewest):.0%} of the time."
    )


@dataclass(frozen=True)
class _Test:
    p_holm: float
    rejected: bool
    obstacle: str
    family: int
    alpha: float


def _obstacle(result: PairedDifference, results: Sequence[PairedDifference], alpha: float) -> str:
    """Returns why the test of `result` could not reject whatever the sizes of its differences; empty where it could."""
    if result.smallest_p > alpha:
        return f"{_seeds(result.n)} allow no p below {number(result.smallest_p)}"
    if result.n < CONFIRMATORY_SEEDS:
        return f"{_seeds(result.n)} are for screening, a claim needs {CONFIRMATORY_SEEDS}"
    first = alpha / len(results)
    if all(other.smallest_p > first or other.n < MIN_SEEDS for other in results):
        return f"Holm asks one of {len(results)} tests for p <= {number(first)} first, and no test here can reach it"
    return ""


def _verdict(result: PairedDifference, confounds: Sequence[str], test: _Test) -> Verdict:
    names = f"{result.reduce} {result.metric} of {result.a} and {result.b}"
    left_out = f" Left out: {'; '.join(result.left_out)}." if result.left_out else ""
    if result.n == 0:
        return Verdict("no pairs", f"No claim on the {names}: no seed has both.{left_out}", result, test.p_holm)
    if result.n < MIN_SEEDS:
        sentence = (
            f"No claim on the {names}: {_seeds(result.n)}, and with fewer than {MIN_SEEDS} a difference cannot be told "
            f"from chance between seeds.{left_out}"
        )
        return Verdict("too few seeds", sentence, result, test.p_holm)
    outcome, sentence = _tested(result, names, test)
    if confounds:
        keys = ", ".join(confounds[:4]) + (f" and {len(confounds) - 4} more" if len(confounds) > 4 else "")
        also = f"{result.a} and {result.b} also differ in {keys}"
        outcome, sentence = "confounded", f"Confounded: {also}, so no difference is the strategy's. {sentence}"
    return Verdict(outcome, sentence + left_out, result, test.p_holm)


def _tested(result: PairedDifference, names: str, test: _Test) -> tuple[Outcome, str]:
    numbers = difference_text(result)
    if result.below_floor:
        return "not distinguishable", (
            f"The {names} are not distinguishable: their difference ({numbers}) is below the noise floor of "
            f"{number(result.floor)}, whatever its p."
        )
    if not np.any(result.differences):
        return "not distinguishable", f"The {names} are equal in all {_seeds(result.n)}."
    if test.obstacle:
        return "cannot be tested", f"Whether the {names} differ cannot be tested: {test.obstacle}. Seen: {numbers}."
    holm_text = f", {number(test.p_holm)} after Holm over {test.family}" if test.family > 1 else ""
    evidence = f"{numbers}; exact sign-flip p = {number(result.p)}{holm_text}, {_seeds(result.n)}"
    if test.rejected:
        less = "smaller" if result.mean < 0 else "larger"
        return "supported", f"{result.a} has a {less} {result.reduce} {result.metric} than {result.b}: {evidence}."
    return "not supported", (
        f"No difference between the {names} is shown: {evidence}, not significant at {number(test.alpha)}. "
        f"{statement(result, test.alpha / test.family)}"
    )


def difference_text(result: PairedDifference) -> str:
    """Returns the mean difference with its interval, and both means."""
    return (
        f"{result.a} minus {result.b} {markdown.interval(result.mean, result.low, result.high)} "
        f"({number(result.mean_a)} against {number(result.mean_b)})"
    )


def _seeds(n: int) -> str:
    return f"{n} paired seed{'s' * (n != 1)}"
