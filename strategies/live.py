"""The rule `live`: no replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.checks import check_rollout, live_rows, one_view, prompt_view, view_length
from strategies.types import ReplayView, Rollout


@dataclass(frozen=True)
class Live:
    """One view: every row live (R3 off); loss on all response tokens.

    The trainer's own router decides in every forward. Needs no recorded rows.
    """

    single_view: ClassVar[bool] = True
    new_rows_only: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        if not any(rollout.segments()):
            return prompt_view(rollout)
        return one_view(rollout, live_rows(rollout, view_length(rollout) - 1))
