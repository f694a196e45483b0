"""The border between an engine's answer and a recorded call: what a reply must satisfy before any strategy sees it.

A reply is accepted as it is, normalised in a way that its engine declared, or refused with a `ReplyError`. Nothing is
padded, clipped or filled. The checks look at every expert id once, so that strategies need not.

Legend: `s` input tokens of the call, `n` new tokens, `L` layers, `K` experts per token, `E` experts. A full reply has
    `s + n - 1` rows.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strategies.checks import check_row_contents
from strategies.types import LIVE, UNKNOWN_VERSION, EngineCall, Rows

Convention = Literal["seqlen-1", "seqlen", "either"]
"""How many rows an engine returns: `s + n - 1`, or (`seqlen`, `either`) possibly one surplus row for the last token."""

LOWEST_LOG_PROB = float(np.finfo(np.float32).min)
"""A lower one would be recorded as -inf."""

NPY_MAGIC = b"\x93NUMPY"


class ReplyError(RuntimeError):
    """An engine broke its contract. The message names the request, what was expected and what came."""


class RowShape(NamedTuple):
    """Shape and range of the model's rows; cells of dense layers, which engines leave unwritten, are recorded as -1."""

    num_layers: int
    top_k: int
    num_experts: int
    dense_layers: tuple[int, ...] = ()


class VersionSpan(NamedTuple):
    """New tokens `start..end-1` of one call (not absolute positions), sampled by weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class RawReply:
    """A reply as it came, and what was asked.

    Attributes:
        request_id: named in every error.
        input_len: `s`, tokens that were sent.
        output_ids: `n` ids.
        finish: `stop`, `length` or `abort`.
        log_probs: one per new token, None for single tokens the engine could not score; None: the field is absent.
        rows: nested list, array, or base64 text of little-endian int32; None: the field is absent.
        version: weight version of all new tokens; None: unknown.
        version_spans: versions of parts of the new tokens, in place of `version`.
        row_start: position of the first row; None: the reply does not say, the count decides.
        requested_start: position from which rows were asked for.
        max_new_tokens: the budget that was asked for; None: not known.
        fed_len: input tokens that the engine reports; None: it does not.
        log_prob_ids: token ids that came beside the log-probs; None: none came.
        prefill_rows: rows of positions 0 on from a separate prefill worker, which replace those of the reply.
        retractions: times the engine put the request back into its queue.
        kv_kept: the KV cache of the call before this one was kept, see EngineCall.
        in_place: weights may have changed inside this call with its KV cache kept.
        rows_asked: rows were asked for, so that a finished reply without them is refused.
    """

    request_id: str
    input_len: int
    output_ids: Sequence[int] | NDArray[np.integer[Any]]
    finish: str
    log_probs: Sequence[float | None] | NDArray[np.floating[Any]] | None
    rows: Any
    version: int | None = None
    version_spans: Sequence[VersionSpan] | None = None
    row_start: int | None = 0
    requested_start: int = 0
    max_new_tokens: int | None = None
    fed_len: int | None = None
    log_prob_ids: Sequence[int] | None = None
    prefill_rows: Any = None
    retractions: int = 0
    kv_kept: bool = False
    in_place: bool = False
    rows_asked: bool = True


@dataclass(frozen=True, eq=False)
class CheckedReply:
    """A recorded call, and what was irregular about its reply.

    Attributes:
        flags: of `phantom_log_prob` (one log-prob without a token at zero budget, dropped), `surplus_row` (set aside),
            `log_prob_missing` (tokens that will carry no loss), `start_ignored` (full rows came though later ones were
            asked for), `mixed_version_call` (EngineCall.mixed_rows). To be counted, never ignored.
    """

    call: EngineCall
    flags: frozenset[str]


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Normalised rows `[s + n - 1 - row_start, L, K]`, and the surplus row `[1, L, K]` that came behind, if any."""

    rows: Rows
    row_start: int
    surplus: Rows | None


