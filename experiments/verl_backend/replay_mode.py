"""Which of verl's replay modes carries out a strategy. Decided by what the strategy does, never by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from strategies.base import MergeStrategy
from strategies.types import LIVE, EngineCall, MergeError, ReplayView, Rollout

TRAINER_VERSIONS = (2, 3, 4, 10**6)
"""Tried on a rollout of versions 0 to 2, where a strategy asks for the trainer's."""

Mode = Literal["R3", "R2", "disabled"]


class UnsupportedStrategy(ValueError):
    """verl's trainer cannot carry out the strategy; the message says why and what to do instead."""


@dataclass(frozen=True)
class ReplayMode:
    """How verl is set up for a strategy.

    Attributes:
        mode: `actor.megatron.router_replay.mode`: replay recorded rows, the trainer's own, or none.
        live_rows: some rows are left to the trainer's router, which needs live_rows.py in the actor workers.
        in_trainer: the strategy needs the trainer's weight version, which agent-loop workers do not know: the trainer
            merges.
    """

    mode: Mode
    live_rows: bool
    in_trainer: bool = False

    @property
    def records_rows(self) -> bool:
        """Whether the engine must return rows."""
        return self.mode == "R3"


def interrupted_rollout() -> Rollout:
    """Returns a rollout of three calls with 4 + 3 + 2 tokens after a prompt of 3, whose rows all differ."""
    calls, held = [], 3
    for version, new in enumerate((4, 3, 2)):
        rows = (np.arange((held + new - 1) * 2).reshape(-1, 2, 1) + 7 * version + np.arange(2)) % 16
        ids = np.arange(held, held + new, dtype=np.int32)
        calls.append(
            EngineCall(
                request_id=f"probe.{version}",
                input_len=held,
                output_ids=ids,
                log_probs=np.full(new, -1.0, np.float32),
                rows=rows.astype(np.int16),
                versions=np.full(new, version, np.int32),
                finish="stop" if version == 2 else "abort",
            )
        )
        held += new
    return Rollout("probe", np.arange(held, dtype=np.int32), 3, tuple(calls), 2, 2, 16)


def replay_mode(strategy: MergeStrategy) -> ReplayMode:
    """Returns the mode for a strategy, from its views of `interrupted_rollout()`.

    Raises:
        UnsupportedStrategy: it gives several views, cannot merge that rollout, or mixes frozen live rows with recorded
            ones.
    """
    name = type(strategy).__name__
    if not strategy.single_view:
        raise UnsupportedStrategy(
            f"{name} trains a rollout in several views, and verl 0.9.1 cuts an update into mini-batches of a fixed "
            "number of rows that must divide evenly over the data-parallel ranks: more rows for interrupted rollouts "
            "would be cut wrongly. Score it as a shadow instead: choose another strategy with shadow.every=1 (exact "
            "is the reference there)"
        )
    rollout = interrupted_rollout()
    try:
        (view,) = strategy(rollout)
        views, in_trainer = [view], False
    except MergeError:
        views, in_trainer = list(_versioned_views(strategy, rollout)), True
    live = np.concatenate([(view.rows == LIVE).any(axis=(1, 2)) for view in views])
    freezes = any(view.freeze_live for view in views)
    if live.all():
        return ReplayMode("R2" if freezes else "disabled", live_rows=False)
    if live.any() and freezes:
        raise UnsupportedStrategy(
            f"{name} replays recorded rows at some positions and the trainer's own (R2) at others; verl does one or "
            "the other in a run"
        )
    return ReplayMode("R3", bool(live.any()), in_trainer)


def _versioned_views(strategy: MergeStrategy, rollout: Rollout) -> Iterator[ReplayView]:
    """Yields the view of a rollout whose tokens are of versions 0 to 2, as trainers of several versions would see it:
    from fresh to stale in every row.
    """
    for version in TRAINER_VERSIONS:
        try:
            (view,) = strategy(replace(rollout, trainer_version=version))
        except MergeError as error:
            raise UnsupportedStrategy(f"{type(strategy).__name__} cannot merge an interrupted rollout: {error}") from (
                error
            )
        yield view
