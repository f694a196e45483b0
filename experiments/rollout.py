"""The rollouter: keeps the engine busy, resumes what a weight sync interrupted and records every call.

A rollout that the engine aborts is sent again as prompt + tokens so far. Nothing is thrown away: the rollout keeps all
calls, and strategies decide later which rows count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from experiments.buffer import Admission, Sample, SampleQueue
from experiments.engines.base import Engine, Request
from experiments.schema import ResumeRows
from strategies.budget import call_budget
from strategies.checks import gather, row_dtype, rows_first_fed
from strategies.types import EngineCall, Rollout, Rows


class Problem(Protocol):
    """What the rollouter needs to know of a problem (experiments/tasks)."""

    @property
    def index(self) -> int: ...
    @property
    def dataset(self) -> str: ...
    @property
    def prompt_ids(self) -> NDArray[np.int32]: ...


class ProblemSource(Protocol):
    """An unlimited stream of problems with a verifier (experiments/tasks)."""

    def problem(self, index: int) -> Problem:
        """Returns problem `index`; the same one on every call."""
        ...

    def reward(self, problem: Any, output_ids: NDArray[np.int32]) -> float:
        """Returns the verifier's score of a response."""
        ...


@dataclass(frozen=True)
class RowShape:
    """Shape and range of a row: layers, experts per token, experts."""

    num_layers: int
    top_k: int
    num_experts: int


@dataclass(frozen=True)
class RolloutLimits:
    """`response`: cap on generated tokens; `context`: tokens that the model can hold; `empty_aborts`: calls in a row
    without a token.
    """

    response: int
    context: int
    empty_aborts: int


@dataclass(eq=False)
class OpenRollout:
    """A rollout in work; `version_sent`: weight version when its running call was sent, None when none runs."""

    rollout_id: str
    sample_seed: int
    prompt_ids: NDArray[np.int32]
    version_started: int
    calls: list[EngineCall] = field(default_factory=list)
    retractions: int = 0
    finished: bool = False
    version_sent: int | None = None
    row_bytes: int = 0

    def tokens(self) -> NDArray[np.int32]:
        """Returns int32: prompt and everything generated so far."""
        return np.concatenate([self.prompt_ids, *(call.output_ids for call in self.calls)]).astype(np.int32)

    def known_rows(self) -> int:
        """Returns how many positions, from 0 on, have the row of the call that fed them first."""
        held = 0
        for call in self.calls:
            if call.new_tokens and call.rows is not None and call.row_start <= held:
                held = call.end - 1
        return held

    def close(self, shape: RowShape) -> Rollout:
        """Returns the immutable record."""
        return Rollout(
            rollout_id=self.rollout_id,
            tokens=self.tokens(),
            prompt_len=len(self.prompt_ids),
            calls=tuple(self.calls),
            num_layers=shape.num_layers,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
        )


def recorded_rows(rollout: Rollout) -> Rows | None:
    """Returns `[m, L, K]`, the row of every position fed so far, as the call that first fed it returned it.

    None before the first token. The last sampled token was not fed yet and has no row.

    Raises:
        MergeError: that call did not return the row. A later call's row is never taken instead.
    """
    spans = rows_first_fed(rollout)
    return gather(rollout, spans, row_dtype(rollout)) if spans else None


@dataclass(eq=False)
class OpenGroup:
    """The rollouts of one problem; handed to the queue when all are finished."""

    problem_index: int
    rollouts: list[OpenRollout]


