"""The SGLang engine against a stand-in server on the loopback interface (sglang_kit.py): pauses, versions, failures.

The real server is tested in tests/sglang.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from experiments.engines.base import EngineLost, PauseMode, Reply, Request
from experiments.engines.sglang.client import Sampling
from experiments.engines.sglang.engine import ServerSource, SGLangEngine
from experiments.engines.sglang.transport import Disk
from experiments.engines.sglang.weights import PREFIX, Publisher
from strategies.reply import ReplyError
from tests.unit.engine_kit import SIZES, model_of
from tests.unit.sglang_kit import EXPERTS, LAYERS, TOP_K, VOCAB, LoopbackServer, loopback_server

CONFIG = Qwen3MoeConfig.from_dict(SIZES)
assert (CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok, CONFIG.num_experts, CONFIG.vocab_size) == (
    LAYERS,
    TOP_K,
    EXPERTS,
    VOCAB,
)
WEIGHTS = {name: tensor.detach() for name, tensor in model_of(seed=0).state_dict().items()}
Scenario = Callable[[SGLangEngine], Coroutine[Any, Any, Any]]


def request(name: str = "r0.0", tokens: int = 20, prompt: int = 4, row_start: int = 0) -> Request:
    return Request(name, np.arange(prompt, dtype=np.int32), tokens, sample_seed=0, row_start=row_start)


class OwnedServers:
    """Servers that the engine starts itself: stand-ins, one after another."""

    def __init__(
        self,
        prepare: Callable[[LoopbackServer, int], None] = lambda server, number: None,
        *,
        weights_in_folder: bool = True,
    ):
        self.started: list[tuple[Path, int, LoopbackServer]] = []
        self._prepare, self._weights_in_folder = prepare, weights_in_folder

    def start(self, folder: Path, version: int) -> Any:
        return OwnedServer(self, folder, version)

    def begin(self, folder: Path, version: int, stack: ExitStack) -> LoopbackServer:
        server = stack.enter_context(loopback_server())
        server.model_path = str(folder)
        if self._weights_in_folder:
            server.update({"model_path": str(folder), "weight_version": str(version)})
        self._prepare(server, len(self.started))
        self.started.append((folder, version, server))
        return server


class OwnedServer:
    """What the engine sees of a server process."""

    def __init__(self, owner: OwnedServers, folder: Path, version: int):
        self._stack = ExitStack()
        self.url = owner.begin(folder, version, self._stack).url

    async def wait_ready(self, timeout_s: float) -> None:
        """It is."""

    def exit_code(self) -> int | None:
        return None

    def tail(self) -> str:
        return "the end of its log"

    async def stop(self) -> None:
        self._stack.close()

    def kill(self) -> None:
        self._stack.close()


def play(tmp_path: Path, scenario: Scenario, url: str | None = None, servers: OwnedServers | None = None, **kw: Any):
    """Returns what `scenario` returns, played on a started engine; nothing that it published may be left."""
    settings = {
        "transport": Disk(Publisher(CONFIG, torch.float32, tmp_path)),
        "max_in_flight": 4,
        "request_timeout_s": 30.0,
        "prefix_cache": True,
        "max_restarts": 1,
        **kw,
    }
    max_restarts = settings.pop("max_restarts")
    engine = SGLangEngine(
        CONFIG,
        source=ServerSource(servers.start if servers else None, url, start_timeout_s=5.0, max_restarts=max_restarts),
        sampling=Sampling(1.0, 1.0, [2]),
        **settings,
    )

    async def run() -> Any:
        await engine.start(WEIGHTS, 5)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    try:
        return asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        assert list(tmp_path.glob(f"{PREFIX}*")) == []


@pytest.fixture
def server():
    with loopback_server() as running:
        yield running


def test_a_server_by_url_gets_the_weights_in_hub_layout_and_their_version(tmp_path, server):
    async def nothing(engine):
        return server.version, server.paused

    assert play(tmp_path, nothing, server.url) == ("5", False)
    fused = WEIGHTS["model.layers.1.mlp.experts.gate_up_proj"]
    expert = "model.layers.1.mlp.experts.3"
    assert np.array_equal(server.held[f"{expert}.gate_proj.weight"], fused[3].chunk(2)[0].numpy())
    assert np.array_equal(server.held[f"{expert}.up_proj.weight"], fused[3].chunk(2)[1].numpy())
    down = WEIGHTS["model.layers.1.mlp.experts.down_proj"][3].numpy()
    assert np.array_equal(server.held[f"{expert}.down_proj.weight"], down)
    assert np.array_equal(server.held["lm_head.weight"], WEIGHTS["lm_head.weight"].numpy())
    assert (server.config["architectures"], server.config["dtype"]) == (["Qwen3MoeForCausalLM"], "float32")


def test_a_reply_becomes_a_call(tmp_path, server):
    reply: Reply = play(tmp_path, lambda engine: engine.generate(request(tokens=6, row_start=2)), server.url)
    call = reply.call
    assert (call.request_id, call.input_len, call.finish, call.row_start) == ("r0.0", 4, "length", 2)
    assert call.output_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert call.rows is not None
    assert call.rows.shape == (4 + 6 - 1 - 2, LAYERS, TOP_K)
    assert call.rows[0, 0].tolist() == [2, 3]
    assert call.versions.tolist() == [5] * 6
    assert (reply.prefill_tokens, reply.row_bytes) == (4, 4 * ((7 * LAYERS * TOP_K * 4 + 2) // 3))


def test_nothing_of_the_sampling_is_left_to_the_server(tmp_path, server):
    play(tmp_path, lambda engine: engine.generate(request(tokens=6)), server.url)
    assert server.bodies[-1]["sampling_params"] == {
        "max_new_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "stop_token_ids": [2],
        "ignore_eos": False,
    }


async def interrupted(engine: SGLangEngine, mode: PauseMode, *requests: Request) -> list[Reply]:
    """Returns replies to requests that an update to version 6 came in between of."""
    calls = [asyncio.create_task(engine.generate(asked)) for asked in requests]
    await asyncio.sleep(0.06)
    await engine.pause(mode)
    await engine.load_weights(WEIGHTS, 6)
    await engine.resume()
    return await asyncio.gather(*calls)


def test_an_abort_answers_what_runs_and_holds_back_what_waits(tmp_path, server):
    asked = [request(f"r{i}.0", tokens=100) for i in range(6)]
    replies = play(tmp_path, lambda engine: interrupted(engine, "abort", *asked), server.url, max_in_flight=4)
    assert [reply.call.finish for reply in replies] == ["abort"] * 4 + ["length"] * 2
    assert all(0 < reply.call.new_tokens < 100 for reply in replies[:4])
    assert [set(reply.call.versions.tolist()) for reply in replies] == [{5}] * 4 + [{6}] * 2
    assert server.most_under_way == 4
    _, second = (i for i, path in enumerate(server.calls) if path == "/update_weights_from_disk")
    assert server.calls.index("/abort_request") < second


def test_in_place_and_retract_give_spans_and_say_which_rows_are_mixed(tmp_path):
    for mode, mixed in (("in_place", False), ("retract", True)):
        with loopback_server() as server:
            (reply,) = play(
                tmp_path,
                lambda engine, mode=mode: interrupted(engine, mode, request(tokens=100)),
                server.url,
                prefix_cache=mode != "in_place",
            )
            assert reply.call.finish == "length"
            assert sorted(set(reply.call.versions.tolist())) == [5, 6]
            assert np.all(np.diff(reply.call.versions) >= 0)
            assert reply.call.mixed_rows is mixed
            assert reply.retractions == (mode == "retract")


def test_only_an_update_in_place_keeps_the_cache(tmp_path):
    for mode, flushed in (("abort", True), ("retract", True), ("in_place", False)):
        with loopback_server() as server:
            asked: list[bool] = []
            update = server.update
            server.update = lambda body, asked=asked, update=update: (asked.append(body["flush_cache"]), update(body))[
                1
            ]
            play(tmp_path, lambda engine, mode=mode: interrupted(engine, mode, request()), server.url)
            assert asked == [True, flushed]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": np.array([], np.int32)}, r"integer input ids \[s\] with s >= 1 are expected"),
        (
            {"input_ids": np.array([0, VOCAB], np.int32)},
            rf"ids in \[0, {VOCAB}\) are expected, {VOCAB} came at position 1",
        ),
        ({"input_ids": np.array([-1], np.int32)}, "are expected, -1 came"),
        ({"max_new_tokens": 0}, "max_new_tokens >= 1 is expected"),
        ({"max_new_tokens": 500}, "at most 200 tokens fit"),
        ({"row_start": 4}, r"row_start in \[0, 4\) is expected"),
        (
            {"rows": np.zeros((3, LAYERS, TOP_K), np.int32)},
            r"request r0\.0: no rows are expected, those of 3 positions",
        ),
    ],
)
def test_a_request_that_would_harm_the_server_is_not_sent(tmp_path, server, bad, message):
    async def scenario(engine):
        sent = len(server.bodies)
        with pytest.raises(ValueError, match=message):
            await engine.generate(Request(**{**vars(request()), **bad}))
        return len(server.bodies) - sent

    assert play(tmp_path, scenario, server.url) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_return_routed_experts": False}, "start it with --enable-return-routed-experts"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm=None expected, EAGLE came"),
        ({"pp_size": 2}, "pp_size=1 expected, 2 came"),
        ({"disable_radix_cache": False}, "start it with --disable-radix-cache"),
    ],
)
def test_a_server_whose_rows_cannot_be_replayed_is_refused_at_once(tmp_path, server, settings, message):
    server.settings |= settings
    with pytest.raises(EngineLost, match=message):
        play(tmp_path, lambda engine: engine.generate(request()), server.url, prefix_cache=False)


def test_a_server_with_another_model_is_refused_at_once(tmp_path, server):
    server.top_k = 3
    with pytest.raises(EngineLost, match="a model of 3 layers and 2 of 8 experts is expected"):
        play(tmp_path, lambda engine: engine.generate(request()), server.url)


def test_no_server_at_the_url_is_a_clear_error(tmp_path):
    with pytest.raises(EngineLost, match=r"the SGLang server cannot be used: http://127.0.0.1:9/server_info"):
        play(tmp_path, lambda engine: engine.generate(request()), "http://127.0.0.1:9")


def test_an_update_by_somebody_else_is_noticed(tmp_path, server):
    async def scenario(engine):
        server.version = "9"
        await engine.generate(request())

    with pytest.raises(ReplyError, match=r"weight version 5..5 expected by our own count of syncs, 9 came"):
        play(tmp_path, scenario, server.url)


def test_a_cache_that_was_not_flushed_is_flushed_again(tmp_path, server):
    async def scenario(engine):
        refusal = {"success": False, "message": "Weights were updated, but the cache was not flushed because ..."}
        update = server.update
        server.update = lambda body: update(body) | refusal
        return await interrupted(engine, "abort", request(tokens=100))

    play(tmp_path, scenario, server.url)
    assert server.calls.count("/flush_cache") == 1


@pytest.mark.parametrize(
    ("path", "fault", "message"),
    [
        (
            "/update_weights_from_disk",
            (400, {"success": False, "message": "Failed to update weights"}),
            "was not taken",
        ),
        ("/update_weights_from_disk", (200, {"success": True, "message": "but nothing was done"}), "it says '5'"),
        ("/update_weights_from_disk", "drop", "update to weight version 6"),
        ("/flush_cache", (400, {}), "was not taken: Weights were updated"),
        ("/pause_generation", "drop", r"pause \(abort\)"),
        ("/pause_generation", (500, {}), r"pause \(abort\)"),
        ("/continue_generation", "drop", "resume"),
        ("/continue_generation", (500, {}), "resume"),
        ("/generate", "drop", "request r1.0"),
        ("/generate", "hang", r"no answer within 0.4 s"),
    ],
)
def test_a_failure_of_a_server_that_is_not_ours_ends_the_run(tmp_path, server, path, fault, message):
    """Nothing is mixed: no request is answered after it, and the error names what was being done."""

    async def scenario(engine):
        server.faults = {path: [fault], "/health": [(503, {})]}
        if path == "/flush_cache":
            refusal = (400, {"success": False, "message": "Weights were updated, but not flushed"})
            server.faults["/update_weights_from_disk"] = [refusal]

        async def work():
            await interrupted(engine, "abort", request("r1.0", tokens=10))
            await engine.generate(request("r2.0", tokens=1))

        with pytest.raises(EngineLost, match=message):
            await work()
        with pytest.raises(EngineLost, match="the engine has ended: "):
            await engine.generate(request("r3.0"))
        await engine.pause("abort")  # nothing runs any more, so that a checkpoint can be saved

    play(tmp_path, scenario, server.url, request_timeout_s=0.4 if fault == "hang" else 30.0)


def test_a_server_of_ours_that_dies_is_started_again_and_lost_requests_are_sent_again(tmp_path, caplog):
    servers = OwnedServers()

    async def scenario(engine):
        servers.started[0][2].faults = {"/generate": ["drop", "drop"], "/health": [(503, {}), (503, {})]}
        replies = await asyncio.gather(*(engine.generate(request(f"r{i}.0", tokens=5)) for i in range(3)))
        return replies, engine.stats().restarts

    replies, restarts = play(tmp_path, scenario, servers=servers)
    assert [reply.call.output_ids.tolist() for reply in replies] == [[1, 2, 3, 4, 5]] * 3
    assert [(folder.name, version) for folder, version, _ in servers.started] == [("v5", 5)] * 2
    assert restarts == 1
    assert "starting it again" in caplog.text


def test_a_connection_that_breaks_while_the_server_is_well_costs_one_more_send(tmp_path, server, caplog):
    async def scenario(engine):
        server.faults = {"/generate": ["drop", "drop"]}
        return await engine.generate(request("r1.0", tokens=3))

    assert play(tmp_path, scenario, server.url).call.new_tokens == 3
    assert caplog.text.count("request r1.0: sent again") == 2
    server.faults = {"/generate": [None, "drop", "drop", "drop"]}
    with pytest.raises(EngineLost, match=r"request r1\.0: the server at"):
        play(tmp_path, lambda engine: engine.generate(request("r1.0", tokens=3)), server.url)


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/pause_generation", "/continue_generation"])
def test_a_server_of_ours_that_dies_in_a_sync_comes_back_with_the_new_weights(tmp_path, path):
    servers = OwnedServers()

    async def scenario(engine):
        servers.started[0][2].faults = {path: ["drop"]}
        await engine.pause("abort")
        await engine.load_weights(WEIGHTS, 6)
        await engine.resume()
        return (await engine.generate(request(tokens=3))).call.versions.tolist()

    assert play(tmp_path, scenario, servers=servers) == [6, 6, 6]
    assert servers.started[1][2].version == "6"


def test_a_server_of_ours_that_refused_an_update_is_replaced_never_mixed(tmp_path):
    servers = OwnedServers()

    async def scenario(engine):
        servers.started[0][2].faults = {
            "/update_weights_from_disk": [
                (400, {"success": False, "message": "Failed to update weights: half of them"})
            ]
        }
        await engine.pause("abort")
        await engine.load_weights(WEIGHTS, 6)
        await engine.resume()
        return (await engine.generate(request(tokens=3))).call.versions.tolist()

    assert play(tmp_path, scenario, servers=servers) == [6, 6, 6]
    assert [(folder.name, version) for folder, version, _ in servers.started] == [("v5", 5), ("v6", 6)]


def test_a_server_that_keeps_dying_ends_the_run_with_its_log(tmp_path):
    def ill(server: LoopbackServer, number: int) -> None:
        server.faults = {"/generate": [*[None] * (number == 0), "drop"], "/health": [(503, {})] * 2}

    servers = OwnedServers(ill)

    async def scenario(engine):
        await engine.generate(request())

    with pytest.raises(EngineLost, match=r"max_restarts=1 times; the end of its log"):
        play(tmp_path, scenario, servers=servers)
    assert len(servers.started) == 2


def test_a_full_disk_leaves_the_server_on_the_old_weights_and_ends_the_run(tmp_path, server, monkeypatch):
    async def scenario(engine):
        full = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        await engine.pause("abort")
        await engine.load_weights(WEIGHTS, 6)

    with pytest.raises(EngineLost, match=r"weight version 6 could not be published: .* set engine.server.publish_dir"):
        play(tmp_path, scenario, server.url)
    assert server.version == "5"
    assert server.calls.count("/update_weights_from_disk") == 1


def test_a_server_that_is_not_ours_is_left_running(tmp_path, server):
    async def scenario(engine):
        await engine.pause("abort")

    play(tmp_path, scenario, server.url)
    assert not server.paused


def test_irregular_replies_are_counted_and_told(tmp_path, server, caplog):
    caplog.set_level(logging.INFO)
    reply = server.reply

    def without_a_log_prob(*args):
        answer = reply(*args)
        answer["meta_info"]["output_token_logprobs"][0][0] = None
        return answer

    server.reply = without_a_log_prob
    play(tmp_path, lambda engine: engine.generate(request(tokens=3)), server.url)
    assert "request r0.0: the reply is flagged log_prob_missing" in caplog.text
    assert "flagged log_prob_missing: 1 of 1" in caplog.text


def test_weights_of_a_process_that_was_killed_are_removed_by_the_next(tmp_path, server):
    left = tmp_path / f"{PREFIX}999999999-x"
    left.mkdir()
    play(tmp_path, lambda engine: engine.generate(request()), server.url)
    assert not left.exists()
