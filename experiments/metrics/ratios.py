"""The PPO ratio and the gap between rollout and trainer, computed once per update over all counted tokens.

Nothing here is averaged over micro-batches or mini-steps: tables are concatenated first. Definitions: `ratio_keys.py`.

Legend: `N` counted tokens; d current minus old log-prob; D trainer's minus engine's log-prob; C cap of the truncated
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experiments.metrics import ratio_keys as m
from experiments.metrics.buckets import Buckets
from experiments.metrics.log_ratio import SEQUENCE_LOG_RATIO_MAX, Float, LogRatioSums, clamp, k3
from experiments.metrics.metric import MINI_STEPS, PERCENTILES, TOKEN_SPLITS, under_strategy
from experiments.metrics.tokens import TokenTable
from experiments.schema import AlgorithmConfig, RatioLevel

K3_TAIL_SHARE = 0.001
"""Share of tokens that `gap/k3_trim` leaves out."""

BAD_UPDATE_DROP = 0.5
"""Fall of a token's probability that counts as a bad update, arXiv 2602.04879."""


class Distribution(Protocol):
    """What is needed of a log-ratio beyond sums: exact values here, a histogram in `accumulate.py`."""

    def percentiles(self, q: NDArray[np.float64]) -> Float:
        """Returns the q-th percentiles of x."""
        ...

    def absolute_percentiles(self, q: NDArray[np.float64]) -> Float:
        """Returns the q-th percentiles of |x|."""
        ...

    def largest_k3(self, tokens: int) -> float:
        """Returns the sum of e^x - 1 - x over the `tokens` tokens where it is largest."""
        ...


@dataclass(frozen=True, eq=False)
class Exact:
    """The distribution of x `[N]` itself."""

    x: Float

    def percentiles(self, q: NDArray[np.float64]) -> Float:
        return np.percentile(self.x, q)

    def absolute_percentiles(self, q: NDArray[np.float64]) -> Float:
        return np.percentile(np.abs(self.x), q)

    def largest_k3(self, tokens: int) -> float:
        return float(np.partition(k3(self.x), self.x.size - tokens)[self.x.size - tokens :].sum())


def ratio_statistics(ratio: str, sums: LogRatioSums, distribution: Distribution) -> dict[str, float]:
    """Returns the stability statistics of e^x under the prefix `ratio` (`gap_ratio` or `ppo_ratio`)."""
    n = sums.n
    percentiles = np.exp(clamp(distribution.percentiles(np.array([float(q) for q in PERCENTILES]))))
    out = {m.RATIO_PERCENTILE.format(ratio=ratio, q=q): float(p) for q, p in zip(PERCENTILES, percentiles, strict=True)}
    values = {
        m.RATIO_MEAN: 1.0 + sums.excess / n,
        m.RATIO_STD: sums.ratio_std,
        m.RATIO_MIN: _bounded_exp(sums.lowest),
        m.RATIO_MAX: _bounded_exp(sums.highest),
        m.RATIO_F2: sums.over_2 / n,
        m.RATIO_F5: sums.over_5 / n,
        m.RATIO_ESS: sums.ess,
        m.RATIO_CHI2_SEQ_LOG: sums.sequence_log_square_sum - float(np.log(sums.sequences)),
        m.RATIO_M2: sums.square / n,
        m.RATIO_CLAMPED: sums.clamped / n,
        m.RATIO_NONFINITE: 0.0,
    }
    return out | {key.format(ratio=ratio): value for key, value in values.items()}


def gap_statistics(sums: LogRatioSums, distribution: Distribution) -> dict[str, float]:
    """Returns the `gap/*` and `rollout_corr/*` metrics that follow from D alone, and `gap_ratio/*`."""
    n = sums.n
    p99, p999 = distribution.absolute_percentiles(np.array([99.0, 99.9]))
    tail = int(np.ceil(K3_TAIL_SHARE * n))
    top = distribution.largest_k3(tail)
    out: dict[str, float] = {
        m.GAP_ABS: sums.absolute / n,
        m.GAP_ABS_P99: float(p99),
        m.GAP_ABS_P999: float(p999),
        m.GAP_ABS_MAX: max(abs(sums.lowest), abs(sums.highest)),
        m.GAP_SQ: sums.square / n,
        m.GAP_MULT: sums.ratio_abs / n,
        m.CORR_KL: -sums.total / n,
        m.CORR_K3: sums.k3_total / n,
        m.CORR_CHI2: sums.chi2,
        m.CORR_CHI2_SEQ: sums.sequence_square / sums.sequences - 1.0,
        m.CORR_IS_ESS: sums.ess_truncated,
        m.CORR_IS_HIGH: sums.high / n,
        m.CORR_IS_LOW: sums.low / n,
        m.CORR_IS_MEAN: 1.0 + sums.weight_excess / n,
        m.CORR_IS_STD: sums.weight_std,
        m.CORR_IS_MAX: min(_bounded_exp(sums.highest), sums.cap),
        m.CORR_IS_MIN: min(_bounded_exp(sums.lowest), sums.cap),
    }
    if n > tail:
        out[m.GAP_K3_TRIM] = max(sums.k3_total - top, 0.0) / (n - tail)
    if sums.k3_total > 0.0:
        out[m.GAP_K3_TOP] = min(top / sums.k3_total, 1.0)
    return out | ratio_statistics("gap_ratio", sums, distribution)


