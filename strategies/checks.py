"""Shared by every strategy: is the rollout consistent, and which call's rows did position i go through?

Strategies check shapes and counts on every merge, which costs microseconds. The contents of the rows (range, distinct
ids) cost more than the merge itself; they are checked once, where a reply enters (strategies/reply.py), with
`check_row_contents`.

Access is by absolute position only. A negative slice would silently take a neighbour's rows when a reply is short, long
or empty.

Legend: `T` tokens, `s` input tokens of a call, `n` new tokens, `L` layers, `K` experts per token, `E` experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from strategies.types import LIVE, EngineCall, MergeError, ReplayView, Rollout, Rows


class Span(NamedTuple):
    """Positions `start..stop-1`, whose rows are those that call `call` returned."""

    call: int
    start: int
    stop: int


def where(rollout: Rollout, index: int) -> str:
    """Returns how errors name a call: rollout, call index and request id."""
    return f"rollout {rollout.rollout_id}, call {index} (request {rollout.calls[index].request_id})"


def check_rollout(rollout: Rollout) -> None:
    """Raises unless tokens, counts and row shapes of all calls fit together; looks at no expert id.

    Raises:
        MergeError: the first fault, with the expected and the actual value.
    """
    held = rollout.prompt_len
    for index, call in enumerate(rollout.calls):
        if call.input_len < held:
            raise MergeError(
                f"{where(rollout, index)}: at least {held} input tokens expected (prompt and tokens so far), "
                f"{call.input_len} were fed"
            )
        held = call.end
        for name, values in (("log_probs", call.log_probs), ("versions", call.versions)):
            if len(values) != call.new_tokens:
                raise MergeError(f"{where(rollout, index)}: {len(values)} {name} for {call.new_tokens} tokens")
        kept = rollout.tokens[call.input_len : call.end]
        if not np.array_equal(kept, call.output_ids[: len(kept)]):
            raise MergeError(
                f"{where(rollout, index)}: the rollout's tokens {call.input_len}..{call.input_len + len(kept) - 1} "
                "are not those that the call generated"
            )
        _check_shape(rollout, index, call)


def _check_shape(rollout: Rollout, index: int, call: EngineCall) -> None:
    """Raises unless the call's rows, if it has any, are integers of shape `[s + n - 1 - row_start, L, K]`."""
    cell = (rollout.num_layers, rollout.top_k)
    if call.surplus is not None and call.surplus.shape != (1, *cell):
        raise MergeError(
            f"{where(rollout, index)}: a surplus row of shape {(1, *cell)} expected, {call.surplus.shape} came"
        )
    if call.rows is None:
        return
    expected = (call.end - 1 - call.row_start, *cell)
    if call.row_start < 0 or call.rows.shape != expected:
        raise MergeError(
            f"{where(rollout, index)}: rows of shape {expected} expected (s={call.input_len}, n={call.new_tokens}, "
            f"row_start={call.row_start}), {call.rows.shape} came"
        )
    if call.rows.dtype.kind not in "iu":
        raise MergeError(f"{where(rollout, index)}: integer rows expected, {call.rows.dtype} came")


def check_row_contents(rows: Rows, num_experts: int, origin: str) -> None:
    """Raises unless every cell of `rows` `[rows, L, K]` holds K distinct ids in 0..E-1, or -1 only (a missing cell).

    Raises:
        ValueError: names `origin`, the row, the layer and the ids.
    """
    whole_live = (rows == LIVE).all(axis=-1)  # [rows, L]
    _refuse(
        ((rows < 0) | (rows >= num_experts)).any(axis=-1) & ~whole_live, rows, origin, f"ids in 0..{num_experts - 1}"
    )
    ordered = np.sort(rows, axis=-1)
    _refuse((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1) & ~whole_live, rows, origin, "distinct ids")


def _refuse(bad: np.ndarray[Any, np.dtype[np.bool_]], rows: Rows, origin: str, expected: str) -> None:
    """Raises for the first bad cell of bool `[rows, L]`."""
    if bad.any():
        row, layer = np.argwhere(bad)[0]
        raise ValueError(
            f"{origin}: {expected} expected in every cell, {rows[row, layer].tolist()} came in row {row}, "
            f"layer {layer} ({int(bad.sum())} of {bad.size} cells are bad)"
        )


def row_dtype(rollout: Rollout, *, signed: bool = False) -> np.dtype[Any]:
    """Returns the dtype of a merged matrix: that of the recorded rows, promoted where calls differ.

    With `signed` it can hold LIVE. It is int16 when no call has rows.

    Raises:
        MergeError: the calls' dtypes have no common integer type.
    """
    dtypes = [call.rows.dtype for call in rollout.calls if call.rows is not None] or [np.dtype(np.int16)]
    dtype = np.result_type(*dtypes, *([np.int8] if signed else []))
    if dtype.kind not in "iu":
        names = sorted({str(dtype) for dtype in dtypes})
        raise MergeError(f"rollout {rollout.rollout_id}: no integer type holds rows of {', '.join(names)}")
    return dtype


