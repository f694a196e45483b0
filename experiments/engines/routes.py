"""Records which experts the routers of a transformers Qwen3-MoE choose, and makes them use given ones.

Legend: `N` tokens of a forward, `L` hidden layers, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from strategies.checks import check_row_contents
from strategies.types import LIVE, Rows


def row_dtype(num_experts: int) -> torch.dtype:
    """Returns the narrowest signed integer type that holds every expert id and LIVE."""
    return torch.int8 if num_experts <= 128 else torch.int16


class RouteRecorder:
    """Keeps the expert ids of the newest forward, or forces given ones, by forward hooks on the routers of one model.

    Layers without experts have cells of LIVE (-1): there is nothing to replay in them.

    Raises:
        ValueError: the model has no router at all.
    """

    def __init__(self, model: Qwen3MoeForCausalLM):
        config = model.config
        self.num_layers: int = config.num_hidden_layers
        self.top_k: int = config.num_experts_per_tok
        self.dtype = row_dtype(config.num_experts)
        self._num_experts: int = config.num_experts
        self._forced: torch.Tensor | None = None
        self._chosen: dict[int, torch.Tensor] = {}
        self._moe_layers: list[int] = []
        for index, layer in enumerate(model.model.layers):
            for module in layer.modules():
                if isinstance(module, Qwen3MoeTopKRouter):
                    module.register_forward_hook(partial(self._record, index))
                    self._moe_layers.append(index)
        if not self._moe_layers:
            raise ValueError("the model has no mixture-of-experts layer: there are no routes to record")

    def check_forced(self, rows: Rows, input_len: int, origin: str) -> None:
        """Raises unless `rows` `[m, L, K]` can route the first m of `input_len` tokens, the last token excepted.

        Raises:
            ValueError: names `origin`, what was expected and what came, and the first bad cell.
        """
        layers, top_k = self.num_layers, self.top_k
        if rows.ndim != 3 or rows.shape[1:] != (layers, top_k) or len(rows) >= input_len or rows.dtype.kind not in "iu":
            raise ValueError(
                f"{origin}: integer rows [m, {layers}, {top_k}] with m <= {input_len - 1} are expected (the last input "
                f"token is routed live), {rows.dtype} {list(rows.shape)} came"
            )
        check_row_contents(rows, self._num_experts, origin)
        live = (rows == LIVE).all(axis=-1)  # [m, L]
        routed = np.isin(np.arange(layers), self._moe_layers)  # [L]
        if (live == routed).any():
            position, layer = np.argwhere(live == routed)[0]
            expected = "recorded experts are" if routed[layer] else f"a cell of {LIVE} (no experts in this layer) is"
            raise ValueError(
                f"{origin}: {expected} expected at position {position} in layer {layer}, "
                f"{rows[position, layer].tolist()} came"
            )

    @contextmanager
    def forcing(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Routes the forward inside the block through integer `rows` `[N, L, K]`; cells of LIVE, and all without rows,
        are the router's own choice."""
        self._forced = rows
        try:
            yield
        finally:
            self._forced = None

    def _record(
        self, layer: int, router: Qwen3MoeTopKRouter, args: Any, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        """Keeps the chosen experts; returns what replaces the router's `output` (logits, weights, experts) when forced.

        The weights of forced experts are this router's own probabilities of them under the present weights, normalised
        as the router normalises those of its own choice: what the trainer computes when it replays the same row.
        """
        logits, _, chosen = output  # [N, E], [N, K], [N, K]
        if self._forced is None:
            self._chosen[layer] = chosen
            return None
        forced = self._forced[:, layer]
        chosen = torch.where(forced == LIVE, chosen, forced)
        self._chosen[layer] = chosen
        weights = logits.softmax(dim=-1, dtype=torch.float).gather(1, chosen)
        if router.norm_topk_prob:
            weights /= weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

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
