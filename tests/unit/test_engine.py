"""The embedded engine generates what its weights say, whoever shares the batch."""

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.clock import VirtualClock, WallClock
from experiments.engines.base import Reply, Request
from experiments.engines.embedded import EmbeddedEngine
from tests.unit.engine_kit import (
    SETTINGS,
    SIZES,
    VOCAB,
    after_a_step,
    assert_as_teacher_forced,
    crowd,
    model_of,
    request,
    run,
    teacher_forced,
    together,
    tokens_of,
)


@pytest.fixture(scope="module")
def old() -> Qwen3MoeForCausalLM:
    return model_of(seed=1)


@pytest.fixture(scope="module")
def new(old: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    return after_a_step(old)


def test_requests_that_join_and_leave_a_batch_get_what_a_teacher_forced_forward_says(old: Qwen3MoeForCausalLM):
    requests = crowd()

    async def scenario(engine: EmbeddedEngine) -> tuple[list[Reply], int]:
        async def late(index: int, item: Request) -> Reply:
            await asyncio.sleep(2.3 * index)
            return await engine.generate(item)

        replies = await asyncio.gather(*(late(index, item) for index, item in enumerate(requests)))
        return replies, engine.stats().peak_running

    replies, peak_running = run(old, scenario)
    assert 3 <= peak_running <= 4
    for item, reply in zip(requests, replies, strict=True):
        assert_as_teacher_forced(old, item, reply)
        assert reply.call.new_tokens == item.max_new_tokens
        assert reply.call.finish == "length"
        assert reply.call.rows is not None
        assert reply.call.rows.dtype == np.int8
        assert reply.row_bytes == reply.call.rows.size
        assert reply.call.log_probs.dtype == np.float32
        assert reply.prefill_tokens == len(item.input_ids)
    assert len({tuple(row) for reply in replies for row in reply.call.rows[:, 0]}) > 8, "the routes vary"


def test_truncated_log_probs_are_those_of_the_nucleus(old: Qwen3MoeForCausalLM):
    items = crowd(4)
    for item, reply in zip(items, run(old, together(*items), top_p=0.7), strict=True):
        assert_as_teacher_forced(old, item, reply, top_p=0.7)


def test_a_bf16_engine_agrees_with_a_bf16_forward(old: Qwen3MoeForCausalLM):
    items = crowd(6)
    low = model_of(seed=9, dtype=torch.bfloat16)
    low.load_state_dict(old.state_dict())
    replies = run(old, together(*items), dtype=torch.bfloat16)
    same, total, differences = 0, 0, []
    for item, reply in zip(items, replies, strict=True):
        log_probs, rows = teacher_forced(low, tokens_of(item, reply))
        same, total = same + (np.sort(reply.call.rows) == np.sort(rows)).sum(), total + rows.size
        differences.extend(np.abs(reply.call.log_probs - log_probs[len(item.input_ids) - 1 :]))
    assert same / total > 0.95
    assert np.median(differences) < 0.05


def test_layers_without_experts_have_live_rows():
    mixed = model_of(seed=2, mlp_only_layers=[1])
    item = request(0)
    (reply,) = run(mixed, together(item))
    assert (reply.call.rows[:, 1] == -1).all()
    _, rows = teacher_forced(mixed, tokens_of(item, reply))
    np.testing.assert_array_equal(reply.call.rows[:, [0, 2]], rows)


def test_drawn_tokens_do_not_depend_on_batch_mates(old: Qwen3MoeForCausalLM):
    items = crowd(6)
    crowded = run(old, together(*items))
    for item, reply in zip(items, crowded, strict=True):
        (alone,) = run(old, together(item))
        np.testing.assert_array_equal(alone.call.output_ids, reply.call.output_ids)


def test_two_runs_are_equal_to_the_last_bit(old: Qwen3MoeForCausalLM, new: Qwen3MoeForCausalLM):
    async def scenario(engine: EmbeddedEngine) -> list[Reply]:
        tasks = [asyncio.create_task(engine.generate(item)) for item in crowd()]
        for mode in ("in_place", "retract", "abort"):
            await asyncio.sleep(6)
            await engine.pause(mode)
            await engine.load_weights(new.state_dict(), 1)
            await engine.resume()
        return await asyncio.gather(*tasks)

    first, second = run(old, scenario), run(old, scenario)
    assert {reply.call.finish for reply in first} == {"length", "abort"}
    for one, other in zip(first, second, strict=True):
        assert one.call.log_probs.tobytes() == other.call.log_probs.tobytes()
        assert one.call.output_ids.tobytes() == other.call.output_ids.tobytes()
        assert (one.call.rows is None) == (other.call.rows is None)
        assert one.call.rows is None or one.call.rows.tobytes() == other.call.rows.tobytes()


def test_a_stop_token_ends_the_output_and_is_part_of_it(old: Qwen3MoeForCausalLM):
    item = request(0, budget=30)
    (free,) = run(old, together(item))
    stop = int(free.call.output_ids[7])
    (stopped,) = run(old, together(item), stop_ids=(stop,))
    length = free.call.output_ids.tolist().index(stop) + 1
    assert stopped.call.finish == "stop"
    np.testing.assert_array_equal(stopped.call.output_ids, free.call.output_ids[:length])
    assert_as_teacher_forced(old, item, stopped)


def test_rows_are_returned_from_row_start_on(old: Qwen3MoeForCausalLM):
    full, delta = (run(old, together(request(0, row_start=start)))[0].call for start in (0, 3))
    assert delta.row_start == 3
    np.testing.assert_array_equal(delta.rows, full.rows[3:])


def test_prefills_are_cut_by_padded_tokens_and_slots_are_filled_in_order_of_arrival(old: Qwen3MoeForCausalLM):
    items = [request(0, 8, 3), request(1, 4, 3), request(2, 8, 3), request(3, 4, 3)]
    order: list[str] = []

    async def scenario(engine: EmbeddedEngine) -> Any:
        async def one(item: Request) -> None:
            await engine.generate(item)
            order.append(f"{item.request_id} at {asyncio.get_running_loop().time()}")

        await asyncio.gather(*(one(item) for item in items))
        return engine.stats()

    stats = run(old, scenario, max_running=3, max_prefill_tokens=16)
    # 12 tokens (16 padded) and 8 tokens are prefilled, three decode twice (2 s); then the fourth decodes alone.
    assert order == ["r0 at 4.5", "r1 at 4.5", "r2 at 4.5", "r3 at 7.0"]
    assert (stats.prefills, stats.decode_steps, stats.peak_running) == (3, 4, 3)
    assert (stats.prefill_tokens, stats.generated_tokens, stats.resumed_tokens) == (24, 12, 0)
    assert stats.forward_s > 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_ids": np.zeros(0, dtype=np.int32)}, "s >= 1"),
        ({"input_ids": np.zeros(3, dtype=np.float32)}, "integer"),
        ({"input_ids": np.array([1, VOCAB], dtype=np.int32)}, "32 came at position 1"),
        ({"input_ids": np.array([-1, 2], dtype=np.int32)}, "-1 came at position 0"),
        ({"max_new_tokens": 0}, "max_new_tokens >= 1"),
        ({"max_new_tokens": 196}, r"at most 200 .* 5 input and 196 new"),
        ({"row_start": 5}, r"row_start in \[0, 5\)"),
        ({"row_start": -1}, "row_start"),
        ({"request_id": "r1"}, "unanswered request of this id"),
    ],
)
def test_a_malformed_request_is_refused_by_name(old: Qwen3MoeForCausalLM, fields: dict[str, Any], reason: str):
    values = vars(request(0)) | fields

    async def scenario(engine: EmbeddedEngine) -> Reply:
        other = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match=rf"request {values['request_id']}: .*{reason}"):
            await engine.generate(Request(**values))
        return await other

    assert run(old, scenario).call.finish == "length"


