"""The rule `mask_stale`: train only on the tokens whose rows one matrix gets right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.checks import check_rollout, prompt_view
from strategies.replace import newest_rows
from strategies.types import ReplayView, Rollout


@dataclass(frozen=True)
class MaskStale:
    """One view: rows as `replace`, loss on the last segment only.

    Exact for the tokens that it trains on; the others are thrown away.
    """

    single_view: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        segments = list(rollout.segments())
        if not segments:
            return prompt_view(rollout)
        mask = rollout.counted()[: segments[-1].last]
        mask[: segments[-1].first] = False
        return [ReplayView(newest_rows(rollout), mask)]
