# pyright: reportMissingImports=false
"""Starts verl: what its own `fully_async_main` does before `run_ppo`, with our runner. Imports torch, Ray and verl."""

from __future__ import annotations

import ray
from omegaconf import DictConfig
from verl.experimental.reward_loop import migrate_legacy_reward_impl
from verl.trainer.main_ppo import run_ppo
from verl.utils.device import auto_set_device

from experiments.verl_backend.trainer import RoutemergeRunner


def start(config: DictConfig) -> None:
    """Runs verl's fully-asynchronous PPO to its end; Ray starts here, or is joined at RAY_ADDRESS."""
    auto_set_device(config)
    config.actor_rollout_ref.rollout.nnodes = config.rollout.nnodes
    config.actor_rollout_ref.rollout.n_gpus_per_node = config.rollout.n_gpus_per_node
    try:
        run_ppo(migrate_legacy_reward_impl(config), task_runner_class=ray.remote(num_cpus=1)(RoutemergeRunner))
    finally:
        ray.shutdown()  # the next job of a sweep has another environment for its workers
