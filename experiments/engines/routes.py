"""Records which experts the routers of a transformers Qwen3-MoE choose.

Legend: `N` tokens of a forward, `L` hidden layers, `K` experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from strategies.types import LIVE


def row_dtype(num_experts: int) -> torch.dtype:
    """Returns the narrowest signed integer type that holds every expert id and LIVE."""
    return torch.int8 if num_experts <= 128 else torch.int16


class RouteRecorder:
    """Keeps the expert ids of the newest forward through forward hooks on the routers of one model.

    Layers without experts have cells of LIVE (-1): there is nothing to replay in them.

    Raises:
        ValueError: the model has no router at all.
    """

    def __init__(self, model: Qwen3MoeForCausalLM):
        config = model.config
        self.num_layers: int = config.num_hidden_layers
        self.top_k: int = config.num_experts_per_tok
        self.dtype = row_dtype(config.num_experts)
        self._chosen: dict[int, torch.Tensor] = {}
        self._moe_layers: list[int] = []
        for index, layer in enumerate(model.model.layers):
            for module in layer.modules():
                if isinstance(module, Qwen3MoeTopKRouter):
                    module.register_forward_hook(partial(self._record, index))
                    self._moe_layers.append(index)
        if not self._moe_layers:
            raise ValueError("the model has no mixture-of-experts layer: there are no routes to record")

    def _record(self, layer: int, router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._chosen[layer] = output[2]  # [N, K]

    def take(self) -> torch.Tensor:
        """Returns the rows `[N, L, K]` of the newest forward and forgets them.

        Raises:
            RuntimeError: a router was not called, so that its rows would be those of another forward.
        """
        if list(self._chosen) != self._moe_layers:
            raise RuntimeError(
                f"rows of layers {self._moe_layers} are expected, those of {list(self._chosen)} came: "
                "a router was bypassed"
            )
        tokens = len(self._chosen[self._moe_layers[0]])
        device = self._chosen[self._moe_layers[0]].device
        rows = torch.full((tokens, self.num_layers, self.top_k), LIVE, dtype=self.dtype, device=device)
        for layer, chosen in self._chosen.items():
            rows[:, layer] = chosen
        self._chosen = {}
        return rows
