"""HTTP to one SGLang server: requests out, JSON back. It knows no rollout and reads nothing into what comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from experiments.check import is_loopback
from experiments.engines.base import PauseMode, Request

MANAGEMENT_TIMEOUT_S = 600.0
"""Of pauses and weight updates, which take as long as the model is large."""


CONNECT_TIMEOUT_S = 10.0

KEEP_ALIVE_S = 2.0
"""Idle connections are closed by us before SGLang's server does (after 5 s), so that no request runs into that."""


class ConnectionLost(RuntimeError):
    """The server did not answer: it is gone, or (`hung`) it took too long."""

    def __init__(self, message: str, *, hung: bool = False):
        super().__init__(message)
        self.hung = hung


HEALTH_TIMEOUT_S = 20.0


class ServerRefused(RuntimeError):
    """The server answered that it did not do what was asked."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, with nothing left to a server's or a checkpoint's defaults."""

    temperature: float
    top_p: float
    stop_ids: Sequence[int]

    def parameters(self, max_new_tokens: int) -> dict[str, Any]:
        """Returns SGLang's `sampling_params` of one request; a new object for each."""
        return {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": not self.stop_ids,
        }


def request_body(request: Request, sampling: Sampling, rid: str) -> dict[str, Any]:
    """Returns the body of `/generate` for one request, rows and log-probs included; the server knows it as `rid`."""
    return {
        "rid": rid,
        "input_ids": [int(token) for token in request.input_ids],
        "sampling_params": sampling.parameters(request.max_new_tokens),
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": request.row_start,
    }


def http_client(url: str, **options: Any) -> httpx.AsyncClient:
    """Returns a client of the server at `url`, with `options` of httpx; it sets no limit on the time of an answer."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    return httpx.AsyncClient(
        base_url=url,
        **options,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        verify=url.startswith("https"),  # loading certificates takes a third of a second
        trust_env=not is_loopback(url),  # no proxy of $HTTP_PROXY reaches this machine's own loopback interface
    )


class SGLangClient:
    """A connection pool to one server.

    Args:
        url: where it answers.
        max_connections: requests under way at once; further ones wait here.
        request_timeout_s: a request without an answer for so long counts as hung.
    """

    def __init__(self, url: str, *, max_connections: int, request_timeout_s: float):
        self.url = url
        self._request_timeout_s = request_timeout_s
        limits = httpx.Limits(
            max_connections=max_connections + 1,
            max_keepalive_connections=max_connections + 1,
            keepalive_expiry=KEEP_ALIVE_S,
        )
        self._http = http_client(url, limits=limits)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def generate(self, body: dict[str, Any]) -> Any:
        """Returns the JSON of a reply, an error body included.

        Raises:
            ConnectionLost: no answer came; whether the server ran the request is not known.
        """
        return await self._json("POST", "/generate", body, timeout_s=self._request_timeout_s)

    async def healthy(self) -> bool:
        """Returns whether the server says that it is well."""
        try:
            return (await self._send("GET", "/health", None, HEALTH_TIMEOUT_S)).status_code == httpx.codes.OK
        except ConnectionLost:
            return False

    async def model_info(self) -> dict[str, Any]:
        """Returns what the server says of its model, e.g. `weight_version`."""
        return _object(await self._json("GET", "/model_info"), "/model_info")

    async def server_info(self) -> dict[str, Any]:
        """Returns the server's settings."""
        return _object(await self._json("GET", "/server_info"), "/server_info")

    async def pause(self, mode: PauseMode) -> None:
        """Pauses generation.

        Raises:
            ServerRefused: it did not.
        """
        await self._done("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continues generation.

        Raises:
            ServerRefused: it did not.
        """
        await self._done("/continue_generation", {})

    async def abort_all(self) -> None:
        """Asks for the end of every request that is in the server by now."""
        await self._send("POST", "/abort_request", {"abort_all": True})

    async def update_weights(self, folder: str, version: int, *, flush_cache: bool) -> tuple[bool, str]:
        """Returns whether the server says that it holds and uses the new weights alone, and its message."""
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": flush_cache}
        return await self._said("/update_weights_from_disk", body)

    async def join_group(self, group: dict[str, Any]) -> tuple[bool, str]:
        """Returns whether the server's ranks joined a process group, and its message."""
        return await self._said("/init_weights_update_group", group)

    async def leave_group(self, name: str) -> tuple[bool, str]:
        """Returns whether the server's ranks left a process group, and its message."""
        return await self._said("/destroy_weights_update_group", {"group_name": name})

    async def begin_update(self) -> tuple[bool, str]:
        """Returns whether weights can be broadcast to the server from now on, and its message."""
        return await self._said("/begin_weight_update", {})

    async def receive_weights(self, tensors: dict[str, Any]) -> tuple[bool, str]:
        """Returns whether the server received and loaded tensors of a broadcast, and its message."""
        return await self._said("/update_weights_from_distributed", tensors)

    async def end_update(self) -> tuple[bool, str]:
        """Returns whether the server finished what `begin_update` began, and its message."""
        return await self._said("/end_weight_update", {})

    async def flush_cache(self) -> bool:
        """Returns whether the prefix cache was emptied."""
        return (await self._send("POST", "/flush_cache", {})).status_code == httpx.codes.OK

    async def _said(self, path: str, body: dict[str, Any]) -> tuple[bool, str]:
        """Returns `success` and `message` of the answer."""
        reply = _object(await self._json("POST", path, body), path)
        return reply.get("success") is True, str(reply.get("message"))

    async def _done(self, path: str, body: dict[str, Any]) -> None:
        response = await self._send("POST", path, body)
        if response.status_code != httpx.codes.OK:
            raise ServerRefused(f"{self.url}{path} {body}: status {response.status_code}, {response.text[:300]}")

    async def _json(self, method: str, path: str, body: Any = None, timeout_s: float = MANAGEMENT_TIMEOUT_S) -> Any:
        response = await self._send(method, path, body, timeout_s)
        try:
            return response.json()
        except ValueError:
            return {"error": {"message": f"status {response.status_code}, {response.text[:300]!r}"}}

    async def _send(self, method: str, path: str, body: Any, timeout_s: float = MANAGEMENT_TIMEOUT_S) -> httpx.Response:
        if self._http.is_closed:
            raise ConnectionLost(f"{self.url}{path}: the connection was closed, the server is being replaced")
        try:
            async with asyncio.timeout(timeout_s):  # of the whole answer: httpx would wait as long for each piece of it
                return await self._http.request(method, path, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            message = f"{self.url}{path}: no answer within {timeout_s:g} s ({type(error).__name__})"
            raise ConnectionLost(message, hung=True) from error
        except httpx.RequestError as error:
            raise ConnectionLost(f"{self.url}{path}: {type(error).__name__}: {error}") from error


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict) or "error" in value:
        raise ServerRefused(f"{path}: an object expected, {str(value)[:300]} came")
    return value
