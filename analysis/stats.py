"""Means with intervals.

Tokens of one rollout share its interruptions and its rows: the rollout is the unit, not the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

RESAMPLES = 2000
LEVEL = 0.95
MIN_CLUSTERS = 10
"""An interval from fewer rollouts means nothing."""


def clustered_means(segments: pd.DataFrame, by: Sequence[str], cluster: Sequence[str]) -> pd.DataFrame:
    """Returns the mean |merge error| per token of every group, with a cluster-bootstrap percentile interval.

    mean = sum of `total` / sum of `count`. Whole clusters are drawn with replacement, the same ones for every group.
    With one run and `by=["strategy"]` the intervals are those of `summary.json.decision`.

    Source: Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8.

    Args:
        segments: rows with `total`, `count` and the columns of `by` and `cluster`.
        by: columns that make a group; groups come in sorted order.
        cluster: columns that make a cluster.

    Returns:
        Columns `by`, `mean`, `low`, `high`, `tokens`, `rollouts` (clusters with a token in the group); `low` and `high`
        are NaN with fewer than MIN_CLUSTERS of them, or where a resample missed the group altogether.
    """
    group = segments.groupby(list(by), sort=True, observed=True)
    clusters = segments.groupby(list(cluster), sort=True)
    index = group.ngroup().to_numpy(), clusters.ngroup().to_numpy()
    totals, counts = np.zeros((group.ngroups, clusters.ngroups)), np.zeros((group.ngroups, clusters.ngroups))
    np.add.at(totals, index, segments["total"].to_numpy(np.float64))
    np.add.at(counts, index, segments["count"].to_numpy(np.float64))

    generator = np.random.default_rng(0)
    size = clusters.ngroups
    resampled = np.empty((RESAMPLES, group.ngroups))
    with np.errstate(invalid="ignore"):  # a small group may be absent from a resample
        for row in resampled:
            weights = np.bincount(generator.integers(0, size, size), minlength=size)
            row[:] = (totals @ weights) / (counts @ weights)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    rollouts = (counts > 0).sum(axis=1)
    known = rollouts >= MIN_CLUSTERS
    out = group.size().index.to_frame(index=False)
    out["mean"] = totals.sum(axis=1) / counts.sum(axis=1)
    out["low"], out["high"] = np.where(known, low, np.nan), np.where(known, high, np.nan)
    out["tokens"], out["rollouts"] = counts.sum(axis=1).astype(int), rollouts
    return out
