"""The one place where an answer of SGLang's `/generate` becomes a `Reply`: read strictly, or refused with the reason.

What every engine must satisfy (counts, log-probs, rows) is in strategies/reply.py; here is what only SGLang's JSON
says, and that it agrees with itself. Pure functions, no connection: recorded replies are read by the same code.

Legend: `s` input tokens of the call, `n` new tokens, `L` layers, `K` experts per token.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.engines.base import Reply
from strategies.reply import RawReply, ReplyError, RowShape, VersionSpan, check_reply
from strategies.types import Rows

VERSION = re.compile(r"v?(\d+)")
"""A weight version on the wire: the number of syncs; recorded replies write `v7`."""

INTERRUPTIONS = ("Aborted", "Abort in waiting queue")
"""Messages of aborts that someone asked for; any other abort is the server's refusal of the request."""

LONG_RUN = 16
"""Equal rows in a row that are flagged: a known fault repeated one row 67 times (sgl-project/sglang#36404)."""


class RefusedRequest(ReplyError):
    """The server did not run the request and says why; sending it again would not help."""


@dataclass(frozen=True)
class Sent:
    """What was asked for.

    Attributes:
        request_id: named in every error.
        input_len: `s`.
        max_new_tokens: the budget.
        row_start: position of the first row that was asked for.
        wants_rows: rows were asked for.
        oldest, newest: weight versions that the server held while the call ran, by our own count; None: not known.
        kept_kv: every update during the call kept its KV cache (pause mode `in_place`).
        rid: the request id that the server was told, which its reply must bear; None: it chose one itself.
        vocab_size: ids are below it; None: not known.
    """

    request_id: str
    input_len: int
    max_new_tokens: int
    row_start: int = 0
    wants_rows: bool = True
    oldest: int | None = None
    newest: int | None = None
    kept_kv: bool = False
    rid: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, eq=False)
class ParsedReply:
    """A valid reply, and what was irregular about it: strategies.reply.CheckedReply.flags, those of `suspect_rows`, and
    `cut_short` where the server allows fewer tokens than were asked for (its context is shorter than the model's).
    """

    reply: Reply
    flags: frozenset[str]


def sent_request(request_id: str, body: Any) -> Sent:
    """Returns what a recorded request body asked for.

    Raises:
        ReplyError: it is no request of one sequence of token ids.
    """
    origin = f"request {request_id}"
    body = _mapping(body, origin, "a request")
    ids, sampling = body.get("input_ids"), _mapping(body.get("sampling_params"), origin, "`sampling_params`")
    if not isinstance(ids, list):
        raise ReplyError(f"{origin}: one list of `input_ids` expected, {type(ids).__name__} came")
    return Sent(
        request_id=request_id,
        input_len=len(ids),
        max_new_tokens=_count(sampling.get("max_new_tokens"), origin, "`max_new_tokens`"),
        row_start=_count(body.get("routed_experts_start_len", 0), origin, "`routed_experts_start_len`"),
        wants_rows=bool(body.get("return_routed_experts", False)),
        rid=body.get("rid"),
    )


