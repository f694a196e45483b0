"""The requests that run: model, KV cache, rows and sampling of one continuous batch. Knows no queue, clock or pause.

The requests occupy slots `0..R-1` without a hole; when one leaves, the last one moves into its slot. Per-token records
lie in arrays by (slot, absolute position), so that a step is a handful of array operations whatever R is.

Legend: `R` running requests, `S` longest prompt of a prefill, `V` vocabulary, `L` layers, `K` experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.engines.attention import use_slot_attention
from experiments.engines.base import Request
from experiments.engines.kv_cache import Placement, SlotCache
from experiments.engines.routes import RouteRecorder
from experiments.engines.sampling import draw, sampled_log_probs, uniforms
from experiments.qwen3_moe import build_qwen3_moe
from strategies.types import LIVE, Rows

_CAPACITY_STEP = 64
"""Positions by which the slots grow, at least: growing copies the whole cache."""


@dataclass(eq=False)
class Generation:
    """A request and what was generated for it so far. Up to date while the request is outside the batch.

    Attributes:
        arrival: order of arrival at the engine.
        tokens: int32 `[s+n]`.
        log_probs, versions: float32 and int32 `[n]`.
        pinned: `[m, L, K]`, m <= s+n-1: the next prefill routes positions 0..m-1 through these; None: all live.
        rows: `[s+n-1, L, K]`; None before the first prefill.
        prefill_tokens: tokens that prefills forwarded for it.
        retractions: times it was put back into the queue.
        mixed_rows: a prefill forwarded tokens again that other weights had sampled, and routed some of them live.
    """

    request: Request
    arrival: int
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    pinned: Rows | None = None
    rows: Rows | None = None
    prefill_tokens: int = 0
    retractions: int = 0
    mixed_rows: bool = False

    @property
    def input_len(self) -> int:
        """`s`."""
        return len(self.request.input_ids)


@dataclass
class Counters:
    """Totals since the start; EngineStats says what they mean."""

    forward_s: float = 0.0
    prefill_tokens: int = 0
    resumed_tokens: int = 0
    generated_tokens: int = 0
    prefills: int = 0
    decode_steps: int = 0
    peak_running: int = 0


class RunningBatch:
    """A continuous batch of at most `slots` requests."""

    def __init__(
        self,
        config: Qwen3MoeConfig,
        *,
        dtype: torch.dtype,
        slots: int,
        temperature: float,
        top_p: float,
        stop_ids: Sequence[int],
        device: torch.device,
    ):
        self.model: Qwen3MoeForCausalLM = build_qwen3_moe(config, dtype=dtype, device=device, seed=0)
        self.model.requires_grad_(False)
        # Measured on two cores, 128 tokens in fp32: grouped_mm 1.7 ms a layer, eager 4.2, batched_mm 15.
        self.model.set_experts_implementation("grouped_mm")
        use_slot_attention(self.model)
        self.counters = Counters()
        self.size = 0
        self._device = device
        self._temperature, self._top_p = temperature, top_p
        self._is_stop = np.zeros(config.vocab_size, dtype=bool)
        self._is_stop[list(stop_ids)] = True
        self.recorder = RouteRecorder(self.model)
        self._cache = SlotCache(config.num_hidden_layers, slots)
        self._max_capacity = config.max_position_embeddings
        self._capacity = 0
        self._generations: list[Generation] = []  # by slot
        self._lengths = np.zeros(slots, dtype=np.int64)
        self._limits = np.zeros(slots, dtype=np.int64)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._tokens = np.zeros((slots, 0), dtype=np.int32)
        self._log_probs = np.zeros((slots, 0), dtype=np.float32)
        self._versions = np.zeros((slots, 0), dtype=np.int32)
        row_shape = (slots, 0, self.recorder.num_layers, self.recorder.top_k)
        self._rows = torch.zeros(row_shape, dtype=self.recorder.dtype, device=device)  # [slots, capacity, L, K]
        self._slot_ids = torch.arange(slots, device=device)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies `weights` into the model, cast to its dtype.

        Raises:
            ValueError: names or shapes differ from the model's; nothing was copied.
        """
        own = self.model.state_dict()
        faults = sorted(own.keys() ^ weights.keys())
        faults += [name for name in sorted(own.keys() & weights.keys()) if own[name].shape != weights[name].shape]
        if faults:
            shapes = {name: tuple(own[name].shape) if name in own else None for name in faults[:3]}
            came = {name: tuple(weights[name].shape) if name in weights else None for name in faults[:3]}
            raise ValueError(f"{len(faults)} weights do not fit the engine's model: expected {shapes}, came {came}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])

    def prefill(self, admitted: Sequence[Generation], version: int) -> list[Generation]:
        """Lets `admitted` join: forwards all their tokens and samples one for each; returns those that are finished.

        Rows of tokens that were forwarded before are overwritten, as in real engines, unless they are pinned.

        A prefill computes every key and value anew, pinned or not: what the KV cache holds is always the present
        weights, on every position. Pinned positions keep their experts, so that the tokens sampled from here on, like
        all before them, were sampled through the first rows of the one matrix that the request ends with. Replaying
        that matrix under the weights of a token's version therefore gives the very distribution that it was drawn
        from, for all versions in one forward; only the weights of different tokens differ, as they must.
        """
        first, count = self.size, len(admitted)
        lengths = np.array([len(generation.tokens) for generation in admitted])
        width = int(lengths.max())
        self._reserve(max(g.input_len + g.request.max_new_tokens for g in admitted))
        ids = np.zeros(
            (count, width), dtype=np.int64
        )  # [count, S]; padding is on the right, where no real token attends to it
        for index, generation in enumerate(admitted):
            self._enter(first + index, generation, version)
            ids[index, : lengths[index]] = generation.tokens
        self.size += count
        self.counters.prefill_tokens += int(lengths.sum())
        self.counters.prefills += 1
        self.counters.peak_running = max(self.counters.peak_running, self.size)
        with torch.inference_mode():
            causal = torch.ones(width, width, dtype=torch.bool, device=self._device).tril()
            positions = torch.arange(width, device=self._device).expand(count, width)
            self._cache.place(Placement(first, count, None, None, width))
            last = torch.from_numpy(lengths - 1).to(self._device)
            with self.recorder.forcing(self._forced_rows(admitted, width)):
                logits, rows = self._forward(torch.from_numpy(ids), positions, causal[None, None], last)
            self._rows[first : first + count, :width] = rows.view(count, width, *rows.shape[1:])
            return self._append(first, count, logits, version)

    def decode(self, version: int) -> list[Generation]:
        """Forwards the newest token of every running request and samples the next; returns those that are finished."""
        count = self.size
        newest = self._lengths[:count] - 1
        width = int(newest.max()) + 1
        self.counters.decode_steps += 1
        ids = self._tokens[np.arange(count), newest].astype(np.int64)
        with torch.inference_mode():
            slots, positions = self._slot_ids[:count], torch.from_numpy(newest).to(self._device)
            visible = torch.arange(width, device=self._device) <= positions[:, None]  # [R, width]
            self._cache.place(Placement(0, count, slots, positions, width))
            last = torch.zeros_like(positions)
            logits, rows = self._forward(
                torch.from_numpy(ids)[:, None], positions[:, None], visible[:, None, None], last
            )
            self._rows[slots, positions] = rows
            return self._append(0, count, logits, version)

    def evict(self, leaving: Sequence[int]) -> list[Generation]:
        """Takes the requests of slots `leaving` out of the batch, brings their records up to date and returns them."""
        evicted = [self._leave(slot) for slot in leaving]
        gone = set(leaving)
        remaining = self.size - len(gone)
        targets = [slot for slot in sorted(gone) if slot < remaining]
        sources = [slot for slot in range(remaining, self.size) if slot not in gone]
        if sources:
            with torch.inference_mode():
                source = torch.tensor(sources, device=self._device)
                target = torch.tensor(targets, device=self._device)
                width = int(self._lengths[sources].max())
                self._cache.move(source, target, width)
                self._rows[target, :width] = self._rows[source, :width]
            for records in (self._lengths, self._limits, self._seeds, self._tokens, self._log_probs, self._versions):
                records[targets] = records[sources]
            for old, new in zip(sources, targets, strict=True):
                self._generations[new] = self._generations[old]
        del self._generations[remaining:]
        self.size = remaining
        return evicted

    def _enter(self, slot: int, generation: Generation, version: int) -> None:
        length, start = len(generation.tokens), generation.input_len
        self._generations.append(generation)
        self._lengths[slot] = length
        self._limits[slot] = start + generation.request.max_new_tokens
        self._seeds[slot] = np.uint64(generation.request.sample_seed % 2**64)
        self._tokens[slot, :length] = generation.tokens
        self._log_probs[slot, start:length] = generation.log_probs
        self._versions[slot, start:length] = generation.versions
        generation.prefill_tokens += length
        pinned = 0 if generation.pinned is None else len(generation.pinned)
        generation.mixed_rows |= pinned < length - 1 and bool((generation.versions != version).any())
        if generation.retractions:
            self.counters.resumed_tokens += length

    def _forced_rows(self, admitted: Sequence[Generation], width: int) -> torch.Tensor | None:
        """Returns int64 `[count * S, L, K]`: pinned rows, LIVE elsewhere; None when no request has any."""
        if all(generation.pinned is None for generation in admitted):
            return None
        rows = np.full((len(admitted), width, self.recorder.num_layers, self.recorder.top_k), LIVE, np.int16)
        for own, generation in zip(rows, admitted, strict=True):
            if generation.pinned is not None:
                own[: len(generation.pinned)] = generation.pinned
        return torch.from_numpy(rows).flatten(0, 1).to(self._device, torch.int64)

    def _leave(self, slot: int) -> Generation:
        generation, length = self._generations[slot], int(self._lengths[slot])
        start = generation.input_len
        generation.tokens = self._tokens[slot, :length].copy()
        generation.log_probs = self._log_probs[slot, start:length].copy()
        generation.versions = self._versions[slot, start:length].copy()
        generation.rows = self._rows[slot, : length - 1].cpu().numpy().copy()
        return generation

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns float32 logits `[count, V]` after token `last` of each sequence, and the rows `[count * S, L, K]`."""
        started = time.perf_counter()
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=self._device)
        mask.masked_fill_(~visible, -torch.inf)
        hidden = self.model.model(
            input_ids=ids.to(self._device),
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        logits = self.model.lm_head(hidden[self._slot_ids[: len(last)], last]).float()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.counters.forward_s += time.perf_counter() - started
        return logits, self.recorder.take()

    def _append(self, first: int, count: int, logits: torch.Tensor, version: int) -> list[Generation]:
        """Samples the next token of slots `first..first+count-1`; evicts and returns the requests that are finished."""
        run = slice(first, first + count)
        slots, positions = np.arange(first, first + count), self._lengths[run]
        numbers = torch.from_numpy(uniforms(self._seeds[run], positions)).to(self._device)
        drawn, drawn_log_probs = draw(sampled_log_probs(logits, self._temperature, self._top_p), numbers)
        tokens, log_probs = drawn.cpu().numpy(), drawn_log_probs.cpu().numpy()
        if not np.isfinite(log_probs).all():
            slot = int(slots[~np.isfinite(log_probs)][0])
            raise RuntimeError(
                f"request {self._generations[slot].request.request_id}: a finite log-prob is expected at position "
                f"{self._lengths[slot]}, {log_probs[slot - first]} came (weight version {version})"
            )
        self._tokens[slots, positions] = tokens
        self._log_probs[slots, positions] = log_probs
        self._versions[slots, positions] = version
        self._lengths[run] += 1
        self.counters.generated_tokens += count
        finished = self._is_stop[tokens] | (self._lengths[run] >= self._limits[run])
        return self.evict(slots[finished].tolist()) if finished.any() else []

    def _reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        steps = -(-max(length, 2 * self._capacity) // _CAPACITY_STEP)
        capacity = max(length, min(steps * _CAPACITY_STEP, self._max_capacity))
        grow = ((0, 0), (0, capacity - self._capacity))
        self._tokens = np.pad(self._tokens, grow)
        self._log_probs = np.pad(self._log_probs, grow)
        self._versions = np.pad(self._versions, grow)
        rows = self._rows.new_zeros(len(self._rows), capacity, *self._rows.shape[2:])
        rows[:, : self._capacity] = self._rows
        self._rows = rows
        self._cache.reserve(capacity)
        self._capacity = capacity
