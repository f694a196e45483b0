"""Does a running server honour the contract? A few requests answer, before a study spends its hours there."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.engines.base import PauseMode, Request
from experiments.engines.sglang.audit import Audit, WrongCheckpoint, audit
from experiments.engines.sglang.client import ConnectionLost, Sampling, ServerRefused, SGLangClient, request_body
from experiments.engines.sglang.handshake import check_settings, numbered
from experiments.engines.sglang.recorded import UnreadableFile, describe, row_shape
from experiments.engines.sglang.reply import ParsedReply, Sent, parse_reply
from strategies.reply import ReplyError, RowShape

Mark = Literal["ok", "note", "FAIL"]

SHORT, LONG = 12, 96
"""Tokens of a plain request, and of one that a pause comes in between of (fewer where the context is shorter)."""

PAUSE_AFTER = 3.0
"""Times of a plain request until the pause comes."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `FAIL` means that rows or log-probs of this server cannot be trusted."""

    mark: Mark
    text: str


@dataclass(frozen=True)
class Probe:
    """What to ask.

    Attributes:
        url: of the server.
        checkpoint: Hugging Face folder of the model that it serves now; rows and log-probs are compared with it.
        shape: of a row; None: from the checkpoint, or from the server's own model folder if it can be read here.
        pauses: the server may be paused, which aborts or delays everybody's requests.
        timeout_s: a request without an answer for so long counts as hung.
    """

    url: str
    checkpoint: Path | None
    shape: RowShape | None
    pauses: bool
    timeout_s: float

    async def run(self) -> AsyncIterator[Finding]:
        """Yields findings as they come; ends early when nothing more can be learnt."""
        client = SGLangClient(self.url, max_connections=4, request_timeout_s=self.timeout_s)
        try:
            async for finding in _Session(self, client).findings():
                yield finding
        except (ConnectionLost, ServerRefused, UnreadableFile, ReplyError, WrongCheckpoint) as error:
            yield Finding("FAIL", str(error))
        finally:
            await client.close()


class _Session:
    def __init__(self, probe: Probe, client: SGLangClient):
        self._probe, self._client = probe, client
        self._sampling = Sampling(temperature=1.0, top_p=1.0, stop_ids=[])
        self._prompt = np.arange(3, 10, dtype=np.int32)
        self._shape = probe.shape
        self._short_s = 0.0
        self._long = LONG

    async def findings(self) -> AsyncIterator[Finding]:
        info = await self._client.server_info()
        yield Finding("ok", f"SGLang {info.get('version')} at {self._probe.url}, dtype {info.get('dtype')}")
        yield await self._settings()
        if info.get("dtype") == "auto":
            yield Finding("note", "dtype auto computes a float32 checkpoint in float16; a run wants --dtype named")
        if isinstance(room := info.get("max_req_input_len"), int):
            self._long = min(LONG, room - len(self._prompt))
        self._shape = self._shape or _known_shape(self._probe, info)
        yield Finding(
            "ok", f"rows of {self._shape.num_layers} layers, {self._shape.top_k} of {self._shape.num_experts}"
        )
        await self._ask("warm-up", self._prompt, SHORT)
        started = time.perf_counter()
        whole = await self._ask("plain", self._prompt, SHORT)
        self._short_s = time.perf_counter() - started
        yield Finding("ok", f"rows, log-probs and token ids of one request agree: {describe(whole)}")
        yield self._spans(whole)
        yield await self._delta(whole)
        if self._probe.checkpoint is not None:
            yield self._audit(whole, self._probe.checkpoint)
        if self._probe.pauses:
            for mode in ("in_place", "retract", "abort"):
                yield await self._pause(mode)
        else:
            yield Finding("note", "pauses were not tried; --pauses allows them (they hit everybody's requests)")

    async def _settings(self) -> Finding:
        try:
            await check_settings(self._client, prefix_cache=True)
        except ServerRefused as error:
            return Finding("FAIL", str(error))
        return Finding("ok", "no setting changes what rows mean")

    async def _ask(self, name: str, tokens: np.ndarray, budget: int, row_start: int = 0) -> ParsedReply:
        assert self._shape is not None
        request = Request(f"probe-{name}-{uuid.uuid4().hex[:8]}", tokens, budget, 0, row_start)
        body = await self._client.generate(request_body(request, self._sampling, request.request_id))
        sent = Sent(request.request_id, len(tokens), budget, row_start, rid=request.request_id)
        return parse_reply(numbered(body), sent, self._shape)

    def _spans(self, parsed: ParsedReply) -> Finding:
        if (parsed.reply.call.versions >= 0).all():
            return Finding("ok", "every token has a weight version")
        return Finding("note", "no version per token: tokens of a call with an update inside stay of unknown version")

    async def _delta(self, whole: ParsedReply) -> Finding:
        tokens = np.concatenate([self._prompt, whole.reply.call.output_ids]).astype(np.int32)
        parsed = await self._ask("delta", tokens, 2, row_start=len(tokens) - 1)
        if "start_ignored" in parsed.flags:
            return Finding("note", "routed_experts_start_len is ignored: all rows come, whatever is asked for")
        return Finding("ok", f"rows from a position on: {describe(parsed)}")

    def _audit(self, whole: ParsedReply, checkpoint: Path) -> Finding:
        call = whole.reply.call
        tokens = np.concatenate([self._prompt, call.output_ids]).astype(np.int32)
        found = audit(call, tokens, checkpoint, self._sampling.temperature)
        text = (
            f"against {checkpoint}: {found.differing_cells} of {found.cells} cells have other experts, log-probs "
            f"differ by at most {found.log_prob_error:.1e}"
        )
        share = found.differing_cells / found.cells if found.cells else 0.0
        if share >= 0.2:
            return Finding("FAIL", f"{text}; positions {_shown(found)}: these are not this model's rows")
        if found.wrong_log_probs:
            return Finding("FAIL", f"{text}: these are not this model's log-probs at temperature 1")
        if found.differing_cells:
            return Finding("note", f"{text}; positions {_shown(found)}: a low-precision server flips some")
        return Finding("ok", text)

    async def _pause(self, mode: PauseMode) -> Finding:
        asked = asyncio.create_task(self._ask(mode, self._prompt, self._long))
        await asyncio.sleep(PAUSE_AFTER * self._short_s)
        await self._client.pause(mode)
        try:
            await asyncio.sleep(self._short_s)
        finally:
            await self._client.resume()
        parsed = await asked
        finish = parsed.reply.call.finish
        if mode == "abort" and finish == "length":
            return Finding("note", f"pause abort: the request had finished before it: {describe(parsed)}")
        right = finish == ("abort" if mode == "abort" else "length")
        return Finding("ok" if right else "FAIL", f"pause {mode}: {describe(parsed)}")


def _shown(found: Audit) -> str:
    return f"{', '.join(map(str, found.differing_positions))}, ..."


def _known_shape(probe: Probe, info: dict[str, Any]) -> RowShape:
    folders = [folder for folder in (probe.checkpoint, info.get("model_path")) if folder is not None]
    for folder in folders:
        path = Path(folder).expanduser() / "config.json"
        if path.is_file():
            return row_shape(json.loads(path.read_text(encoding="utf-8")), str(path))
    raise UnreadableFile(
        f"the model's sizes are not known: {info.get('model_path')} cannot be read here; give --checkpoint, or "
        "--layers, --top-k and --experts"
    )