def parse_reply(body: Any, sent: Sent, shape: RowShape) -> ParsedReply:
    """Returns the validated reply.

    Raises:
        RefusedRequest: an error body, or an abort that nobody asked for.
        ReplyError: the reply contradicts the request, our count of weight versions, or itself. The message names the
            request, what was expected and what came.
    """
    origin = f"request {sent.request_id}"
    body = _mapping(body, origin, "a reply")
    if "error" in body:
        raise RefusedRequest(f"{origin}: the server refused it: {body['error']}")
    meta = _mapping(body.get("meta_info"), origin, "`meta_info`")
    if sent.rid is not None and meta.get("id") != sent.rid:
        raise ReplyError(f"{origin}: the reply to {sent.rid!r} expected, that to {meta.get('id')!r} came")
    ids = _token_ids(body.get("output_ids"), sent, origin)
    finish = _finish(meta, ids, sent, origin)
    log_probs, log_prob_ids = _log_probs(meta, origin)
    rows, spans = _rows(meta, sent, origin), _spans(meta, len(ids), sent, origin)
    retractions = _count(meta.get("num_retractions", 0), origin, "`num_retractions`")
    raw = RawReply(
        request_id=sent.request_id,
        input_len=sent.input_len,
        output_ids=ids,
        finish=finish,
        log_probs=log_probs,
        rows=rows,
        version=_whole_version(meta, sent, origin) if spans is None else None,
        version_spans=spans,
        row_start=None if sent.row_start else 0,
        requested_start=sent.row_start,
        max_new_tokens=sent.max_new_tokens,
        fed_len=_optional_count(meta, "prompt_tokens", origin),
        log_prob_ids=log_prob_ids,
        retractions=retractions,
        in_place=sent.kept_kv and not retractions,
        rows_asked=sent.wants_rows,
    )
    checked = check_reply(raw, shape, "seqlen-1")
    for name in ("completion_tokens", "output_token_logprobs_length"):
        if (came := _optional_count(meta, name, origin)) not in (None, len(ids)):
            raise ReplyError(f"{origin}: {len(ids)} output ids came, but `{name}` is {came}")
    flags = set(checked.flags)
    if checked.call.rows is not None:
        flags |= suspect_rows(checked.call.rows)
    if finish == "length" and len(ids) < sent.max_new_tokens:
        flags.add("cut_short")
    return ParsedReply(
        Reply(
            call=checked.call,
            prefill_tokens=_prefill_tokens(meta, sent, origin),
            retractions=retractions,
            row_bytes=0 if rows is None else len(rows),
        ),
        frozenset(flags),
    )


def suspect_rows(rows: Rows) -> set[str]:
    """Returns what is possible, but hardly the router's choice, in `[rows, L, K]`: `repeated_rows` (a run of LONG_RUN),
    `constant_layer` (one layer is the same in all of at least LONG_RUN rows).
    """
    if len(rows) < LONG_RUN:
        return set()
    suspect = {"repeated_rows"} if longest_equal_run(rows) >= LONG_RUN else set()
    return suspect | ({"constant_layer"} if (rows == rows[:1]).all(axis=(0, 2)).any() else set())


def longest_equal_run(rows: Rows) -> int:
    """Returns the largest number of equal rows in a row, in `[rows, L, K]`."""
    if len(rows) < 2:
        return len(rows)
    breaks = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=(1, 2)))  # i: row i+1 differs from row i
    edges = np.concatenate([[-1], breaks, [len(rows) - 1]])
    return int(np.diff(edges).max())


def _token_ids(value: Any, sent: Sent, origin: str) -> list[int]:
    if not isinstance(value, list):
        raise ReplyError(f"{origin}: a list of `output_ids` expected, {_shown(value)} came")
    limit = sent.vocab_size if sent.vocab_size is not None else np.iinfo(np.int32).max
    for index, token in enumerate(value):
        if not _is_int(token) or not 0 <= token < limit:
            raise ReplyError(f"{origin}: an id in 0..{limit - 1} expected, {_shown(token)} came as new token {index}")
    return value


def _finish(meta: Mapping[str, Any], ids: Sequence[int], sent: Sent, origin: str) -> str:
    """Returns `stop`, `length` or `abort`.

    Raises:
        RefusedRequest: an abort that is a refusal.
        ReplyError: the reason does not fit the tokens.
    """
    reason = _mapping(meta.get("finish_reason"), origin, "`finish_reason`")
    kind = reason.get("type")
    if kind == "abort" and (reason.get("status_code") is not None or reason.get("message") not in INTERRUPTIONS):
        raise RefusedRequest(f"{origin}: the server aborted it: {reason.get('message')}")
    if kind == "stop" and not ids:
        raise ReplyError(f"{origin}: a token expected with finish stop, none came")
    if kind == "length" and len(ids) < sent.max_new_tokens and reason.get("length") != len(ids):
        raise ReplyError(
            f"{origin}: {sent.max_new_tokens} tokens expected with finish length, {len(ids)} came "
            f"(`length` {reason.get('length')})"
        )
    matched = reason.get("matched")
    if kind == "stop" and _is_int(matched) and matched != ids[-1]:
        raise ReplyError(f"{origin}: stop token {matched} expected as the last one, {ids[-1]} came")
    return str(kind)


