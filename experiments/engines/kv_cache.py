"""A KV cache of slots for continuous batching: one request per slot, each with its own length, written in place.

The requests that run occupy the first slots without a hole, so that attention reads a view of the cache.
Legend: `H` key-value heads, `D` head dimension, `S` tokens of a padded prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the next forward writes and what it attends to.

    Attributes:
        first, count: the slots of the forward, `first..first+count-1`.
        slots, positions: int64 `[count]`, where the single token of each slot goes; None: whole prompts, from
            position 0.
        width: positions that attention reads; those beyond a slot's own length are masked by the caller.
    """

    first: int
    count: int
    slots: torch.Tensor | None
    positions: torch.Tensor | None
    width: int


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `[slots, H, capacity, D]` each."""

    def __init__(self, slots: int):
        super().__init__()
        self._slots = slots
        self._capacity = 0
        self.placement: Placement | None = None

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` positions per slot and keeps what is there."""
        self._capacity = capacity
        if self.is_initialized:
            self.keys = _grown(self.keys, capacity)
            self.values = _grown(self.values, capacity)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not uninitialised memory: a masked key weighs 0, and 0 * NaN would be NaN.
        self.keys, self.values = (
            states.new_zeros(self._slots, states.shape[1], self._capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new states `[count, H, S or 1, D]` where the placement says; returns what attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.placement
        assert place is not None
        assert self.keys is not None
        assert self.values is not None
        run = slice(place.first, place.first + place.count)
        if place.positions is None:
            self.keys[run, :, : place.width] = key_states
            self.values[run, :, : place.width] = value_states
            return key_states, value_states
        self.keys[place.slots, :, place.positions] = key_states[:, :, 0]
        self.values[place.slots, :, place.positions] = value_states[:, :, 0]
        return self.keys[run, :, : place.width], self.values[run, :, : place.width]

    def move(self, sources: torch.Tensor, targets: torch.Tensor, width: int) -> None:
        """Copies the first `width` positions of slots `sources` to slots `targets`."""
        assert self.keys is not None
        assert self.values is not None
        self.keys[targets, :, :width] = self.keys[sources, :, :width]
        self.values[targets, :, :width] = self.values[sources, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.placement.width if self.placement else 0), 0

    def get_seq_length(self) -> int:
        return self.placement.width if self.placement else 0

    def get_max_cache_shape(self) -> int:
        return self._capacity


class SlotCache(Cache):
    """The slots of all layers."""

    def __init__(self, num_layers: int, slots: int):
        self.slot_layers = [SlotLayer(slots) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` positions per slot in every layer."""
        for layer in self.slot_layers:
            layer.reserve(capacity)

    def place(self, placement: Placement) -> None:
        """Sets where the next forward writes."""
        for layer in self.slot_layers:
            layer.placement = placement

    def move(self, sources: torch.Tensor, targets: torch.Tensor, width: int) -> None:
        """Copies slots `sources` to slots `targets` in every layer."""
        for layer in self.slot_layers:
            layer.move(sources, targets, width)


def _grown(states: torch.Tensor | None, capacity: int) -> torch.Tensor:
    assert states is not None
    grown = states.new_zeros(states.shape[0], states.shape[1], capacity, states.shape[3])
    grown[:, :, : states.shape[2]] = states
    return grown
