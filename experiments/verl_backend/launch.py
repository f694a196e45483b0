"""One run on the cluster back end: configuration, plan, preflight, and verl's own `run_ppo` with our runner.

verl, Ray and torch are imported only when the run starts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.check import VERL_CHECKPOINT_FILE, ConfigError, build_strategies, check_names, strategy_nodes
from experiments.run_dir import State, inspect, write_composition
from experiments.schema import Config, OldLogProb
from experiments.tracking import Tracker
from experiments.verl_backend.compose import lay_over, verl_defaults, verl_folder
from experiments.verl_backend.plan import plan_text
from experiments.verl_backend.preflight import checks, gather_facts, layout, unchecked
from experiments.verl_backend.replay_mode import ReplayMode, UnsupportedStrategy, replay_mode

COMPLETED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

ROOT = Path(__file__).resolve().parents[2]

AGENT_LOOPS = {"single_turn_agent": "MergingSingleTurnLoop", "tool_agent": "MergingToolLoop"}

ABSENT_IN_VERLS_YAML = (
    "routemerge",
    "ray_kwargs.ray_init.runtime_env",
    "actor_rollout_ref.actor.policy_loss.rollout_correction",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.rollout.engine_kwargs.sglang",
)


LOCAL_FILES = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")
"""Read by workers, which start in another folder than run.py."""


@dataclass(frozen=True)
class Job:
    """One run to make: the configuration, typed and as Hydra composed it, the strategy's YAML, the run directory, and
    the command that makes it again.
    """

    config: Config
    node: DictConfig
    strategy_name: str
    run_dir: Path
    command: str


def launch(job: Job) -> int:
    """Runs one experiment in verl, or prints its plan (`dry_run`), and returns the exit code.

    Raises:
        ConfigError: verl cannot carry out the strategy, verl's configuration has no such key, or the run directory
            holds a run that this one does not continue.
    """
    check_names(job.strategy_name, job.config)
    mode = strategy_mode(job.config)
    values = overrides(job, mode)
    composed = has_verl()
    verl = lay_over(verl_defaults(), values, ABSENT_IN_VERLS_YAML) if composed else OmegaConf.create(values)
    facts = gather_facts(job.config, verl)
    failures = checks(job.config, verl, mode, facts)
    if job.config.dry_run:
        preflight = [f"FAIL {failure}" for failure in failures] or ["all checks passed"]
        preflight += unchecked(job.config, facts)
        print(plan_text(job.config, job.strategy_name, mode, values, verl if composed else None, preflight))
        return COMPLETED
    if failures:
        print(f"run.py: bad configuration: {len(failures)} preflight checks failed:", file=sys.stderr)
        print("\n".join(f"  - {failure}" for failure in failures), file=sys.stderr)
        return REFUSED
    check_run_dir(job, verl)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    write_composition(job.run_dir, job.node)
    OmegaConf.save(agent_loops(job.config, mode), job.run_dir / "agent_loops.yaml")
    OmegaConf.save(verl, job.run_dir / "verl.yaml")
    from experiments.verl_backend.start import RecordedRunner, start

    return start(verl, RecordedRunner(job.run_dir, tracker_opener(job, verl)))


def check_run_dir(job: Job, verl: DictConfig) -> None:
    """Refuses a run directory that holds a run which this one does not continue.

    Raises:
        ConfigError: it does.
    """
    found = inspect(job.run_dir, job.node)
    if found.state is State.foreign:
        raise ConfigError(found.reason)
    if found.state is not State.new and resumed_update(job, verl) is None:
        raise ConfigError(
            f"{job.run_dir} holds a run already: with a checkpoint of verl in it, "
            "backend.verl.trainer.resume_mode=auto continues it; else choose another hydra.run.dir"
        )


def tracker_opener(job: Job, verl: DictConfig) -> Callable[[], Tracker]:
    """Returns what opens the run's record, in any process."""
    resolved = OmegaConf.create(OmegaConf.to_container(job.node, resolve=True, enum_to_str=True))
    assert isinstance(resolved, DictConfig)
    plan = layout(job.config, verl)
    return partial(
        Tracker,
        job.run_dir.resolve(),
        resolved,
        strategy=job.strategy_name,
        device=f"{plan.train_gpus} + {plan.rollout_gpus} GPUs",
        command=job.command,
        resume_after=resumed_update(job, verl),
    )


def resumed_update(job: Job, verl: DictConfig) -> int | None:
    """Returns the update of the checkpoint that verl will continue from in this run directory; None for a new run."""
    newest = job.run_dir / VERL_CHECKPOINT_FILE
    if verl.trainer.resume_mode != "auto" or not newest.is_file():
        return None
    return int(newest.read_text(encoding="utf-8")) * job.config.schedule.sync_interval


def has_verl() -> bool:
    """Returns whether this environment has verl, without importing it."""
    try:
        verl_folder()
    except ConfigError:
        return False
    return True


def strategy_mode(config: Config) -> ReplayMode:
    """Returns verl's replay mode for the run, live rows included where the policy or shadow scoring needs them.

    Raises:
        ConfigError: verl cannot carry out the strategy; `backend.live_rows=false` contradicts it.
    """
    strategy, shadows = build_strategies(config)
    try:
        mode = replay_mode(strategy)
    except UnsupportedStrategy as error:
        raise ConfigError(f"`backend=verl`: {error}") from error
    shadow_modes = [replay_mode(s) for s in shadows.values() if s.single_view] if config.shadow.every else []
    wanted = mode.records_rows and (
        mode.live_rows
        or config.backend.on_missing_rows == "live"
        or any(shadow.live_rows or not shadow.records_rows for shadow in shadow_modes)
    )
    if wanted and config.backend.live_rows is False:
        raise ConfigError(
            "`backend.live_rows=false`, but the strategy, on_missing_rows=live or a shadow strategy leaves rows to the "
            "trainer's router"
        )
    return dataclasses.replace(mode, live_rows=mode.records_rows and bool(wanted or config.backend.live_rows))


