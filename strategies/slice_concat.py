"""The rule `slice_concat`: one matrix, every position as it was routed when it was first fed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.checks import (
    Span,
    check_rollout,
    clip,
    gather,
    one_view,
    prompt_view,
    row_dtype,
    rows_first_fed,
    view_length,
)
from strategies.types import ReplayView, Rollout, Rows


def first_fed_rows(rollout: Rollout) -> tuple[list[Span], Rows]:
    """Returns where each row comes from, and rows `[t-1, L, K]`.

    Call 0 gives positions 0..s_1-2, a later call k the positions that it fed first, s_k-1 on.

    Raises:
        MergeError: the call that first fed a position did not return its row. A later call's row is never taken
            instead.
    """
    spans = clip(rows_first_fed(rollout), 0, view_length(rollout) - 1)
    return spans, gather(rollout, spans, row_dtype(rollout))


@dataclass(frozen=True)
class SliceConcat:
    """One view: for every position the row of the call that first fed it, with loss on all response tokens.

    Exact for the first segment; later tokens were sampled on a prefix that was routed again under newer weights. Rows
    of a call that generated nothing are left out, as verl does. Source: verl PR #6046.
    """

    single_view: ClassVar[bool] = True
    new_rows_only: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        if not any(rollout.segments()):
            return prompt_view(rollout)
        return one_view(rollout, first_fed_rows(rollout)[1])
