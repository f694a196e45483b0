"""The engine boundary: which replies become recorded calls, in which form, and which are refused."""

from __future__ import annotations

import base64
import dataclasses

import numpy as np
import pytest

from strategies.checks import check_row_contents
from strategies.reply import Convention, RawReply, ReplyError, RowShape, VersionSpan, check_reply, row_dtype_for
from strategies.types import Rows

SHAPE = RowShape(num_layers=2, top_k=2, num_experts=16)
GOOD = RawReply(
    request_id="r17.1",
    input_len=4,
    output_ids=[7, 8],
    finish="stop",
    log_probs=[-0.5, -0.25],
    rows=[[[i, i + 1], [i + 1, i]] for i in range(5)],
    version=3,
)


def with_rows(rows: object, **fields: object) -> RawReply:
    return dataclasses.replace(GOOD, rows=rows, **fields)  # pyright: ignore[reportArgumentType]


def lists(rows: Rows | None) -> list[object] | None:
    return None if rows is None else rows.tolist()


def payload(rows: object) -> str:
    return base64.b64encode(np.asarray(rows, dtype="<i4").tobytes()).decode()


def test_every_container_gives_the_same_writable_rows_in_the_narrowest_type():
    array = np.array(GOOD.rows, dtype=np.uint16)
    array.flags.writeable = False
    for rows in (GOOD.rows, array, np.asfortranarray(array), payload(array), payload(array).encode()):
        call = check_reply(with_rows(rows), SHAPE, "seqlen-1").call
        assert call.rows is not None
        assert np.array_equal(call.rows, array)
        assert call.rows.dtype == np.int8
        call.rows[0] = -1
    assert array[0, 0].tolist() == [0, 1]


def test_the_narrowest_type_holds_every_id_and_minus_one():
    assert [row_dtype_for(experts) for experts in (8, 128, 129, 256, 40000)] == [
        np.dtype(name) for name in ("int8", "int8", "int16", "int16", "int32")
    ]


def test_ids_are_checked_before_they_are_narrowed():
    """256 + 1 would wrap to 1 in eight bits."""
    rows = np.array(GOOD.rows)
    rows[2, 1, 0] = 257
    with pytest.raises(
        ReplyError, match=r"request r17.1, .*: ids in 0..15 expected in every cell, \[257, 2\] came in row 2, layer 1"
    ):
        check_reply(with_rows(rows), SHAPE, "seqlen-1")


def test_whole_missing_cells_pass_and_half_missing_ones_do_not():
    check_row_contents(np.array([[[-1, -1], [3, 4]]]), 16, "here")
    with pytest.raises(
        ValueError, match=r"here: ids in 0..15 expected in every cell, \[-1, 4\] came in row 0, layer 1"
    ):
        check_row_contents(np.array([[[-1, -1], [-1, 4]]]), 16, "here")
    with pytest.raises(
        ValueError, match=r"distinct ids expected in every cell, \[4, 4\] came in row 0, layer 0 .1 of 2"
    ):
        check_row_contents(np.array([[[4, 4], [3, 4]]]), 16, "here")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("not base64!", "base64 text expected"),
        (payload(np.zeros((5, 2, 3))), r"80 bytes expected \(int32, 16 a row\), 120 came"),
        ([[[0, 1], [1, 2]], [[0, 1]]], "a regular array of rows expected, a ragged list came"),
        (np.zeros((5, 4), int), r"rows of shape \[rows, 2, 2\] expected, \(5, 4\) came"),
        (np.zeros((5, 2, 2)), "integer expert ids expected, float64 came"),
        (GOOD.rows[:4], r"5 rows from position 0 on expected \(s=4, n=2, convention seqlen-1\), 4 came"),
        (GOOD.rows + GOOD.rows[:1], ".*seqlen-1.*, 6 came"),
        (None, r"5 rows expected \(s=4, n=2\), none came with a reply that finished by stop"),
    ],
)
def test_wrong_rows_are_refused(rows: object, message: str):
    with pytest.raises(ReplyError, match=f"request r17.1.*: {message}"):
        check_reply(with_rows(rows), SHAPE, "seqlen-1")


def test_a_surplus_row_is_set_aside_where_the_convention_allows_one():
    last = [[[9, 8], [8, 9]]]
    conventions: list[Convention] = ["seqlen", "either"]
    for convention in conventions:
        checked = check_reply(with_rows(GOOD.rows + last), SHAPE, convention)
        assert checked.flags == {"surplus_row"}
        assert lists(checked.call.rows) == GOOD.rows
        assert lists(checked.call.surplus) == last


