"""Agent loops and verl's batch: F6, F7, F13, F14. Real loop classes and real `AgentLoopWorker` post-processing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
from verl.workers.utils.padding import left_right_2_no_padding

from experiments.verl_backend.agent_loops import (
    FLAGS_FIELD,
    ROLLOUT_FIELD,
    MergingSingleTurnLoop,
    MergingToolLoop,
    apply_merged,
)
from experiments.verl_backend.client import RecordingClient, Trajectory
from experiments.verl_backend.merging import FLAGS, Merged, Merging
from strategies import MergeError, Replace
from tests.verl.kit import PROMPT, Reply, merging, positions, rows_of, upstream_client, versions


def loop_of(cls: Any, script: list[Reply], rule: Merging) -> Any:
    """Returns the loop without verl's tokenizer: prompts are given as ids, turns are appended as they come."""
    loop = object.__new__(cls)
    loop._merging = rule
    loop.server_manager = RecordingClient.around(upstream_client(script), rule)
    loop.response_length, loop.rollout_config = 64, SimpleNamespace(full_determinism=False)

    async def nothing(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    async def prompt(*args: Any, **kwargs: Any) -> list[int]:
        return list(range(PROMPT))

    async def append(running, new, mask, log_probs, assistant_logprobs=None):
        merged = SimpleNamespace(token_ids=running + new)
        return merged, mask + [1] * len(new), (log_probs or []) + (assistant_logprobs or [])

    loop.process_multi_modal_info, loop.ct_build_initial_tokens, loop.ct_merge_assistant_token = nothing, prompt, append
    loop._get_mm_processor_kwargs = loop._assert_mm_supported = loop.build_sglang_video_payload = lambda *a: None
    return loop


def tool_loop(script: list[Reply], rule: Merging, tool_tokens: int) -> Any:
    loop = loop_of(MergingToolLoop, script, rule)
    loop.rollout_config.full_determinism = False
    loop.tools, loop.tool_schemas, loop.max_assistant_turns, loop.max_user_turns = {}, [], 0, 0
    turns = iter([["call"], []])

    async def tool_calls(ids: list[int], tools: Any) -> tuple[str, list[str]]:
        return "", next(turns)

    async def answer(data: Any) -> Any:
        data.prompt_ids = data.prompt_ids + [7] * tool_tokens
        data.response_mask = data.response_mask + [0] * tool_tokens
        data.response_logprobs = data.response_logprobs + [0.0] * tool_tokens
        return AgentState.GENERATING

    loop.tool_parser = SimpleNamespace(stop_token_ids=None, extract_tool_calls=tool_calls)
    loop._handle_processing_tools_state = answer
    loop._build_assistant_message = lambda *a: {}
    return loop


def test_the_single_turn_loop_hands_verl_the_merged_rows():
    loop = loop_of(MergingSingleTurnLoop, [Reply(3, 0), Reply(4, 1, "stop")], merging())
    output = asyncio.run(loop.run({}, raw_prompt=[]))
    assert isinstance(loop, SingleTurnAgentLoop)
    assert versions(output.routed_experts) == [0] * 7 + [1] * 4
    assert output.response_mask == [1] * 7
    assert output.extra_fields[ROLLOUT_FIELD].versions()[PROMPT:].tolist() == [0] * 3 + [1] * 4
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 1)


