"""Sufficient statistics as plain numbers, so that they survive verl's averaging over micro-batches and ranks.

verl reduces every value that a loss returns by itself: summed over micro-batches and averaged over data-parallel ranks,
or taken to its extreme. What is packed here adds up exactly under that; the trainer unpacks and finalises once per
weight sync, to the metrics that experiments/metrics/ratios.py computes of a whole batch, splits included.

Legend: `N` counted tokens, d current minus old log-prob, D trainer's minus engine's, nats; p and q the trainer's and
the engine's probability of a token; g mean over a sequence of engine's minus trainer's log-prob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics import ratio_keys as m
from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.metrics.buckets import Buckets
from experiments.metrics.log_ratio import Float, LogRatioSums, clamp, k3, sum_by
from experiments.metrics.metric import SPLITS, TOKEN_SPLITS, Metric
from experiments.metrics.ratios import BAD_UPDATE_DROP, clip_flags
from experiments.metrics.tokens import TokenTable
from experiments.schema import AlgorithmConfig

PREFIX = "routemerge/"

SEQUENCE_BOUND = 150.0
"""Bound on a sequence's log-ratio, nats: sums of e^(2 D) must stay finite numbers here, log-sum-exp does not add up."""

LOGS = ("log_ratio_sum", "log_square_sum", "sequence_log_square_sum")
EXTREMES = {"lowest": "min", "highest": "max"}
COUNTS = frozenset(f.name for f in fields(LogRatioSums) if f.type == "int")

EMPTY_BINS = len(LogRatioAccumulator.of(np.zeros(1), np.zeros(1, np.int64), 2.0).counts)

COLUMNS = ("tokens", "clamped", "plain", "absolute", "square", "k3", "over_2", "clipped", "weight", "weight_square")
"""Sums per bucket of a split, of d: tokens, clamped d, d, |d|, d^2, e^d - 1 - d, |d| > ln 2, clipped tokens, e^d (d
clamped) and its square."""

TOKEN_TOTALS = ("clipped", "clipped_lower", "bad_update", "p", "q", "pp", "qq", "pq", "difference", "difference_square")
SEQUENCE_TOTALS = ("ratio", "trainer_perplexity", "engine_perplexity", "drift", "drift_absolute", "perplexity_ratio")
REDUCTIONS: dict[str, str] = {
    **dict.fromkeys((*TOKEN_TOTALS, *SEQUENCE_TOTALS), "sum"),
    **dict.fromkeys(("ratio_min", "drift_min"), "min"),
    **dict.fromkeys(("ratio_max", "drift_max", "difference_max"), "max"),
}
"""Numbers that are no sums of d alone, and how two of them merge. Of sequences: e^(mean d), e^(-mean trainer log-prob),
the engine's, g, |g|, e^g."""

_EMPTY = {"sum": 0.0, "min": np.inf, "max": -np.inf}
_MERGE = {"sum": lambda a, b: a + b, "min": min, "max": max}


