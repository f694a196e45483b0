"""Router replay on one model: installs rows in its routers, verifies that they were executed, and takes them out again.

megatron-core's router asks the `RouterReplay` object that it holds for its top-k (`moe_enable_routing_replay`).
Upstream keeps all those objects of the process in one global list in order of construction, gathers at every id it is
given, and under activation recompute pops targets from a queue. Here each router of *this* model gets a `PinnedRoutes`,
found by walking the model and ordered by layer number, which knows live cells, and whose targets stay until the
micro-batch's backward has run: a recomputed forward uses the very ids of the first one.

Legend: `N` cells of one layer (sequence-major, padding included), `L` layers, `K` experts per token, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from experiments.trainers.base import ReplayCounts
from experiments.trainers.upstream import GPTModel, RouterReplay, TopKRouter
from strategies.types import LIVE


class PinnedRoutes(RouterReplay):
    """The routes of one router for one micro-batch; without targets the router is on its own, as upstream."""

    def __init__(self, layer: int):
        super().__init__()
        # The base class enters every instance into a process-wide list, which would keep it alive and couple models.
        RouterReplay.global_router_replay_instances.remove(self)
        self.layer = layer
        self.clear()

    def install(
        self, targets: torch.Tensor, expected: torch.Tensor, live: torch.Tensor | None, *, margins: bool
    ) -> None:
        """Sets targets `[N, K]` (ids ascending), the same as bool `[N, E]`, and live `[N]`, None when no cell is
        live."""
        self.target_topk_idx = targets
        self.expected = expected
        self.live = live
        self.record_margins = margins

    def clear(self) -> None:
        """Forgets targets and records."""
        self.clear_indices()
        self.expected: torch.Tensor | None = None
        self.live: torch.Tensor | None = None
        self.used: torch.Tensor | None = None
        self.margins: torch.Tensor | None = None
        self.record_margins = False
        self.first_map: torch.Tensor | None = None
        self.calls = 0
        self.wrong: list[torch.Tensor] = []

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (scores, ids) `[N, K]` of the chosen experts; the scores carry gradient, as upstream.

        Ids are ascending in a cell, so that the order in which an engine lists a row's experts changes no bit of the
        result.
        """
        assert default_compute_topk is not None
        if self.target_topk_idx is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if self.used is None:
            self.used = self._choose(scores, lambda: default_compute_topk(scores, topk, num_groups, group_topk)[1])
        return scores.gather(1, self.used), self.used

    @torch.no_grad()
    def _choose(self, scores: torch.Tensor, live_ids: Callable[[], torch.Tensor]) -> torch.Tensor:
        targets = self.target_topk_idx
        assert targets is not None
        if targets.shape[0] != scores.shape[0]:
            raise RuntimeError(
                f"layer {self.layer}: {targets.shape[0]} cells are installed, the forward has {scores.shape[0]}"
            )
        if self.record_margins and scores.shape[1] == targets.shape[1]:  # every expert is chosen: nothing is close
            self.margins = torch.full_like(scores[:, 0], torch.inf)
        elif self.record_margins:
            best = scores.topk(targets.shape[1] + 1, dim=1).values  # [N, K + 1]
            self.margins = best[:, -2] - best[:, -1]
        if self.live is None:
            return targets
        return torch.where(self.live[:, None], live_ids().sort(dim=1).values, targets)

    @torch.no_grad()
    def verify(self, routing_map: torch.Tensor, fed: torch.Tensor) -> None:
        """Compares what the router hands to its experts, bool `[N, E]`, with the installed cells, and a recomputation
        with the first pass."""
        assert self.expected is not None
        assert self.target_topk_idx is not None
        self.calls += 1
        right = (routing_map == self.expected).all(1)
        if self.live is not None:
            right |= self.live & (routing_map.sum(1) == self.target_topk_idx.shape[1])
        if self.first_map is None:
            self.first_map = routing_map
        else:
            right &= (routing_map == self.first_map).all(1)
        self.wrong.append((~right & fed).sum())


