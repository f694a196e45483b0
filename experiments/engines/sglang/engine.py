"""The engine contract (experiments/engines/base.py) on a real SGLang server, ours or one given by URL.

Weights reach the server through a transport (transport.py). Every reply goes through reply.py; the weight versions in
it are checked against our own count of syncs.

A server of ours that dies is started again with the weights of the current version, and the requests whose answers were
lost are sent again: as no answer was taken, nothing is known of what it sampled, and the new call is as good as the
first. An update that fails leaves a server in an unknown state: it is restarted with the new weights, or the run stops.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from transformers import Qwen3MoeConfig

from experiments.engines.base import EngineLost, PauseMode, Reply, Request, check_request
from experiments.engines.sglang.client import ConnectionLost, Sampling, ServerRefused, SGLangClient, request_body
from experiments.engines.sglang.handshake import (
    check_dtype,
    check_identity,
    check_model,
    check_settings,
    check_sizes,
)
from experiments.engines.sglang.process import ServerProcess, ServerStartError
from experiments.engines.sglang.reply import ParsedReply, Sent, parse_reply
from experiments.engines.sglang.transport import NOT_FLUSHED, Transport
from strategies.reply import RowShape

log = logging.getLogger(__name__)

DRAIN_RETRY_S = 0.05
"""Between two orders to abort: a request on its way to the server is not reached by the first."""


MAX_RESENDS = 2
"""Of one request whose connection broke while the server is well."""


@dataclass(frozen=True)
class EngineStats:
    """Totals since the start of the engine.

    Attributes:
        busy_s: wall seconds in which at least one request was under way.
        forward_s: 0: what a server spends inside the model is not known here.
        generated_tokens: tokens of all replies.
        row_bytes: characters of rows as they travelled.
        requests: replies taken.
        restarts: servers started after the first.
        flags: irregularities of replies by name (reply.py).
    """

    busy_s: float
    forward_s: float
    generated_tokens: int
    row_bytes: int
    requests: int
    restarts: int
    flags: Mapping[str, int]


@dataclass(frozen=True)
class ServerSource:
    """Where servers come from.

    Attributes:
        start: starts a server of ours from a folder of the transport, as a weight version; None: the server at `url` is
            not ours.
        url: of a server that somebody else runs.
        start_timeout_s: until a server of ours answers.
        max_restarts: servers of ours that may be started after the first.
    """

    start: Callable[[Path, int], ServerProcess] | None
    url: str | None
    start_timeout_s: float
    max_restarts: int


class SGLangEngine:
    """A rollout engine on one SGLang server.

    Args:
        config: sizes of the model, which the server must share.
        source: where the server comes from.
        transport: how weights reach it.
        sampling: temperature, top-p, stop tokens. SGLang's log-probs are those of the distribution at that temperature
            before top-p cuts it.
        max_in_flight: requests under way at once; further ones wait here, and no sync aborts them.
        request_timeout_s: a request without an answer for so long counts as hung.
        prefix_cache: the server may keep one; not with pauses `in_place`, after which it would serve prompts from the
            KV cache of older weights.
        dtype: what the server computes in, by torch's name.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        *,
        source: ServerSource,
        transport: Transport,
        sampling: Sampling,
        max_in_flight: int,
        request_timeout_s: float,
        prefix_cache: bool,
        dtype: str = "float32",
    ):
        self._config, self._dtype = config, dtype
        self._shape = RowShape(config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)
        self._vocab_size, self._max_length = config.vocab_size, config.max_position_embeddings
        self._source, self._transport, self._sampling = source, transport, sampling
        self._max_in_flight, self._request_timeout_s = max_in_flight, request_timeout_s
        self._prefix_cache = prefix_cache
        self._name = uuid.uuid4().hex[:8]  # keeps our request ids apart from those of other clients
        self._server: ServerProcess | None = None
        self._client: SGLangClient | None = None
        self._version = 0
        self._update_modes: dict[int, PauseMode] = {}  # by the version that the update brought
        self._pause_mode: PauseMode | None = None
        self._whole = (
            True  # the server holds one version's weights; not so while an update is under way, or after a failure
        )
        self._open = asyncio.Event()
        self._slots = asyncio.Semaphore(max_in_flight)
        self._sending: set[str] = set()
        self._names: set[str] = set()
        self._idle = asyncio.Event()
        self._recovery = asyncio.Lock()
        self._incarnation = 0
        self._lost: EngineLost | None = None
        self._busy_s, self._busy_since = 0.0, 0.0
        self._tokens = self._row_bytes = self._requests = 0
        self._flags: Counter[str] = Counter()

    def stats(self) -> EngineStats:
        """Returns totals since the start."""
        running = time.perf_counter() - self._busy_since if self._sending else 0.0
        return EngineStats(
            busy_s=self._busy_s + running,
            forward_s=0.0,
            generated_tokens=self._tokens,
            row_bytes=self._row_bytes,
            requests=self._requests,
            restarts=self._incarnation,
            flags=dict(self._flags),
        )

    async def start(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Brings the server up with `weights` as weight version `version`, and checks that it honours the contract.

        Raises:
            RuntimeError: it was started before.
            EngineLost: the server does not come up, or is not what the configuration says.
        """
        if self._client is not None or self._lost is not None:
            raise RuntimeError("the engine was started before")
        try:
            await self._transport.stage(weights, version)
            self._version = version
            if self._source.start is not None:
                await self._start_server()
                assert self._client is not None
                await check_model(self._client, self._shape, self._sampling, self._name)
            else:
                assert self._source.url is not None
                self._client = self._connect(self._source.url)
                await self._take_over(self._client)
        except (OSError, ServerStartError, ServerRefused, ConnectionLost) as error:
            lost = self._give_up(f"the SGLang server cannot be used: {error}", error)
            await self.close()
            raise lost from error
        except BaseException:
            if self._server is not None:
                self._server.kill()  # nothing of it is worth the wait for an orderly end
            await self.close()
            raise
        self._idle.set()
        self._open.set()

    async def generate(self, request: Request) -> Reply:
        """Generates until stop, length or an abort; see experiments/engines/base.py.

        Raises:
            ValueError: the request is malformed, or gives rows to go through; it was not sent (ids out of the
                vocabulary end the server).
            ReplyError: the reply breaks the contract; the message names the request, what was expected and what came.
            EngineLost: the server is gone and cannot be restarted.
        """
        self._check_alive()
        if self._client is None:
            raise RuntimeError("the engine is not started")
        check_request(request, self._names, self._vocab_size, self._max_length)
        if request.rows is not None:
            raise ValueError(
                f"request {request.request_id}: no rows are expected, those of {len(request.rows)} positions came: "
                "SGLang routes every position itself; use engine.resume_rows=recompute"
            )
        self._names.add(request.request_id)
        try:
            async with self._slots:
                for attempt in itertools.count():
                    self._check_alive()
                    while not self._open.is_set():  # a pause may come between the signal and our turn
                        await self._open.wait()
                        self._check_alive()
                    incarnation, client = self._incarnation, self._client
                    try:
                        return self._take(await self._send(client, request, attempt))
                    except ConnectionLost as error:
                        if attempt < MAX_RESENDS and not error.hung and await client.healthy():
                            log.warning("request %s: sent again: %s", request.request_id, error)
                            continue
                        await self._recover(incarnation, f"request {request.request_id}", error)
            raise AssertionError("the loop above has no end")
        finally:
            self._names.discard(request.request_id)

    async def pause(self, mode: PauseMode) -> None:
        """Stops generation; returns when nothing runs any more. On an engine that was lost nothing runs.

        Raises:
            ValueError: unknown mode.
            EngineLost: the server is gone and cannot be restarted.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"a pause mode of {get_args(PauseMode)} is expected, {mode!r} came")
        if self._lost is not None:
            return
        self._open.clear()
        self._pause_mode = mode
        incarnation, client = await self._current()
        try:
            if mode == "abort":
                await self._drain(client)
            await client.pause(mode)
        except (ConnectionLost, ServerRefused) as error:
            await self._recover(incarnation, f"pause ({mode})", error)

    async def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces the weights while paused; tokens sampled from here on carry `version`.

        Raises:
            RuntimeError: the engine is not paused.
            EngineLost: the update failed and the server cannot be restarted with the new weights.
        """
        self._check_alive()
        if self._pause_mode is None:
            raise RuntimeError(f"load_weights(version={version}): the engine must be paused first")
        try:
            await self._transport.stage(weights, version)
        except OSError as error:
            raise self._give_up(f"weight version {version} could not be published: {error}", error) from error
        self._version = version
        self._update_modes[version] = self._pause_mode
        while True:
            incarnation, client = await self._current()
            try:
                await self._update(client)
                return
            except (ConnectionLost, ServerRefused) as error:
                await self._recover(incarnation, f"update to weight version {version}", error)

    async def resume(self) -> None:
        """Continues after `pause`.

        Raises:
            RuntimeError: the engine is not paused.
            EngineLost: the server is gone and cannot be restarted.
        """
        self._check_alive()
        if self._pause_mode is None:
            raise RuntimeError("resume(): the engine is not paused")
        incarnation, client = await self._current()
        try:
            await client.resume()
        except (ConnectionLost, ServerRefused) as error:
            await self._recover(incarnation, "resume", error)
        self._pause_mode = None
        self._open.set()

    async def close(self) -> None:
        """Ends the server if it is ours, lets it go on if it is not, and removes what was published. May be called
        twice.
        """
        for name, count in sorted(self._flags.items()):
            log.info("SGLang replies flagged %s: %d of %d", name, count, self._requests)
        self._flags.clear()
        client, self._client = self._client, None
        server, self._server = self._server, None
        self._lost = self._lost or EngineLost("the engine was closed")
        self._open.set()  # whoever waits gets the error
        with ExitStack() as whatever_happens:
            if server is not None:
                whatever_happens.callback(server.kill)
            await self._transport.close(client if server is None else None)
            if client is not None:
                if server is None:
                    await self._release(client)
                await client.close()
            if server is not None:
                await server.stop()

    # --- one request --------------------------------------------------------------------------------------------------

    async def _send(self, client: SGLangClient, request: Request, attempt: int) -> ParsedReply:
        """Returns the parsed reply to one request; no other task runs between the gate and the send."""
        oldest = self._version
        rid = f"{self._name}-{request.request_id}-{attempt}"
        if not self._sending:
            self._busy_since = time.perf_counter()
        self._sending.add(rid)
        self._idle.clear()
        try:
            body = await client.generate(request_body(request, self._sampling, rid))
        finally:
            self._sending.discard(rid)
            if not self._sending:
                self._busy_s += time.perf_counter() - self._busy_since
                self._idle.set()
        modes = {self._update_modes[version] for version in range(oldest + 1, self._version + 1)}
        sent = Sent(
            request_id=request.request_id,
            input_len=len(request.input_ids),
            max_new_tokens=request.max_new_tokens,
            row_start=request.row_start,
            oldest=oldest,
            newest=self._version,
            kept_kv=modes == {"in_place"},
            rid=rid,
            vocab_size=self._vocab_size,
        )
        return parse_reply(body, sent, self._shape)

    def _take(self, parsed: ParsedReply) -> Reply:
        reply = parsed.reply
        self._requests += 1
        self._tokens += reply.call.new_tokens
        self._row_bytes += reply.row_bytes
        for flag in parsed.flags:
            if flag not in self._flags:
                log.warning("SGLang: request %s: the reply is flagged %s", reply.call.request_id, flag)
            self._flags[flag] += 1
        return reply

    # --- the server ---------------------------------------------------------------------------------------------------

    async def _current(self) -> tuple[int, SGLangClient]:
        """Returns the running incarnation of the server and the connection to it, once no restart is under way."""
        async with self._recovery:
            self._check_alive()
            if self._client is None:
                raise RuntimeError("the engine is not started")
            return self._incarnation, self._client

    def _connect(self, url: str) -> SGLangClient:
        return SGLangClient(url, max_connections=self._max_in_flight, request_timeout_s=self._request_timeout_s)

    async def _start_server(self) -> None:
        """Starts a server of ours on the newest weights."""
        assert self._source.start is not None
        folder = await asyncio.to_thread(self._transport.folder)
        self._server = self._source.start(folder, self._version)
        await self._server.wait_ready(self._source.start_timeout_s)
        client = self._connect(self._server.url)
        try:
            await check_identity(client, folder)
            await check_settings(client, self._prefix_cache)
            await self._transport.connect(client)
            if not self._transport.folder_has_weights:
                await self._update(client)
        except BaseException:
            await client.close()
            raise
        self._client = client

    async def _take_over(self, client: SGLangClient) -> None:
        """Gives a server that is not ours the newest weights; it must not be in use.

        It is looked at first: weights of another model would end it, or leave a part of its own. A server that is
        paused, as one is after a failed update, cannot be asked for a token before it has them.
        """
        await check_settings(client, self._prefix_cache)
        await check_dtype(client, self._dtype)
        await check_sizes(client, self._config)
        serves = await client.healthy()
        if serves:
            await check_model(client, self._shape, self._sampling, self._name)
        await self._transport.connect(client)
        await client.pause("abort")
        await self._update(client)
        await client.resume()
        if not serves:
            await check_model(client, self._shape, self._sampling, self._name)

    async def _release(self, client: SGLangClient) -> None:
        if not self._whole:
            log.warning("the server at %s may hold a part of the weights: it stays paused", client.url)
        elif self._pause_mode is not None:
            try:
                await client.resume()
            except (ConnectionLost, ServerRefused) as error:
                log.warning("the server at %s could not be resumed: %s", client.url, error)

    async def _drain(self, client: SGLangClient) -> None:
        """Aborts until no request is under way; then nobody waits for the server."""
        while self._sending:
            await client.abort_all()
            try:
                await asyncio.wait_for(self._idle.wait(), DRAIN_RETRY_S)
            except TimeoutError:
                continue

    async def _update(self, client: SGLangClient) -> None:
        """Returns when the server holds the newest weights alone.

        A cache that could not be flushed under new weights is flushed again; a KV cache that is to be kept is not.

        Raises:
            ServerRefused: it may hold anything.
        """
        keep = self._pause_mode == "in_place"
        self._whole = False
        ok, message = await self._transport.send(client, flush_cache=not keep)
        if not ok and message.startswith(NOT_FLUSHED):
            ok = await client.flush_cache()
        if not ok:
            raise ServerRefused(f"weight version {self._version} was not taken: {message}")
        held, wanted = (await client.model_info()).get("weight_version"), str(self._version)
        if held != wanted:
            raise ServerRefused(f"weight_version {wanted} expected of the server after the update, it says {held!r}")
        self._whole = True

    async def _recover(self, incarnation: int, what: str, error: Exception) -> None:
        """Starts a new server in place of incarnation `incarnation`, unless that has been done.

        Raises:
            EngineLost: the server is not ours, or it may not be started again.
        """
        async with self._recovery:
            self._check_alive()
            if self._incarnation != incarnation:
                return
            server, client = self._server, self._client
            if self._source.start is None or server is None:
                raise self._give_up(f"{what}: the server at {self._source.url} failed: {error}", error) from error
            code = server.exit_code()
            state = "it still runs" if code is None else f"it ended with exit code {code}"
            if incarnation >= self._source.max_restarts:
                raise self._give_up(
                    f"{what}: the SGLang server failed ({error}; {state}) and was restarted "
                    f"engine.server.max_restarts={self._source.max_restarts} times; {server.tail()}",
                    error,
                ) from error
            log.warning("%s: the SGLang server failed (%s; %s); starting it again", what, error, state)
            await server.stop()
            if client is not None:
                await client.close()
            self._incarnation += 1
            try:
                await self._start_server()
            except (OSError, ServerStartError, ServerRefused, ConnectionLost) as again:
                raise self._give_up(f"{what}: the SGLang server could not be restarted: {again}", again) from again

    def _give_up(self, message: str, cause: BaseException) -> EngineLost:
        """Returns the error that this and every later call gets; waiting requests are woken to get it."""
        if self._lost is None:
            self._lost = EngineLost(message)
            self._lost.__cause__ = cause
        self._open.set()
        return self._lost

    def _check_alive(self) -> None:
        """Raises what made the engine end, if it ended."""
        if self._lost is not None:
            raise EngineLost(f"the engine has ended: {self._lost}") from self._lost
