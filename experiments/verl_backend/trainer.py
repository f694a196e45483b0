# pyright: reportMissingImports=false
"""verl's fully-asynchronous trainer with our loss, merging by version, shadow scoring and run record.

verl's trainer and runner are Ray actor classes, which cannot be subclassed as exported; Ray keeps the class itself in
`__ray_metadata__.modified_class`. `start.py` starts the runner of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from verl.utils.debug import marked_timer

from experiments.schema import AlgorithmConfig, OldLogProb
from experiments.verl_backend.agent_loops import FLAGS_FIELD, ROLLOUT_FIELD
from experiments.verl_backend.columns import token_column, token_table
from experiments.verl_backend.cycle import CycleMetrics
from experiments.verl_backend.loss import RANKS, TOKEN_FIELD, recording_loss
from experiments.verl_backend.merging import FLAGS
from experiments.verl_backend.rollouter import RESOURCES, RoutemergeRollouter
from experiments.verl_backend.settings import TrainerSettings
from experiments.verl_backend.shadow import Line, score_shadows
from experiments.verl_backend.statistics import PREFIX, RatioStatistics, unpack
from strategies.types import Rollout

Trainer: Any = FullyAsyncTrainer.__ray_metadata__.modified_class  # pyright: ignore[reportFunctionMemberAccess]
Runner: Any = FullyAsyncTaskRunner.__ray_metadata__.modified_class  # pyright: ignore[reportFunctionMemberAccess]

RECORD = "routemerge"
"""Name of our logger among those of verl's `Tracking`."""


class CycleLog:
    """A logger of verl's `Tracking`: holds what verl logs until the run's record takes it, once per weight sync."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Takes values of one sync; verl logs several times per sync."""
        self._values |= data

    def take(self) -> dict[str, Any]:
        """Returns what came since the last call."""
        values, self._values = self._values, {}
        return values