class ModelReplay:
    """The routers of one model."""

    def __init__(self, model: GPTModel, num_experts: int):
        routers = {
            module.layer_number - 1: module
            for _, module in model.named_modules()
            if isinstance(module, TopKRouter) and module.layer_number is not None
        }
        self._num_experts = num_experts
        self._pins = [PinnedRoutes(layer) for layer in sorted(routers)]
        self._fed: torch.Tensor | None = None
        self._installed: torch.Tensor | None = None
        for pins in self._pins:
            router = routers[pins.layer]
            if router.router_replay in RouterReplay.global_router_replay_instances:
                RouterReplay.global_router_replay_instances.remove(router.router_replay)
            router.router_replay = pins
            router.register_forward_hook(self._hook(pins))

    def _hook(self, pins: PinnedRoutes) -> Callable[..., None]:
        def after_router(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            if pins.target_topk_idx is not None:
                assert self._fed is not None
                pins.verify(output[1], self._fed)

        return after_router

    @contextmanager
    def replaying(self, rows: torch.Tensor, fed: torch.Tensor, *, margins: bool = False) -> Iterator[None]:
        """Replays rows int64 `[L, N, K]` (LIVE: the router decides) inside the block, which holds one forward and its
        backward.

        `fed` bool `[N]` is False at padding. Whatever happens in the block, nothing stays installed behind it.
        """
        if rows.shape[0] != len(self._pins):
            raise ValueError(f"rows have {rows.shape[0]} layers, the model has {len(self._pins)} routers")
        live = rows[..., 0] == LIVE  # [L, N]
        any_live = live.any(1).tolist()
        # A live cell's -1 is entered as expert 0; `verify` looks at live cells in another way.
        expected = fed.new_zeros(*rows.shape[:2], self._num_experts).scatter_(2, rows.clamp(min=0), True)  # [L, N, E]
        self._fed, self._installed = fed, rows
        try:
            for layer, pins in enumerate(self._pins):
                pins.install(rows[layer], expected[layer], live[layer] if any_live[layer] else None, margins=margins)
            yield
        finally:
            self._fed = self._installed = None
            for pins in self._pins:
                pins.clear()

    def check_executed(self, calls: int) -> ReplayCounts:
        """Returns how the cells of the current block were routed, after its forward (calls=1) or a recomputing backward
        (calls=2).

        Raises:
            RuntimeError: a router ran another number of times than `calls`, or used other experts than installed.
        """
        assert self._fed is not None
        assert self._installed is not None
        for pins in self._pins:
            if pins.calls != calls:
                raise RuntimeError(
                    f"replay: expected the router of layer {pins.layer} to consume its targets {calls} times, "
                    f"it did {pins.calls} times"
                )
        live = ((self._installed[..., 0] == LIVE) & self._fed).sum()
        wrong = torch.stack([torch.stack(pins.wrong).sum() for pins in self._pins])
        # One transfer: per-layer faults, live cells, fed positions.
        *mismatched, live_cells, fed = torch.cat([wrong, live[None], self._fed.sum()[None]]).tolist()
        if any(mismatched):
            layer = next(i for i, count in enumerate(mismatched) if count)
            raise RuntimeError(
                f"replay: {sum(mismatched)} of {fed * len(self._pins)} cells used other experts than installed, "
                f"first in layer {layer}"
            )
        return ReplayCounts(replayed=fed * len(self._pins) - live_cells, live=live_cells, mismatched=0)

    def used_rows(self) -> torch.Tensor:
        """Returns int64 `[L, N, K]`: the experts used by the forward of the current block, ids ascending."""
        return torch.stack([_present(pins.used) for pins in self._pins])

    def margins(self) -> torch.Tensor:
        """Returns float32 `[L, N]`: K-th minus (K+1)-th best score of the live router, whatever was replayed."""
        return torch.stack([_present(pins.margins) for pins in self._pins])


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise RuntimeError("replay: no forward has run in this block")
    return tensor
