"""What becomes of an error in an agent loop: verl's own rollouter ends as if all were generated, ours fails."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from verl.experimental.fully_async_policy.detach_utils import RolloutSample

from experiments.verl_backend.rollouter import Rollouter, RoutemergeRollouter
from strategies import MergeError


class Queue:
    """verl's message queue, seen from the rollouter."""

    def __init__(self) -> None:
        self.samples: list[Any] = []

    async def put_sample(self, sample: Any) -> bool:
        self.samples.append(sample)
        return True


def rollouter_of(cls: type, error: Exception | None) -> Any:
    """Returns verl's rollouter with two prompts to generate, whose second one raises."""
    rollouter = object.__new__(cls)
    started = iter([None, error])

    async def generate(batch: Any) -> Any:
        raised = next(started)
        if raised is not None:
            raise raised
        return batch

    async def feed() -> None:
        for index in range(2):
            await rollouter.pending_queue.put(RolloutSample(Group(), f"sample_{index}", 0, {}))
        await rollouter.pending_queue.put(None)

    async def nothing(*args: Any) -> Any:
        return {}

    rollouter.message_queue_client = Queue()
    rollouter.async_rollout_manager = SimpleNamespace(generate_sequences_single=generate)
    rollouter._feed_samples, rollouter._async_monitor_loop = feed, nothing
    rollouter._should_pause_generation, rollouter.get_statistics = nothing, nothing
    rollouter._record_active_count = lambda: None
    rollouter.active_tasks, rollouter.max_concurrent_samples = set(), 1
    for counter in ("staleness_samples", "total_generated_samples", "dropped_stale_samples", "processed_sample_count"):
        setattr(rollouter, counter, 0)
    rollouter._step_generated_samples = 0
    return rollouter


class Group:
    """A batch of one prompt; plain, so that it travels."""

    def __init__(self) -> None:
        self.non_tensor_batch: dict[str, Any] = {}

    def __len__(self) -> int:
        return 2


def fit(rollouter: Any) -> list[Any]:
    async def run() -> None:
        rollouter.pending_queue, rollouter.lock = asyncio.Queue(), asyncio.Lock()
        rollouter._resume_event = asyncio.Event()
        await rollouter.fit()

    asyncio.run(run())
    return rollouter.message_queue_client.samples


def test_an_error_of_an_agent_loop_fails_the_rollouter():
    error = MergeError("rollout r, call 1 (request r.1): rows expected")
    samples = fit(rollouter_of(Rollouter, error))
    assert [sample is None for sample in samples] == [False, True]  # upstream: the end, one prompt short
    with pytest.raises(MergeError, match=r"request r\.1"):
        fit(rollouter_of(RoutemergeRollouter, error))


def test_generation_without_an_error_ends_as_verls():
    samples = fit(rollouter_of(RoutemergeRollouter, None))
    assert [sample is None for sample in samples] == [False, False, True]
