"""The rule `replace`: one matrix, as the newest call saw the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.checks import (
    calls_with_tokens,
    check_rollout,
    clip,
    gather,
    missing,
    one_view,
    prompt_view,
    row_dtype,
    rows_used,
    view_length,
)
from strategies.types import MergeError, ReplayView, Rollout, Rows


def newest_rows(rollout: Rollout) -> Rows:
    """Returns `[t-1, L, K]`: the rows that the newest call covering positions 0..t-2 was routed through.

    A call that generated nothing is not considered, whatever rows it returned: verl (PR #6046) drops them too, and the
        tokens that
    they would cover were sampled before it.

    Raises:
        MergeError: the newest call sent only later rows after its prefix was fed again, or no call reaches position
            t-2.
    """
    stop = view_length(rollout) - 1
    candidates = [index for index in calls_with_tokens(rollout) if rollout.calls[index].end - 1 >= stop]
    if not candidates:
        raise MergeError(f"rollout {rollout.rollout_id}: no call with tokens reaches position {stop - 1}")
    spans = [clip(rows_used(rollout, index), 0, stop) for index in candidates]
    complete = [option for option in spans if missing(rollout, option) is None]
    return gather(rollout, (complete or spans)[-1], row_dtype(rollout))


@dataclass(frozen=True)
class Replace:
    """One view: the newest call's rows for every position, with loss on all response tokens.

    Exact for the last segment; tokens sampled before the last interruption are paired with rows that newer weights
    chose. Source: verl PR #6029.
    """

    single_view: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        if not any(rollout.segments()):
            return prompt_view(rollout)
        return one_view(rollout, newest_rows(rollout))