def check_reply(raw: RawReply, shape: RowShape, convention: Convention) -> CheckedReply:
    """Returns the recorded call of a valid reply.

    Raises:
        ReplyError: anything that the module's contract does not allow.
    """
    origin = f"request {raw.request_id}"
    n = len(raw.output_ids)
    if raw.finish not in ("stop", "length", "abort"):
        raise ReplyError(f"{origin}: finish stop, length or abort expected, {raw.finish!r} came")
    if raw.fed_len is not None and raw.fed_len != raw.input_len:
        raise ReplyError(f"{origin}: {raw.input_len} input tokens were sent, the reply is for {raw.fed_len}")
    if raw.max_new_tokens is not None and n > raw.max_new_tokens:
        raise ReplyError(f"{origin}: at most {raw.max_new_tokens} tokens asked for, {n} came")
    log_probs, flags = check_log_probs(raw, origin)
    block = None
    if raw.rows is not None:
        block = normalize_rows(raw, shape, convention)
        flags |= {"surplus_row"} if block.surplus is not None else set()
        flags |= {"start_ignored"} if block.row_start < raw.requested_start else set()
    elif n and raw.finish != "abort" and raw.rows_asked:
        raise ReplyError(
            f"{origin}: {raw.input_len + n - 1} rows expected (s={raw.input_len}, n={n}), none came with a reply that "
            f"finished by {raw.finish}; does the engine return routed experts?"
        )
    versions = token_versions(raw, origin)
    mixed = is_mixed(raw, versions)
    call = EngineCall(
        request_id=raw.request_id,
        input_len=raw.input_len,
        output_ids=np.array(raw.output_ids, dtype=np.int32),
        log_probs=log_probs,
        rows=None if block is None else block.rows,
        versions=versions,
        finish=raw.finish,
        row_start=0 if block is None else block.row_start,
        kv_kept=raw.kv_kept,
        mixed_rows=mixed,
        surplus=None if block is None else block.surplus,
    )
    return CheckedReply(call, frozenset(flags | ({"mixed_version_call"} if mixed else set())))


def check_log_probs(raw: RawReply, origin: str) -> tuple[NDArray[np.float32], set[str]]:
    """Returns float32 `[n]` log-probs, NaN for single missing ones, and flags.

    Raises:
        ReplyError: their number is not n, one is above 0 or infinite, or one belongs to another token.
    """
    n = len(raw.output_ids)
    if raw.log_probs is None:
        if n:
            raise ReplyError(f"{origin}: {n} log-probs expected, none came")
        return np.empty(0, np.float32), set()
    values = [math.nan if value is None else value for value in raw.log_probs]
    if n == 0 and raw.max_new_tokens == 0 and len(values) == 1:
        return np.empty(0, np.float32), {"phantom_log_prob"}
    if len(values) != n:
        raise ReplyError(f"{origin}: {n} log-probs expected, {len(values)} came")
    for index, value in enumerate(values):
        if value == value and not LOWEST_LOG_PROB <= value <= 0:  # NaN differs from itself: a missing one
            raise ReplyError(f"{origin}: a finite log-prob <= 0 expected, {value} came for new token {index}")
    if raw.log_prob_ids is not None and list(raw.log_prob_ids) != list(raw.output_ids):
        raise ReplyError(
            f"{origin}: log-probs of tokens {list(raw.output_ids)} expected, of {list(raw.log_prob_ids)} came"
        )
    log_probs = np.array(values, dtype=np.float32)
    return log_probs, {"log_prob_missing"} if np.isnan(log_probs).any() else set()


def token_versions(raw: RawReply, origin: str) -> NDArray[np.int32]:
    """Returns int32 `[n]`: the weight version of each new token, UNKNOWN_VERSION where the reply does not say.

    Raises:
        ReplyError: spans overlap or leave the new tokens.
    """
    n = len(raw.output_ids)
    if raw.version_spans is None:
        return np.full(n, UNKNOWN_VERSION if raw.version is None else raw.version, dtype=np.int32)
    versions = np.full(n, UNKNOWN_VERSION, dtype=np.int32)
    held = 0
    for span in raw.version_spans:
        if not held <= span.start <= span.end <= n:
            raise ReplyError(
                f"{origin}: ordered version spans within [0, {n}) expected, [{span.start}, {span.end}) came"
            )
        versions[span.start : span.end] = span.version
        held = span.end
    return versions


def is_mixed(raw: RawReply, versions: NDArray[np.int32]) -> bool:
    """Returns whether older tokens of the call are paired with rows that newer weights chose (EngineCall.mixed_rows).

    So when its KV cache was not kept and its tokens span two versions; or when it was retracted and the reply gives no
    version per token, so that it cannot be ruled out.
    """
    if raw.in_place:
        return False
    return len(np.unique(versions)) > 1 or (raw.retractions > 0 and len(versions) > 0 and raw.version_spans is None)


def row_dtype_for(num_experts: int) -> np.dtype[Any]:
    """Returns the narrowest integer type that holds -1 and the ids 0..E-1."""
    return np.min_scalar_type(-num_experts)