def _log_probs(meta: Mapping[str, Any], origin: str) -> tuple[list[float | None] | None, list[int] | None]:
    """Returns the log-prob and the token id of every entry of `output_token_logprobs`; None: the field is absent."""
    entries = meta.get("output_token_logprobs")
    if entries is None:
        return None, None
    if not isinstance(entries, list):
        raise ReplyError(f"{origin}: a list of log-probs expected, {_shown(entries)} came")
    values: list[float | None] = []
    ids: list[int] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) != 3:
            raise ReplyError(f"{origin}: (log-prob, id, text) expected, {_shown(entry)} came for new token {index}")
        value, token, _ = entry
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ReplyError(f"{origin}: a log-prob expected, {_shown(value)} came for new token {index}")
        if not _is_int(token):
            raise ReplyError(f"{origin}: a token id beside the log-prob expected, {_shown(token)} came ({index})")
        values.append(value)
        ids.append(token)
    return values, ids


def _rows(meta: Mapping[str, Any], sent: Sent, origin: str) -> str | None:
    rows = meta.get("routed_experts")
    if rows is not None and not isinstance(rows, str):
        raise ReplyError(f"{origin}: base64 text expected as `routed_experts`, {_shown(rows)} came")
    if rows is not None and not sent.wants_rows:
        raise ReplyError(f"{origin}: no rows were asked for, {len(rows)} characters of them came")
    return rows


def _spans(meta: Mapping[str, Any], n: int, sent: Sent, origin: str) -> list[VersionSpan] | None:
    """Returns the spans of weight versions, which cover the new tokens; None where the server does not send them."""
    entries = meta.get("weight_versions")
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise ReplyError(f"{origin}: a list of version spans expected, {_shown(entries)} came")
    spans = []
    for entry in entries:
        entry = _mapping(entry, origin, "a version span")
        start, end = (_count(entry.get(edge), origin, f"`{edge}` of a version span") for edge in ("start", "end"))
        spans.append(VersionSpan(_version(entry.get("version"), sent, origin), start, end))
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), n]
    if edges[::2] != edges[1::2] or any(span.start == span.end for span in spans if n):
        raise ReplyError(f"{origin}: version spans that cover [0, {n}) expected, {_shown(entries)} came")
    if any(new.version <= old.version for old, new in itertools.pairwise(spans)):
        raise ReplyError(f"{origin}: weight versions that grow expected, {_shown(entries)} came")
    if spans and meta.get("weight_version") is not None and meta["weight_version"] != entries[-1]["version"]:
        raise ReplyError(
            f"{origin}: `weight_version` {entries[-1]['version']!r} expected, the last span's, "
            f"{meta['weight_version']!r} came"
        )
    return spans


def _whole_version(meta: Mapping[str, Any], sent: Sent, origin: str) -> int | None:
    """Returns the version of all new tokens; None where it is not known.

    The field is the version when the reply was built: it says nothing about tokens sampled before an update.
    """
    text = meta.get("weight_version")
    if text is None or sent.oldest != sent.newest:
        return None
    return _version(text, sent, origin)


def _version(text: Any, sent: Sent, origin: str) -> int:
    match = VERSION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ReplyError(f"{origin}: a weight version (a number of syncs) expected, {_shown(text)} came")
    version = int(match[1])
    low, high = sent.oldest, sent.newest
    if (low is not None and version < low) or (high is not None and version > high):
        raise ReplyError(
            f"{origin}: weight version {low}..{high} expected by our own count of syncs, {version} came; does another "
            "client update this server?"
        )
    return version


def _prefill_tokens(meta: Mapping[str, Any], sent: Sent, origin: str) -> int:
    """Returns the input tokens that were not served from the prefix cache; 0 for a call that never ran."""
    cached = _optional_count(meta, "cached_tokens", origin)
    if cached is None:
        return 0
    if cached > sent.input_len:
        raise ReplyError(f"{origin}: at most {sent.input_len} cached tokens expected, {cached} came")
    return sent.input_len - cached


def _mapping(value: Any, origin: str, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ReplyError(f"{origin}: {what} (an object) expected, {_shown(value)} came")
    return value


def _optional_count(meta: Mapping[str, Any], name: str, origin: str) -> int | None:
    return None if meta.get(name) is None else _count(meta[name], origin, f"`{name}`")


def _count(value: Any, origin: str, what: str) -> int:
    if not _is_int(value) or value < 0:
        raise ReplyError(f"{origin}: a number >= 0 expected as {what}, {_shown(value)} came")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