def test_an_abort_with_tokens_but_without_rows_is_recorded_as_such():
    call = check_reply(with_rows(None, finish="abort"), SHAPE, "seqlen-1").call
    assert (call.rows, call.new_tokens) == (None, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"finish": "done"}, "finish stop, length or abort expected, 'done' came"),
        ({"fed_len": 3}, "4 input tokens were sent, the reply is for 3"),
        ({"max_new_tokens": 1}, "at most 1 tokens asked for, 2 came"),
        ({"log_probs": None}, "2 log-probs expected, none came"),
        ({"log_probs": [-0.5]}, "2 log-probs expected, 1 came"),
        ({"log_probs": [-0.5, 0.1]}, "a finite log-prob <= 0 expected, 0.1 came for new token 1"),
        ({"log_prob_ids": [7, 9]}, r"log-probs of tokens \[7, 8\] expected, of \[7, 9\] came"),
        (
            {"version_spans": [VersionSpan(1, 0, 2), VersionSpan(2, 1, 2)]},
            r"ordered version spans within \[0, 2\) expected, \[1, 2\)",
        ),
        ({"version_spans": [VersionSpan(1, 0, 3)]}, r"ordered version spans within \[0, 2\) expected, \[0, 3\)"),
        (
            {"row_start": 2, "rows": GOOD.rows[2:], "prefill_rows": GOOD.rows[:1]},
            r"prefill rows of positions 0..1 expected, 1 rows",
        ),
    ],
)
def test_replies_that_break_the_contract_are_refused(fields: dict[str, object], message: str):
    with pytest.raises(ReplyError, match=message):
        check_reply(dataclasses.replace(GOOD, **fields), SHAPE, "seqlen-1")  # pyright: ignore[reportArgumentType]


def test_a_missing_log_prob_of_one_token_stays_missing():
    checked = check_reply(dataclasses.replace(GOOD, log_probs=[None, -0.25]), SHAPE, "seqlen-1")
    assert np.isnan(checked.call.log_probs).tolist() == [True, False]
    assert checked.flags == {"log_prob_missing"}


def test_versions_are_per_token_and_unknown_where_no_span_says_them():
    spans = [VersionSpan(5, 1, 2)]
    call = check_reply(dataclasses.replace(GOOD, version_spans=spans, in_place=True), SHAPE, "seqlen-1").call
    assert call.versions.tolist() == [-1, 5]


def test_only_a_reply_that_recomputed_older_tokens_under_newer_weights_is_mixed():
    two = [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)]
    for fields, mixed in (
        ({"version_spans": two}, True),
        ({"version_spans": two, "in_place": True}, False),
        ({"retractions": 1}, True),
        ({"retractions": 1, "version_spans": [VersionSpan(2, 0, 2)]}, False),
        ({}, False),
    ):
        checked = check_reply(dataclasses.replace(GOOD, **fields), SHAPE, "seqlen-1")
        assert checked.call.mixed_rows is mixed
        assert checked.flags == ({"mixed_version_call"} if mixed else set())


def test_prefill_rows_replace_the_rows_of_a_decode_worker():
    prompt = [[[9, 8], [8, 9]]] * 4
    call = check_reply(with_rows(GOOD.rows, prefill_rows=prompt), SHAPE, "seqlen-1").call
    assert lists(call.rows) == prompt + GOOD.rows[4:]
    delta = check_reply(with_rows(GOOD.rows[4:], row_start=4, prefill_rows=prompt), SHAPE, "seqlen-1").call
    assert lists(delta.rows) == lists(call.rows)
    assert delta.row_start == 0


def test_cells_of_dense_layers_are_recorded_as_missing_whatever_the_engine_left_there():
    rows = np.array(GOOD.rows)
    rows[:, 0] = 0
    call = check_reply(with_rows(rows), RowShape(2, 2, 16, dense_layers=(0,)), "seqlen-1").call
    assert call.rows is not None
    assert (call.rows[:, 0] == -1).all()
    assert np.array_equal(call.rows[:, 1], rows[:, 1])
    with pytest.raises(ReplyError, match=r"distinct ids expected in every cell, \[0, 0\] came in row 0, layer 0"):
        check_reply(with_rows(rows), SHAPE, "seqlen-1")
