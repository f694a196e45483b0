"""The plan of a cluster run as text: what would be started, on what, and what stands in the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.schema import Config
from experiments.verl_backend.preflight import layout, model_size
from experiments.verl_backend.replay_mode import ReplayMode
from experiments.verl_backend.resources import Layout, Memory, ModelSize, expected_memory

REPLAY = {
    "R3": "R3: the engine's rows, merged by the strategy, are replayed in every forward of the trainer",
    "R2": "R2: the trainer records its own routes before the update and replays them; the engine returns no rows",
    "disabled": "none: the trainer's own router decides; the engine returns no rows",
}


IN_TRAINER = "in the trainer: the strategy needs its weight version, and the rows of every call travel there"


def plan_text(
    config: Config,
    strategy_name: str,
    mode: ReplayMode,
    values: Mapping[str, Any],
    verl: DictConfig | None,
    preflight: Sequence[str],
) -> str:
    """Returns the plan: strategy, resources, memory, the lines of the preflight, and verl's configuration (the values
    laid over it when `verl` is None because it is not installed here).
    """
    laid_out = OmegaConf.create(dict(values)) if verl is None else verl
    size, plan = model_size(config), layout(config, laid_out)
    memory = expected_memory(size, plan)
    parts = [
        f"Plan of {config.experiment_name}, strategy {strategy_name}, seed {config.seed} (dry run: nothing is started)",
        _section("Strategy", _strategy(config, mode)),
        _section("Resources", _resources(config, plan)),
        _section("Expected memory per GPU (computed, not measured)", _memory(size, plan, memory)),
        _section("Preflight", preflight),
        _section(_title(verl), OmegaConf.to_yaml(laid_out if verl is None else _without_hydra(verl)).splitlines()),
    ]
    return "\n\n".join(parts)


def _title(verl: DictConfig | None) -> str:
    if verl is None:
        return "verl is not installed here: the values that would be laid over its configuration"
    return "verl's configuration, composed"


def _without_hydra(verl: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(verl, [str(key) for key in verl if key != "hydra"])


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _strategy(config: Config, mode: ReplayMode) -> list[str]:
    target = config.strategy["_target_"]
    arguments = {key: value for key, value in config.strategy.items() if key != "_target_"}
    shadow = ["exact", *map(str, config.shadow.strategies)] if config.shadow.every and mode.records_rows else []
    return [
        f"{target} {arguments or ''}".rstrip(),
        f"replay {REPLAY[mode.mode]}",
        f"merged {IN_TRAINER if mode.in_trainer else 'in the agent-loop workers, when a trajectory is complete'}",
        f"live rows: {'supported by our engine class (live_rows.py)' if mode.live_rows else 'none'}",
        f"missing rows: {config.backend.on_missing_rows}",
        f"old log-probs: {config.algorithm.old_log_prob.value}",
        f"shadow scoring: {', '.join(shadow)} every {config.shadow.every} updates" if shadow else "shadow scoring: off",
    ]


def _resources(config: Config, plan: Layout) -> list[str]:
    a, s = config.algorithm, config.schedule
    engines, groups = plan.rollout_gpus // plan.rollout_tensor, a.batch_size // a.group_size
    return [
        f"{plan.train_gpus} GPUs train: tensor {plan.tensor}, pipeline {plan.pipeline}, context {plan.context}, "
        f"expert {plan.expert} x {plan.expert_tensor}, data {plan.data_parallel}",
        f"{plan.rollout_gpus} GPUs roll out: {engines} engines of {plan.rollout_tensor}",
        f"{config.steps} updates of {a.batch_size} trajectories ({groups} prompts x {a.group_size}), "
        f"{a.mini_batches} mini-batches, a weight sync every {s.sync_interval}, staleness threshold "
        f"{s.staleness_threshold}",
        f"up to {plan.sequence_tokens} tokens a trajectory, {plan.micro_batch_tokens} a micro-batch",
    ]


def _memory(size: ModelSize, plan: Layout, memory: Memory) -> list[str]:
    optimizer = f"optimiser {memory.optimizer:.1f}"
    if plan.offload_optimizer:
        optimizer = f"optimiser on the host {memory.host_optimizer:.1f}"
    return [
        f"model: {size.parameters / 1e9:.4g} G parameters",
        f"training GPU {memory.training:.1f} GiB of {plan.gpu_gib:.0f}: weights {memory.parameters:.1f}, gradients "
        f"{memory.gradients:.1f}, {optimizer}, activations {memory.activations:.1f}, rows {memory.rows:.2f}",
        f"rollout GPU {memory.rollout:.1f} GiB: weights {memory.rollout_weights:.1f}, KV cache {memory.kv_cache:.1f} "
        f"({memory.kv_tokens} tokens an engine)",
        f"rows through Ray: {memory.batch_rows_per_trajectory:.1f} MiB a trajectory, "
        f"{size.row_bytes} bytes a token, padded to the longest",
    ]
