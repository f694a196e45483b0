"""Weights by broadcast: the trainer is rank 0 of a process group, the server's ranks are 1, 2, ...

The protocol is SGLang's (0.5.23, srt/managers/scheduler_components/weight_updater.py): the ranks join a group once; an
update is begun, then any number of broadcasts are announced over HTTP while they run, then it is ended. The server
makes its end of the group with torch's `_new_process_group_helper`, whose keys in the store ours repeats. Ours comes
from the backend's public class, so that torch.distributed's default group, which is megatron-core's, is not touched.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from experiments.engines.sglang.client import ConnectionLost, ServerRefused, SGLangClient
from experiments.engines.sglang.transport import NOT_FLUSHED
from experiments.engines.sglang.weights import Publisher, hub_tensors

Backend = Literal["gloo", "nccl"]

_dist: Any = dist  # torch documents these classes, but its type hints do not export them

BUCKET_BYTES = 256 * 2**20
"""Of one broadcast; the trainer holds two at a time, the server one. A larger tensor is a broadcast of its own."""

GROUP_TIMEOUT_S = 300.0
"""Until the group is formed, and of one broadcast."""

POLL_S = 0.002
LAST_WORD_S = 5.0
"""What a server gets to say why, once its end of a broadcast has broken."""


@dataclass(frozen=True)
class Bucket:
    """Tensors one behind the other; SGLang's `flattened_bucket`.

    Attributes:
        names, dtypes, shapes: of the tensors, in order.
        data: uint8 `[bytes]`.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    data: torch.Tensor


def buckets(weights: Mapping[str, torch.Tensor], dtype: torch.dtype, limit: int) -> Iterator[Bucket]:
    """Yields all weights (transformers' state_dict layout) by the hub's names as `dtype`, at most `limit` bytes at once
    unless a single tensor is larger.
    """
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in hub_tensors(weights, dtype):
        if held and size + tensor.nbytes > limit:
            yield _bucket(held)
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield _bucket(held)


def _bucket(tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(
        names=[name for name, _ in tensors],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        shapes=[list(tensor.shape) for _, tensor in tensors],
        data=torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in tensors]),
    )