def test_f7_a_tool_agents_turns_keep_their_rows_and_versions():
    """Upstream keeps the newest turn's rows only."""
    loop = tool_loop([Reply(3, 0, "stop"), Reply(2, 1, "stop")], merging(), tool_tokens=4)
    output = asyncio.run(loop.run({}, raw_prompt=[]))
    assert isinstance(loop, ToolAgentLoop)
    assert versions(output.routed_experts) == [0] * 7 + [1] * 6
    assert positions(output.routed_experts) == [i % 8 for i in range(13)]
    assert output.response_mask == [1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert output.extra_fields[ROLLOUT_FIELD].versions()[PROMPT:].tolist() == [0, 0, 0, -1, -1, -1, -1, 1, 1]
    assert output.extra_fields["max_global_steps"] == 1


def test_f7_an_interrupted_turn_is_merged_like_any_other():
    script = [Reply(3, 0, "stop"), Reply(2, 1), Reply(1, 2, "stop")]
    output = asyncio.run(tool_loop(script, merging(Replace()), tool_tokens=4).run({}, raw_prompt=[]))
    assert versions(output.routed_experts) == [2] * 14


def worker() -> Any:
    class Tokenizer:
        pad_token_id = 0
        padding_side = "left"

        def pad(self, values, padding, max_length, return_tensors, return_attention_mask):
            ids = values["input_ids"]
            fill = [0] * (max_length - len(ids))
            padded = fill + ids if self.padding_side == "left" else ids + fill
            marks = (
                [0] * len(fill) + [1] * len(ids) if self.padding_side == "left" else [1] * len(ids) + [0] * len(fill)
            )
            return {"input_ids": torch.tensor([padded]), "attention_mask": torch.tensor([marks])}

    w = object.__new__(AgentLoopWorker)
    w.tokenizer, w.processor, w.mm_processor_kwargs = Tokenizer(), None, {}
    w.rollout_config = SimpleNamespace(prompt_length=8, response_length=12)
    w.reward_loop_worker_handles, w.distillation_enabled = None, False
    return w


def processed(w: Any, output: AgentLoopOutput) -> Any:
    return asyncio.run(w._agent_loop_postprocess(output, False, raw_prompt=[]))


def output_of(rows: Any, mask: list[int] | None = None) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=[1] * PROMPT,
        response_ids=[2] * 7,
        response_mask=mask or [1] * 7,
        response_logprobs=[-0.1] * 7,
        routed_experts=rows,
        metrics=AgentLoopMetrics(),
    )


def merged_output(script: list[Reply], rule: Merging) -> AgentLoopOutput:
    return asyncio.run(loop_of(MergingSingleTurnLoop, script, rule).run({}, raw_prompt=[]))


def test_f6_upstream_fills_short_rows_with_zeros_and_ours_are_never_short():
    w = worker()
    short = processed(w, output_of(rows_of(7, 0))).routed_experts[0, 3 : 3 + 11]
    assert (short[7:] == 0).all()
    whole = processed(w, merged_output([Reply(3, 0), Reply(4, 1, "stop")], merging())).routed_experts[0, 3 : 3 + 11]
    assert versions(whole.numpy()) == [0] * 7 + [1] * 4


def test_f13_read_only_rows_reach_the_batch():
    rows = rows_of(11, 1)
    rows.setflags(write=False)
    assert processed(worker(), output_of(rows)).routed_experts.shape == (1, 20, 2, 2)


def test_f14_a_group_with_missing_rows_is_whole_in_ours_and_broken_upstream():
    w = worker()
    with pytest.raises(TypeError):
        w._postprocess([processed(w, output_of(rows_of(11, 0))), processed(w, output_of(None))])
    reverse = w._postprocess([processed(w, output_of(None)), processed(w, output_of(rows_of(11, 0)))])
    assert "routed_experts" not in reverse.batch.keys()  # noqa: SIM118
    rule = merging(on_missing_rows="drop")
    scripts = [[Reply(3, 0), Reply(4, 1, "stop", extra=None)], [Reply(3, 0), Reply(4, 1, "stop")]]
    batch = w._postprocess([processed(w, merged_output(script, rule)) for script in scripts])
    assert batch.batch["routed_experts"].shape == (2, 20, 2, 2)
    assert batch.batch["response_mask"].sum(dim=1).tolist() == [0, 7]
    flags = dict(zip(FLAGS, np.stack(list(batch.non_tensor_batch[FLAGS_FIELD])).sum(axis=0), strict=True))
    assert (flags["rows_missing"], flags["dropped"], flags["live"]) == (1, 1, 0)
    jagged = left_right_2_no_padding(batch.to_tensordict())["routed_experts"]
    assert [len(part) for part in jagged.unbind()] == [12, 12]


