"""Row faults of verl_hooks F1 to F9 between engine and trajectory: verl's real client, scripted engines."""

import asyncio
from typing import Any

import pytest
import torch

from experiments.verl_backend.client import RecordingClient
from experiments.verl_backend.merging import Merged, Merging
from strategies import MergeError, NaiveConcat, Replace
from strategies.reply import ReplyError
from tests.verl.kit import PROMPT, Reply, merging, positions, upstream_client, versions


def generate(client: Any, **sampling: Any) -> Any:
    return asyncio.run(client.generate("r", prompt_ids=list(range(PROMPT)), sampling_params=sampling))


def ours(script: list[Reply], rule: Merging) -> Merged:
    client = RecordingClient.around(upstream_client(script), rule)
    output = generate(client)
    calls = client.trajectory
    return rule.merge("r", list(range(PROMPT)), output.token_ids, calls.calls, calls.flags)


def test_an_interrupted_trajectory_gets_the_rows_of_its_strategy():
    script = [Reply(3, 0), Reply(4, 1, "stop")]
    first_fed, newest = ours(script, merging()), ours(script, merging(Replace()))
    assert versions(first_fed.rows) == [0] * 7 + [1] * 4
    assert versions(newest.rows) == [1] * 11
    assert positions(first_fed.rows) == positions(newest.rows) == [i % 8 for i in range(11)]
    assert first_fed.rollout.versions()[PROMPT:].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert first_fed.response_mask.all()


def test_slice_concat_equals_upstreams_merge_where_that_is_right():
    script = [Reply(2, 0), Reply(0, 1), Reply(3, 1), Reply(2, 2, "stop")]
    theirs = generate(upstream_client(script)).routed_experts
    assert (ours(script, merging()).rows == theirs).all()


F1 = [Reply(2, 0), Reply(3, 1, extra=None), Reply(2, 2, "stop")]
F2 = [Reply(3, 0), Reply(4, 1, "stop", extra=None)]


@pytest.mark.parametrize("script", [F1, F2], ids=["F1 middle call without rows", "F2 last call without rows"])
def test_f1_f2_missing_rows_follow_the_policy_and_are_counted(script: list[Reply]):
    theirs = generate(upstream_client(script))
    assert len(theirs.routed_experts) < PROMPT + len(theirs.token_ids) - 1  # upstream: short and silent
    with pytest.raises(MergeError, match="the call returned no rows"):
        ours(script, merging())
    dropped = ours(script, merging(on_missing_rows="drop"))
    assert not dropped.response_mask.any()
    assert (dropped.rows == -1).all()
    assert (dropped.flags["rows_missing"], dropped.flags["dropped"]) == (1, 1)
    live = ours(script, merging(on_missing_rows="live", live_rows=True))
    assert live.response_mask.all()
    assert (live.rows == -1).all()
    assert live.flags["live"] == 1


def test_f1_a_strategy_that_does_not_need_the_missing_rows_merges():
    assert versions(ours(F1, merging(Replace())).rows) == [2] * 11


@pytest.mark.parametrize(("first", "second"), [(1, 0), (0, 1), (1, 1)])
def test_f3_mixed_row_conventions_are_aligned_by_position(first: int, second: int):
    merged = ours([Reply(3, 0, extra=first), Reply(4, 1, "stop", extra=second)], merging())
    assert positions(merged.rows) == [i % 8 for i in range(11)]
    assert versions(merged.rows) == [0] * 7 + [1] * 4
    assert merged.flags["surplus_row"] == first + second


def test_f4_a_short_reply_is_refused_or_counts_as_missing():
    script = [Reply(3, 0, extra=-2), Reply(4, 1, "stop")]
    assert positions(generate(upstream_client(script)).routed_experts) != [i % 8 for i in range(9)]
    with pytest.raises(ReplyError, match="7 rows from position 0 on expected"):
        ours(script, merging())
    dropped = ours(script, merging(on_missing_rows="drop"))
    assert (dropped.flags["rows_refused"], dropped.flags["dropped"]) == (1, 1)


def test_f5_naive_concatenation_happens_only_when_it_is_asked_for():
    merged = ours([Reply(3, 0), Reply(4, 1, "stop")], merging(NaiveConcat()))
    assert positions(merged.rows) == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert len(merged.rows) == 11


def test_f8_an_expert_id_beyond_the_model_is_refused():
    theirs = generate(upstream_client([Reply(3, 0, "stop", first_id=40000)])).routed_experts
    assert torch.from_numpy(theirs).to(torch.int16)[0, 0, 0] == -25536  # upstream: verl's worker, silently
    with pytest.raises(ReplyError, match="40000"):
        ours([Reply(3, 0, "stop", first_id=40000)], merging())


def test_f9_missing_log_probs_are_refused():
    theirs = generate(upstream_client([Reply(3, 0, log_probs=False), Reply(2, 1, "stop")]))
    assert (len(theirs.token_ids), len(theirs.log_probs)) == (5, 2)  # upstream: silently
    with pytest.raises(ReplyError, match="3 log-probs expected, none came"):
        ours([Reply(3, 0, log_probs=False), Reply(2, 1, "stop")], merging())


def test_f13_read_only_rows_are_copied():
    merged = ours([Reply(3, 0, read_only=True), Reply(4, 1, "stop", read_only=True)], merging())
    assert merged.rows.flags.writeable


def test_rows_of_tokens_that_the_server_dropped_are_ignored():
    """verl's server empties `token_ids` when the number of log-probs differs and keeps two tokens' rows."""
    merged = ours([Reply(3, 0), Reply(0, 1, extra=2), Reply(4, 1, "stop")], merging())
    assert positions(merged.rows) == [i % 8 for i in range(11)]


def test_aborts_without_a_token_do_not_go_on_for_ever():
    with pytest.raises(ReplyError, match="4 aborts in a row without a token"):
        ours([Reply(0, 0)] * 9, merging())


def test_a_budget_spent_exactly_at_an_abort_ends_the_trajectory():
    client = RecordingClient.around(upstream_client([Reply(4, 0)]), merging())
    output = generate(client, max_tokens=4)
    assert (output.stop_reason, len(client.trajectory.calls)) == ("length", 1)


def test_another_client_is_refused():
    with pytest.raises(TypeError, match="FullyAsyncLLMServerClient expected, object came"):
        RecordingClient.around(object(), merging())
