"""The rule `naive_concat`: the historical fault, a positive control. Its rows do not belong to their positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.checks import check_rollout, one_view, prompt_view, row_dtype, view_length
from strategies.types import MergeError, ReplayView, Rollout


@dataclass(frozen=True)
class NaiveConcat:
    """One view: all replies joined as they came, cut to t-1 rows; loss on all response tokens.

    Positions are disregarded on purpose. Right only with one call, or when every later reply holds just the rows not
    yet held. Source: the fault fixed by verl PR #6029.
    """

    single_view: ClassVar[bool] = True
    misaligned: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        if not any(rollout.segments()):
            return prompt_view(rollout)
        parts = [rows for call in rollout.calls for rows in (call.rows, call.surplus) if rows is not None]
        came, needed = sum(map(len, parts)), view_length(rollout) - 1
        if came < needed:
            raise MergeError(
                f"rollout {rollout.rollout_id}: {needed} rows expected, all calls together returned {came}"
            )
        out = np.empty((needed, rollout.num_layers, rollout.top_k), row_dtype(rollout))
        filled = 0
        for part in parts:
            taken = part[: needed - filled]
            out[filled : filled + len(taken)] = taken
            filled += len(taken)
        return one_view(rollout, out)