@dataclass(frozen=True, eq=False)
class RatioStatistics:
    """Statistics of d over some tokens, whole sequences only; `+` merges.

    Attributes:
        ratios: of d; None without tokens.
        totals: the numbers of REDUCTIONS.
        by_split: by name of TOKEN_SPLITS, float64 `[len(COLUMNS), buckets]`.
    """

    ratios: LogRatioAccumulator | None
    totals: Mapping[str, float]
    by_split: Mapping[str, Float]

    @classmethod
    def of(cls, table: TokenTable, settings: AlgorithmConfig) -> RatioStatistics:
        """Returns the statistics of d = `log_probs - old_log_probs` of a table.

        Args:
            settings: clip_low, clip_high, dual_clip, ratio_level, importance_weight_cap are read.

        Raises:
            RuntimeError: d is not finite somewhere.
        """
        x = table.log_probs - table.old_log_probs
        if not x.size:
            empty = {split: np.zeros((len(COLUMNS), len(SPLITS[split]))) for split in TOKEN_SPLITS}
            return cls(None, {name: _EMPTY[reduction] for name, reduction in REDUCTIONS.items()}, empty)
        clipped, lower = clip_flags(table, settings)
        weight = np.exp(clamp(x))
        over = np.abs(x) > np.log(2.0)
        columns = (np.ones_like(x), clamp(x), x, np.abs(x), x * x, k3(x), over, clipped, weight, weight * weight)
        index = Buckets.of(table, TOKEN_SPLITS).index
        by_split = {
            split: np.stack([sum_by(index[split], np.asarray(c, np.float64), len(SPLITS[split])) for c in columns])
            for split in TOKEN_SPLITS
        }
        ratios = LogRatioAccumulator.of(x, table.rollout, settings.importance_weight_cap)
        return cls(ratios, _token_totals(table, clipped, lower) | _sequence_totals(table, x), by_split)

    def __add__(self, other: RatioStatistics) -> RatioStatistics:
        return RatioStatistics(
            self.ratios + other.ratios if self.ratios and other.ratios else self.ratios or other.ratios,
            {name: _MERGE[how](self.totals[name], other.totals[name]) for name, how in REDUCTIONS.items()},
            {split: sums + other.by_split[split] for split, sums in self.by_split.items()},
        )

    def ppo_metrics(self) -> dict[str, float]:
        """Returns the keys of `ratios.ppo_metrics` without those by mini-step; none without tokens."""
        if self.ratios is None:
            return {}
        n, sequences, t = self.ratios.sums.n, self.ratios.sums.sequences, self.totals
        out = self.ratios.ppo_metrics() | {
            m.PG_CLIPFRAC: t["clipped"] / n,
            m.PG_CLIPFRAC_LOWER: t["clipped_lower"] / n,
            m.PPO_BAD_UPDATE: t["bad_update"] / n,
            m.PPO_SEQ_RATIO: t["ratio"] / sequences,
            m.PPO_SEQ_RATIO_MIN: t["ratio_min"],
            m.PPO_SEQ_RATIO_MAX: t["ratio_max"],
        }
        for metric, column, sign in (
            (m.PPO_KL, "clamped", -1.0),
            (m.PPO_KL_K3, "k3", 1.0),
            (m.PG_CLIPFRAC, "clipped", 1.0),
        ):
            out |= self._means(metric, column, sign)
        return out | self._ratio_splits("ppo_ratio")

    def gap_metrics(self) -> dict[str, float]:
        """Returns the keys of `ratios.gap_metrics` but `gap/missing_log_probs`, of statistics whose d is D: those of a
        first mini-step in bypass mode, or of a table whose old log-probs are the engine's.
        """
        if self.ratios is None:
            return {}
        out = self.ratios.gap_metrics() | self._probabilities() | self._perplexities()
        for metric, column, sign in (
            (m.GAP_ABS, "absolute", 1.0),
            (m.CORR_KL, "plain", -1.0),
            (m.CORR_K3, "k3", 1.0),
        ):
            out |= self._means(metric, column, sign)
        return out | self._ratio_splits("gap_ratio")

    def mini_step_metrics(self, label: str) -> dict[str, float]:
        """Returns the metrics of one mini-step, `first` or `last`."""
        if self.ratios is None:
            return {}
        whole = self.ppo_metrics()
        metrics = (m.PPO_KL, m.PPO_KL_K3, m.PG_CLIPFRAC, m.RATIO_ESS)
        return {
            metric.by("mini_step", label).format(ratio="ppo_ratio"): whole[metric.format(ratio="ppo_ratio")]
            for metric in metrics
        }

    def _means(self, metric: Metric, column: str, sign: float) -> dict[str, float]:
        return {
            metric.by(split, label): sign * float(total / tokens)
            for split, sums in self.by_split.items()
            if split in metric.splits
            for label, total, tokens in zip(SPLITS[split], sums[COLUMNS.index(column)], sums[0], strict=True)
            if tokens
        }

    def _ratio_splits(self, ratio: str) -> dict[str, float]:
        out = self._means(m.RATIO_F2, "over_2", 1.0) | self._means(m.RATIO_M2, "square", 1.0)
        weight, square = COLUMNS.index("weight"), COLUMNS.index("weight_square")
        for split, sums in self.by_split.items():
            for label, w, s, tokens in zip(SPLITS[split], sums[weight], sums[square], sums[0], strict=True):
                if tokens:
                    out[m.RATIO_ESS.by(split, label)] = float(w * w / (tokens * s))
        return {key.format(ratio=ratio): value for key, value in out.items()}

    def _probabilities(self) -> dict[str, float]:
        assert self.ratios is not None
        n, t = self.ratios.sums.n, self.totals
        mean = t["difference"] / n
        out: dict[str, float] = {m.PROBS_DIFF_MEAN: mean, m.PROBS_DIFF_MAX: t["difference_max"]}
        if n > 1:
            out[m.PROBS_DIFF_STD] = float(np.sqrt(max(t["difference_square"] - n * mean * mean, 0.0) / (n - 1)))
        p, q = t["p"] / n, t["q"] / n
        scale = (t["pp"] / n - p * p) * (t["qq"] / n - q * q)
        if scale > 0.0:
            out[m.PROBS_PEARSON] = float(np.clip((t["pq"] / n - p * q) / np.sqrt(scale), -1.0, 1.0))
        return out

    def _perplexities(self) -> dict[str, float]:
        assert self.ratios is not None
        sequences, t = self.ratios.sums.sequences, self.totals
        return {
            m.CORR_TRAINING_PPL: t["trainer_perplexity"] / sequences,
            m.CORR_ROLLOUT_PPL: t["engine_perplexity"] / sequences,
            m.CORR_LOG_PPL_DIFF: t["drift"] / sequences,
            m.CORR_LOG_PPL_ABS: t["drift_absolute"] / sequences,
            m.CORR_LOG_PPL_MAX: t["drift_max"],
            m.CORR_LOG_PPL_MIN: t["drift_min"],
            m.CORR_PPL_RATIO: t["perplexity_ratio"] / sequences,
        }


