# pyright: reportMissingImports=false
"""Rows of -1 in verl's Megatron trainer: the trainer's own router decides there.

verl's replay takes a mask by position but builds it from lengths alone. Here the routers' replay objects read the mask
off the rows. The engine class is offered to verl's registry for NVIDIA devices, which it prefers over the general one;
verl imports this module in the actor workers (`model.external_lib`), and only when a run needs it.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.megatron.router_replay_patch import RouterReplay
from verl.utils.megatron.router_replay_utils import iter_model_routers
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead


class LiveRowReplay(RouterReplay):
    """A router's replay object that leaves rows of -1 to the router."""

    def set_target_indices(self, topk_indices: torch.Tensor, replay_mask: torch.Tensor | None = None) -> None:
        """Sets int64 `[tokens, K]` targets of one layer; `replay_mask` bool `[tokens]`, False rows stay live anyway.

        Raises:
            RuntimeError: a row is live in part.
        """
        live = topk_indices < 0
        partly = live.any(dim=-1) & ~live.all(dim=-1)
        if replay_mask is not None:
            partly &= replay_mask.to(partly.device).flatten().bool()
        if partly.any():
            raise RuntimeError(f"router replay: {int(partly.sum())} rows hold experts and -1 side by side")
        replayed = ~live.all(dim=-1)
        if replay_mask is not None:
            replayed &= replay_mask.to(replayed.device).flatten().bool()
        super().set_target_indices(topk_indices.clamp(min=0), replay_mask=replayed)


def allow_live_rows(model: Any) -> int:
    """Lets every router of `model` (a module or verl's list of chunks) leave rows of -1 live; returns their number.

    Raises:
        RuntimeError: the model has no router with replay.
    """
    routers = [router for _, router in iter_model_routers(model)]
    if not routers:
        raise RuntimeError("live rows: no router with replay in the model; is actor.megatron.router_replay.mode R3?")
    for router in routers:
        router.__class__ = LiveRowReplay  # keeps verl's list of instances as it is
    return len(routers)


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor="nvidia")
class LiveRowsEngine(MegatronEngineWithLMHead):
    """verl's Megatron engine whose replay honours live rows."""

    def _build_megatron_module(self) -> Any:
        module = super()._build_megatron_module()
        if self.enable_routing_replay:
            allow_live_rows(module)
        return module