def normalize_rows(raw: RawReply, shape: RowShape, convention: Convention) -> RowBlock:
    """Returns the reply's rows, a writable copy in the narrowest integer type, cut to the rows of tokens that were fed.

    A surplus last row is set aside where `convention` allows one, and at zero budget (SGLang 0.5.12 counts a token that
    it drops). A reply that does not say where it starts is a full one or starts at `requested_start`, whichever its
    count fits.

    Raises:
        ReplyError: wrong payload, type, shape, count or contents.
    """
    origin = f"request {raw.request_id}"
    n = len(raw.output_ids)
    full = raw.input_len + n - 1
    starts = {raw.row_start} if raw.row_start is not None else {0, raw.requested_start}
    came = decode_rows(raw.rows, shape, origin, [full - start for start in sorted(starts)])
    extras = (0, 1) if convention != "seqlen-1" or (raw.max_new_tokens == 0 and n == 0) else (0,)
    fits = [(start, extra) for start in sorted(starts) for extra in extras if len(came) == full - start + extra]
    if len(fits) != 1:
        expected = " or ".join(f"{full - start} rows from position {start} on" for start in sorted(starts))
        raise ReplyError(
            f"{origin}: {expected} expected (s={raw.input_len}, n={n}, convention {convention}), {len(came)} came"
            + ("; that fits more than one reading, ask for full rows" if fits else "")
        )
    start = fits[0][0]
    if raw.prefill_rows is not None:
        came = _put_prefill(came, decode_rows(raw.prefill_rows, shape, origin, [raw.input_len]), start, origin)
        start = 0
    if shape.dense_layers:
        came = came.copy()
        came[:, list(shape.dense_layers)] = LIVE
    try:
        check_row_contents(came, shape.num_experts, f"{origin}, rows from position {start} on")
    except ValueError as error:
        raise ReplyError(str(error)) from error
    rows = came.astype(row_dtype_for(shape.num_experts))
    return RowBlock(rows[: full - start], start, rows[full - start :] if fits[0][1] else None)


def _put_prefill(came: Rows, prefill: Rows, start: int, origin: str) -> Rows:
    """Returns the rows of positions 0 on, the prefill worker's first: a decode worker never routed the prompt."""
    if len(prefill) < start:
        raise ReplyError(f"{origin}: prefill rows of positions 0..{start - 1} expected, {len(prefill)} rows came")
    return np.concatenate([prefill, came[len(prefill) - start :]])


def decode_rows(rows: Any, shape: RowShape, origin: str, expected: Sequence[int]) -> Rows:
    """Returns integer `[rows, L, K]` of an array, a nested list, or base64 text of little-endian int32 in C order.

    Args:
        expected: row counts that would be right, named in errors about the payload's size.

    Raises:
        ReplyError: an .npy container, a size that is no whole number of rows, another shape, or values that are no
            integers.
    """
    if isinstance(rows, str | bytes):
        return _decode_payload(rows, shape, origin, expected)
    try:
        array = np.asarray(rows)
    except ValueError as error:
        raise ReplyError(f"{origin}: a regular array of rows expected, a ragged list came ({error})") from error
    if array.size == 0 and len(array) == 0:
        return np.empty((0, shape.num_layers, shape.top_k), np.int32)
    if array.dtype.kind not in "iu":
        raise ReplyError(f"{origin}: integer expert ids expected, {array.dtype} came")
    if array.ndim != 3 or array.shape[1:] != (shape.num_layers, shape.top_k):
        raise ReplyError(
            f"{origin}: rows of shape [rows, {shape.num_layers}, {shape.top_k}] expected, {array.shape} came"
        )
    return array


def _decode_payload(payload: str | bytes, shape: RowShape, origin: str, expected: Sequence[int]) -> Rows:
    """Returns read-only int32 `[rows, L, K]` of a base64 payload (SGLang's wire form)."""
    try:
        data = base64.b64decode(payload, validate=True)
    except ValueError as error:  # also of text that is not ASCII
        raise ReplyError(f"{origin}: base64 text expected, the payload does not decode ({error})") from error
    row_bytes = 4 * shape.num_layers * shape.top_k
    sizes = " or ".join(str(count * row_bytes) for count in expected)
    if data.startswith(NPY_MAGIC):
        raise ReplyError(f"{origin}: {sizes} bytes of raw int32 expected, an .npy container of {len(data)} bytes came")
    if len(data) % row_bytes:
        raise ReplyError(f"{origin}: {sizes} bytes expected (int32, {row_bytes} a row), {len(data)} came")
    return np.frombuffer(data, dtype="<i4").reshape(-1, shape.num_layers, shape.top_k)
