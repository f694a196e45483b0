"""10,000 mutations of recorded replies: each is refused or read as it says, none is misread."""

from __future__ import annotations

import base64
import copy
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import experiments.engines.sglang.reply
import strategies.reply
from experiments.engines.sglang.reply import ParsedReply
from strategies.reply import ReplyError
from tests.unit.sglang_cases import RECORDED, ROW_BYTES, SHAPE, parse, rows_of, with_rows

# What a mutation must lead to: a refusal, or what the JSON says (checked by an independent reading).
REFUSED, AS_IT_SAYS = "refused", "as it says"
Mutation = Callable[[random.Random, dict[str, Any]], str | None]


def mutate_row_count(rng: random.Random, case: dict[str, Any]) -> str | None:
    rows = rows_of(case["response"])
    count = rng.choice([n for n in range(len(rows) + 4) if n not in allowed_counts(case)])
    case.update(with_rows(case, np.resize(rows, (count, *rows.shape[1:]))))
    return REFUSED


def allowed_counts(case: dict[str, Any]) -> set[int]:
    s, n = len(case["request"]["input_ids"]), len(case["response"]["output_ids"])
    surplus = {s} if case["request"]["sampling_params"]["max_new_tokens"] == 0 else set()
    return {s + n - 1, s + n - 1 - case["request"].get("routed_experts_start_len", 0)} | surplus


def mutate_cell(rng: random.Random, case: dict[str, Any]) -> str | None:
    rows = rows_of(case["response"]).copy()
    row, layer = rng.randrange(len(rows)), rng.randrange(SHAPE.num_layers)
    cell = [rng.randrange(-2, 11), rng.randrange(-2, 11)]
    rows[row, layer] = cell
    case.update(with_rows(case, rows))
    valid = cell == [-1, -1] or (all(0 <= expert < 8 for expert in cell) and cell[0] != cell[1])
    return AS_IT_SAYS if valid else REFUSED


def mutate_row_order(rng: random.Random, case: dict[str, Any]) -> str | None:
    rows = rows_of(case["response"]).copy()
    case.update(with_rows(case, rows[rng.sample(range(len(rows)), len(rows))]))
    return AS_IT_SAYS


def mutate_payload_bytes(rng: random.Random, case: dict[str, Any]) -> str | None:
    info = case["response"]["meta_info"]
    data = base64.b64decode(info["routed_experts"])
    cut = rng.randrange(1, ROW_BYTES)
    info["routed_experts"] = base64.b64encode(data[:-cut] if rng.random() < 0.5 else data + data[:cut]).decode()
    return REFUSED


def mutate_payload_text(rng: random.Random, case: dict[str, Any]) -> str | None:
    info = case["response"]["meta_info"]
    text = info["routed_experts"]
    at = rng.randrange(len(text))
    info["routed_experts"] = text[:at] + rng.choice("@ \n-_é") + text[at + 1 :]
    return REFUSED


def mutate_output_ids(rng: random.Random, case: dict[str, Any]) -> str | None:
    ids = case["response"]["output_ids"]
    at = rng.randrange(len(ids))
    edit = rng.choice(["change", "drop", "insert", "type"])
    if edit == "change":
        ids[at] = (ids[at] + rng.randrange(1, 200)) % 256
    elif edit == "drop":
        del ids[at]
    elif edit == "insert":
        ids.insert(at, rng.randrange(256))
    else:
        ids[at] = rng.choice([str(ids[at]), float(ids[at]), None, [ids[at]], -1, True, 2**40])
    return REFUSED


def mutate_log_prob(rng: random.Random, case: dict[str, Any]) -> str | None:
    entries = case["response"]["meta_info"]["output_token_logprobs"]
    at = rng.randrange(len(entries))
    value, expected = rng.choice(
        [
            *((v, AS_IT_SAYS) for v in (-rng.random() * 20, None, math.nan, 0.0, -0.0, -1, -3.4e38)),
            *((v, REFUSED) for v in (0.5, math.inf, -math.inf, -3.5e38, -(10**400), 10**400, "x", True, [-1.0])),
        ]
    )
    entries[at] = [value, *entries[at][1:]]
    return expected