class Rollouter:
    """Admits groups as the staleness limit allows and drives their rollouts to the end."""

    def __init__(
        self,
        *,
        engine: Engine,
        problems: ProblemSource,
        queue: SampleQueue,
        admission: Admission,
        limits: RolloutLimits,
        shape: RowShape,
        resume_rows: ResumeRows,
        group_size: int,
        seed: int,
        version: Callable[[], int],
        open_groups: list[OpenGroup],
        next_problem: int,
        delta_rows: bool,
    ):
        """`delta_rows`: ask only for rows of positions that no earlier call returned."""
        self._engine = engine
        self._problems = problems
        self._queue = queue
        self._admission = admission
        self._limits = limits
        self._shape = shape
        self._resume_rows = resume_rows
        self._group_size = group_size
        self._seed = seed
        self._version = version
        self._delta_rows = delta_rows
        self._open: dict[int, OpenGroup] = {group.problem_index: group for group in open_groups}
        self._next_problem = next_problem

    @property
    def open_groups(self) -> list[OpenGroup]:
        """Groups in work, oldest first."""
        return list(self._open.values())

    @property
    def open_rollouts(self) -> int:
        """Rollouts that are not in the queue yet: unfinished ones and finished members of unfinished groups."""
        return sum(len(group.rollouts) for group in self._open.values())

    def versions_in_use(self, newest: int) -> set[int]:
        """Returns the weight versions, up to `newest`, that tokens of unfinished rollouts were sampled under or may
        have been: a running call says only when it returns.
        """
        versions: set[int] = set()
        for group in self._open.values():
            for rollout in group.rollouts:
                versions.update(*(call.versions.tolist() for call in rollout.calls))
                if rollout.version_sent is not None:
                    versions.update(range(rollout.version_sent, newest + 1))
        return versions

    @property
    def next_problem(self) -> int:
        """Index of the problem that is admitted next."""
        return self._next_problem

    async def run(self) -> None:
        """Runs until cancelled. An error in any rollout ends it."""
        async with asyncio.TaskGroup() as tasks:
            for group in self.open_groups:
                tasks.create_task(self._run_group(group))
            while True:
                await self._admission.enter(self._group_size)
                tasks.create_task(self._run_group(self._admit()))

    def _admit(self) -> OpenGroup:
        index = self._next_problem
        self._next_problem += 1
        prompt_ids = np.asarray(self._problems.problem(index).prompt_ids, dtype=np.int32)
        first = index * self._group_size
        rollouts = [
            OpenRollout(f"r{first + i}", _sample_seed(self._seed, first + i), prompt_ids, self._version())
            for i in range(self._group_size)
        ]
        group = OpenGroup(index, rollouts)
        self._open[index] = group
        return group

    async def _run_group(self, group: OpenGroup) -> None:
        async with asyncio.TaskGroup() as tasks:
            for rollout in group.rollouts:
                tasks.create_task(self._run_rollout(rollout))
        problem = self._problems.problem(group.problem_index)
        samples = []
        for opened in group.rollouts:
            rollout = opened.close(self._shape)
            reward = self._problems.reward(problem, rollout.tokens[rollout.prompt_len :])
            samples.append(
                Sample(
                    rollout,
                    group.problem_index,
                    problem.dataset,
                    reward,
                    opened.version_started,
                    opened.retractions,
                    opened.row_bytes,
                )
            )
        del self._open[group.problem_index]
        self._queue.put(samples)

    async def _run_rollout(self, rollout: OpenRollout) -> None:
        empty_aborts = 0
        while not rollout.finished:
            tokens = rollout.tokens()
            budget = call_budget(
                input_len=len(tokens),
                generated=len(tokens) - len(rollout.prompt_ids),
                response_cap=self._limits.response,
                context_limit=self._limits.context,
            )
            if budget < 1 and not rollout.calls:
                raise RuntimeError(
                    f"rollout {rollout.rollout_id}: its prompt of {len(tokens)} tokens leaves no room for a response "
                    f"in a context of {self._limits.context}; raise model.max_position_embeddings or shorten the task"
                )
            if budget < 1:  # spent exactly when the abort came: the rollout ends by length without another call
                break
            request_id = f"{rollout.rollout_id}.{len(rollout.calls)}"
            pinned = self._resume_rows is ResumeRows.pinned
            request = Request(
                request_id,
                tokens,
                budget,
                rollout.sample_seed,
                row_start=rollout.known_rows() if self._delta_rows else 0,
                rows=recorded_rows(rollout.close(self._shape)) if pinned else None,
            )
            rollout.version_sent = self._version()
            reply = await self._engine.generate(request)
            rollout.version_sent = None
            rollout.calls.append(reply.call)
            rollout.retractions += reply.retractions
            rollout.row_bytes += reply.row_bytes
            rollout.finished = reply.call.finish != "abort"
            empty_aborts = 0 if reply.call.new_tokens else empty_aborts + 1
            if empty_aborts > self._limits.empty_aborts and not rollout.finished:
                raise RuntimeError(
                    f"request {request_id}: {empty_aborts} aborts in a row without a token "
                    f"(schedule.max_empty_aborts={self._limits.empty_aborts}): rollouts never get to run between two "
                    "syncs; raise schedule.sync_interval or engine.max_running, or lower schedule.staleness_threshold"
                )
        rollout.finished = True


def _sample_seed(seed: int, rollout: int) -> int:
    """Returns a 63-bit stream id; a fixed mix, so that it never depends on the interpreter's hash seed."""
    value = (seed * 0x9E3779B97F4A7C15 + rollout * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    return (value ^ (value >> 31)) & (2**63 - 1)
