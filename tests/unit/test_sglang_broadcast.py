"""Weights by broadcast, over a real process group, to a stand-in server on the loopback interface (sglang_kit.py).

That the real server joins the same group and computes with what it received is tested in tests/sglang.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.engines.base import EngineLost
from experiments.engines.sglang.broadcast import Broadcast, buckets
from experiments.engines.sglang.weights import Publisher, hub_tensors
from tests.unit.sglang_kit import LoopbackServer, loopback_server
from tests.unit.test_sglang_engine import CONFIG, WEIGHTS, OwnedServers, interrupted, play, request

HUB = dict(hub_tensors(WEIGHTS, torch.float32))
BYTES = sum(tensor.nbytes for tensor in HUB.values())
UPDATED = {name: tensor + 1 for name, tensor in WEIGHTS.items()}


@pytest.fixture
def server():
    with loopback_server() as running:
        yield running


def broadcast(tmp_path: Path, **settings) -> Broadcast:
    return Broadcast(Publisher(CONFIG, torch.float32, tmp_path), torch.float32, "gloo", timeout_s=10.0, **settings)


def holds(server: LoopbackServer, weights: dict[str, torch.Tensor]) -> bool:
    expected = dict(hub_tensors(weights, torch.float32))
    return server.held.keys() == expected.keys() and all(
        np.array_equal(server.held[name], tensor.numpy()) for name, tensor in expected.items()
    )


def test_buckets_hold_every_tensor_once_and_stay_below_the_limit_where_a_tensor_allows_it():
    largest = max(tensor.nbytes for tensor in HUB.values())
    for limit in (1, largest, 3 * largest, 2 * BYTES):
        found = list(buckets(WEIGHTS, torch.float32, limit))
        assert [name for bucket in found for name in bucket.names] == list(HUB)
        assert all(len(bucket.data) <= max(limit, largest) for bucket in found)
        assert sum(len(bucket.data) for bucket in found) == BYTES
    assert len(found) == 1
    half = list(buckets(WEIGHTS, torch.bfloat16, 2 * BYTES))
    assert (len(half[0].data), set(half[0].dtypes)) == (BYTES // 2, {"bfloat16"})


def test_a_server_gets_all_weights_and_the_version_and_the_flush_with_the_last_of_them(tmp_path, server):
    async def scenario(engine):
        return await interrupted(engine, "abort", request(tokens=100))

    server.token_s = 0.05  # the update comes in the midst of the request, however busy the machine is
    (reply,) = play(tmp_path, scenario, server.url, transport=broadcast(tmp_path, bucket_bytes=BYTES // 3))
    assert (reply.call.finish, set(reply.call.versions.tolist())) == ("abort", {5})
    assert (server.version, holds(server, WEIGHTS)) == ("6", True)
    first, second = server.broadcasts[:4], server.broadcasts[4:]
    for sent, version in ((first, "5"), (second, "6")):
        assert sum(size for size, _ in sent) == BYTES
        assert [asked["weight_version"] for _, asked in sent] == [None, None, None, version]
        assert [asked["flush_cache"] for _, asked in sent] == [False, False, False, True]
    assert "/update_weights_from_disk" not in server.calls
    assert server.calls.count("/init_weights_update_group") == 1
    assert (server.groups, server.updating) == ({}, False), "the group is dissolved at the end"


def test_an_update_in_place_keeps_the_cache(tmp_path, server):
    play(
        tmp_path,
        lambda engine: interrupted(engine, "in_place", request()),
        server.url,
        transport=broadcast(tmp_path),
    )
    assert [asked["flush_cache"] for _, asked in server.broadcasts] == [True, False]


def test_a_server_of_ours_starts_without_weights_and_gets_them_before_it_is_used(tmp_path):
    servers = OwnedServers(weights_in_folder=False)

    async def scenario(engine):
        folder, _, server = servers.started[0]
        assert sorted(path.name for path in folder.iterdir()) == ["config.json"]
        assert holds(server, WEIGHTS)
        return await engine.generate(request(tokens=3))

    reply = play(tmp_path, scenario, servers=servers, transport=broadcast(tmp_path))
    assert reply.call.versions.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/update_weights_from_distributed", "drop"),
        ("/update_weights_from_distributed", (400, {"success": False, "message": "partially updated"})),
        ("/begin_weight_update", (400, {"success": False, "message": "no"})),
        ("/end_weight_update", "drop"),
    ],
)
def test_a_server_of_ours_that_fails_in_a_broadcast_is_replaced_never_mixed(tmp_path, path, fault):
    servers = OwnedServers(weights_in_folder=False)

    async def scenario(engine):
        servers.started[0][2].faults = {path: [fault]}
        await engine.pause("abort")
        await engine.load_weights(UPDATED, 6)
        await engine.resume()
        assert holds(servers.started[1][2], UPDATED)
        return (await engine.generate(request(tokens=3))).call.versions.tolist()

    assert play(tmp_path, scenario, servers=servers, transport=broadcast(tmp_path)) == [6, 6, 6]
    assert [version for _, version, _ in servers.started] == [5, 6]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((400, {"success": False, "message": "partially updated"}), "was not taken: partially updated"),
        ("drop", "update to weight version 6: the server at"),
    ],
)
def test_a_failed_broadcast_to_a_server_that_is_not_ours_ends_the_run(tmp_path, server, fault, message):
    async def scenario(engine):
        server.faults = {"/update_weights_from_distributed": [None, fault]}
        await engine.pause("abort")
        await engine.load_weights(WEIGHTS, 6)

    transport = broadcast(tmp_path, bucket_bytes=BYTES // 3)
    with pytest.raises(EngineLost, match=message):
        play(tmp_path, scenario, server.url, transport=transport)
    assert server.version == "5", "whatever it holds, it is not called version 6"

    async def nothing(engine):
        return holds(server, WEIGHTS) and not server.paused

    assert (server.updating, server.paused) == (True, True), "nobody is served from a part of the weights"
    assert play(tmp_path, nothing, server.url, transport=broadcast(tmp_path))


def test_a_server_that_does_not_take_part_is_given_up_in_time(tmp_path, server):
    over = threading.Event()

    async def scenario(engine):
        server.receive = lambda body: over.wait(60) and {"success": False, "message": "too late"}
        await engine.pause("abort")
        await engine.load_weights({"lm_head.weight": torch.zeros(16, 2**20)}, 6)  # more than the kernel's buffers take

    transport = Broadcast(Publisher(CONFIG, torch.float32, tmp_path), torch.float32, "gloo", timeout_s=2.0)
    with pytest.raises(EngineLost, match=r"a broadcast of weights failed: .*[Tt]imed out"):
        play(tmp_path, scenario, server.url, transport=transport)
    over.set()


def test_a_server_that_does_not_join_is_refused_at_once(tmp_path, server):
    refusal = (400, {"success": False, "message": "Failed to initialize custom process group: no"})
    server.faults = {"/init_weights_update_group": [refusal]}
    started = time.monotonic()
    with pytest.raises(EngineLost, match=r"a gloo group \(127\.0\.0\.1\) was not joined: Failed to initialize"):
        play(tmp_path, lambda engine: asyncio.sleep(0), server.url, transport=broadcast(tmp_path))
    assert time.monotonic() - started < 8, "without waiting for the group's own time-out"


def test_data_parallel_servers_are_refused(tmp_path, server):
    server.settings["dp_size"] = 2
    with pytest.raises(EngineLost, match="dp_size=1 expected, 2 came"):
        play(tmp_path, lambda engine: asyncio.sleep(0), server.url, transport=broadcast(tmp_path))
