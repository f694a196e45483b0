"""The in-process engine: transformers' Qwen3-MoE behind the engine contract, with all three pause modes.

One background task serves the requests: it admits and prefills whoever waits and finds a slot, else it decodes one
step. Each of the two is one piece of work on the clock; a pause takes effect between them. Nothing else touches the
running batch while a step is in progress.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import torch
from transformers import Qwen3MoeConfig

from experiments.clock import Clock
from experiments.engines.base import PauseMode, Reply, Request, check_request
from experiments.engines.running_batch import Generation, RunningBatch
from experiments.schema import CostConfig, ResumeRows
from strategies.types import EngineCall


@dataclass(frozen=True)
class EngineStats:
    """Totals since the start of the engine.

    Attributes:
        busy_s: wall seconds of prefills and decode steps, sampling and bookkeeping included.
        forward_s: those of them inside the model's forwards.
        prefill_tokens: tokens that prefills forwarded, padding not counted.
        resumed_tokens: those of them that were forwarded again after a retraction.
        generated_tokens: tokens sampled.
        prefills, decode_steps: forwards of each kind.
        peak_running: most requests that ran together.
    """

    busy_s: float
    forward_s: float
    prefill_tokens: int
    resumed_tokens: int
    generated_tokens: int
    prefills: int
    decode_steps: int
    peak_running: int


class EmbeddedEngine:
    """A rollout engine on transformers' Qwen3-MoE with KV cache and continuous batching (experiments/engines/base.py).

    What is prefilled again is routed afresh under the current weights, as real engines do, unless its rows are pinned:
    those of a request through `Request.rows`, those of a retraction through `resume_rows`. In both cases the keys and
    values are computed anew. `kv_kept` is therefore never set: a KV cache is only ever kept inside one call (pause mode
    `in_place`), whose rows are one consistent matrix.

    Args:
        config: sizes of the model; not modified.
        dtype: of weights and KV cache; sampling is float32.
        max_running: requests decoded in one batch.
        max_prefill_tokens: padded tokens forwarded in one prefill; a single longer prompt is forwarded alone.
        temperature, top_p: of the distribution that is sampled from.
        stop_ids: tokens that end a request; the stop token is part of its output.
        resume_rows: whether a retracted request is prefilled again through the rows recorded so far (`pinned`).
        clock, cost: what a step costs in virtual seconds.
        device: where the model runs.

    Raises:
        ValueError: a setting that no distribution or batch has. Temperature 0 is refused: greedy decoding has no
            log-prob that a policy gradient could use.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        *,
        dtype: torch.dtype,
        max_running: int,
        max_prefill_tokens: int,
        temperature: float,
        top_p: float,
        stop_ids: Sequence[int],
        resume_rows: ResumeRows,
        clock: Clock,
        cost: CostConfig,
        device: torch.device,
    ):
        if not temperature > 0.0:
            raise ValueError(f"temperature > 0 is expected, {temperature} came: greedy decoding has no usable log-prob")
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"0 < top_p <= 1 is expected, {top_p} came")
        if max_running < 1 or max_prefill_tokens < 1:
            raise ValueError(f"max_running={max_running} and max_prefill_tokens={max_prefill_tokens}: 1 at least")
        if any(not 0 <= token < config.vocab_size for token in stop_ids):
            raise ValueError(
                f"stop_ids={list(stop_ids)}: ids below the vocabulary size {config.vocab_size} are expected"
            )
        self._clock, self._cost = clock, cost
        self._max_running, self._max_prefill_tokens = max_running, max_prefill_tokens
        self._vocab_size, self._max_length = config.vocab_size, config.max_position_embeddings
        self._stop_ids = frozenset(stop_ids)
        self._resume_rows = resume_rows
        self._batch = RunningBatch(
            config,
            dtype=dtype,
            slots=max_running,
            temperature=temperature,
            top_p=top_p,
            stop_ids=stop_ids,
            device=device,
        )
        self._version = 0
        self._waiting: deque[Generation] = deque()
        self._futures: dict[str, asyncio.Future[Reply]] = {}  # by request id, unanswered
        self._arrivals = 0
        self._busy_s = 0.0
        self._paused = False
        self._failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._runnable = asyncio.Event()
        self._boundary = asyncio.Lock()  # held during a step

    def stats(self) -> EngineStats:
        """Returns totals since the start."""
        return EngineStats(busy_s=self._busy_s, **vars(self._batch.counters))

    async def start(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Loads `weights` as weight version `version` and starts to serve.

        Raises:
            RuntimeError: the engine was started before.
            ValueError: the weights do not fit the model.
        """
        if self._task is not None or self._failure is not None:
            raise RuntimeError("the engine was started before")
        self._batch.load_weights(weights)
        self._version = version
        self._task = asyncio.create_task(self._serve(), name="embedded engine")

    async def generate(self, request: Request) -> Reply:
        """Generates until stop, length or an abort; see experiments/engines/base.py.

        When the awaiting task is cancelled, the request still runs to its end and its reply is dropped.

        Raises:
            ValueError: the request is malformed; the message names it.
            RuntimeError: the engine is not started, closed, or failed in a step.
        """
        self._check_serving()
        self._check_request(request)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        self._waiting.append(
            Generation(
                request,
                self._arrivals,
                tokens=np.asarray(request.input_ids, dtype=np.int32),
                log_probs=np.zeros(0, dtype=np.float32),
                versions=np.zeros(0, dtype=np.int32),
                pinned=request.rows,
            )
        )
        self._arrivals += 1
        self._wake()
        return await future

    async def pause(self, mode: PauseMode) -> None:
        """Stops at the next step boundary and treats unfinished requests as `mode` says.

        Returns when no step is in progress. A paused engine may be paused again: the mode is applied to what is
        unfinished.

        Raises:
            ValueError: unknown mode.
            RuntimeError: the engine is not started, closed, or failed in a step.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"a pause mode of {get_args(PauseMode)} is expected, {mode!r} came")
        async with self._boundary:
            self._check_serving()
            self._paused = True
            self._runnable.clear()
            if mode == "in_place":
                return
            running = self._batch.evict(range(self._batch.size))
            running.sort(key=lambda generation: generation.arrival)
            if mode == "abort":
                for generation in [*running, *self._waiting]:
                    self._answer(generation, "abort")
                self._waiting.clear()
            else:
                for generation in running:
                    generation.retractions += 1
                    if self._resume_rows is ResumeRows.pinned:
                        generation.pinned = generation.rows
                self._waiting.extendleft(reversed(running))

    async def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces the weights by copies of `weights`; tokens sampled from here on carry `version`.

        Raises:
            RuntimeError: the engine is not paused.
            ValueError: the weights do not fit the model; the old ones are still in place.
        """
        self._check_serving()
        if not self._paused:
            raise RuntimeError(f"load_weights(version={version}): the engine must be paused first")
        async with self._boundary:
            await self._clock.run(partial(self._batch.load_weights, weights), 0.0)
            self._version = version

    async def resume(self) -> None:
        """Continues after `pause`.

        Raises:
            RuntimeError: the engine is not paused.
        """
        self._check_serving()
        if not self._paused:
            raise RuntimeError("resume(): the engine is not paused")
        self._paused = False
        self._wake()

    async def close(self) -> None:
        """Ends the engine after the step in progress; unanswered requests fail with RuntimeError.

        May be called twice.
        """
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with self._boundary:
                task.cancel()
        finally:
            task.cancel()
            self._fail(RuntimeError("the engine was closed"))
        await asyncio.wait([task])

    async def _serve(self) -> None:
        while True:
            await self._runnable.wait()
            async with self._boundary:
                # A pause that came first may have ended again meanwhile, and may have left nothing to do.
                if self._paused or not self._has_work():
                    continue
                try:
                    await self._advance()
                except Exception as error:  # the border of the task: whoever waits gets the error
                    self._fail(error)
                    return
                if not self._has_work():
                    self._runnable.clear()

    async def _advance(self) -> None:
        """Takes one step: a prefill if anybody can be admitted, else one decode step."""
        admitted = self._admit()
        if admitted:
            cost_s = self._cost.prefill_token_s * sum(len(generation.tokens) for generation in admitted)
            step = partial(self._batch.prefill, admitted, self._version)
            finished = await self._clock.run(partial(self._timed, step), cost_s)
        else:
            step = partial(self._batch.decode, self._version)
            finished = await self._clock.run(partial(self._timed, step), self._cost.decode_step_s)
        for generation in finished:
            self._answer(generation, "stop" if int(generation.tokens[-1]) in self._stop_ids else "length")

    def _timed(self, step: Callable[[], list[Generation]]) -> list[Generation]:
        started = time.perf_counter()
        finished = step()
        self._busy_s += time.perf_counter() - started
        return finished

    def _admit(self) -> list[Generation]:
        """Returns the requests that the next prefill takes from the head of the queue, first come first served."""
        admitted: list[Generation] = []
        longest = 0
        while self._waiting and self._batch.size + len(admitted) < self._max_running:
            longest = max(longest, len(self._waiting[0].tokens))
            if admitted and longest * (len(admitted) + 1) > self._max_prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _answer(self, generation: Generation, finish: str) -> None:
        request, rows = generation.request, generation.rows
        if rows is not None:
            rows = rows[request.row_start :]
        call = EngineCall(
            request_id=request.request_id,
            input_len=generation.input_len,
            output_ids=generation.tokens[generation.input_len :],
            log_probs=generation.log_probs,
            rows=rows,
            versions=generation.versions,
            finish=finish,
            row_start=request.row_start,
            mixed_rows=generation.mixed_rows,
        )
        reply = Reply(
            call, generation.prefill_tokens, generation.retractions, row_bytes=0 if rows is None else rows.nbytes
        )
        future = self._futures.pop(request.request_id)
        if not future.done():
            future.set_result(reply)

    def _wake(self) -> None:
        if not self._paused and self._has_work():
            self._runnable.set()

    def _has_work(self) -> bool:
        return bool(self._waiting) or self._batch.size > 0

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._waiting.clear()
        for request_id, future in self._futures.items():
            if not future.done():
                failure = RuntimeError(f"request {request_id}: the engine ended before it was answered: {error!r}")
                failure.__cause__ = error
                future.set_exception(failure)
        self._futures.clear()

    def _check_serving(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has ended: {self._failure!r}") from self._failure
        if self._task is None:
            raise RuntimeError("the engine is not started")

    def _check_request(self, request: Request) -> None:
        check_request(request, self._futures.keys(), self._vocab_size, self._max_length)
        if request.rows is not None:
            self._batch.recorder.check_forced(request.rows, len(request.input_ids), f"request {request.request_id}")