def merging_node(config: Config, mode: ReplayMode) -> dict[str, Any]:
    """Returns the run's `Merging` as a node to instantiate, in agent-loop workers and in the trainer."""
    return {
        "_target_": "experiments.verl_backend.merging.Merging",
        "_convert_": "all",  # strategies are dataclasses, which OmegaConf would wrap inside a mapping
        "strategy": dict(config.strategy),
        "num_layers": config.model.num_hidden_layers,
        "top_k": config.model.num_experts_per_tok,
        "num_experts": config.model.num_experts,
        "records_rows": mode.records_rows,
        "on_missing_rows": config.backend.on_missing_rows,
        "live_rows": mode.live_rows,
        "max_empty_aborts": config.schedule.max_empty_aborts,
        "in_trainer": mode.in_trainer,
        "keeps_rows": mode.in_trainer or (config.shadow.every > 0 and mode.records_rows),
    }


def agent_loops(config: Config, mode: ReplayMode) -> Any:
    """Returns verl's agent-loop file: both loops, registered anew with our classes, the strategy and the policy."""
    merging = merging_node(config, mode)
    return OmegaConf.create(
        [
            {"name": name, "_target_": f"experiments.verl_backend.agent_loops.{loop}", "merging": merging}
            for name, loop in AGENT_LOOPS.items()
        ]
    )


def trainer_settings(job: Job, mode: ReplayMode) -> dict[str, Any]:
    """Returns what our trainer reads (settings.py)."""
    shadow = job.config.shadow
    return {
        "algorithm": OmegaConf.to_container(OmegaConf.structured(job.config.algorithm), enum_to_str=True),
        "merging": merging_node(job.config, mode),
        "shadow": {
            "own": job.strategy_name,
            "every": shadow.every if mode.records_rows else 0,
            "strategies": strategy_nodes(shadow.strategies, "shadow.strategies") if shadow.every else {},
        },
    }


def overrides(job: Job, mode: ReplayMode) -> dict[str, Any]:
    """Returns what is laid over verl's configuration: `backend.verl`, and what follows from strategy, steps, mode and
    run directory.
    """
    config = job.config
    a = config.algorithm
    groups = a.batch_size // a.group_size
    bypass = a.old_log_prob is OldLogProb.bypass
    libraries = ["experiments.verl_backend.sglang_rows"] if mode.records_rows else []
    libraries += ["experiments.verl_backend.live_rows"] if mode.live_rows else []
    correction = {
        "bypass_mode": bypass,
        "loss_type": "ppo_clip",
        "rollout_is": None if bypass else "token",
        "rollout_is_threshold": a.importance_weight_cap,
        "rollout_rs": None,
    }
    policy_loss: dict[str, Any] = {"loss_mode": "bypass_mode" if bypass else "vanilla"}
    if bypass:  # verl switches the loss when it fits, on the trainer's copy: too late for the actor workers
        policy_loss["rollout_correction"] = correction
    derived = {
        "routemerge": trainer_settings(job, mode),
        "actor_rollout_ref": {
            "model": {"external_lib": libraries or None},
            "actor": {
                "ppo_mini_batch_size": groups // a.mini_batches,
                "policy_loss": policy_loss,
                "use_kl_loss": a.kl_coef > 0,
                "kl_loss_coef": a.kl_coef,
                "kl_loss_type": a.kl_estimator,
                "megatron": {"router_replay": {"mode": mode.mode}},
            },
            "rollout": {
                "enable_rollout_routing_replay": mode.records_rows,
                "agent": {"agent_loop_config_path": str(job.run_dir.resolve() / "agent_loops.yaml")},
            },
        },
        "algorithm": {"rollout_correction": correction},
        "async_training": {"require_batches": a.mini_batches},
        "rollout": {"total_rollout_steps": config.steps * groups},
        "trainer": {
            "experiment_name": f"{job.strategy_name}-s{config.seed}",
            "default_local_dir": str(job.run_dir.resolve() / "checkpoint"),
            "logger": ["console", "file"],  # W&B gets the run from our recorder, with the local loop's names
        },
        "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": worker_environment(job)}}},
    }
    merged = OmegaConf.merge(OmegaConf.create(config.backend.verl), OmegaConf.create(derived))
    for key in LOCAL_FILES:
        OmegaConf.update(merged, key, _absolute(OmegaConf.select(merged, key)), force_add=True)
    values = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _absolute(path: Any) -> Any:
    """Returns the path, or list of them, absolute where it is one of a file or folder on this node."""
    if isinstance(path, str):
        local = Path(path).expanduser()
        return str(local.absolute()) if local.exists() else path
    return path if path is None else [_absolute(one) for one in path]


def worker_environment(job: Job) -> dict[str, str]:
    """Returns the variables that Ray sets in every worker: where our packages are, and where verl keeps its own log."""
    folder = job.run_dir.resolve()
    # Absolute: a worker starts in a folder of its own.
    own = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *own])),
        "WANDB_MODE": job.config.tracking.mode.value,  # nothing that a worker imports may go online by itself
        "VERL_FILE_LOGGER_PATH": str(folder / "verl_metrics.jsonl"),
    }
