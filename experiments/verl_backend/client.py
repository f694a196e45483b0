# pyright: reportMissingImports=false
"""The client between verl's resume loop and the engine: it sees every answer, before verl merges anything.

verl's `FullyAsyncLLMServerClient.generate` loops until an answer is no abort and merges rows inside the loop. It
reaches the engine through `super().generate`, which Python resolves over the instance's classes: `_EveryAnswer` stands
between it and `LLMServerClient` and hands the answer on without rows, so that verl's own merge has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from experiments.verl_backend.merging import Answer, Merging, finish_of
from strategies.reply import ReplyError
from strategies.types import EngineCall


@dataclass(eq=False)
class Trajectory:
    """The calls of one trajectory, over all its turns, and what was irregular about them."""

    calls: list[EngineCall] = field(default_factory=list)
    flags: dict[str, int] = field(default_factory=dict)


_on_answer: ContextVar[Callable[[list[int], TokenOutput], None] | None] = ContextVar("on_answer", default=None)


class _EveryAnswer(LLMServerClient):
    """Passes every answer of the engine to `_on_answer`."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        output = await super().generate(request_id, **kwargs)
        listener = _on_answer.get()
        if listener is None:
            raise RuntimeError(f"request {request_id}: called outside RecordingClient.generate")
        listener(kwargs["prompt_ids"], output)
        return output.model_copy(update={"routed_experts": None})


class RecordingClient(FullyAsyncLLMServerClient, _EveryAnswer):
    """verl's client, that also records every call of one trajectory."""

    merging: Merging
    trajectory: Trajectory

    @classmethod
    def around(cls, client: LLMServerClient, merging: Merging) -> RecordingClient:
        """Returns a client like `client` for one new trajectory: same configuration and load balancer.

        Raises:
            TypeError: the client is not the one that verl's fully-asynchronous policy builds.
        """
        if not isinstance(client, FullyAsyncLLMServerClient):
            raise TypeError(f"verl's FullyAsyncLLMServerClient expected, {type(client).__name__} came")
        new = cls.__new__(cls)
        new.__dict__.update(client.__dict__)
        new.merging, new.trajectory = merging, Trajectory()
        return new

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        """Returns verl's output of one turn, its rows left out: they are merged when the trajectory is complete.

        Raises:
            ReplyError: an answer breaks the contract; or `max_empty_aborts` calls in a row brought no token, with
                which verl's loop would never end.
        """
        empty = 0

        def record(sent: list[int], output: TokenOutput) -> None:
            nonlocal empty
            name = f"{request_id}.{len(self.trajectory.calls)}"
            call = self.merging.record(_answer(sent, output), name, self.trajectory.flags)
            self.trajectory.calls.append(call)
            empty = empty + 1 if call.finish == "abort" and not call.new_tokens else 0
            if empty > self.merging.max_empty_aborts:
                raise ReplyError(
                    f"request {name}: {empty} aborts in a row without a token (schedule.max_empty_aborts="
                    f"{self.merging.max_empty_aborts}): the engine never gets to run between two syncs"
                )

        token = _on_answer.set(record)
        try:
            return await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        finally:
            _on_answer.reset(token)


def _answer(sent: list[int], output: TokenOutput) -> Answer:
    return Answer(
        input_len=len(sent),
        output_ids=output.token_ids,
        log_probs=output.log_probs,
        rows=output.routed_experts,
        version=output.extra_fields.get("global_steps"),
        finish=finish_of(output.stop_reason),
    )
