"""Are rows and log-probs those of a checkpoint? No length or range check can see that they are not.

Legend: `T` tokens of input and output together, `s` input tokens, `L` layers, `K` experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeForCausalLM

from strategies.types import LIVE, EngineCall


@dataclass(frozen=True)
class Audit:
    """How a call compares with a plain forward of the checkpoint over the same tokens.

    Attributes:
        cells: (position, layer) cells compared.
        differing_cells: those whose experts are another set.
        differing_positions: positions with such a cell, the first of them at most `SHOWN`.
        mean_log_prob_error: mean |difference| of the tokens' log-probs, nats; NaN when none was compared.
        log_prob_error: largest |difference| of a token's log-prob under the model's own routes, nats; NaN when none was
            compared. Small beside differing cells: the server computed rightly and returned other rows.
    """

    cells: int
    differing_cells: int
    differing_positions: tuple[int, ...]
    mean_log_prob_error: float
    log_prob_error: float

    @property
    def wrong_log_probs(self) -> bool:
        """Whether the log-probs are another distribution's, not this one's in lower precision."""
        return self.mean_log_prob_error > LOG_PROB_LIMIT


SHOWN = 8

LOG_PROB_LIMIT = 0.05
"""Nats; bfloat16 errs by about 0.01 per token, another temperature by several times 0.1."""


class WrongCheckpoint(ValueError):
    """The checkpoint is not of the reply's model."""


@torch.no_grad()
def audit(call: EngineCall, tokens: NDArray[np.int32], checkpoint: Path, temperature: float) -> Audit:
    """Returns the comparison of `call`, whose input and output are `tokens` `[T]`, with the model in `checkpoint`.

    Float32, without a KV cache. Missing rows and log-probs are left out.

    Raises:
        WrongCheckpoint: its sizes are not those of the call.
    """
    model = Qwen3MoeForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32).eval()
    sizes = (model.config.num_hidden_layers, model.config.num_experts_per_tok)
    if call.rows is not None and call.rows.shape[1:] != sizes:
        raise WrongCheckpoint(
            f"{checkpoint}: {sizes[0]} layers and {sizes[1]} experts per token expected, its rows have "
            f"{call.rows.shape[1]} and {call.rows.shape[2]}"
        )
    if (highest := int(tokens.max())) >= model.config.vocab_size:
        raise WrongCheckpoint(f"{checkpoint}: ids below {model.config.vocab_size} expected, {highest} came")
    out = model(torch.from_numpy(np.asarray(tokens[None, :-1], dtype=np.int64)), output_router_logits=True)
    logits = torch.log_softmax(out.logits[0].float() / temperature, dim=-1)  # [T-1, V]
    targets = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
    expected = logits.gather(-1, targets)[:, 0].numpy()[call.input_len - 1 :]
    errors = np.abs(expected - call.log_probs)
    cells = differing = 0
    positions: list[int] = []
    if call.rows is not None:
        top_k = call.rows.shape[2]
        routes = torch.stack([torch.topk(layer, top_k).indices for layer in out.router_logits], dim=1).numpy()
        theirs = np.sort(routes[call.row_start :], axis=-1)  # [rows, L, K]
        known = call.rows[..., 0] != LIVE
        wrong = (np.sort(call.rows, axis=-1) != theirs).any(axis=-1) & known
        cells, differing = int(known.sum()), int(wrong.sum())
        positions = (np.flatnonzero(wrong.any(axis=1)) + call.row_start).tolist()
    found = errors[np.isfinite(errors)]
    mean, worst = (float(found.mean()), float(found.max())) if len(found) else (float("nan"), float("nan"))
    return Audit(cells, differing, tuple(positions[:SHOWN]), mean, worst)
