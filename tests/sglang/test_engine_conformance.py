"""One suite for both engines: what the loop relies on, on the embedded engine and on a real SGLang server, which gets
its weights from disk and by broadcast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from experiments.engines.base import Engine, PauseMode, Request
from tests.sglang.kit import (
    CONFIG,
    RESPONSE,
    TEMPERATURE,
    VOCAB,
    Interruption,
    embedded_engine,
    interrupted_rollouts,
    play,
    request,
    seconds_of_a_response,
    sglang_engine,
    update,
    weight_versions,
)
from tests.unit.engine_kit import model_of, teacher_forced

WEIGHTS = weight_versions(3)
K, L, E = CONFIG.num_experts_per_tok, CONFIG.num_hidden_layers, CONFIG.num_experts

Make = Callable[[], Engine]


REAL = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture(params=["embedded", pytest.param("disk", marks=REAL), pytest.param("gloo", marks=REAL)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Returns a function that makes an engine of the suite's model."""
    if request.param == "embedded":
        yield embedded_engine
    else:
        server = request.getfixturevalue("server")
        yield lambda: sglang_engine(server, request.param)


def model(version: int):
    built = model_of(seed=3, vocab_size=VOCAB)
    built.load_state_dict(WEIGHTS[version])
    return built


def test_a_reply_has_the_models_rows_and_log_probs_for_every_position(make: Make):
    asked = [request(f"r{i}", budget=12 + i) for i in range(6)]

    async def scenario(engine):
        return await asyncio.gather(*(engine.generate(item) for item in asked))

    for item, reply in zip(asked, play(make(), WEIGHTS[0], 0, scenario), strict=True):
        call = reply.call
        assert (call.request_id, call.input_len, call.finish) == (item.request_id, 5, "length")
        assert call.new_tokens == item.max_new_tokens
        assert call.versions.tolist() == [0] * call.new_tokens
        assert call.rows is not None
        assert call.rows.shape == (5 + call.new_tokens - 1, L, K)
        tokens = np.concatenate([item.input_ids, call.output_ids])
        log_probs, rows = teacher_forced(model(0), tokens, TEMPERATURE)
        np.testing.assert_allclose(call.log_probs, log_probs[4:], atol=1e-4, rtol=0)
        assert np.array_equal(np.sort(call.rows, axis=-1), np.sort(rows, axis=-1))
        assert reply.row_bytes > 0
        assert reply.prefill_tokens >= 1


def test_rows_can_be_asked_for_from_a_position_on(make: Make):
    async def scenario(engine):
        whole = await engine.generate(request("r0", budget=10))
        tokens = np.concatenate([request("r0").input_ids, whole.call.output_ids])
        return tokens, [await engine.generate(request(f"r1.{start}", tokens, 4, start)) for start in (0, 14)]

    tokens, (full, delta) = play(make(), WEIGHTS[0], 0, scenario)
    assert len(tokens) == 15
    assert (full.call.row_start, delta.call.row_start) == (0, 14)
    assert (len(full.call.rows), len(delta.call.rows)) == (18, 4)
    assert np.array_equal(delta.call.rows[0], full.call.rows[14])
    assert delta.row_bytes < full.row_bytes


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": np.array([], np.int32)}, "s >= 1"),
        ({"input_ids": np.array([VOCAB], np.int32)}, "came at position 0"),
        ({"max_new_tokens": 0}, "max_new_tokens >= 1"),
        ({"max_new_tokens": 196}, "at most 200 tokens fit"),
        ({"row_start": 5}, "row_start in"),
    ],
)
def test_malformed_requests_are_refused_and_the_engine_goes_on(make: Make, bad, message):
    async def scenario(engine):
        with pytest.raises(ValueError, match=f"request bad: .*{message}"):
            await engine.generate(Request(**{**vars(request("bad")), **bad}))
        return await engine.generate(request("good", budget=195))

    assert play(make(), WEIGHTS[0], 0, scenario).call.new_tokens == 195


def test_an_abort_answers_with_what_is_there_and_later_requests_wait_for_the_new_weights(make: Make):
    async def scenario(engine):
        whole_s = await seconds_of_a_response(engine)
        running = [asyncio.create_task(engine.generate(request(f"r{i}"))) for i in range(3)]
        await asyncio.sleep(whole_s / 3)
        await engine.pause("abort")
        aborted = await asyncio.gather(*running)
        later = asyncio.create_task(engine.generate(request("later", budget=8)))
        await asyncio.sleep(whole_s / 4)
        assert not later.done(), "paused"
        await engine.load_weights(WEIGHTS[1], 1)
        await engine.resume()
        return aborted, await later

    aborted, later = play(make(), WEIGHTS[0], 0, scenario)
    for reply in aborted:
        assert (reply.call.finish, set(reply.call.versions.tolist())) == ("abort", {0})
        assert 0 < reply.call.new_tokens < RESPONSE
        assert len(reply.call.rows) == 5 + reply.call.new_tokens - 1
    assert (later.call.finish, set(later.call.versions.tolist())) == ("length", {1})


@pytest.mark.parametrize(("mode", "mixed", "retractions"), [("in_place", False, 0), ("retract", True, 1)])
def test_other_pauses_end_no_request_and_count_versions_per_token(make: Make, mode: PauseMode, mixed, retractions):
    async def scenario(engine):
        whole_s = await seconds_of_a_response(engine)
        running = asyncio.create_task(engine.generate(request("r0")))
        await asyncio.sleep(whole_s / 3)
        await update(engine, mode, WEIGHTS[1], 1)
        return await running

    reply = play(make(), WEIGHTS[0], 0, scenario)
    call = reply.call
    assert (call.finish, call.new_tokens, len(call.rows)) == ("length", RESPONSE, 5 + RESPONSE - 1)
    assert sorted(set(call.versions.tolist())) == [0, 1]
    assert np.all(np.diff(call.versions) >= 0)
    assert (call.mixed_rows, reply.retractions) == (mixed, retractions)
    tokens = np.concatenate([request("r0").input_ids, call.output_ids])
    log_probs, _ = teacher_forced(model(0), tokens, TEMPERATURE)
    before = call.versions == 0
    np.testing.assert_allclose(call.log_probs[before], log_probs[4:][before], atol=1e-4, rtol=0)


def test_a_resumed_prefix_is_routed_afresh(make: Make):
    def scenario(engine):
        return interrupted_rollouts(engine, WEIGHTS, ["r0"], [Interruption("abort", 1), Interruption("abort", 2)])

    (rollout,) = play(make(), WEIGHTS[0], 0, scenario)
    assert [set(call.versions.tolist()) for call in rollout.calls] == [{0}, {1}, {2}]
    for version, call in enumerate(rollout.calls):
        _, rows = teacher_forced(model(version), rollout.tokens[: call.end], TEMPERATURE)
        assert np.array_equal(np.sort(call.rows, axis=-1), np.sort(rows, axis=-1))


def test_weights_change_only_while_paused_and_nothing_is_served_after_the_end(make: Make):
    engine = make()

    async def scenario(started):
        with pytest.raises(RuntimeError, match="must be paused first"):
            await started.load_weights(WEIGHTS[1], 1)
        with pytest.raises(RuntimeError, match="not paused"):
            await started.resume()
        await started.pause("abort")
        await started.pause("abort")
        await started.resume()
        with pytest.raises(ValueError, match="a pause mode of"):
            await started.pause("sideways")

    async def after():
        with pytest.raises(RuntimeError, match=r"ended|closed|not started"):
            await engine.generate(request("r0"))
        await engine.close()

    play(engine, WEIGHTS[0], 0, scenario)
    asyncio.run(after())
