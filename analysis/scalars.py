"""One number per run and metric: what every comparison of runs starts from.

Tokens, samples and updates inside a run are correlated and never enter a test as independent: the run is the unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.runs import Runs

type Float = NDArray[np.float64]

Direction = Literal["lower", "higher", "none"]


def _auc(steps: Float, values: Float) -> float:
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def _fifth(values: Float) -> int:
    return math.ceil(len(values) / 5)


REDUCTIONS: dict[str, Callable[[Float, Float], float]] = {
    "mean": lambda steps, values: float(values.mean()),
    "median": lambda steps, values: float(np.median(values)),
    "p95": lambda steps, values: float(np.percentile(values, 95)),
    "max": lambda steps, values: float(values.max()),
    "min": lambda steps, values: float(values.min()),
    "sd": lambda steps, values: float(values.std(ddof=1)),
    "auc": _auc,
    "first_fifth": lambda steps, values: float(values[: _fifth(values)].mean()),
    "last_fifth": lambda steps, values: float(values[-_fifth(values) :].mean()),
    "last": lambda steps, values: float(values[-1]),
}
"""Scalars of one run, from the updates (`steps`, `values`, `[n]` each) that logged the metric.

`max` is the largest spike; `sd` is unbiased (n - 1); `auc` is the trapezoid over the updates divided by their range, so
that it has the unit of the metric; `p95` and the fifths are those of `summary.json`.
"""
_NEED_TWO = ("sd", "auc")

SCALAR_COLUMNS = ("run", "strategy", "seed", "metric", "reduce", "value", "updates", "reason")


def scalars(runs: Runs, metric: str, reduce: str) -> pd.DataFrame:
    """Returns one row per run, SCALAR_COLUMNS.

    A value is NaN where the whole planned curve is not there to be reduced: the run did not complete, or the metric
    was infinite or never logged; `reason` then says which, and is empty otherwise. A curve is never shortened to what
    is finite. `updates` counts the updates that logged the metric (a sparse metric has fewer than the run).

    Raises:
        ValueError: `reduce` is not one of REDUCTIONS.
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce={reduce!r}: expected one of {', '.join(REDUCTIONS)}")
    curves: dict[str, tuple[Float, Float]] = {}
    if metric in runs.history:
        logged = runs.history.loc[runs.history[metric].notna(), ["run", "step", metric]]
        for run, own in logged.groupby("run", observed=True, sort=False):
            curves[str(run)] = own["step"].to_numpy(np.float64), own[metric].to_numpy(np.float64)
    empty = np.empty(0), np.empty(0)
    rows = []
    for run, facts in runs.runs.iterrows():
        steps, values = curves.get(str(run), empty)
        reason = unusable(facts) or _unusable_curve(steps, values, reduce)
        value = math.nan if reason else REDUCTIONS[reduce](steps, values)
        rows.append((run, facts["strategy"], facts["seed"], metric, reduce, value, len(values), reason))
    return pd.DataFrame(rows, columns=list(SCALAR_COLUMNS))


def unusable(facts: pd.Series) -> str:
    """Returns why the run of this row of `Runs.runs` has no whole curve; empty where it has."""
    done, planned = facts["steps"], facts["planned"]
    of = "" if pd.isna(planned) else f" of {planned:.0f}"
    if facts["status"] != "completed":
        return f"{facts['status']} after {done:.0f}{of} updates"
    return f"ended after {done:.0f}{of} updates" if of and done < planned else ""


def _unusable_curve(steps: Float, values: Float, reduce: str) -> str:
    if not len(values):
        return "never logged"
    if not np.isfinite(values).all():
        return f"not finite at update {steps[~np.isfinite(values)][0]:.0f}"
    if reduce in _NEED_TWO and len(values) < 2:
        return f"logged by one update, {reduce} needs two"
    return ""


# The first pattern that matches decides. What is not listed has no better end.
_DIRECTIONS: tuple[tuple[str, Direction], ...] = (
    (r"^reward/(mean|min|max|solved_frac)$", "higher"),
    (r"/(ess_raw|ess_trunc|rollout_is_eff_sample_size|rollout_actor_probs_pearson_corr)$", "higher"),
    (r"^route/(overlap|identical_frac|margin_p5)$", "higher"),
    (r"_ratio/p(0\.1|1|5|25)$|/(ratio_min|seq_ratio_min)$", "higher"),
    (r"_ratio/p(75|95|99|99\.9)$|/(ratio_max|ratio_std|seq_ratio_max)$", "lower"),
    (r"^(gap|merge)/.*\b(abs|sq|k3|F2|token_mult_error|nonzero_frac)", "lower"),
    (r"/(F2|F5|m2|k3_kl|kl_k2|kl_k3|chi2_token|chi2_seq|log1p_chi2_seq|bad_update_frac|log_ppl_abs_diff)$", "lower"),
    (r"^actor/.*pg_clipfrac", "lower"),
    (r"^training/rollout_probs_diff|^decomp/.*_(abs|sq)$", "lower"),
    (r"^route/(set_mismatch|token_any_mismatch|layers_differ|zero_overlap|churn)", "lower"),
)


def direction(metric: str, reduce: str) -> Direction:
    """Returns which end of the scalar is better; `none` for signed or neutral ones (`actor/ppo_kl`).

    A spread over the updates is better low where the metric itself is, and for `actor/ppo_kl`.
    """
    base = metric.split("_by_")[0]
    ends: list[Direction] = [end for pattern, end in _DIRECTIONS if re.search(pattern, base)]
    if reduce == "sd":
        return "lower" if ends[:1] == ["lower"] or base.endswith("/ppo_kl") else "none"
    return ends[0] if ends else "none"