def test_the_longest_request_that_the_model_allows_is_served(old: Qwen3MoeForCausalLM):
    item = request(0, length=150, budget=50)
    (reply,) = run(old, together(item))
    assert_as_teacher_forced(old, item, reply)


def test_an_error_in_a_step_reaches_everybody_who_waits(old: Qwen3MoeForCausalLM):
    broken = copy.deepcopy(old)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)

    async def scenario(engine: EmbeddedEngine) -> list[Any]:
        waiting = [asyncio.create_task(engine.generate(request(i))) for i in range(6)]
        await asyncio.sleep(0)
        failures = await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(RuntimeError, match="has ended"):
            await engine.generate(request(9))
        with pytest.raises(RuntimeError, match="has ended"):
            await engine.pause("abort")
        return failures

    for index, failure in enumerate(run(broken, scenario)):
        assert isinstance(failure, RuntimeError)
        assert str(failure).startswith(f"request r{index}: ")
        assert "request r0: a finite log-prob is expected at position 5, nan came" in str(failure.__cause__)


def test_close_fails_what_is_unanswered_and_leaves_no_task(old: Qwen3MoeForCausalLM):
    async def scenario(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.generate(request(0, budget=100)))
        await asyncio.sleep(5)
        await engine.close()
        with pytest.raises(RuntimeError, match=r"request r0: .*closed"):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(request(1))

    run(old, scenario)


def test_settings_that_no_distribution_has_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.0}, "greedy"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_running": 0}, "max_running"),
        ({"stop_ids": [VOCAB]}, "stop_ids"),
    ]
    for fields, reason in cases:
        with pytest.raises(ValueError, match=reason):
            EmbeddedEngine(Qwen3MoeConfig.from_dict(SIZES), clock=VirtualClock(), **(SETTINGS | fields))


def test_on_the_wall_clock_the_same_tokens_come(old: Qwen3MoeForCausalLM):
    items = crowd(5)

    async def scenario(engine: EmbeddedEngine) -> list[Reply]:
        tasks = [asyncio.create_task(engine.generate(item)) for item in items]
        await asyncio.sleep(0.01)
        await engine.pause("in_place")
        await engine.resume()
        return await asyncio.gather(*tasks)

    replies = run(old, scenario, clock=WallClock())
    for reply, virtual in zip(replies, run(old, together(*items)), strict=True):
        np.testing.assert_array_equal(reply.call.output_ids, virtual.call.output_ids)
