"""The rule `last_segment`: replay only where one call's rows are beyond doubt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.checks import check_rollout, clip, gather, live_rows, one_view, prompt_view, rows_used, view_length
from strategies.types import ReplayView, Rollout


@dataclass(frozen=True)
class LastSegment:
    """One view: the rows that predicted the last segment's tokens, live elsewhere; loss on all response tokens.

    Those are the rows of positions first-1..last-2 of the call that generated tokens first..last-1.
    """

    single_view: ClassVar[bool] = True
    new_rows_only: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        segments = list(rollout.segments())
        if not segments:
            return prompt_view(rollout)
        first, last = segments[-1].first, segments[-1].last
        rows = live_rows(rollout, view_length(rollout) - 1)
        spans = clip(rows_used(rollout, segments[-1].call_index), first - 1, last - 1)
        rows[first - 1 : last - 1] = gather(rollout, spans, rows.dtype)
        return one_view(rollout, rows)
