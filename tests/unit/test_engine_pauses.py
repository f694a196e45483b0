"""What each pause mode does to requests, versions, rows and log-probs, and when weights may change."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3MoeForCausalLM

from experiments.engines.base import PauseMode, Reply, Request
from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.sampling import sampled_log_probs
from tests.unit.engine_kit import (
    after_a_step,
    assert_as_teacher_forced,
    interrupted,
    model_of,
    one_thread,
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


def test_abort_answers_running_requests_with_their_tokens_and_waiting_ones_with_none(old: Qwen3MoeForCausalLM):
    items = [request(i, budget=20) for i in range(6)]

    async def scenario(engine: EmbeddedEngine) -> list[Reply]:
        tasks = [asyncio.create_task(engine.generate(item)) for item in items]
        await asyncio.sleep(6)
        await engine.pause("abort")
        return await asyncio.gather(*tasks)

    replies = run(old, scenario)
    assert {reply.call.finish for reply in replies} == {"abort"}
    for item, reply in zip(items[:4], replies[:4], strict=True):
        assert 0 < reply.call.new_tokens < 20
        assert_as_teacher_forced(old, item, reply)
    for reply in replies[4:]:
        assert reply.call.new_tokens == len(reply.call.log_probs) == len(reply.call.versions) == 0
        assert reply.call.rows is None
        assert (reply.prefill_tokens, reply.row_bytes) == (0, 0)


def test_an_aborted_and_resumed_rollout_draws_the_same_tokens_while_the_weights_are_the_same(
    old: Qwen3MoeForCausalLM,
):
    whole = request(0, budget=15)
    (undisturbed,) = run(old, together(whole))

    async def scenario(engine: EmbeddedEngine) -> np.ndarray:
        first = await interrupted(whole, "abort", None)(engine)
        assert first.call.new_tokens == 5
        rest = Request("r0.1", tokens_of(whole, first), 10, whole.sample_seed)
        return tokens_of(rest, await engine.generate(rest))

    np.testing.assert_array_equal(run(old, scenario), tokens_of(whole, undisturbed))


def test_a_call_resumed_after_an_abort_is_routed_afresh_under_the_new_weights(
    old: Qwen3MoeForCausalLM, new: Qwen3MoeForCausalLM
):
    item = request(0, budget=15)

    async def scenario(engine: EmbeddedEngine) -> tuple[Reply, Request, Reply]:
        first = await interrupted(item, "abort", new, version=7)(engine)
        rest = Request("r0.1", tokens_of(item, first), 10, item.sample_seed)
        return first, rest, await engine.generate(rest)

    first, rest, second = run(old, scenario)
    assert_as_teacher_forced(old, item, first)
    assert_as_teacher_forced(new, rest, second)
    assert first.call.versions.tolist() == [0] * 5
    assert second.call.versions.tolist() == [7] * 10
    prefix = len(first.call.rows)
    assert (second.call.rows[:prefix] != first.call.rows).any(), "the step moved some routes"
    assert not first.call.mixed_rows
    assert not second.call.mixed_rows
    assert not second.call.kv_kept


def test_retract_overwrites_the_rows_of_older_tokens_and_says_so(old: Qwen3MoeForCausalLM, new: Qwen3MoeForCausalLM):
    item = request(0, budget=12)
    reply = run(old, interrupted(item, "retract", new))
    call = reply.call
    assert call.versions.tolist() == [0] * 5 + [1] * 7
    assert (call.mixed_rows, call.kv_kept, call.finish) == (True, False, "length")
    assert (reply.retractions, reply.prefill_tokens) == (1, 5 + 10)
    tokens = tokens_of(item, reply)
    new_log_probs, new_rows = teacher_forced(new, tokens)
    old_log_probs, old_rows = teacher_forced(old, tokens)
    np.testing.assert_array_equal(call.rows, new_rows)
    assert (old_rows[:10] != new_rows[:10]).any()
    np.testing.assert_allclose(call.log_probs[:5], old_log_probs[4:9], atol=1e-5, rtol=0)
    np.testing.assert_allclose(call.log_probs[5:], new_log_probs[9:], atol=1e-5, rtol=0)


def test_retract_without_new_weights_changes_nothing_but_the_cost(old: Qwen3MoeForCausalLM):
    item = request(0, budget=12)
    (undisturbed,) = run(old, together(item))

    async def scenario(engine: EmbeddedEngine) -> tuple[Reply, int]:
        return await interrupted(item, "retract", None)(engine), engine.stats().resumed_tokens

    reply, resumed_tokens = run(old, scenario)
    np.testing.assert_array_equal(reply.call.output_ids, undisturbed.call.output_ids)
    assert_as_teacher_forced(old, item, reply)
    assert (reply.call.mixed_rows, reply.retractions, resumed_tokens) == (False, 1, 10)


def test_retracted_requests_return_before_those_that_never_ran(old: Qwen3MoeForCausalLM):
    items = [request(i, budget=10) for i in range(6)]
    order: list[str] = []

    async def scenario(engine: EmbeddedEngine) -> None:
        async def one(item: Request) -> None:
            await engine.generate(item)
            order.append(item.request_id)

        tasks = [asyncio.create_task(one(item)) for item in items]
        await asyncio.sleep(6)
        await engine.pause("retract")
        await engine.resume()
        await asyncio.gather(*tasks)

    run(old, scenario, max_running=2)
    assert order == [f"r{i}" for i in range(6)]


def test_a_request_aborted_while_retracted_keeps_the_rows_of_its_tokens(old: Qwen3MoeForCausalLM):
    item = request(0, budget=12)

    async def scenario(engine: EmbeddedEngine) -> Reply:
        task = asyncio.create_task(engine.generate(item))
        await asyncio.sleep(4)
        await engine.pause("retract")
        await engine.pause("abort")
        return await task

    reply = run(old, scenario)
    assert 0 < reply.call.new_tokens < 12
    assert not reply.call.mixed_rows
    assert_as_teacher_forced(old, item, reply)


def test_in_place_keeps_the_kv_cache_and_the_rows_as_first_computed(old: Qwen3MoeForCausalLM, new: Qwen3MoeForCausalLM):
    item = request(0, budget=12)
    reply = run(old, interrupted(item, "in_place", new))
    call = reply.call
    assert call.versions.tolist() == [0] * 5 + [1] * 7
    assert (call.mixed_rows, call.kv_kept) == (False, False)
    assert (reply.retractions, reply.prefill_tokens) == (0, 5)

    tokens = torch.from_numpy(tokens_of(item, reply)).long()
    cache, rows, logits = DynamicCache(), [], []
    with torch.no_grad(), one_thread():
        for model, fed in ((old, tokens[None, :9]), (new, tokens[None, 9:-1])):
            out = model(fed, past_key_values=cache, output_router_logits=True)
            rows.append(torch.stack([layer.topk(2).indices for layer in out.router_logits], dim=1))
            logits.append(out.logits[0])
    expected = sampled_log_probs(torch.cat(logits), 0.8, 1.0).gather(-1, tokens[1:, None])[4:, 0]
    np.testing.assert_allclose(call.log_probs, expected.numpy(), atol=1e-5, rtol=0)
    np.testing.assert_array_equal(call.rows, torch.cat(rows).numpy())


def test_a_pause_waits_until_the_step_in_progress_is_visible(old: Qwen3MoeForCausalLM):
    async def scenario(engine: EmbeddedEngine) -> tuple[float, Reply]:
        task = asyncio.create_task(engine.generate(request(0, length=8, budget=20)))
        await asyncio.sleep(3.25)  # 1 s of prefill, two steps and a quarter of the third
        await engine.pause("abort")
        return asyncio.get_running_loop().time(), await task

    time_s, reply = run(old, scenario)
    assert time_s == 4.0
    assert reply.call.new_tokens == 4


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_nothing_runs_while_paused_and_what_arrives_waits(old: Qwen3MoeForCausalLM, mode: PauseMode):
    async def scenario(engine: EmbeddedEngine) -> Reply:
        await engine.pause(mode)
        task = asyncio.create_task(engine.generate(request(0)))
        await asyncio.sleep(50)
        assert engine.stats().prefills == 0
        assert not task.done()
        await engine.resume()
        return await task

    assert run(old, scenario).call.finish == "length"


def test_weights_change_only_while_paused_and_only_if_they_fit(old: Qwen3MoeForCausalLM, new: Qwen3MoeForCausalLM):
    item = request(0)

    async def scenario(engine: EmbeddedEngine) -> Reply:
        with pytest.raises(RuntimeError, match=r"version=1.*paused first"):
            await engine.load_weights(new.state_dict(), 1)
        with pytest.raises(RuntimeError, match="not paused"):
            await engine.resume()
        await engine.pause("abort")
        foreign = dict(new.state_dict())
        foreign["lm_head.weight"] = foreign["lm_head.weight"][:-1]
        with pytest.raises(ValueError, match=r"lm_head.weight.*\(32, 32\).*\(31, 32\)"):
            await engine.load_weights(foreign, 1)
        await engine.resume()
        return await engine.generate(item)

    reply = run(old, scenario)
    assert reply.call.versions.tolist() == [0] * 12
    assert_as_teacher_forced(old, item, reply)


def test_loaded_weights_are_copies(old: Qwen3MoeForCausalLM):
    trainer = copy.deepcopy(old)
    item = request(0)

    async def scenario(engine: EmbeddedEngine) -> Reply:
        await engine.pause("abort")
        await engine.load_weights(trainer.state_dict(), 1)
        with torch.no_grad():
            trainer.lm_head.weight.zero_()
        await engine.resume()
        return await engine.generate(item)

    assert_as_teacher_forced(old, item, run(old, scenario))