def ppo_statistics(sums: LogRatioSums, distribution: Distribution) -> dict[str, float]:
    """Returns `actor/ppo_kl` and the `ppo/*` metrics that follow from d alone, and `ppo_ratio/*`."""
    return {
        m.PPO_KL: -sums.clamped_total / sums.n,
        m.PPO_KL_K2: sums.square / (2.0 * sums.n),
        m.PPO_KL_K3: sums.k3_total / sums.n,
        m.PPO_ESS_TRUNC: sums.ess_truncated,
        m.PPO_CHI2: sums.chi2,
    } | ratio_statistics("ppo_ratio", sums, distribution)


def gap_metrics(table: TokenTable, cap: float) -> dict[str, float]:
    """Returns everything about D = trainer's minus engine's log-prob; empty for an empty table.

    Args:
        table: `log_probs` are the trainer's at scoring time, under the strategy's rows.
        cap: C of the truncated weights (`algorithm.importance_weight_cap`).
    """
    if not table.size:
        return {}
    x = table.log_probs - table.rollout_log_probs
    buckets = Buckets.of(table, TOKEN_SPLITS)
    absolute = np.abs(x)
    out = gap_statistics(LogRatioSums.of(x, table.rollout, cap), Exact(x))
    out[m.GAP_MISSING] = float(table.missing)
    out |= _probability_metrics(table) | _perplexity_metrics(table)
    out |= buckets.means(m.GAP_ABS, absolute) | buckets.means(m.CORR_KL, -x) | buckets.means(m.CORR_K3, k3(x))
    return out | _ratio_buckets("gap_ratio", x, buckets)


def ppo_metrics(mini_steps: Sequence[TokenTable], settings: AlgorithmConfig) -> dict[str, float]:
    """Returns everything about d = current minus old log-prob over an update; empty without tokens.

    `actor/ppo_kl` and the others are over all tokens of all mini-steps. Only the first mini-step isolates the rollout
    gap, because the weights are still those of scoring time: it is logged as `..._by_mini_step/first`, the last one as
    `.../last` (equal to the first when there is one).

    Args:
        mini_steps: one table per optimiser step, in order; `log_probs` under the weights before that step.
        settings: clip_low, clip_high, dual_clip, ratio_level, importance_weight_cap are read.
    """
    mini_steps = [table for table in mini_steps if table.size]
    if not mini_steps:
        return {}
    out = _update_metrics(TokenTable.concatenate(mini_steps), settings)
    for label, step in zip(MINI_STEPS, (mini_steps[0], mini_steps[-1]), strict=True):
        out |= _mini_step_metrics(label, step, settings)
    return out


def _update_metrics(table: TokenTable, settings: AlgorithmConfig) -> dict[str, float]:
    x = table.log_probs - table.old_log_probs
    buckets = Buckets.of(table, TOKEN_SPLITS)
    clipped, lower = clip_flags(table, settings)
    drop = np.exp(table.rollout_log_probs) - np.exp(table.log_probs)
    sequence_ratio = np.exp(clamp(table.per_sequence_mean(x)))
    out = ppo_statistics(LogRatioSums.of(x, table.rollout, settings.importance_weight_cap), Exact(x))
    out |= {
        m.PG_CLIPFRAC: float(clipped.mean()),
        m.PG_CLIPFRAC_LOWER: float(lower.mean()),
        m.PPO_SEQ_RATIO: float(sequence_ratio.mean()),
        m.PPO_SEQ_RATIO_MIN: float(sequence_ratio.min()),
        m.PPO_SEQ_RATIO_MAX: float(sequence_ratio.max()),
        m.PPO_BAD_UPDATE: float(((table.advantages < 0) & (drop >= BAD_UPDATE_DROP)).mean()),
    }
    out |= buckets.means(m.PPO_KL, -clamp(x)) | buckets.means(m.PPO_KL_K3, k3(x))
    return out | buckets.means(m.PG_CLIPFRAC, clipped) | _ratio_buckets("ppo_ratio", x, buckets)


def shadow_metrics(table: TokenTable, settings: AlgorithmConfig, strategy: str) -> dict[str, float]:
    """Returns the would-be PPO and gap metrics of a strategy, as in `actor/replace/ppo_kl`.

    Args:
        table: tokens under the strategy's views, scored under the weights before the update.
    """
    if not table.size:
        return {}
    gap = gap_metrics(table, settings.importance_weight_cap)
    return under_strategy(_update_metrics(table, settings) | gap, strategy)


