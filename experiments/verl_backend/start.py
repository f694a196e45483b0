# pyright: reportMissingImports=false
"""Starts verl: what its own `fully_async_main` does before `run_ppo`, with our runner and our record of the run.

Imports torch, Ray and verl.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.trainer.main_ppo import run_ppo
from verl.utils.device import auto_set_device

from experiments.summary import closing_table
from experiments.tracking import Tracker
from experiments.verl_backend.launch import COMPLETED, FAILED, INTERRUPTED
from experiments.verl_backend.recorder import Recorder
from experiments.verl_backend.trainer import RoutemergeRunner

TRACEBACK = "traceback.txt"


@dataclass
class RecordedRunner:
    """What `run_ppo` takes for a Ray class: once Ray is up, it opens the record on this node and starts our runner.

    Attributes:
        folder: the run directory.
        open_tracker: opens the run's record (experiments/tracking).
        runner: the class of the runner, which gets the recorder's handle.
        recorder: the handle; None until the record is open.
    """

    folder: Path
    open_tracker: Callable[[], Tracker]
    runner: type = RoutemergeRunner
    recorder: Any = None

    def remote(self) -> Any:
        """Returns the runner's handle.

        Raises:
            ray.exceptions.RayTaskError: the record cannot be opened (W&B is out of reach, the directory is taken).
        """
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # An actor has the environment of its node's Ray, which may know nothing of this shell's W&B account.
        account = {key: value for key, value in os.environ.items() if key.startswith("WANDB_")}
        actor = ray.remote(num_cpus=0)(Recorder).options(scheduling_strategy=here, runtime_env={"env_vars": account})
        recorder = actor.remote(self.open_tracker)
        ray.get(recorder.ready.remote())
        self.recorder = recorder
        return ray.remote(num_cpus=1)(self.runner).remote(self.recorder)

    def options(self, **options: Any) -> Any:
        """verl's runner under the profiler nsys, which needs options that a record has no part in."""
        raise RuntimeError("backend.verl.global_profiler.tool=nsys: not with a recorded run; choose another profiler")


def start(config: DictConfig, recorded: RecordedRunner) -> int:
    """Runs verl's fully-asynchronous PPO to its end and returns the exit code; Ray starts here, or is joined at
    RAY_ADDRESS.
    """
    auto_set_device(config)
    config.actor_rollout_ref.rollout.nnodes = config.rollout.nnodes
    config.actor_rollout_ref.rollout.n_gpus_per_node = config.rollout.n_gpus_per_node
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return supervise(recorded, lambda: run_ppo(migrate_legacy_reward_impl(config), task_runner_class=recorded))
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()  # the next job of a sweep has another environment for its workers


def supervise(recorded: RecordedRunner, work: Callable[[], None]) -> int:
    """Runs `work`, ends the record with how it went, prints the closing table and returns the exit code."""
    status, error = "completed", None
    try:
        work()
    except KeyboardInterrupt:
        status = "interrupted"
    except Exception as raised:
        status, error = "failed", reason(raised)
        (recorded.folder / TRACEBACK).write_text("".join(traceback.format_exception(raised)), encoding="utf-8")
    if recorded.recorder is not None:
        print(closing_table(ray.get(recorded.recorder.finish.remote(status, error))))
    if error:
        print(f"run.py: failed: {error}\nThe traceback is in {recorded.folder / TRACEBACK}", file=sys.stderr)
    return {"completed": COMPLETED, "failed": FAILED, "interrupted": INTERRUPTED}[status]


def reason(raised: Exception) -> str:
    """Returns type and message in one line of what an actor raised, out of what Ray wraps it in."""
    cause = getattr(raised, "cause", None) or raised
    lines = str(cause).strip().splitlines() or [""]
    if getattr(cause, "actor_init_failed", False):  # of Ray's RayActorError
        return lines[-1]  # the traceback of its __init__ comes before
    return f"{type(cause).__name__}: {lines[0]}"
