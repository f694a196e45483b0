# pyright: reportMissingImports=false
"""verl's agent loops with our client and our rows; selected by configuration alone (`agent_loop_config_path`).

Rows are merged once, when the trajectory is complete, so that a tool agent's turns are calls like any other: upstream
keeps the newest turn's rows only, and drops every turn's versions but the first's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.workers.rollout.llm_server import LLMServerClient

from experiments.verl_backend.client import RecordingClient, Trajectory
from experiments.verl_backend.merging import FLAGS, Merged, Merging
from strategies import MergeError

FLAGS_FIELD = "routemerge_flags"
ROLLOUT_FIELD = "routemerge_rollout"
"""Fields of `extra_fields`, which become columns of verl's batch: int `[len(FLAGS)]`; the trajectory as a Rollout."""


def apply_merged(output: AgentLoopOutput, merged: Merged, trajectory: Trajectory) -> None:
    """Puts the merged rows, mask, counters and the trajectory itself into verl's output.

    Raises:
        MergeError: a token that carries loss has no log-prob in verl's output.
    """
    kept = len(merged.response_mask)
    output.response_ids = output.response_ids[:kept]
    output.response_mask = merged.response_mask.astype(int).tolist()
    output.response_logprobs = _log_probs(output.response_logprobs, merged.response_mask, merged.rollout.rollout_id)
    output.routed_experts = merged.rows
    versions = [int(v) for call in trajectory.calls if call.new_tokens for v in call.versions]
    if versions:
        output.extra_fields["min_global_steps"] = min(versions)
        output.extra_fields["max_global_steps"] = max(versions)
    output.extra_fields[ROLLOUT_FIELD] = merged.rollout
    output.extra_fields[FLAGS_FIELD] = np.array([merged.flags.get(flag, 0) for flag in FLAGS])


def _log_probs(came: list[float] | None, mask: NDArray[np.bool_], rollout_id: str) -> list[float]:
    """Returns a number for every response token; what `mask` leaves out needs one because verl's gradient still
    multiplies it by 0. A list also where verl gives None (no token was generated): a group's first member decides
    whether there is a column.
    """
    values = np.full(len(mask), np.nan)
    given = (came or [])[: len(mask)]
    values[: len(given)] = given
    known = np.isfinite(values)
    if (missing := np.flatnonzero(mask & ~known)).size:
        raise MergeError(
            f"rollout {rollout_id}: response token {missing[0]} carries loss, but verl's output has no finite log-prob "
            f"for it ({missing.size} such of {len(mask)})"
        )
    return np.where(known, values, 0.0).tolist()


class _Merging:
    """Wraps the client of a trajectory and merges its rows at the end."""

    def __init__(self, *args: Any, server_manager: LLMServerClient, merging: Merging, **kwargs: Any):
        self._merging = merging
        client = RecordingClient.around(server_manager, merging)
        super().__init__(*args, server_manager=client, **kwargs)  # pyright: ignore[reportCallIssue]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Returns verl's output with the strategy's rows and mask.

        Raises:
            MergeError: as `Merging.merge`.
            ReplyError: as `Merging.record`.
        """
        output = await super().run(sampling_params, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        client: RecordingClient = self.server_manager  # pyright: ignore[reportAttributeAccessIssue]
        trajectory = client.trajectory
        name = trajectory.calls[0].request_id.rpartition(".")[0] if trajectory.calls else "without a call"
        merged = self._merging.merge(name, output.prompt_ids, output.response_ids, trajectory.calls, trajectory.flags)
        apply_merged(output, merged, trajectory)
        return output


class MergingSingleTurnLoop(_Merging, SingleTurnAgentLoop):
    """verl's `single_turn_agent`."""


class MergingToolLoop(_Merging, ToolAgentLoop):
    """verl's `tool_agent`."""
