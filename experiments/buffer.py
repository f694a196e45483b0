"""Finished rollouts that wait for the trainer, and the staleness limit on what may be started."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.types import Rollout


@dataclass(frozen=True, eq=False)
class Sample:
    """A finished rollout with its reward.

    Attributes:
        rollout: everything the engine returned.
        problem_index: index of the problem in the task's stream; the rollouts of one problem form a group.
        dataset: name of the problem's dataset.
        reward: the verifier's score.
        version_started: weight version that the engine held when the rollout was admitted.
        retractions: times that the engine put its requests back into the queue.
        row_bytes: size of its rows as they travelled from the engine.
    """

    rollout: Rollout
    problem_index: int
    dataset: str
    reward: float
    version_started: int
    retractions: int
    row_bytes: int = 0


class Interrupted(Exception):
    """The user asked the run to stop."""


class SampleQueue:
    """Groups of finished rollouts, first finished first."""

    def __init__(self, groups: list[list[Sample]]):
        self._groups: deque[list[Sample]] = deque(groups)
        self._changed = asyncio.Event()
        self._interrupted = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, group: list[Sample]) -> None:
        """Appends the finished rollouts of one problem."""
        self._groups.append(group)
        self._changed.set()

    def interrupt(self) -> None:
        """Makes the waiting and every later `take` raise `Interrupted`. Callable from a signal handler."""
        self._interrupted = True
        if self._loop is not None:  # wakes an event loop that waits for nothing but us
            self._loop.call_soon_threadsafe(self._changed.set)

    async def take(self, count: int) -> list[Sample]:
        """Waits for `count` groups and returns their samples, group after group.

        Raises:
            Interrupted: `interrupt` was called.
        """
        self._loop = asyncio.get_running_loop()
        while not self._interrupted:
            if len(self._groups) >= count:
                return [sample for _ in range(count) for sample in self._groups.popleft()]
            self._changed.clear()
            await self._changed.wait()
        raise Interrupted

    async def interrupted(self) -> None:
        """Returns when `interrupt` was called. Not while another coroutine waits in `take`."""
        self._loop = asyncio.get_running_loop()
        while not self._interrupted:
            self._changed.clear()
            await self._changed.wait()

    @property
    def groups(self) -> list[list[Sample]]:
        """What waits, oldest first."""
        return list(self._groups)

    def versions_in_use(self) -> set[int]:
        """Returns the weight versions that the tokens of waiting rollouts were sampled under."""
        return {int(v) for group in self._groups for sample in group for v in np.unique(sample.rollout.versions())}

    @property
    def samples(self) -> int:
        """Number of rollouts that wait."""
        return sum(len(group) for group in self._groups)


class Admission:
    """verl's staleness rule: between two weight syncs at most `limit` rollouts are in work, counting those that were
    unfinished or waiting at the last sync (`FullyAsyncRollouter._should_pause_generation`, verl 0.9.1).

    `limit = (1 + staleness_threshold) * sync_interval * batch_size`.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._window = 0
        self._room = asyncio.Event()

    async def enter(self, count: int) -> None:
        """Waits until `count` more rollouts may start, and counts them."""
        while self._window + count > self._limit:
            self._room.clear()
            await self._room.wait()
        self._window += count

    def synced(self, carried_over: int) -> None:
        """Opens a new window after a weight sync; `carried_over` rollouts are unfinished or wait in the queue."""
        self._window = carried_over
        self._room.set()

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs."""
        return {"window": self._window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues a window."""
        self._window = state["window"]
