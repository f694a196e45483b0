"""The rollouter against a scripted engine: resumes, budgets, admission, order. Only the engine is a fake."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from experiments import reporting
from experiments.buffer import Admission, Interrupted, SampleQueue
from experiments.clock import VirtualClock
from experiments.engines.base import Reply
from experiments.metrics.route_keys import ROW_BYTES
from experiments.reporting import UpdateRecord
from experiments.rollout import Rollouter, RolloutLimits, RowShape
from experiments.schema import ResumeRows
from strategies import SliceConcat
from strategies.types import EngineCall

L, K, E = 2, 2, 8


@dataclass(frozen=True)
class Problem:
    index: int
    dataset: str
    prompt_ids: np.ndarray


class Problems:
    def problem(self, index):
        return Problem(index, "count", np.array([1, 2, 3], np.int32))

    def reward(self, problem, output_ids):
        return float(len(output_ids))


class ScriptedEngine:
    """Answers each call of a rollout from a script of (new tokens, finish); records the requests."""

    def __init__(self, clock, script, rows):
        self.clock, self.script, self.rows, self.requests = clock, script, rows, []

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(0.1)
        rollout, call = request.request_id.split(".")
        n, finish = self.script(rollout, int(call), request)
        rows = self.rows(int(call), len(request.input_ids) + n - 1) if n else None
        call = EngineCall(
            request.request_id,
            len(request.input_ids),
            np.full(n, 7, np.int32),
            np.full(n, -0.5, np.float32),
            rows,
            np.zeros(n, np.int32),
            finish,
        )
        return Reply(call, prefill_tokens=len(request.input_ids), row_bytes=0 if rows is None else 10 * len(rows))


def rollouter_with(open_groups, **parts):
    """Returns a rollouter of `open_groups`; parts that are not given are never reached."""
    unused = {"engine": None, "queue": None, "admission": None, "limits": None}
    given = unused | {"group_size": 2, "resume_rows": ResumeRows.recompute, "delta_rows": False} | parts
    return Rollouter(
        **given,
        problems=Problems(),
        shape=RowShape(L, K, E),
        seed=0,
        version=lambda: 0,
        open_groups=open_groups,
        next_problem=0,
    )


def zero_rows(call, count):
    return np.zeros((count, L, K), np.int16)


def stamped_rows(call, count):
    """Row i of call k holds 100 k + i everywhere."""
    return np.broadcast_to(100 * call + np.arange(count, dtype=np.int16)[:, None, None], (count, L, K))


def collect(
    script,
    *,
    groups,
    group_size=2,
    response=6,
    context=64,
    limit=100,
    empty_aborts=3,
    resume_rows=ResumeRows.recompute,
    rows=zero_rows,
    delta_rows=False,
):
    clock = VirtualClock()
    engine = ScriptedEngine(clock, script, rows)

    async def main():
        queue, admission = SampleQueue([]), Admission(limit)
        rollouter = rollouter_with(
            [],
            engine=engine,
            queue=queue,
            admission=admission,
            limits=RolloutLimits(response, context, empty_aborts),
            resume_rows=resume_rows,
            group_size=group_size,
            delta_rows=delta_rows,
        )
        task = asyncio.create_task(rollouter.run())
        take = asyncio.create_task(queue.take(groups))
        await asyncio.wait({task, take}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            take.cancel()
            await task
        task.cancel()
        return await take, rollouter

    samples, rollouter = clock.run_loop(main())
    return samples, rollouter, engine


def test_an_aborted_rollout_is_sent_again_with_its_tokens_and_a_smaller_budget():
    samples, _, engine = collect(lambda r, c, q: [(2, "abort"), (1, "abort"), (1, "stop")][c], groups=1, limit=2)
    rollout = samples[0].rollout
    assert [call.finish for call in rollout.calls] == ["abort", "abort", "stop"]
    sent = [q for q in engine.requests if q.request_id.startswith("r0.")]
    assert [(len(q.input_ids), q.max_new_tokens) for q in sent] == [(3, 6), (5, 4), (6, 3)]
    assert [(s.first, s.last) for s in rollout.segments()] == [(3, 5), (5, 6), (6, 7)]
    assert samples[0].reward == 4.0
    assert len({q.sample_seed for q in sent}) == 1, "a resumed rollout continues its own random stream"


def test_a_pinned_resume_sends_the_row_of_every_position_from_the_call_that_first_fed_it():
    """Call 1 generates nothing and contributes nothing; the last sampled token has no row yet."""
    script = [(2, "abort"), (0, "abort"), (3, "abort"), (1, "stop")]
    samples, _, engine = collect(
        lambda r, c, q: script[c], groups=1, limit=2, resume_rows=ResumeRows.pinned, rows=stamped_rows
    )
    sent = [q.rows for q in engine.requests if q.request_id.startswith("r0.")]
    assert sent[0] is None
    assert [len(rows) for rows in sent[1:]] == [4, 4, 7]
    assert sent[1][:, 0, 0].tolist() == sent[2][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert sent[3][:, 0, 0].tolist() == [0, 1, 2, 3, 204, 205, 206]
    (view,) = SliceConcat()(samples[0].rollout)
    np.testing.assert_array_equal(view.rows[:7], sent[3], err_msg="the rule whose rows the trainer replays")


def test_a_recomputing_resume_sends_no_rows():
    _, _, engine = collect(lambda r, c, q: [(2, "abort"), (1, "stop")][c], groups=1, limit=2)
    assert all(q.rows is None for q in engine.requests)


def test_a_pinned_resume_without_recorded_rows_is_an_error():
    with pytest.raises(BaseExceptionGroup) as caught:
        collect(
            lambda r, c, q: [(2, "abort"), (1, "stop")][c],
            groups=1,
            limit=2,
            resume_rows=ResumeRows.pinned,
            rows=lambda call, count: None,
        )
    assert "call 0 (request r0.0): rows of positions 0..3 expected, the call returned no rows" in str(
        leaf(caught.value)
    )


def leaf(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def test_a_budget_spent_at_the_abort_ends_the_rollout_without_another_call():
    samples, _, engine = collect(lambda r, c, q: (6, "abort"), groups=1, limit=2)
    assert len(samples[0].rollout.calls) == 1
    assert max(q.max_new_tokens for q in engine.requests) == 6


def test_the_context_limit_bounds_the_budget():
    _, _, engine = collect(lambda r, c, q: (q.max_new_tokens, "length"), groups=1, context=5, limit=2)
    assert {q.max_new_tokens for q in engine.requests} == {2}


def test_empty_aborts_are_recorded_and_bounded():
    samples, _, _ = collect(lambda r, c, q: (0, "abort") if c < 3 else (2, "stop"), groups=1, limit=2)
    assert [call.new_tokens for call in samples[0].rollout.calls] == [0, 0, 0, 2]
    with pytest.raises(BaseExceptionGroup) as caught:
        collect(lambda r, c, q: (0, "abort"), groups=1, limit=2)
    assert "request r0.3: 4 aborts in a row without a token" in str(leaf(caught.value))


def test_admission_stops_at_the_staleness_limit_and_reopens_at_a_sync():
    async def main():
        admission = Admission(limit=4)
        await admission.enter(2)
        await admission.enter(2)
        blocked = asyncio.create_task(admission.enter(2))
        await asyncio.sleep(1)
        assert not blocked.done(), "finished or not, four rollouts were started since the last sync"
        admission.synced(carried_over=3)
        await asyncio.sleep(1)
        assert not blocked.done(), "three carried over leave room for one"
        admission.synced(carried_over=2)
        await blocked

    VirtualClock().run_loop(main())


def test_only_admitted_groups_start():
    samples, rollouter, engine = collect(lambda r, c, q: (2, "stop"), groups=2, limit=4)
    assert len(samples) == 4
    assert {q.request_id for q in engine.requests} == {"r0.0", "r1.0", "r2.0", "r3.0"}
    assert rollouter.next_problem == 2


def test_an_interrupted_queue_wakes_the_trainer():
    async def main():
        queue = SampleQueue([])
        take = asyncio.create_task(queue.take(1))
        await asyncio.sleep(1)
        queue.interrupt()
        with pytest.raises(Interrupted):
            await take

    VirtualClock().run_loop(main())


def test_with_delta_rows_a_call_asks_from_the_first_row_on_that_is_not_known():
    script = [(2, "abort"), (0, "abort"), (1, "abort"), (1, "stop")]  # 3 prompt tokens; the empty call sends no rows
    _, _, engine = collect(lambda r, c, q: script[c], groups=1, limit=2, delta_rows=True)
    assert [q.row_start for q in engine.requests if q.request_id.startswith("r0.")] == [0, 4, 4, 5]
    _, _, engine = collect(lambda r, c, q: script[c], groups=1, limit=2)
    assert {q.row_start for q in engine.requests} == {0}


def test_the_rows_of_all_calls_count_as_travelled_per_trained_token():
    script = [(2, "abort"), (0, "abort"), (1, "abort"), (1, "stop")]  # 4, 5 and 6 rows of 10 bytes; 4 trained tokens
    samples, _, _ = collect(lambda r, c, q: script[c], groups=1, limit=2)
    assert [sample.row_bytes for sample in samples] == [150, 150]
    views = [SliceConcat()(sample.rollout) for sample in samples]
    record = cast(UpdateRecord, SimpleNamespace(samples=samples, views=views))
    assert reporting._row_bytes(record) == {ROW_BYTES: 300 / 8}