def mutate_entries(rng: random.Random, case: dict[str, Any]) -> str | None:
    entries = case["response"]["meta_info"]["output_token_logprobs"]
    at = rng.randrange(len(entries))
    edit = rng.choice(["drop", "repeat", "swap", "id", "width", "type"])
    if edit == "drop":
        del entries[at]
    elif edit == "repeat":
        entries.insert(at, copy.deepcopy(entries[at]))
    elif edit == "swap":
        other = (at + 1) % len(entries)
        if entries[at][1] == entries[other][1]:
            return None  # undetectable, and harmless only if the values are equal too
        entries[at], entries[other] = entries[other], entries[at]
    elif edit == "id":
        entries[at][1] = rng.choice([entries[at][1] + 1, None, str(entries[at][1]), float(entries[at][1])])
    elif edit == "width":
        entries[at] = entries[at][: rng.randrange(3)] if rng.random() < 0.5 else [*entries[at], None]
    else:
        entries[at] = rng.choice([None, -1.0, {"logprob": -1.0}, "x"])
    return REFUSED


def mutate_spans(rng: random.Random, case: dict[str, Any]) -> str | None:
    info, n = case["response"]["meta_info"], len(case["response"]["output_ids"])
    cuts = sorted(rng.sample(range(1, n), min(rng.randrange(3), n - 1)))
    versions = [rng.randrange(1, 5) for _ in range(len(cuts) + 1)]
    edges = [0, *cuts, n]
    if rng.random() < 0.5:
        edges[rng.randrange(len(edges))] += rng.choice([-1, 1])
    spans = [
        {"version": f"v{version}", "start": start, "end": end}
        for version, (start, end) in zip(versions, itertools.pairwise(edges), strict=True)
    ]
    info["weight_versions"], info["weight_version"] = spans, spans[-1]["version"]
    good = edges[0] == 0 and edges[-1] == n and all(a < b for a, b in itertools.pairwise(edges))
    return AS_IT_SAYS if good and versions == sorted(set(versions)) else REFUSED


def mutate_count(rng: random.Random, case: dict[str, Any]) -> str | None:
    name = rng.choice(["completion_tokens", "output_token_logprobs_length", "prompt_tokens"])
    info = case["response"]["meta_info"]
    info[name] = rng.choice(
        [info[name] + 1, info[name] - 1, str(info[name]), float(info[name]), -1, True, [info[name]]]
    )
    return REFUSED


def mutate_structure(rng: random.Random, case: dict[str, Any]) -> str | None:
    response = case["response"]
    path = rng.choice(["output_ids", "meta_info", "finish_reason", "output_token_logprobs", "routed_experts"])
    holder = response if path in response else response["meta_info"]
    if rng.random() < 0.5:
        del holder[path]
        if path == "routed_experts" and response["meta_info"]["finish_reason"]["type"] == "abort":
            return None  # an abort may come without rows
    else:
        holder[path] = rng.choice([7, "x", True, [[]], {"a": 1}])
    return REFUSED


def mutate_start(rng: random.Random, case: dict[str, Any]) -> str | None:
    """Asks for rows from another position on than the reply has them."""
    came = case["request"].get("routed_experts_start_len", 0)
    asked = rng.randrange(len(case["request"]["input_ids"]))
    case["request"]["routed_experts_start_len"] = asked
    return AS_IT_SAYS if came in (0, asked) else REFUSED


def mutate_finish(rng: random.Random, case: dict[str, Any]) -> str | None:
    ids = case["response"]["output_ids"]
    reason, expected = rng.choice(
        [
            ({"type": "stop", "matched": ids[-1]}, AS_IT_SAYS),
            ({"type": "stop", "matched": ids[-1] + 1}, REFUSED),
            ({"type": "length", "length": len(ids)}, AS_IT_SAYS),
            ({"type": "abort", "message": "Aborted"}, AS_IT_SAYS),
            ({"type": "abort", "message": "Input is too long"}, REFUSED),
            ({"type": "abort", "message": "Aborted", "status_code": 500}, REFUSED),
            ({"type": rng.choice(["STOP", "", None, 1])}, REFUSED),
        ]
    )
    case["response"]["meta_info"]["finish_reason"] = reason
    return expected


def mutate_counters(rng: random.Random, case: dict[str, Any]) -> str | None:
    info, s = case["response"]["meta_info"], len(case["request"]["input_ids"])
    name = rng.choice(["cached_tokens", "num_retractions"])
    info[name] = rng.choice([rng.randrange(s + 1), s + 1, -1, "1", True, 1.0, [1]])
    if type(info[name]) is not int or info[name] < 0:
        return REFUSED
    return REFUSED if name == "cached_tokens" and info[name] > s else AS_IT_SAYS


