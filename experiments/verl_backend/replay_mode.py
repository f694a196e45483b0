"""Which of verl's replay modes carries out a strategy. Decided by what the strategy does, never by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from strategies.base import MergeStrategy
from strategies.types import LIVE, EngineCall, MergeError, Rollout

Mode = Literal["R3", "R2", "disabled"]


class UnsupportedStrategy(ValueError):
    """verl's trainer cannot carry out the strategy; the message says why and what to do instead."""


@dataclass(frozen=True)
class ReplayMode:
    """How verl is set up for a strategy.

    Attributes:
        mode: `actor.megatron.router_replay.mode`: replay recorded rows, the trainer's own, or none.
        live_rows: some rows are left to the trainer's router, which needs live_rows.py in the actor workers.
    """

    mode: Mode
    live_rows: bool

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
        UnsupportedStrategy: it gives several views, mixes frozen live rows with recorded ones, or needs what verl's
            agent-loop workers do not know (the trainer's weight version).
    """
    name = type(strategy).__name__
    if not strategy.single_view:
        raise UnsupportedStrategy(
            f"{name} trains a rollout in several views, and verl 0.9.1 cuts an update into mini-batches of a fixed "
            "number of rows that must divide evenly over the data-parallel ranks: more rows for interrupted rollouts "
            "would be cut wrongly. Score it as a shadow instead: choose another strategy with shadow.every=1 (exact "
            "is the reference there)"
        )
    try:
        (view,) = strategy(interrupted_rollout())
    except MergeError as error:
        raise UnsupportedStrategy(f"{name} cannot merge in verl's agent-loop workers: {error}") from error
    live = (view.rows == LIVE).any(axis=(1, 2))
    if live.all():
        return ReplayMode("R2" if view.freeze_live else "disabled", live_rows=False)
    if live.any() and view.freeze_live:
        raise UnsupportedStrategy(
            f"{name} replays recorded rows at some positions and the trainer's own (R2) at others; verl does one or "
            "the other in a run"
        )
    return ReplayMode("R3", live_rows=bool(live.any()))
