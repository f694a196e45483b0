"""Splits of a token table: which bucket each token is in, and means per bucket.

Buckets use fixed edges, so that sums of several batches merge. An empty bucket is missing from the result, never 0.

Legend: `N` counted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.log_ratio import Float, clamp, sum_by
from experiments.metrics.metric import SPLITS, Metric
from experiments.metrics.tokens import TokenTable

Index = NDArray[np.integer[Any]]

_LAG_EDGES = np.array([0, 1, 2, 3, 5, 9])
_BOUNDARY_EDGES = np.array([-64, -16, -3, 0, 1, 4, 16, 64])


def segment_bucket(table: TokenTable) -> Index:
    """Returns `[N]`: first, middle or last segment of the rollout, or its only one."""
    bucket = np.where(table.segment == 0, 0, np.where(table.segment == table.segments - 1, 2, 1))
    return np.where(table.segments == 1, 3, bucket)


def lag_bucket(table: TokenTable) -> Index:
    """Returns `[N]`: lag 0, 1, 2, 3-4, 5-8, 9 and above; -1 for a token of unknown version."""
    return np.searchsorted(_LAG_EDGES, table.lag, side="right") - 1


def versions_bucket(table: TokenTable) -> Index:
    """Returns `[N]`: 1 for tokens of rollouts with two or more known versions."""
    return table.multi_version.astype(np.int64)


def boundary_bucket(table: TokenTable) -> Index:
    """Returns `[N]`: signed distance to the nearest resume boundary; -1 without one, and below -64."""
    bucket = np.searchsorted(_BOUNDARY_EDGES, table.boundary, side="right") - 1
    return np.where(table.segments == 1, -1, bucket)


def probability_bucket(table: TokenTable) -> Index:
    """Returns `[N]`: tenth of the engine's probability e^mu; 1 belongs to the last tenth."""
    return np.minimum((10.0 * np.exp(table.rollout_log_probs)).astype(np.int64), 9)


_BUCKETS: dict[str, Callable[[TokenTable], Index]] = {
    "segment": segment_bucket,
    "lag": lag_bucket,
    "versions": versions_bucket,
    "boundary": boundary_bucket,
    "prob": probability_bucket,
}


@dataclass(frozen=True, eq=False)
class Buckets:
    """The buckets of a table's tokens by every split asked for."""

    index: Mapping[str, Index]
    count: Mapping[str, Float]

    @classmethod
    def of(cls, table: TokenTable, splits: tuple[str, ...]) -> Buckets:
        """Returns the buckets of `table` by `splits` (names of SPLITS)."""
        index = {split: _BUCKETS[split](table) for split in splits}
        count = {split: sum_by(index[split], np.ones(table.size), len(SPLITS[split])) for split in splits}
        return cls(index, count)

    def means(self, metric: Metric, values: NDArray[Any]) -> dict[str, float]:
        """Returns the mean of `values` `[N]` in every non-empty bucket of the metric's splits that are here."""
        return self._each(metric, lambda split: self._sums(split, values) / np.maximum(self.count[split], 1))

    def effective_sample_sizes(self, metric: Metric, x: Float) -> dict[str, float]:
        """Returns (sum w)^2 / (n sum w^2), w = e^x with x `[N]` clamped, in every non-empty bucket."""
        weight = np.exp(clamp(x))

        def per_bucket(split: str) -> Float:
            square = np.maximum(self.count[split], 1) * self._sums(split, weight**2)
            return self._sums(split, weight) ** 2 / np.where(square > 0, square, 1.0)

        return self._each(metric, per_bucket)

    def percentiles(self, metric: Metric, values: Float, q: float) -> dict[str, float]:
        """Returns the q-th percentile of `values` `[N]` in every non-empty bucket."""
        return self._each(
            metric,
            lambda split: np.array(
                [
                    np.percentile(values[self.index[split] == bucket], q) if count else np.nan
                    for bucket, count in enumerate(self.count[split])
                ]
            ),
        )

    def _sums(self, split: str, values: NDArray[Any]) -> Float:
        return sum_by(self.index[split], values.astype(np.float64), len(SPLITS[split]))

    def _each(self, metric: Metric, per_bucket: Callable[[str], Float]) -> dict[str, float]:
        return {
            metric.by(split, label): float(value)
            for split in self.index
            if split in metric.splits
            for label, value, count in zip(SPLITS[split], per_bucket(split), self.count[split], strict=True)
            if count
        }
