"""Builds the parts of one run from its configuration and runs the loop: the only place that names concrete engines and
trainers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from experiments import checkpoint
from experiments.buffer import Admission, Interrupted, SampleQueue
from experiments.check import CHECKPOINT_FILE, ConfigError, build_strategies, check_names, weight_transport
from experiments.clock import Clock, VirtualClock, WallClock
from experiments.engines.base import Engine
from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.sglang.build import build_engine as build_sglang_engine
from experiments.generating import AuditPlan
from experiments.learner import PPOLearner
from experiments.loop import Learner, Loop, LoopSettings, Progress, first_error
from experiments.qwen3_moe import qwen3_moe_config
from experiments.recorder import RecordingLearner, start_recording
from experiments.rollout import Rollouter, RolloutLimits, RowShape
from experiments.run_dir import write_composition
from experiments.schema import ClockKind, Config, ResumeRows, WeightTransport
from experiments.shadow import ShadowPlan, ShadowScorer
from experiments.summary import closing_table
from experiments.tasks.task import Task, load_task
from experiments.timing import Stopwatch, Totals
from experiments.tracking import Tracker
from experiments.tracking.run_folder import flatten
from experiments.trainers.convert import check_supported
from experiments.trainers.megatron import MegatronTrainer
from experiments.trainers.runtime import resolve_device
from experiments.warm_start import PreparedModel, prepare_model
from experiments.weight_history import WeightHistory
from strategies import Exact
from strategies.base import MergeStrategy, needs_new_rows_only

COMPLETED, FAILED, INTERRUPTED = 0, 1, 130

TRACEBACK = "traceback.txt"

WHERE_THE_SERVER_IS = (
    "engine.url",
    *(
        f"engine.server.{key}"
        for key in (
            *("host", "port", "publish_dir", "transport", "cache_dir"),
            *("start_timeout_s", "request_timeout_s", "max_restarts"),
        )
    ),
)
CHANGEABLE = (
    *("steps", "resume", "tracking", "checkpoint", "threads", "task.warm_start.cache_dir"),
    *WHERE_THE_SERVER_IS,
)
"""Keys that a resumed run may set anew; any other difference would make it another experiment."""


@dataclass(frozen=True)
class Job:
    """One run to make.

    Attributes:
        config: the typed configuration; `node`: the same as Hydra composed it.
        strategy_name: name of the strategy's YAML.
        run_dir: where everything is written.
        started: `time.perf_counter()` when the job began.
        command: what runs this job again.
    """

    config: Config
    node: DictConfig
    strategy_name: str
    run_dir: Path
    started: float
    command: str


def launch(job: Job) -> int:
    """Runs one experiment and returns the exit code.

    Raises:
        ConfigError: the task, the model, the checkpoint to resume or the run directory do not fit the configuration.
    """
    config = job.config
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    with as_config_errors():
        check_names(job.strategy_name, config)
        _check_devices(config)
        saved = _saved(job)
        task = load_task(config.task, config.seed, config.model.checkpoint)
        check_supported(qwen3_moe_config(config.model, task.tokenizer.vocab_size))
        tracker = Tracker(
            job.run_dir,
            job.node,
            strategy=job.strategy_name,
            device=str(resolve_device(config.trainer.device)),
            command=job.command,
            resume_after=saved["progress"]["step"] if saved else None,
        )
        write_composition(job.run_dir, job.node)
    interrupt = Interrupt()
    with interruptible(interrupt):
        return supervise(tracker, lambda: _train(job, task, tracker, saved, interrupt), closing_table)


def _check_devices(config: Config) -> None:
    """Refuses weights from GPU to GPU where the trainer has none.

    Raises:
        ConfigError: names the keys.
    """
    device = resolve_device(config.trainer.device)
    server = config.engine.server
    if server is not None and server.transport is WeightTransport.nccl and device.type != "cuda":
        raise ConfigError(
            f"`engine.server.transport=nccl` needs a trainer on CUDA; `trainer.device={config.trainer.device}` is "
            f"{device.type} here; use transport=gloo"
        )


def _train(job: Job, task: Task, tracker: Tracker, saved: dict[str, Any] | None, interrupt: Interrupt) -> None:
    """Prepares the model, builds the parts and runs the loop to its end."""
    config = job.config
    model = prepare_model(config.model, task, progress=config.tracking.progress)
    with MegatronTrainer(
        model.config, model.weights, settings=config.trainer, temperature=config.sampling.temperature
    ) as trainer:
        if saved:
            trainer.load_state_dict(saved["trainer"])
        run = _build(job, task, model, trainer, tracker, saved)
        interrupt.ask = run.interrupt
        run.clock.run_loop(run.loop.run())


class Interrupt:
    """How to stop the run: at once before the loop exists, between two updates after that."""

    def __init__(self) -> None:
        self.ask: Callable[[], None] = self._at_once

    @staticmethod
    def _at_once() -> None:
        raise Interrupted


@dataclass(frozen=True)
class Run:
    """A loop ready to go, its clock, and how to ask it to stop."""

    loop: Loop
    clock: Clock
    interrupt: Callable[[], None]


def _saved(job: Job) -> dict[str, Any] | None:
    """Returns the checkpoint to continue from, or None for a new run.

    Raises:
        CheckpointError: no readable checkpoint, or it belongs to another configuration.
    """
    if job.config.resume is None:
        return None
    state = checkpoint.load(job.run_dir)
    ours = _comparable(job.node)
    theirs = state["config"]
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise checkpoint.CheckpointError(
                f"{job.run_dir} was run with {key}={theirs.get(key)}, now {key}={ours.get(key)}; a resumed run may "
                f"change only {', '.join(CHANGEABLE)}"
            )
    return state


def _comparable(node: DictConfig) -> dict[str, str]:
    """Returns the configuration flattened to `dotted.key: text`, without the keys that a resumed run may change."""
    flat = flatten(OmegaConf.to_container(node, resolve=True, enum_to_str=True))
    return {
        path: text
        for path, text in flat.items()
        if not any(path == key or path.startswith(f"{key}.") for key in CHANGEABLE)
    }


def _build(
    job: Job, task: Task, model: PreparedModel, trainer: MegatronTrainer, tracker: Tracker, saved: dict[str, Any] | None
) -> Run:
    """Returns a loop that starts at the beginning, or where the checkpoint `saved` was taken."""
    config = job.config
    algorithm, schedule = config.algorithm, config.schedule
    progress = Progress(**saved["progress"]) if saved else Progress()
    clock = _clock(config, progress.clock_s)
    engine = _engine(job, model, task, clock, trainer.device)
    queue = SampleQueue(checkpoint.unpack_samples(saved["queue"]) if saved else [])
    admission = Admission(int((1 + schedule.staleness_threshold) * schedule.sync_interval * algorithm.batch_size))
    if saved:
        admission.load_state_dict(saved["admission"])
    rollouter = _rollouter(config, engine, task, queue, admission, model, progress, saved)
    history = WeightHistory(saved["history"] if saved else {})

    def save() -> None:
        checkpoint.save(
            job.run_dir,
            {
                "config": _comparable(job.node),
                "progress": vars(progress),
                "engine_weights": loop.unsynced_engine_weights(),
                "trainer": trainer.state_dict(),
                "queue": checkpoint.pack_samples(queue.groups),
                "open_groups": checkpoint.pack_groups(rollouter.open_groups),
                "next_problem": rollouter.next_problem,
                "admission": admission.state_dict(),
                "history": history.state_dict(),
            },
        )

    loop = Loop(
        settings=LoopSettings(
            steps=config.steps,
            groups_per_batch=algorithm.batch_size // algorithm.group_size,
            sync_interval=schedule.sync_interval,
            pause_mode=schedule.pause_mode.value,
            update_s=schedule.cost.update_s,
            sync_s=schedule.cost.sync_s,
            checkpoint_every=config.checkpoint.every,
        ),
        clock=clock,
        engine=engine,
        trainer=trainer,
        learner=_recorded(job, trainer, model, progress, _learner(job, trainer, model, history)),
        rollouter=rollouter,
        queue=queue,
        reopen_window=admission.synced,
        tracker=tracker,
        stopwatch=Stopwatch(lambda: _totals(engine, trainer, loop), job.started),
        save_checkpoint=save,
        progress=progress,
        engine_weights=saved["engine_weights"] if saved else None,
        history=history if config.shadow.every > 0 else None,
    )
    return Run(loop, clock, queue.interrupt)


def _engine(job: Job, model: PreparedModel, task: Task, clock: Clock, device: torch.device) -> Engine:
    config = job.config
    if config.engine.server is not None:
        return build_sglang_engine(
            model.config,
            engine=config.engine,
            transport=weight_transport(config.engine),
            sampling=config.sampling,
            pause_mode=config.schedule.pause_mode,
            stop_ids=[task.tokenizer.eos_id],
            run_dir=job.run_dir,
            threads=config.threads,
        )
    return EmbeddedEngine(
        model.config,
        dtype=getattr(torch, config.engine.dtype.value),
        max_running=config.engine.max_running,
        max_prefill_tokens=config.engine.max_prefill_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        stop_ids=[task.tokenizer.eos_id],
        resume_rows=config.engine.resume_rows,
        clock=clock,
        cost=config.schedule.cost,
        device=device,
    )


def _rollouter(
    config: Config,
    engine: Engine,
    task: Task,
    queue: SampleQueue,
    admission: Admission,
    model: PreparedModel,
    progress: Progress,
    saved: dict[str, Any] | None,
) -> Rollouter:
    shape = model.config
    return Rollouter(
        engine=engine,
        problems=task,
        queue=queue,
        admission=admission,
        limits=RolloutLimits(
            response=config.sampling.max_response_tokens,
            context=shape.max_position_embeddings,
            empty_aborts=config.schedule.max_empty_aborts,
        ),
        shape=RowShape(shape.num_hidden_layers, shape.num_experts_per_tok, shape.num_experts),
        resume_rows=config.engine.resume_rows,
        group_size=config.algorithm.group_size,
        seed=config.seed,
        version=lambda: progress.version,
        open_groups=checkpoint.unpack_groups(saved["open_groups"]) if saved else [],
        next_problem=saved["next_problem"] if saved else 0,
        delta_rows=_delta_rows(config),
    )


def _delta_rows(config: Config) -> bool:
    """Says whether resumed calls may leave out the rows of their prefix: nothing that looks at this run needs them."""
    strategy, _ = build_strategies(config)
    looked_at = config.shadow.every > 0 or config.record  # a recording must serve any strategy
    return config.engine.delta_rows and not looked_at and needs_new_rows_only(strategy)


def _learner(job: Job, trainer: MegatronTrainer, model: PreparedModel, history: WeightHistory) -> PPOLearner:
    config = job.config
    strategy, shadow_strategies = build_strategies(config)
    plan = shadow_plan(config, shadow_strategies)
    return PPOLearner(
        trainer=trainer,
        strategy_name=job.strategy_name,
        strategy=strategy,
        algorithm=config.algorithm,
        max_response_tokens=config.sampling.max_response_tokens,
        shadow=ShadowScorer(trainer, plan, history),
        reference=model.weights if config.algorithm.kl_coef > 0 else None,
    )


def shadow_plan(config: Config, strategies: Mapping[str, MergeStrategy]) -> ShadowPlan:
    """Returns how the rollouts of a run with `config` are scored."""
    audit = AuditPlan(
        config.shadow.audit_limit[config.engine.dtype.value], config.engine.resume_rows is ResumeRows.pinned
    )
    return ShadowPlan(config.shadow.every, config.shadow.probe_every, strategies, Exact(), audit)


def _recorded(
    job: Job, trainer: MegatronTrainer, model: PreparedModel, progress: Progress, learner: PPOLearner
) -> Learner:
    """Returns the learner, with a recording of what it is given if the run makes one."""
    if not job.config.record:
        return learner
    config = OmegaConf.to_container(job.node, resolve=True, enum_to_str=True)
    assert isinstance(config, dict)
    folder = start_recording(
        job.run_dir,
        strategy=job.strategy_name,
        config={str(key): value for key, value in config.items()},
        model=json.loads(model.config.to_json_string(use_diff=False)),
        step=progress.step,
        version=progress.version,
    )
    return RecordingLearner(
        learner,
        trainer=trainer,
        folder=folder,
        sync_interval=job.config.schedule.sync_interval,
        normalize_advantages=job.config.algorithm.normalize_advantages,
    )


def _totals(engine: Engine, trainer: MegatronTrainer, loop: Loop) -> Totals:
    e, t = engine.stats(), trainer.stats()
    return Totals(
        generate=e.busy_s,
        score=t.score_s,
        train=t.update_s,
        sync=loop.sync_seconds,
        models=e.forward_s + t.model_s,
        generated_tokens=e.generated_tokens,
        trained_tokens=t.update_tokens,
    )


def _clock(config: Config, start_s: float) -> Clock:
    return VirtualClock(start_s) if config.schedule.clock is ClockKind.virtual else WallClock(start_s)


def supervise(tracker: Tracker, work: Callable[[], None], closing: Callable[[Mapping[str, Any]], str]) -> int:
    """Runs `work`, records how it ended, prints what `closing` makes of the summary and returns the exit code."""
    status, error = "failed", None
    try:
        work()
        status = "completed"
    except Interrupted:
        status = "interrupted"
    except BaseException as raised:
        leaf = first_error(raised)
        error = f"{type(leaf).__name__}: {leaf}"
        (tracker.folder / TRACEBACK).write_text("".join(traceback.format_exception(raised)), encoding="utf-8")
        if not isinstance(leaf, Exception):  # a second Ctrl-C
            raise
    finally:
        summary = tracker.finish(status, error)
    if error:
        print(f"run.py: failed: {error}\nThe traceback is in {tracker.folder / TRACEBACK}", file=sys.stderr)
        if (tracker.folder / CHECKPOINT_FILE).is_file():
            print(f"The newest checkpoint can be continued with resume={tracker.folder}", file=sys.stderr)
        return FAILED
    if status == "interrupted" and not (tracker.folder / CHECKPOINT_FILE).is_file():
        print("run.py: stopped without a checkpoint; there is nothing to resume", file=sys.stderr)
    else:
        print(closing(summary))
    return INTERRUPTED if status == "interrupted" else COMPLETED


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Turns the ValueErrors of parts that read configuration values into configuration errors."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def interruptible(interrupt: Interrupt) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks for a checkpoint between two updates, the second one stops at once."""

    def ask(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        print("\nrun.py: stopping after this update; once more to stop at once", file=sys.stderr)
        interrupt.ask()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