def floor_metrics(first: Float, second: Float) -> dict[str, float]:
    """Returns `gap/floor_*` of the log-probs `[N]` of two forwards with equal weights and routes."""
    if first.shape != second.shape or not first.size:
        raise ValueError(
            f"metrics: the noise floor needs two equal, non-empty sets of tokens, got {first.shape}, {second.shape}"
        )
    x = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    if not np.isfinite(x).all():
        raise RuntimeError(f"{m.GAP_FLOOR_ABS}: {int((~np.isfinite(x)).sum())} of {x.size} differences are not finite")
    absolute = np.abs(x)
    return {
        m.GAP_FLOOR_ABS: float(absolute.mean()),
        m.GAP_FLOOR_P99: float(np.percentile(absolute, 99.0)),
        m.GAP_FLOOR_MAX: float(absolute.max()),
        m.GAP_FLOOR_K3: float(k3(x).mean()),
    }


def best_shift(table: TokenTable) -> dict[str, float]:
    """Returns `gap/shift_best`, or nothing where a correlation is undefined (few or constant tokens).

    0 wins ties. Anything but 0 at the first step means that rows or log-probs are off by one: the run should stop.
    """
    trainer, engine = table.log_probs, table.rollout_log_probs
    left = np.flatnonzero((np.diff(table.rollout) == 0) & (np.diff(table.position) == 1))
    pairs = {0: (trainer, engine), 1: (trainer[left], engine[left + 1]), -1: (trainer[left + 1], engine[left])}
    correlation = {shift: _correlation(*pair) for shift, pair in pairs.items() if pair[0].size >= 3}
    if len(correlation) < 3 or any(value is None for value in correlation.values()):
        return {}
    return {m.GAP_SHIFT: float(max(correlation, key=lambda shift: correlation[shift] or 0.0))}


def _ratio_buckets(ratio: str, x: Float, buckets: Buckets) -> dict[str, float]:
    out = buckets.means(m.RATIO_F2, np.abs(x) > np.log(2.0)) | buckets.means(m.RATIO_M2, x * x)
    out |= buckets.effective_sample_sizes(m.RATIO_ESS, x)
    return {key.format(ratio=ratio): value for key, value in out.items()}


def _mini_step_metrics(label: str, table: TokenTable, settings: AlgorithmConfig) -> dict[str, float]:
    x = table.log_probs - table.old_log_probs
    weight = np.exp(clamp(x))
    return {
        m.PPO_KL.by("mini_step", label): float(-clamp(x).mean()),
        m.PPO_KL_K3.by("mini_step", label): float(k3(x).mean()),
        m.PG_CLIPFRAC.by("mini_step", label): float(clip_flags(table, settings)[0].mean()),
        m.RATIO_ESS.by("mini_step", label).format(ratio="ppo_ratio"): float(
            weight.sum() ** 2 / (x.size * (weight @ weight))
        ),
    }


def clip_flags(table: TokenTable, settings: AlgorithmConfig) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns bool `[N]` twice: the clipped loss exceeds the plain one; the dual clip is active (token level).

    Args:
        settings: clip_low, clip_high, dual_clip, ratio_level are read.
    """
    x = table.log_probs - table.old_log_probs
    advantages = table.advantages
    if settings.ratio_level is RatioLevel.sequence:
        total, count = np.bincount(table.rollout, weights=x), np.bincount(table.rollout)
        ratio = np.exp(np.minimum((total / np.maximum(count, 1))[table.rollout], SEQUENCE_LOG_RATIO_MAX))
    else:
        ratio = np.exp(clamp(x))
    plain = -advantages * ratio
    inside = -advantages * np.clip(ratio, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    lower = (advantages < 0) & (np.maximum(plain, inside) > -advantages * settings.dual_clip)
    return inside > plain, lower & (settings.ratio_level is RatioLevel.token)


def _probability_metrics(table: TokenTable) -> dict[str, float]:
    p, q = np.exp(table.log_probs), np.exp(table.rollout_log_probs)
    difference = np.abs(p - q)
    out: dict[str, float] = {m.PROBS_DIFF_MEAN: float(difference.mean()), m.PROBS_DIFF_MAX: float(difference.max())}
    if table.size > 1:
        out[m.PROBS_DIFF_STD] = float(difference.std(ddof=1))
    correlation = _correlation(p, q)
    return out if correlation is None else out | {m.PROBS_PEARSON: correlation}


def _perplexity_metrics(table: TokenTable) -> dict[str, float]:
    trainer, engine = table.per_sequence_mean(table.log_probs), table.per_sequence_mean(table.rollout_log_probs)
    difference = engine - trainer  # [M]
    return {
        m.CORR_TRAINING_PPL: float(np.exp(-trainer).mean()),
        m.CORR_ROLLOUT_PPL: float(np.exp(-engine).mean()),
        m.CORR_LOG_PPL_DIFF: float(difference.mean()),
        m.CORR_LOG_PPL_ABS: float(np.abs(difference).mean()),
        m.CORR_LOG_PPL_MAX: float(difference.max()),
        m.CORR_LOG_PPL_MIN: float(difference.min()),
        m.CORR_PPL_RATIO: float(np.exp(clamp(difference)).mean()),
    }


def _correlation(a: Float, b: Float) -> float | None:
    """Returns the correlation of `a` and `b`, None when either is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(np.clip((a @ b) / scale, -1.0, 1.0)) if scale > 0.0 else None


def _bounded_exp(x: float) -> float:
    return float(np.exp(clamp(np.array(x))))