class RoutemergeTrainer(Trainer):
    """verl's trainer; `config.routemerge` holds the settings of settings.py, `recorder` is the actor that keeps the
    run's files.
    """

    def __init__(self, *args: Any, recorder: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._settings = TrainerSettings.of(self.config.routemerge)
        self._recorder = recorder
        self._log = self.logger.logger[RECORD] = CycleLog()
        self._cycle = CycleMetrics(self.config.data.max_response_length)
        self._lines: list[Line] = []
        self._rollouts: list[Rollout] = []
        self._synced: dict[str, Any] | None = None

    @property
    def _updates(self) -> int:
        """Updates made so far; verl's `global_steps` is one too high in a run that continues from a checkpoint."""
        return self.current_param_version * self.trigger_parameter_sync_step + self.local_trigger_step - 1

    async def init_workers(self) -> None:
        """As verl's; then installs the recording loss in the actor workers."""
        await super().init_workers()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_wg.set_loss_fn(partial(recording_loss, config=actor, algorithm=self._settings.algorithm))

    async def fit(self) -> None:
        """As verl's; then records the updates after the last sync, where the run's number of updates leaves some."""
        await super().fit()
        if self._cycle.values():
            self._record_cycle({})

    def _fit_compute_log_prob(self, batch: DataProto) -> DataProto:
        rollouts, flags = list(batch.non_tensor_batch.pop(ROLLOUT_FIELD)), batch.non_tensor_batch.pop(FLAGS_FIELD)
        self._rollouts, version = rollouts, self.current_param_version
        self._cycle.count_flags(np.stack(list(flags)))
        if self._settings.merging.in_trainer:
            self._cycle.count_flags(merge_in_batch(batch, rollouts, self._settings, version))
        width = batch.batch["responses"].shape[1]
        batch.batch[TOKEN_FIELD] = torch.from_numpy(token_column(rollouts, width, version))
        self._cycle.add_batch(
            rollouts, self.reward_tensor.sum(dim=-1).tolist(), batch.non_tensor_batch["uid"].tolist(), version
        )
        batch = super()._fit_compute_log_prob(batch)
        if self._settings.algorithm.old_log_prob is OldLogProb.decoupled:
            self._cycle.add_gap(gap_statistics(batch, self._settings.algorithm))
        return batch

    def _current_log_probs(self, batch: DataProto) -> torch.Tensor:
        """Returns float32 `[B, R]` under the newest weights. verl's own override restores the weights of the last sync
        first, for its old policy; shadow scoring asks about the weights before this update.
        """
        return super(Trainer, self)._compute_old_log_prob(batch)[0].batch["old_log_probs"]

    def _fit_update_actor(self, batch: DataProto) -> DataProto:
        if self._settings.shadow_due(self._updates + 1):
            with marked_timer("shadow", self.timing_raw):
                self._score_shadows(batch)
        self._rollouts = []
        return super()._fit_update_actor(batch)

    def _score_shadows(self, batch: DataProto) -> None:
        settings = self._settings
        values, lines = score_shadows(
            batch,
            self._rollouts,
            self._current_log_probs,
            settings.shadow,
            settings.algorithm,
            self.current_param_version,
        )
        self._cycle.add_values(values)
        self._lines += lines

    def _update_actor(self, batch: DataProto) -> DataProto:
        output = super()._update_actor(batch)
        metrics = output.meta_info["metrics"]
        ours = {key: metrics.pop(key) for key in list(metrics) if key.startswith(f"actor/{PREFIX}")}
        algorithm = self._settings.algorithm
        steps = mini_steps(ours, algorithm.importance_weight_cap)
        self._cycle.add_update(steps, gap_from_first=algorithm.old_log_prob is OldLogProb.bypass)
        return output

    def _fit_log_aggregated_training_metrics(self, rollout_reset_timing_raw: dict[str, Any]) -> None:
        """Waits for the metrics of the update that the sync followed: verl adds them to its aggregator only after it
        has logged, so that they would appear one sync late, and those of the last sync never.
        """
        self._synced = rollout_reset_timing_raw

    def _fit_postprocess_step(self) -> None:
        self._cycle.take_over(self.metrics)
        super()._fit_postprocess_step()
        if self._synced is not None:
            synced, self._synced = self._synced, None
            self._record_cycle(synced)

    def _record_cycle(self, rollouter_timings: dict[str, Any]) -> None:
        """Logs the updates since the last call to verl's loggers and to the run's record."""
        super()._fit_log_aggregated_training_metrics(rollouter_timings)
        self.logger.log(data=self._cycle.finish(), step=self.current_param_version)
        lines, self._lines = self._lines, []
        # Waiting for it makes a value that the record refuses (NaN) end the run where it occurred.
        ray.get(self._recorder.log.remote(self._updates, self._log.take(), lines))


def merge_in_batch(
    batch: DataProto, rollouts: Sequence[Rollout], settings: TrainerSettings, trainer_version: int
) -> np.ndarray:
    """Puts the rows and masks of a strategy that needs the trainer's version into the batch; returns the counters, int
    `[B, len(FLAGS)]`.

    Raises:
        MergeError: as `Merging.merge`.
    """
    rows, mask = batch.batch["routed_experts"], batch.batch["response_mask"]
    width = batch.batch["prompts"].shape[1]
    counts = np.zeros((len(rollouts), len(FLAGS)), np.int64)
    for index, rollout in enumerate(rollouts):
        merged = settings.merge(rollout, trainer_version)
        start, held = width - rollout.prompt_len, rollout.prompt_len
        rows[index, start : start + len(merged.rows)] = torch.from_numpy(merged.rows.astype(np.int16))
        mask[index] = 0
        mask[index, : rollout.length - held] = torch.from_numpy(merged.loss_mask[held:]).to(mask.dtype)
        counts[index] = [merged.flags.get(flag, 0) for flag in FLAGS]
    return counts


def mini_steps(packed: Mapping[str, list[float]], cap: float) -> list[RatioStatistics]:
    """Returns the statistics of every mini-step, in order, from verl's lists of numbers by key."""
    bare = {key.removeprefix("actor/"): values for key, values in packed.items()}
    if RANKS not in bare:
        raise RuntimeError(f"verl's trainer: metric {RANKS} expected from the actor workers; is the loss installed?")
    count = len(bare[RANKS])
    return [unpack({key: values[i] for key, values in bare.items()}, round(bare[RANKS][i]), cap) for i in range(count)]


def gap_statistics(batch: DataProto, algorithm: AlgorithmConfig) -> RatioStatistics:
    """Returns the statistics of trainer's minus engine's log-prob before the update, decoupled mode."""
    mask = batch.batch["response_mask"].bool()
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask].numpy()
    codes = batch.batch[TOKEN_FIELD][mask].numpy()
    trainer, engine = (batch.batch[name][mask].double().numpy() for name in ("old_log_probs", "rollout_log_probs"))
    return RatioStatistics.of(token_table(codes, sequence, trainer, engine, engine, np.zeros_like(engine)), algorithm)


class RoutemergeRunner(Runner):
    """verl's runner, which builds our rollouter, and our trainer with the recorder."""

    def __init__(self, recorder: Any):
        super().__init__()
        self._recorder = recorder

    def _create_trainer(self, config: Any) -> None:
        roles = {k: v for k, v in self.components["role_worker_mapping"].items() if k != Role.Rollout}
        trainer = ray.remote(num_cpus=10)(RoutemergeTrainer).remote(
            config=config,
            tokenizer=self.components["tokenizer"],
            role_worker_mapping=roles,
            resource_pool_manager=create_resource_pool_manager(config, roles=list(roles)),
            ray_worker_group_cls=self.components["ray_worker_group_cls"],
            device_name=config.trainer.device,
            recorder=self._recorder,
        )
        ray.get(trainer.init_workers.remote())
        self.components["trainer"] = trainer

    def _create_rollouter(self, config: Any) -> None:
        rollouter = ray.remote(**RESOURCES)(RoutemergeRollouter).remote(
            config=config,
            tokenizer=self.components["tokenizer"],
            processor=self.components["processor"],
            device_name=config.trainer.device,
        )
        if "hybrid_worker_group" in self.components:
            ray.get(rollouter.set_hybrid_worker_group.remote(self.components["hybrid_worker_group"]))
        ray.get(rollouter.init_workers.remote())
        ray.get(rollouter.set_max_required_samples.remote())
        self.components["rollouter"] = rollouter