class Group:
    """Our end of one process group. `join` blocks until the server's ranks have joined too.

    Args:
        backend: gloo sends through host memory, whatever the server computes on; nccl from GPU to GPU.
        server_host: where the server is; the group listens on the interface that leads there, and on no other: it
            knows no password.
        ranks: of the server.
        timeout_s: until all have joined, and of one broadcast.
    """

    def __init__(self, backend: Backend, server_host: str, ranks: int, timeout_s: float):
        self.name = f"routemerge-{uuid.uuid4().hex[:8]}"
        self._backend: Backend = backend
        self._world, self._timeout = 1 + ranks, timedelta(seconds=timeout_s)
        family, self._host = _address_towards(server_host)
        listener = socket.create_server((self._host, 0), family=family)
        self._port = listener.getsockname()[1]
        self._store = _dist.TCPStore(
            self._host,
            self._port,
            self._world,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._ranks: Any = None
        self._work: Any = None

    def invitation(self) -> dict[str, Any]:
        """Returns what the server must be told to join."""
        return {
            "master_address": self._host,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._world,
            "group_name": self.name,
            "backend": self._backend,
        }

    def join(self) -> None:
        """Joins.

        Raises:
            RuntimeError: the others did not.
        """
        device = "cpu" if self._backend == "gloo" else "cuda"
        store: Any = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = _dist.PrefixStore(prefix, store)
        if self._backend == "gloo":
            gloo = _dist.ProcessGroupGloo._Options()
            gloo._devices = [_dist.ProcessGroupGloo.create_device(hostname=self._host)]  # default: that of our hostname
            gloo._timeout = self._timeout
            self._ranks = _dist.ProcessGroupGloo(store, 0, self._world, gloo)
        else:
            nccl = _dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            self._ranks = _dist.ProcessGroupNCCL(store, 0, self._world, nccl)

    async def broadcast(self, data: torch.Tensor) -> None:
        """Returns when `data` is on its way to every rank.

        Raises:
            RuntimeError: a rank is gone, or did not take it in time.
        """
        if self._backend == "nccl":
            data = data.to("cuda")
        self._work = self._ranks.broadcast(data, 0)
        while not self._work.is_completed():
            await asyncio.sleep(POLL_S)
        self._work.wait()

    def leave(self) -> None:
        """Takes our end down. What a broken broadcast still waits for is left to end by itself."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        if self._backend == "nccl":
            ranks.abort()
        elif self._work is not None and not self._work.is_completed():
            # The destructor waits for it, which must not hold up the end of the run.
            threading.Thread(target=_drop_after, args=(ranks, self._work), daemon=True).start()


def _drop_after(ranks: Any, work: Any) -> None:
    with suppress(RuntimeError):  # it failed, as was to be expected
        work.wait()
    del ranks


def _address_towards(host: str) -> tuple[socket.AddressFamily, str]:
    """Returns the family and the address of the interface through which this machine reaches `host`; sends nothing.

    Raises:
        OSError: `host` is not known or not reachable.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return family, probe.getsockname()[0]


class Broadcast:
    """A transport (transport.py) without a file system that both see. A server of ours starts with random weights.

    Args:
        publisher: writes the model's configuration for a server of ours.
        dtype: what the server computes in.
        backend, timeout_s: of the group.
        bucket_bytes: of one broadcast.
    """

    folder_has_weights = False

    def __init__(
        self,
        publisher: Publisher,
        dtype: torch.dtype,
        backend: Backend,
        *,
        timeout_s: float = GROUP_TIMEOUT_S,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._publisher, self._dtype = publisher, dtype
        self._backend: Backend = backend
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._weights: Mapping[str, torch.Tensor] = {}
        self._version = 0
        self._group: Group | None = None

    async def stage(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Keeps a reference; see `Transport`."""
        self._weights, self._version = weights, version

    def folder(self) -> Path:
        """Returns a folder with the model's configuration alone."""
        return self._publisher.publish_config()

    async def connect(self, client: SGLangClient) -> None:
        """Forms a group with the server; see `Transport`."""
        self._leave()
        info = await client.server_info()
        if info.get("dp_size", 1) != 1:
            raise ServerRefused(
                f"{client.url}: dp_size=1 expected, {info['dp_size']} came: SGLang receives broadcast weights without "
                "data parallelism only; set engine.server.transport=disk"
            )
        host = urlsplit(client.url).hostname or ""
        try:
            group = Group(self._backend, host, int(info.get("tp_size", 1)), self._timeout_s)
        except OSError as error:
            raise ConnectionLost(f"{client.url}: no {self._backend} group with {host}: {error}") from error
        self._group = group
        what = f"{client.url}: a {self._backend} group ({group.invitation()['master_address']})"
        ok, message = await _together(client.join_group(group.invitation()), _in_thread(group.join), what)
        if not ok:
            raise ServerRefused(f"{what} was not joined: {message}")

    async def send(self, client: SGLangClient, *, flush_cache: bool) -> tuple[bool, str]:
        """Broadcasts the newest weights; see `Transport`."""
        ok, message = await client.begin_update()
        if not ok and "already open" in message:  # by a run that failed in an update; everything is sent anew
            await client.end_update()
            ok, message = await client.begin_update()
        if not ok:
            return False, message
        pending = buckets(self._weights, self._dtype, self._bucket_bytes)
        bucket = await asyncio.to_thread(next, pending, None)
        while ok and bucket is not None:
            following = await asyncio.to_thread(next, pending, None)
            last = following is None  # only with the last tensors are the weights those of the new version
            ok, message = await self._send(client, bucket, flush_cache and last, str(self._version) if last else None)
            bucket = following
        if ok or message.startswith(NOT_FLUSHED):
            ended, why = await client.end_update()
            return (ok, message) if ended else (False, why)
        return False, message

    async def close(self, client: SGLangClient | None) -> None:
        """Dissolves the group; see `Transport`."""
        try:
            if client is not None and self._group is not None:
                with suppress(ConnectionLost, ServerRefused):  # the server's end goes with it, or stays unused
                    await client.leave_group(self._group.name)
        finally:
            self._leave()
            self._publisher.close()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    async def _send(
        self, client: SGLangClient, bucket: Bucket, flush_cache: bool, version: str | None
    ) -> tuple[bool, str]:
        assert self._group is not None
        announced = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self._group.name,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        what = f"{client.url}: a broadcast of weights"
        return await _together(client.receive_weights(announced), self._group.broadcast(bucket.data), what)


async def _together(
    server: Coroutine[Any, Any, tuple[bool, str]], ours: Coroutine[Any, Any, None], what: str
) -> tuple[bool, str]:
    """Returns the server's answer when our end of the same operation is through too. A server that says no ends the
    wait for it, as our end would wait for ever.

    Raises:
        ConnectionLost: our end failed; what the server held is gone or mixed.
        ServerRefused: the server's answer was no answer.
    """
    answer, done = asyncio.ensure_future(server), asyncio.ensure_future(ours)
    try:
        await asyncio.wait({answer, done}, return_when=asyncio.FIRST_COMPLETED)
        if done.done() and (error := done.exception()) is not None:
            await asyncio.wait({answer}, timeout=LAST_WORD_S)
            said = f"; the server: {answer.result()[1]}" if answer.done() and not answer.exception() else ""
            raise ConnectionLost(f"{what} failed: {_first_line(error)}{said}") from error
        ok, message = await answer
        if ok:
            try:
                await done
            except RuntimeError as error:
                raise ConnectionLost(f"{what} failed: {_first_line(error)}; the server: {message}") from error
        return ok, message
    finally:
        for task in (answer, done):
            task.cancel()
        await asyncio.gather(answer, done, return_exceptions=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


async def _in_thread(work: Callable[[], None]) -> None:
    """Runs `work` in a thread that nobody waits for when this coroutine is cancelled or the process ends.

    Raises:
        RuntimeError: what `work` raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: RuntimeError | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except RuntimeError as raised:
            error = raised
        with suppress(RuntimeError):  # the event loop ended first
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="weight group", daemon=True).start()
    await done
