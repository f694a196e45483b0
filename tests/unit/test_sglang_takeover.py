"""Before a run gives a server its weights: is it the server, and the model, that the run means?"""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transformers import Qwen3MoeConfig

from experiments.engines.base import EngineLost
from tests.unit.sglang_kit import loopback_server
from tests.unit.test_sglang_engine import CONFIG, WEIGHTS, OwnedServers, play, request


@pytest.fixture
def server():
    with loopback_server() as running:
        yield running


async def nothing(engine) -> None:
    """The engine starts and ends."""


WRONG = {
    "another number of experts per token": lambda server: setattr(server, "top_k", 3),
    "another number of layers": lambda server: setattr(server, "layers", 4),
    "no rows": lambda server: server.settings.update(enable_return_routed_experts=False),
    "a setting": lambda server: server.settings.update(pp_size=2),
    "another dtype": lambda server: server.settings.update(dtype="bfloat16"),
    "a dtype that is not known": lambda server: server.settings.update(dtype="auto"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_server_that_does_not_fit_keeps_its_weights_and_its_requests(tmp_path, server, fault):
    WRONG[fault](server)
    with pytest.raises(EngineLost, match="expected"):
        play(tmp_path, nothing, server.url)
    assert (server.version, server.paused, server.held) == ("default", False, {})
    assert not {"/pause_generation", "/abort_request", "/update_weights_from_disk"} & set(server.calls)


@pytest.mark.parametrize(
    ("size", "ours"), [("vocab_size", 32), ("num_experts", 8), ("num_hidden_layers", 3), ("hidden_size", 32)]
)
def test_a_server_of_other_sizes_is_refused_where_its_model_can_be_read(tmp_path, server, size, ours):
    """Some of these would be taken without a word: SGLang leaves out weights that it has no place for."""
    folder = tmp_path / "theirs"
    theirs = Qwen3MoeConfig.from_dict(CONFIG.to_dict())
    setattr(theirs, size, 2 * ours)
    theirs.save_pretrained(folder)
    server.settings["model_path"] = str(folder)
    with pytest.raises(EngineLost, match=f"{size}={ours} expected, {2 * ours} came"):
        play(tmp_path, nothing, server.url)
    assert (server.version, server.held) == ("default", {})
    CONFIG.save_pretrained(folder)
    play(tmp_path, nothing, server.url)
    assert server.version == "5"


def test_a_server_that_is_paused_gets_its_weights_before_it_is_asked(tmp_path, server):
    server.paused = True
    play(tmp_path, nothing, server.url)
    assert (server.version, server.paused) == ("5", False)
    assert server.calls.index("/update_weights_from_disk") < server.calls.index("/generate")


def test_a_server_that_took_the_port_of_ours_is_not_ours(tmp_path):
    def of_another_run(server, number):
        server.model_path = "/elsewhere/routemerge-weights-1-x/v5"

    servers = OwnedServers(of_another_run)
    with pytest.raises(EngineLost, match=r"a server of .*/v5 expected, one of .*-1-x/v5 answers: another program took"):
        play(tmp_path, nothing, servers=servers)
    assert "/generate" not in servers.started[0][2].calls


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write further, as a full disk or a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_while_weights_are_written_leaves_the_server_on_the_old_ones(tmp_path, server):
    async def scenario(engine):
        (own,) = tmp_path.iterdir()
        with files_of_at_most(5000):
            await engine.pause("abort")
            try:
                await engine.load_weights(WEIGHTS, 6)
            finally:
                assert [path.name for path in own.iterdir()] == ["v5"]

    with pytest.raises(EngineLost, match=r"weight version 6 could not be published: .* set engine.server.publish_dir"):
        play(tmp_path, scenario, server.url)
    assert (server.version, server.paused) == ("5", False)


def test_a_folder_that_is_gone_in_the_midst_of_a_run_ends_it_with_its_name(tmp_path, server):
    async def scenario(engine):
        (own,) = tmp_path.iterdir()
        shutil.rmtree(own)
        await engine.pause("abort")
        await engine.load_weights(WEIGHTS, 6)

    with pytest.raises(EngineLost, match=r"weight version 6 could not be published: .*No such file.*weights-"):
        play(tmp_path, scenario, server.url)
    assert server.version == "5"


def test_a_weight_version_that_goes_backwards_is_noticed(tmp_path, server):
    async def scenario(engine):
        asked = asyncio.create_task(engine.generate(request(tokens=100)))
        await asyncio.sleep(0.05)
        server.version = "4"
        await asked

    with pytest.raises(Exception, match=r"weight version 5..5 expected by our own count of syncs, 4 came"):
        play(tmp_path, scenario, server.url)
