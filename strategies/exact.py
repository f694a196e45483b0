"""The rule `exact`: one forward per segment, so that every token is scored through the rows it was sampled with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.checks import check_rollout, clip, gather, row_dtype, rows_used, where
from strategies.types import MergeError, ReplayView, Rollout, Rows

BLOCK = 256
"""Rows compared at a time."""


def continues(first: Rows, longer: Rows) -> bool:
    """Returns whether `first` `[m, L, K]` is the beginning of `longer`; stops at the first block that differs."""
    return all(
        np.array_equal(first[start : start + BLOCK], longer[start : min(start + BLOCK, len(first))])
        for start in range(0, len(first), BLOCK)
    )


@dataclass(frozen=True)
class Exact:
    """One view per segment: the rows that its own call used for positions 0..last-2, with loss on that segment only.

    The views partition the counted tokens. A view whose rows continue those of the view before it joins that view: one
    forward is exact for both. This is so when the KV cache was kept, when a resumed prefix was routed through its
    recorded rows, and when a resume reproduced the rows. Segments in which no token has a log-prob need no view.

    Raises MergeError where no view can be exact: the engine recomputed older tokens' rows inside a call (`mixed_rows`).
    """

    single_view: ClassVar[bool] = False

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        counted, dtype = rollout.counted(), row_dtype(rollout)
        views: list[ReplayView] = []
        for segment in rollout.segments():
            if rollout.calls[segment.call_index].mixed_rows:
                raise MergeError(
                    f"{where(rollout, segment.call_index)}: rows of one weight version per call expected, the "
                    "engine recomputed the prefix inside the call under newer weights; pause with abort or in_place, "
                    "or drop the rollout"
                )
            mask = np.zeros(segment.last, dtype=bool)
            mask[segment.first :] = counted[segment.first : segment.last]
            if not mask.any():
                continue
            rows = gather(rollout, clip(rows_used(rollout, segment.call_index), 0, segment.last - 1), dtype)
            if views and continues(views[-1].rows, rows):
                mask[: views[-1].length] |= views.pop().loss_mask
            views.append(ReplayView(rows, mask))
        return views
