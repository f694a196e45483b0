"""SGLang's JSON becomes a recorded call or is refused: every recorded reply, every fault of the contract."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from experiments.engines.sglang.reply import (
    LONG_RUN,
    RefusedRequest,
    longest_equal_run,
    suspect_rows,
)
from strategies.reply import ReplyError
from tests.unit.sglang_cases import ROW_BYTES, SHAPE, parse, recorded, rows_of, with_rows


@pytest.mark.parametrize(
    ("name", "finish", "rows", "spans", "flags"),
    [
        ("0.5.23/complete", "length", 16, {1: 12}, set()),
        ("0.5.23/one_token", "length", 5, {1: 1}, set()),
        ("0.5.23/zero_budget", "length", 4, {}, set()),
        ("0.5.23/start_len_3", "length", 13, {1: 12}, set()),
        ("0.5.23/abort_segment_1", "abort", 16, {1: 12}, set()),
        ("0.5.23/abort_segment_2", "length", 36, {2: 20}, set()),
        ("0.5.23/abort_segment_2_delta", "length", 20, {2: 20}, set()),
        ("0.5.23/abort_queue_0", "abort", 37, {5: 35}, set()),
        ("0.5.23/abort_queue_4", "abort", None, {}, set()),
        ("0.5.23/retract", "length", 124, {7: 36, 8: 84}, {"mixed_version_call"}),
        ("0.5.23/routes_not_requested", "length", None, {1: 12}, set()),
        ("0.5.12/complete", "length", 16, {1: 12}, set()),
        ("0.5.12/abort_segment_1", "abort", 55, {1: 51}, set()),
        ("0.5.12/abort_segment_2", "length", 75, {2: 20}, set()),
        ("0.5.12/abort_queue_5", "abort", None, {}, set()),
        ("0.5.12/zero_budget", "length", 4, {}, {"surplus_row"}),
        ("0.5.12/wrong_rows", "length", 16, {1: 12}, set()),  # right in every count: only the model can tell
    ],
)
def test_every_recorded_reply_is_read_as_it_was(name, finish, rows, spans, flags):
    case = recorded(name)
    parsed = parse(case)
    call, response = parsed.reply.call, case["response"]
    assert (call.finish, parsed.flags) == (finish, flags)
    assert call.output_ids.tolist() == response["output_ids"]
    assert (None if call.rows is None else len(call.rows)) == rows
    if rows is not None:
        assert np.array_equal(call.rows, rows_of(response)[:rows])
        assert parsed.reply.row_bytes == len(response["meta_info"]["routed_experts"])
    expected = [entry[0] for entry in response["meta_info"]["output_token_logprobs"]]
    assert np.array_equal(call.log_probs, np.array(expected, np.float32))
    assert call.versions.tolist() == [version for version, count in spans.items() for _ in range(count)]
    assert parsed.reply.retractions == response["meta_info"].get("num_retractions", 0)


def test_a_delta_reply_says_where_its_rows_start():
    full, delta = recorded("0.5.23/abort_segment_2"), recorded("0.5.23/abort_segment_2_delta")
    call = parse(delta).reply.call
    assert call.row_start == delta["request"]["routed_experts_start_len"] == 16
    assert call.rows is not None
    assert np.array_equal(call.rows[0], rows_of(full["response"])[16]), "the boundary row is the same under one version"


def test_a_server_that_ignores_the_start_is_noticed_by_the_count():
    case = recorded("0.5.23/complete")
    parsed = parse(case, row_start=3)
    assert parsed.flags == {"start_ignored"}
    assert parsed.reply.call.row_start == 0


def test_in_place_pauses_keep_rows_and_tokens_of_one_piece():
    case = recorded("0.5.23/in_place")
    assert parse(case).reply.call.mixed_rows, "two versions, and nobody says that the KV cache was kept"
    call = parse(case, kept_kv=True, oldest=6, newest=7).reply.call
    assert not call.mixed_rows
    assert call.versions.tolist() == [6] * 23 + [7] * 97


def test_a_retraction_within_one_version_is_harmless():
    case = recorded("0.5.23/complete")
    case["response"]["meta_info"]["num_retractions"] = 1
    parsed = parse(case, kept_kv=True)
    assert (parsed.reply.retractions, parsed.reply.call.mixed_rows) == (1, False)


def test_a_server_without_spans_leaves_versions_unknown_where_an_update_came_between():
    case = recorded("0.5.12/complete")
    assert set(parse(case, oldest=1, newest=1).reply.call.versions.tolist()) == {1}
    assert set(parse(case, oldest=0, newest=1).reply.call.versions.tolist()) == {-1}


def test_tokens_that_were_served_from_the_prefix_cache_were_not_forwarded():
    assert parse(recorded("0.5.23/complete")).reply.prefill_tokens == 5
    assert parse(recorded("0.5.23/abort_segment_2_delta")).reply.prefill_tokens == 1
    assert parse(recorded("0.5.23/abort_queue_4")).reply.prefill_tokens == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0.5.23/empty_prompt", "the server refused it: .*input_ids cannot be empty"),
        ("0.5.23/logprobs_not_requested", "12 log-probs expected, none came"),
    ],
)
def test_recorded_replies_of_no_use_are_refused(name, message):
    with pytest.raises(ReplyError, match=message):
        parse(recorded(name))


Edit = Callable[[dict[str, Any]], Any]


def meta(**fields: Any) -> Edit:
    """An edit of `meta_info`; a value `...` removes the field."""

    def edit(case: dict[str, Any]) -> None:
        for name, value in fields.items():
            case["response"]["meta_info"].pop(name, None)
            if value is not ...:
                case["response"]["meta_info"][name] = value

    return edit


def payload(edit: Callable[[bytes], bytes]) -> Edit:
    def apply(case: dict[str, Any]) -> None:
        info = case["response"]["meta_info"]
        info["routed_experts"] = base64.b64encode(edit(base64.b64decode(info["routed_experts"]))).decode()

    return apply


def cells(edit: Callable[[np.ndarray], Any]) -> Edit:
    def apply(data: bytes) -> bytes:
        rows = np.frombuffer(data, "<i4").reshape(-1, SHAPE.num_layers, SHAPE.top_k).copy()
        changed = edit(rows)
        return (rows if changed is None else changed).astype("<i4").tobytes()

    return payload(apply)


def entry(value: Any, index: int = 3) -> Edit:
    """Replaces one (log-prob, id, text)."""

    def edit(case: dict[str, Any]) -> None:
        entries = case["response"]["meta_info"]["output_token_logprobs"]
        entries[index] = value(entries[index]) if callable(value) else value

    return edit


def drop_last_entry(case: dict[str, Any]) -> None:
    case["response"]["meta_info"]["output_token_logprobs"].pop()


def drop_last_token(case: dict[str, Any]) -> None:
    case["response"]["output_ids"].pop()


def span(*versions: tuple[Any, int, int]) -> Edit:
    return meta(weight_versions=[{"version": v, "start": a, "end": b} for v, a, b in versions])


FAULTS: dict[str, tuple[Edit, str]] = {
    "not an object": (lambda c: c.update(response=[c["response"]]), "a reply .an object. expected"),
    "no meta_info": (lambda c: c["response"].pop("meta_info"), "`meta_info` .an object. expected, None came"),
    "error body": (lambda c: c.update(response={"error": {"message": "too long"}}), "the server refused it"),
    "abort with a cause": (
        meta(finish_reason={"type": "abort", "message": "routed_experts_start_len is higher", "status_code": 400}),
        "the server aborted it: routed_experts_start_len is higher",
    ),
    "unknown finish": (meta(finish_reason={"type": "done"}), "finish stop, length or abort expected, 'done' came"),
    "no finish": (meta(finish_reason=...), "`finish_reason` .an object. expected"),
    "no rows": (meta(routed_experts=...), "16 rows expected .* does the engine return routed experts"),
    "rows are no text": (meta(routed_experts=[1, 2]), "base64 text expected as `routed_experts`"),
    "rows are no base64": (meta(routed_experts="@@@"), "base64 text expected, the payload does not decode"),
    "one row short": (payload(lambda d: d[:-ROW_BYTES]), r"16 rows from position 0 on expected .*, 15 came"),
    "one row more": (payload(lambda d: d + d[-ROW_BYTES:]), "16 rows .* expected .*, 17 came"),
    "a byte short": (payload(lambda d: d[:-1]), r"512 bytes expected \(int32, 32 a row\), 511 came"),
    "npy container": (payload(lambda d: b"\x93NUMPY" + d), "raw int32 expected, an .npy container"),
    "int16 rows": (payload(lambda d: np.frombuffer(d, "<i4").astype("<i2").tobytes()), "expected .*8 came"),
    "an extra column per cell": (
        payload(lambda d: np.pad(np.frombuffer(d, "<i4").reshape(-1, 2), ((0, 0), (0, 1))).astype("<i4").tobytes()),
        "24 came",
    ),
    "id too large": (cells(lambda r: r.__setitem__((2, 1, 0), 8)), r"ids in 0..7 expected .* row 2, layer 1"),
    "id negative": (cells(lambda r: r.__setitem__((2, 1, 0), -1)), r"ids in 0..7 expected .* row 2, layer 1"),
    "big-endian": (payload(lambda d: np.frombuffer(d, "<i4").astype(">i4").tobytes()), "ids in 0..7 expected"),
    "repeated id": (cells(lambda r: r.__setitem__((5, 3), 4)), r"distinct ids expected .* row 5, layer 3"),
    "all zeros": (cells(lambda r: r * 0), "distinct ids expected"),
    "log-probs absent": (meta(output_token_logprobs=...), "12 log-probs expected, none came"),
    "one log-prob short": (drop_last_entry, "12 log-probs expected, 11 came"),
    "one token short": (drop_last_token, "12 tokens expected with finish length, 11 came"),
    "a pair for a triple": (entry(lambda e: e[:2]), r"\(log-prob, id, text\) expected"),
    "log-prob of another token": (entry(lambda e: [e[0], e[1] + 1, None]), "log-probs of tokens .* expected"),
    "positive log-prob": (entry(lambda e: [0.25, e[1], None]), "a finite log-prob <= 0 expected, 0.25 came"),
    "infinite log-prob": (entry(lambda e: [-math.inf, e[1], None]), "a finite log-prob <= 0 expected, -inf came"),
    "log-prob as text": (entry(lambda e: ["-1", e[1], None]), "a log-prob expected, '-1' came"),
    "tokens beyond the budget": (
        lambda c: c["request"]["sampling_params"].update(max_new_tokens=11),
        "at most 11 tokens asked for, 12 came",
    ),
    "another input length": (meta(prompt_tokens=6), "5 input tokens were sent, the reply is for 6"),
    "another token count": (meta(completion_tokens=11), "12 output ids came, but `completion_tokens` is 11"),
    "a token that is no number": (lambda c: c["response"]["output_ids"].__setitem__(0, "73"), "an id in .* expected"),
    "a negative token": (lambda c: c["response"]["output_ids"].__setitem__(0, -1), "an id in .* expected, -1 came"),
    "stop without a token": (
        lambda c: (c["response"].update(output_ids=[]), meta(finish_reason={"type": "stop", "matched": 2})(c)),
        "a token expected with finish stop, none came",
    ),
    "another stop token": (meta(finish_reason={"type": "stop", "matched": 3}), "stop token 3 expected as the last one"),
    "a version that is no number": (span(("default", 0, 12)), "a weight version .* expected, 'default' came"),
    "spans that leave a gap": (span(("v1", 0, 5), ("v2", 6, 12)), r"spans that cover \[0, 12\) expected"),
    "spans that end early": (span(("v1", 0, 11)), r"spans that cover \[0, 12\) expected"),
    "spans that run back": (span(("v2", 0, 5), ("v1", 5, 12)), "weight versions that grow expected"),
    "another last version": (meta(weight_version="v2"), "`weight_version` 'v1' expected, the last span's, 'v2' came"),
    "cached more than the input": (meta(cached_tokens=6), "at most 5 cached tokens expected, 6 came"),
    "negative retractions": (meta(num_retractions=-1), "a number >= 0 expected as `num_retractions`"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_the_contract_is_refused_and_names_the_request(fault):
    edit, message = FAULTS[fault]
    case = recorded("0.5.23/complete")
    edit(case)
    with pytest.raises(ReplyError, match=message) as error:
        parse(case)
    assert "request complete" in str(error.value)


def test_a_refused_request_is_told_from_a_broken_reply():
    for fault in ("error body", "abort with a cause"):
        case = recorded("0.5.23/complete")
        FAULTS[fault][0](case)
        with pytest.raises(RefusedRequest):
            parse(case)


def test_versions_are_held_against_our_own_count():
    case = recorded("0.5.23/complete")
    assert parse(case, oldest=1, newest=1).flags == set()
    for count in ({"oldest": 2, "newest": 2}, {"oldest": 0, "newest": 0}):
        with pytest.raises(ReplyError, match=r"by our own count of syncs, 1 came; does another client update"):
            parse(case, **count)


def test_a_reply_to_another_request_is_refused():
    case = recorded("0.5.23/complete")
    assert parse(case, rid=case["response"]["meta_info"]["id"]).flags == set()
    with pytest.raises(ReplyError, match=r"the reply to 'x-r1.0' expected"):
        parse(case, rid="x-r1.0")


def test_output_ids_lie_in_the_vocabulary():
    case = recorded("0.5.23/complete")
    with pytest.raises(ReplyError, match=r"an id in 0..199 expected, 206 came as new token 4"):
        parse(case, vocab_size=200)


def test_single_missing_log_probs_stay_missing_and_are_flagged():
    case = recorded("0.5.23/complete")
    entry(lambda e: [None, e[1], None])(case)
    entry(lambda e: [math.nan, e[1], None], index=5)(case)
    parsed = parse(case)
    assert np.flatnonzero(np.isnan(parsed.reply.call.log_probs)).tolist() == [3, 5]
    assert parsed.flags == {"log_prob_missing"}


def test_a_phantom_log_prob_at_zero_budget_is_dropped_and_flagged():
    case = recorded("0.5.23/zero_budget")
    case["response"]["meta_info"].update(output_token_logprobs=[[-1.5, 7, None]], output_token_logprobs_length=0)
    parsed = parse(case)
    assert parsed.flags == {"phantom_log_prob"}
    assert not len(parsed.reply.call.log_probs)


def test_an_abort_with_tokens_but_without_rows_is_a_segment_without_rows():
    case = recorded("0.5.23/abort_segment_1")
    del case["response"]["meta_info"]["routed_experts"]
    call = parse(case).reply.call
    assert (call.rows, call.new_tokens) == (None, 12)


def test_a_response_that_the_server_cuts_short_is_flagged():
    case = recorded("0.5.23/complete")
    case["request"]["sampling_params"]["max_new_tokens"] = 13
    assert parse(case).flags == {"cut_short"}


def test_a_log_prob_too_low_for_float32_is_no_minus_infinity():
    for value in (-3.5e38, -(10**400)):
        case = recorded("0.5.23/complete")
        entry(lambda e, value=value: [value, e[1], None])(case)
        with pytest.raises(ReplyError, match="request complete: a finite log-prob <= 0 expected"):
            parse(case)


def test_a_row_that_is_repeated_over_and_over_is_flagged():
    case = recorded("0.5.23/abort_queue_0")
    rows = rows_of(case["response"]).copy()
    rows[10:30] = rows[10]
    parsed = parse(with_rows(case, rows))
    assert parsed.flags == {"repeated_rows"}
    assert longest_equal_run(rows) >= 20


def test_a_layer_that_never_changes_is_flagged():
    """All tokens through the same experts of one layer: an exporter that reads the wrong buffer looks like this."""
    case = recorded("0.5.23/abort_queue_0")
    rows = rows_of(case["response"]).copy()
    rows[:, 1] = rows[0, 1]
    assert parse(with_rows(case, rows)).flags == {"constant_layer"}
    assert suspect_rows(rows[: LONG_RUN - 1]) == set()
