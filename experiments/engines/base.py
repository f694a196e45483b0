"""The contract between the loop and a rollout engine: five coroutines, whatever runs behind them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from strategies.types import EngineCall, Rows

if TYPE_CHECKING:
    import torch


class EngineLost(RuntimeError):
    """The engine is gone and will not come back; what was asked of it is not answered. The loop saves a checkpoint."""


PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, eq=False)
class Request:
    """One call to the engine.

    Attributes:
        request_id: unique in the run, e.g. `r17.2` (rollout 17, call 2).
        input_ids: int32 `[s]`, s >= 1: prompt and tokens so far.
        max_new_tokens: >= 1; the client never sends a zero budget.
        sample_seed: identifies the rollout's random stream: the uniform number behind the token at absolute position i
            depends on (`sample_seed`, i) alone, not on the batch, the call or the pause, so that two runs draw alike
            until their weights differ.
        row_start: first position whose row the client wants.
        rows: integer `[m, L, K]`, 0 <= m <= s-1: positions 0..m-1 are routed through these experts, whatever the router
            would choose, and the reply repeats them; later positions are routed live. Cells are LIVE exactly in layers
            without experts. None: all positions are routed live. An engine that cannot force routes refuses rows.
    """

    request_id: str
    input_ids: NDArray[np.int32]
    max_new_tokens: int
    sample_seed: int
    row_start: int = 0
    rows: Rows | None = None


@dataclass(frozen=True, eq=False)
class Reply:
    """A validated answer: the call as strategies see it, and what it cost.

    Attributes:
        call: tokens, log-probs, rows and versions.
        prefill_tokens: input tokens that were forwarded for this call, recomputations included.
        retractions: times the request was put back into the queue inside the call.
        row_bytes: size of the rows as they travelled.
    """

    call: EngineCall
    prefill_tokens: int
    retractions: int = 0
    row_bytes: int = 0


class EngineTotals(Protocol):
    """Totals since the start: wall seconds of generation, those of them inside the model (0 where that is not known),
    tokens generated.
    """

    @property
    def busy_s(self) -> float: ...
    @property
    def forward_s(self) -> float: ...
    @property
    def generated_tokens(self) -> int: ...


class Engine(Protocol):
    """A rollout engine. Its coroutines belong to the loop's event loop."""

    async def start(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Brings the engine up with `weights` (transformers' state_dict layout) as weight version `version`."""
        ...

    async def generate(self, request: Request) -> Reply:
        """Generates until stop, length or a pause with mode `abort`; requests sent while paused wait for `resume`.

        Raises:
            ValueError: the request is malformed (empty, ids out of the vocabulary, zero budget, too long).
            RuntimeError: the engine broke its contract; the message names the request, what was expected and what came.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stops generation at the next step boundary. Returns when nothing runs any more.

        `abort`: every unfinished request is answered with finish `abort`. `retract`: running requests go back to the
        queue with their tokens and are prefilled again after `resume`. `in_place`: requests freeze and keep their KV
        cache.
        """
        ...

    async def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replaces the weights while paused; tokens sampled from here on carry `version`."""
        ...

    async def resume(self) -> None:
        """Continues generation after `pause`."""
        ...

    async def close(self) -> None:
        """Ends the engine; leaves no process and no task behind, also after an error."""
        ...

    def stats(self) -> EngineTotals:
        """Returns totals since the start."""
        ...


def check_request(request: Request, unanswered: Container[str], vocab_size: int, max_length: int) -> None:
    """Refuses a malformed request before any engine sees it: an id out of the vocabulary ends an SGLang server.

    Args:
        unanswered: ids of the requests that the engine works on.
        vocab_size: ids lie below it.
        max_length: tokens that the model can hold.

    Raises:
        ValueError: names the request, what was expected and what came.
    """
    name, ids = f"request {request.request_id}", np.asarray(request.input_ids)
    if request.request_id in unanswered:
        raise ValueError(f"{name}: an unanswered request of this id is in the engine")
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name}: integer input ids [s] with s >= 1 are expected, {ids.dtype} {list(ids.shape)} came")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise ValueError(
            f"{name}: ids in [0, {vocab_size}) are expected, {ids[outside[0]]} came at position {outside[0]}"
        )
    if request.max_new_tokens < 1:
        raise ValueError(f"{name}: max_new_tokens >= 1 is expected, {request.max_new_tokens} came")
    if len(ids) + request.max_new_tokens > max_length:
        raise ValueError(
            f"{name}: at most {max_length} tokens fit (max_position_embeddings), "
            f"{len(ids)} input and {request.max_new_tokens} new ones came"
        )
    if not 0 <= request.row_start < len(ids):
        raise ValueError(f"{name}: row_start in [0, {len(ids)}) is expected, {request.row_start} came")