def calls_with_tokens(rollout: Rollout) -> list[int]:
    """Returns the indices of the calls that generated something, before any cap."""
    return [index for index, call in enumerate(rollout.calls) if call.new_tokens]


def view_length(rollout: Rollout) -> int:
    """Returns `t`, the tokens up to the last generated one; environment tokens behind it train nothing."""
    return max(segment.last for segment in rollout.segments())


def rows_used(rollout: Rollout, index: int) -> list[Span]:
    """Returns the spans, in order from position 0 to `s + n - 2`, that call `index` itself was routed through.

    A call that fed its prefix again used its own rows throughout. One that kept the KV cache used, for the older
    positions, what the call before it had used. That call may have generated nothing: it ran if it returned rows.
    """
    spans: list[Span] = []
    stop = rollout.calls[index].end - 1
    while True:
        call = rollout.calls[index]
        ran = [i for i in range(index) if rollout.calls[i].new_tokens or rollout.calls[i].rows is not None]
        if not call.kv_kept or call.mixed_rows or not ran:
            return [Span(index, 0, stop), *spans]
        start = rollout.calls[ran[-1]].end - 1
        spans.insert(0, Span(index, start, stop))
        index, stop = ran[-1], start


def rows_first_fed(rollout: Rollout) -> list[Span]:
    """Returns the spans of `slice_concat`: for every position the row that the first call with tokens used there.

    The boundary position of a resume, `s_k - 1`, is fed first by call k.
    """
    spans: list[Span] = []
    held = 0
    for index in calls_with_tokens(rollout):
        spans.extend(clip(rows_used(rollout, index), held, rollout.calls[index].end - 1))
        held = rollout.calls[index].end - 1
    return spans


def clip(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """Returns the parts of `spans` that lie in positions `start..stop-1`."""
    cut = (Span(span.call, max(span.start, start), min(span.stop, stop)) for span in spans)
    return [span for span in cut if span.start < span.stop]


def missing(rollout: Rollout, spans: Iterable[Span]) -> Span | None:
    """Returns the first part of `spans` whose call did not return its rows, or None when all are there."""
    for span in spans:
        call = rollout.calls[span.call]
        if call.rows is None:
            return span
        if span.start < call.row_start:
            return Span(span.call, span.start, min(span.stop, call.row_start))
    return None


def gather(rollout: Rollout, spans: list[Span], dtype: np.dtype[Any]) -> Rows:
    """Returns a new, writable `[stop - start, L, K]` matrix of the spans' rows, in order; each row is copied once.

    `spans` cover positions start..stop-1 without gap or overlap; start is 0 for a whole matrix.

    Raises:
        MergeError: a call did not return a row that is needed; names positions and what the call returned.
    """
    gap = missing(rollout, spans)
    if gap is not None:
        raise MergeError(_missing_text(rollout, gap))
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans)), spans
    start, stop = (spans[0].start, spans[-1].stop) if spans else (0, 0)
    out = np.empty((stop - start, rollout.num_layers, rollout.top_k), dtype)
    for span in spans:
        call = rollout.calls[span.call]
        assert call.rows is not None
        out[span.start - start : span.stop - start] = call.rows[
            span.start - call.row_start : span.stop - call.row_start
        ]
    return out


def _missing_text(rollout: Rollout, gap: Span) -> str:
    """Returns the message for rows that a call did not return, with the way out."""
    call = rollout.calls[gap.call]
    needed = f"{where(rollout, gap.call)}: rows of positions {gap.start}..{gap.stop - 1} expected"
    if call.rows is None:
        return f"{needed}, the call returned no rows; drop the rollout, for every strategy alike"
    return (
        f"{needed}, only {call.row_start}..{call.end - 2} came (delta rows) and the older ones "
        "are not known otherwise: request full rows (row_start 0), or use slice_concat where earlier calls hold them"
    )


def one_view(rollout: Rollout, rows: Rows) -> list[ReplayView]:
    """Returns the single view of `rows` `[t-1, L, K]`, with loss on every counted token."""
    return [ReplayView(rows, rollout.counted()[: len(rows) + 1])]


def prompt_view(rollout: Rollout) -> list[ReplayView]:
    """Returns what a single-view strategy gives for a rollout that kept no generated token.

    That is one view without loss when some call's rows cover positions 0..T-2 (the newest such call), and nothing
    otherwise: no row is needed, so none is missing.
    """
    stop = rollout.length - 1
    for index in reversed(range(len(rollout.calls))):
        spans = rows_used(rollout, index)
        if spans[-1].stop >= stop and missing(rollout, clip(spans, 0, stop)) is None:
            return one_view(rollout, gather(rollout, clip(spans, 0, stop), row_dtype(rollout)))
    return []


def live_rows(rollout: Rollout, count: int) -> Rows:
    """Returns `[count, L, K]` rows that are all live."""
    return np.full((count, rollout.num_layers, rollout.top_k), LIVE, row_dtype(rollout, signed=True))