def _token_totals(table: TokenTable, clipped: NDArray[np.bool_], lower: NDArray[np.bool_]) -> dict[str, float]:
    p, q = np.exp(table.log_probs), np.exp(table.rollout_log_probs)
    difference = np.abs(p - q)
    return {
        "clipped": float(clipped.sum()),
        "clipped_lower": float(lower.sum()),
        "bad_update": float(((table.advantages < 0) & (q - p >= BAD_UPDATE_DROP)).sum()),
        "p": float(p.sum()),
        "q": float(q.sum()),
        "pp": float(p @ p),
        "qq": float(q @ q),
        "pq": float(p @ q),
        "difference": float(difference.sum()),
        "difference_square": float(difference @ difference),
        "difference_max": float(difference.max()),
    }


def _sequence_totals(table: TokenTable, x: Float) -> dict[str, float]:
    ratio = np.exp(clamp(table.per_sequence_mean(x)))
    trainer, engine = table.per_sequence_mean(table.log_probs), table.per_sequence_mean(table.rollout_log_probs)
    drift = engine - trainer
    return {
        "ratio": float(ratio.sum()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "trainer_perplexity": float(np.exp(-trainer).sum()),
        "engine_perplexity": float(np.exp(-engine).sum()),
        "drift": float(drift.sum()),
        "drift_absolute": float(np.abs(drift).sum()),
        "drift_min": float(drift.min()),
        "drift_max": float(drift.max()),
        "perplexity_ratio": float(np.exp(clamp(drift)).sum()),
    }


def pack(statistics: RatioStatistics) -> dict[str, tuple[float, str]]:
    """Returns number and reduction (`sum`, `min`, `max`) by key; the same keys for every micro-batch, also without
    tokens.
    """
    ratios = statistics.ratios
    zeros = np.zeros(EMPTY_BINS)
    vectors = {
        "counts": zeros if ratios is None else ratios.counts,
        "k3_by_bin": zeros if ratios is None else ratios.k3_sums,
    } | {f"by_{split}": sums.ravel() for split, sums in statistics.by_split.items()}
    packed = {f"{PREFIX}{n}/{i}": (float(v), "sum") for n, vector in vectors.items() for i, v in enumerate(vector)}
    packed |= {f"{PREFIX}{name}": (value, REDUCTIONS[name]) for name, value in statistics.totals.items()}
    for f in fields(LogRatioSums):
        if f.name == "cap":
            continue
        reduction = EXTREMES.get(f.name, "sum")
        value = _EMPTY[reduction] if ratios is None else getattr(ratios.sums, f.name)
        if f.name in LOGS and ratios is not None:
            value = np.exp(min(value, 2 * SEQUENCE_BOUND))
        packed[f"{PREFIX}ratios/{f.name}"] = (float(value), reduction)
    return packed


def unpack(numbers: Mapping[str, float], ranks: int, cap: float) -> RatioStatistics:
    """Returns the statistics of one mini-step from verl's reduction of `pack`'s numbers over micro-batches and `ranks`
    data-parallel ranks (verl averages a sum over ranks).

    Raises:
        KeyError: a number is missing.
    """

    def number(name: str, reduction: str) -> float:
        return numbers[f"{PREFIX}{name}"] * (ranks if reduction == "sum" else 1)

    def vector(name: str, size: int) -> Float:
        return np.array([number(f"{name}/{i}", "sum") for i in range(size)])

    totals = {name: number(name, reduction) for name, reduction in REDUCTIONS.items()}
    by_split = {
        split: vector(f"by_{split}", len(COLUMNS) * len(SPLITS[split])).reshape(len(COLUMNS), -1)
        for split in TOKEN_SPLITS
    }
    values: dict[str, Any] = {"cap": cap}
    for f in fields(LogRatioSums):
        if f.name != "cap":
            values[f.name] = number(f"ratios/{f.name}", EXTREMES.get(f.name, "sum"))
    if round(values["n"]) == 0:
        return RatioStatistics(None, totals, by_split)
    for name in COUNTS:
        values[name] = round(values[name])
    for name in LOGS:
        values[name] = float(np.log(values[name]))
    counts = np.rint(vector("counts", EMPTY_BINS)).astype(np.int64)
    ratios = LogRatioAccumulator(LogRatioSums(**values), counts, vector("k3_by_bin", EMPTY_BINS))
    return RatioStatistics(ratios, totals, by_split)