def test_f14_a_member_without_a_token_keeps_its_group_whole():
    """verl's loops give it no log-probs at all, and a group's first member decides whether there is a column."""
    scripts = [[Reply(0, 0, "stop", extra=None)], [Reply(3, 0), Reply(4, 1, "stop")]]
    w = worker()
    for order in (scripts, scripts[::-1]):
        batch = w._postprocess([processed(w, merged_output(script, merging())) for script in order])
        assert batch.batch["rollout_log_probs"].shape == (2, 12)
        assert batch.batch["routed_experts"].shape == (2, 20, 2, 2)
        assert sorted(batch.batch["response_mask"].sum(dim=1).tolist()) == [0, 7]


def test_a_token_without_a_log_prob_carries_no_loss_and_leaves_no_nan():
    output = merged_output([Reply(3, 0, unscored=1), Reply(4, 1, "stop")], merging())
    assert output.response_mask == [1, 0, 1, 1, 1, 1, 1]
    assert output.response_logprobs == [-1.0, 0.0, *[-1.0] * 5]
    assert np.isnan(output.extra_fields[ROLLOUT_FIELD].log_probs()[PROMPT + 1])
    assert dict(zip(FLAGS, output.extra_fields[FLAGS_FIELD], strict=True))["log_prob_missing"] == 1


@pytest.mark.parametrize("keeps", [False, True])
def test_the_calls_travel_with_the_trajectory(keeps: bool):
    output = merged_output([Reply(3, 0), Reply(4, 1, "stop")], merging(keeps_rows=keeps))
    batch = worker()._postprocess([processed(worker(), output)])
    rollout = batch.non_tensor_batch[ROLLOUT_FIELD][0]
    assert [call.new_tokens for call in rollout.calls] == [3, 4]
    assert [call.rows is not None for call in rollout.calls] == [keeps] * 2


def test_apply_merged_cuts_what_no_call_generated():
    rule = merging()
    client = RecordingClient.around(upstream_client([Reply(3, 0, "stop")]), rule)
    asyncio.run(client.generate("r", prompt_ids=list(range(PROMPT)), sampling_params={}))
    output = output_of(None, mask=[1, 1, 1, 0, 0, 0, 0])
    output.response_ids = [5, 6, 7, 9, 9, 9, 9]
    merged = rule.merge("r", list(range(PROMPT)), output.response_ids, client.trajectory.calls, {})
    apply_merged(output, merged, client.trajectory)
    assert (output.response_ids, output.response_mask) == ([5, 6, 7], [1, 1, 1])
    assert len(output.routed_experts) == PROMPT + 2


def test_a_token_with_loss_but_without_a_log_prob_is_refused_not_filled():
    """Masked tokens get a number, because verl multiplies it by 0; a token that carries loss never gets one from us."""
    given = merged_output([Reply(3, 0), Reply(4, 1, "stop")], merging())
    mask = np.array(given.response_mask, dtype=bool)
    merged = Merged(given.routed_experts, mask, {}, given.extra_fields[ROLLOUT_FIELD])
    hidden = Merged(given.routed_experts, mask & (np.arange(len(mask)) != 2), {}, given.extra_fields[ROLLOUT_FIELD])
    for came in (
        None,
        given.response_logprobs[:2],
        [*given.response_logprobs[:2], float("nan"), *given.response_logprobs[3:]],
    ):
        given.response_logprobs = came
        with pytest.raises(MergeError, match="carries loss, but verl's output has no finite log-prob"):
            apply_merged(given, merged, Trajectory())
    apply_merged(given, hidden, Trajectory())
    assert given.response_logprobs[2] == 0.0
    assert np.isfinite(given.response_logprobs).all()
