# pyright: reportMissingImports=false
"""verl's fully-asynchronous trainer with our loss, version lags, row counters and shadow scoring.

verl's trainer and runner are Ray actor classes, which cannot be subclassed as exported; Ray keeps the class itself in
`__ray_metadata__.modified_class`. `launch.py` starts the runner of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from verl import DataProto
from verl.experimental.fully_async_policy.fully_async_main import FullyAsyncTaskRunner, create_resource_pool_manager
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
from verl.trainer.ppo.utils import Role
from verl.utils.config import omega_conf_to_dataclass

from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.verl_backend.agent_loops import FLAGS_FIELD, SHADOW_FIELD, VERSIONS_FIELD
from experiments.verl_backend.cycle import CycleMetrics, lag_indices
from experiments.verl_backend.loss import LAG_FIELD, RANKS, recording_loss
from experiments.verl_backend.shadow import score_shadows
from experiments.verl_backend.statistics import PREFIX, unpack

Trainer: Any = FullyAsyncTrainer.__ray_metadata__.modified_class  # pyright: ignore[reportFunctionMemberAccess]
Runner: Any = FullyAsyncTaskRunner.__ray_metadata__.modified_class  # pyright: ignore[reportFunctionMemberAccess]


class RoutemergeTrainer(Trainer):
    """verl's trainer; `config.routemerge` holds `cap` and `shadow_every`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cycle = CycleMetrics()

    async def init_workers(self) -> None:
        """As verl's; then installs the recording loss in the actor workers."""
        await super().init_workers()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_wg.set_loss_fn(partial(recording_loss, config=actor, cap=self.config.routemerge.cap))

    def _fit_compute_log_prob(self, batch: DataProto) -> DataProto:
        self._cycle.count_flags(np.stack(list(batch.non_tensor_batch.pop(FLAGS_FIELD))))
        versions = batch.non_tensor_batch.pop(VERSIONS_FIELD)
        batch.batch[LAG_FIELD] = torch.from_numpy(
            lag_indices(versions, batch.batch["responses"].shape[1], self.current_param_version)
        )
        views = batch.non_tensor_batch.pop(SHADOW_FIELD, None)
        every = self.config.routemerge.shadow_every
        if views is not None and every and (self.global_steps - 1) % every == 0:
            self.metrics.update(score_shadows(batch, views, self._current_log_probs, self.config.routemerge.cap))
        batch = super()._fit_compute_log_prob(batch)
        if not self.config.algorithm.rollout_correction.bypass_mode:
            self._cycle.add_gap(_gap(batch, self.config.routemerge.cap))
        return batch

    def _current_log_probs(self, batch: DataProto) -> torch.Tensor:
        """Returns float32 `[B, R]` under the newest weights. verl's own override restores the weights of the last sync
        first, for its old policy; shadow scoring asks about the weights before this update.
        """
        return super(Trainer, self)._compute_old_log_prob(batch)[0].batch["old_log_probs"]

    def _update_actor(self, batch: DataProto) -> DataProto:
        output = super()._update_actor(batch)
        metrics = output.meta_info["metrics"]
        ours = {key: metrics.pop(key) for key in list(metrics) if key.startswith(f"actor/{PREFIX}")}
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        self._cycle.add_update(mini_steps(ours, self.config.routemerge.cap), gap_from_first=bypass)
        return output

    def _fit_update_actor(self, batch: DataProto) -> DataProto:
        batch = super()._fit_update_actor(batch)
        last = self.local_trigger_step == self.trigger_parameter_sync_step
        self._cycle.finish_step(self.metrics, last_of_cycle=last)
        return batch


def mini_steps(packed: Mapping[str, list[float]], cap: float) -> list[Any]:
    """Returns the statistics of every mini-step, in order, from verl's lists of numbers by key."""
    bare = {key.removeprefix("actor/"): values for key, values in packed.items()}
    if RANKS not in bare:
        raise RuntimeError(f"verl's trainer: metric {RANKS} expected from the actor workers; is the loss installed?")
    count = len(bare[RANKS])
    return [unpack({key: values[i] for key, values in bare.items()}, round(bare[RANKS][i]), cap) for i in range(count)]


def _gap(batch: DataProto, cap: float) -> LogRatioAccumulator:
    """Returns the statistics of trainer's minus engine's log-prob before the update, decoupled mode."""
    mask = batch.batch["response_mask"].bool()
    x = (batch.batch["old_log_probs"].double() - batch.batch["rollout_log_probs"].double())[mask]
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    return LogRatioAccumulator.of(x.numpy(), sequence.numpy(), cap)


class RoutemergeRunner(Runner):
    """verl's runner, which builds our trainer."""

    def _create_trainer(self, config: Any) -> None:
        roles = {k: v for k, v in self.components["role_worker_mapping"].items() if k != Role.Rollout}
        trainer = ray.remote(num_cpus=10)(RoutemergeTrainer).remote(
            config=config,
            tokenizer=self.components["tokenizer"],
            role_worker_mapping=roles,
            resource_pool_manager=create_resource_pool_manager(config, roles=list(roles)),
            ray_worker_group_cls=self.components["ray_worker_group_cls"],
            device_name=config.trainer.device,
        )
        ray.get(trainer.init_workers.remote())
        self.components["trainer"] = trainer