def mutate_budget(rng: random.Random, case: dict[str, Any]) -> str | None:
    n = len(case["response"]["output_ids"])
    case["request"]["sampling_params"]["max_new_tokens"] = rng.randrange(n)
    return REFUSED


MUTATIONS: tuple[Mutation, ...] = (
    mutate_row_count,
    mutate_cell,
    mutate_row_order,
    mutate_payload_bytes,
    mutate_payload_text,
    mutate_output_ids,
    mutate_log_prob,
    mutate_entries,
    mutate_spans,
    mutate_count,
    mutate_structure,
    mutate_start,
    mutate_finish,
    mutate_counters,
    mutate_budget,
)


def assert_read_as_it_says(case: dict[str, Any], parsed: ParsedReply) -> None:
    """Holds the parsed call against a plain reading of the same JSON."""
    call, response = parsed.reply.call, case["response"]
    info, s, n = response["meta_info"], len(case["request"]["input_ids"]), len(response["output_ids"])
    assert (call.request_id, call.input_len, call.finish) == (case["name"], s, info["finish_reason"]["type"])
    assert call.row_start == s + n - 1 - len(rows_of(response))
    assert (call.surplus, call.kv_kept) == (None, False)
    assert parsed.reply.prefill_tokens == s - info["cached_tokens"]
    assert parsed.reply.retractions == info.get("num_retractions", 0)
    assert parsed.reply.row_bytes == len(info["routed_experts"])
    assert call.output_ids.tolist() == response["output_ids"]
    said = [math.nan if e[0] is None else e[0] for e in info["output_token_logprobs"]]
    assert np.array_equal(call.log_probs, np.array(said, np.float32), equal_nan=True)
    assert call.rows is not None
    assert np.array_equal(call.rows, rows_of(response))
    per_token = [int(s["version"][1:]) for s in info["weight_versions"] for _ in range(s["start"], s["end"])]
    assert call.versions.tolist() == per_token
    assert call.mixed_rows == (len(set(per_token)) > 1)


def play(count: int) -> dict[str, int]:
    """Returns how many of `count` mutated replies were refused and read; raises when one was neither."""
    names = ("complete", "one_token", "start_len_3", "abort_segment_1", "abort_segment_2", "abort_segment_2_delta")
    names += ("abort_queue_0", "retract", "in_place")
    texts = [(RECORDED / "0.5.23" / f"{name}.json").read_text() for name in names]
    rng = random.Random(20)
    outcomes = {REFUSED: 0, AS_IT_SAYS: 0}
    while sum(outcomes.values()) < count:
        case, mutation = json.loads(rng.choice(texts)), rng.choice(MUTATIONS)
        expected = mutation(rng, case)
        if expected is None:
            continue
        outcomes[expected] += 1
        try:
            parsed, reason = parse(case), None
        except ReplyError as error:
            parsed, reason = None, str(error)
        came = REFUSED if parsed is None else AS_IT_SAYS
        assert came == expected, f"{mutation.__name__}: {reason or case['response']}"
        if parsed is not None:
            assert_read_as_it_says(case, parsed)
    return outcomes


def test_ten_thousand_mutations_are_refused_or_read_as_they_say():
    assert min(play(10_000).values()) > 1000


def changed_block(**change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a `normalize_rows` whose result is changed in one field."""
    real = strategies.reply.normalize_rows

    def normalize(*arguments: Any) -> Any:
        block = real(*arguments)
        return dataclasses.replace(block, **{name: edit(getattr(block, name)) for name, edit in change.items()})

    return normalize


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "rows one position late": (strategies.reply, "normalize_rows", changed_block(rows=lambda r: np.roll(r, 1, axis=0))),
    "row_start one too far": (strategies.reply, "normalize_rows", changed_block(row_start=lambda start: start + 1)),
    "row_start forgotten": (strategies.reply, "normalize_rows", changed_block(row_start=lambda start: 0)),
    "contents unchecked": (strategies.reply, "check_row_contents", lambda *_: None),
    "spans unread": (experiments.engines.sglang.reply, "_spans", lambda *_: None),
    "finish unread": (experiments.engines.sglang.reply, "_finish", lambda *_: "length"),
    "cache unread": (experiments.engines.sglang.reply, "_prefill_tokens", lambda meta, sent, _: sent.input_len),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_parser_that_misreads_does_not_get_through(monkeypatch, fault):
    monkeypatch.setattr(*PLANTED[fault])
    with pytest.raises(AssertionError):
        play(2000)
