"""The rule `recompute`: replay of the trainer's own routes (R2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from strategies.live import Live
from strategies.types import ReplayView, Rollout


@dataclass(frozen=True)
class Recompute:
    """One view: all rows live and frozen (`ReplayView.freeze_live`); loss on all response tokens.

    The trainer records its routes in the scoring pass before the update and replays them in every optimiser step of it.
    Needs no recorded rows. Source: router replay R2 of verl and of arXiv 2507.18071, section on MoE training.
    """

    single_view: ClassVar[bool] = True
    new_rows_only: ClassVar[bool] = True

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        return [replace(view, freeze_live=True) for view in Live()(rollout)]
