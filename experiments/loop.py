"""The fully asynchronous PPO loop: rollouts and updates overlap, and a weight sync interrupts whatever is unfinished.

Read `Loop.run` from top to bottom; the parts that it holds (engine, rollouter, learner, tracker) are seen through their
contracts only. One loop serves both clocks (experiments/clock.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from experiments.buffer import Interrupted, Sample, SampleQueue
from experiments.clock import Clock
from experiments.engines.base import Engine, EngineLost, PauseMode
from experiments.metrics import route_keys as keys
from experiments.rollout import Rollouter
from experiments.timing import Stopwatch
from experiments.trainers.base import Trainer
from experiments.weight_history import WeightHistory

if TYPE_CHECKING:
    import torch

    from experiments.learner import Update
    from experiments.shadow_report import Line

    Weights = Mapping[str, torch.Tensor]


class Learner(Protocol):
    """Turns a batch into one update (experiments/learner.py)."""

    def step(self, step: int, samples: list[Sample], version: int) -> Update:
        """Takes update `step` on `samples` with a trainer whose last sync was `version`."""
        ...


class Tracker(Protocol):
    """Where metrics go (experiments/tracking)."""

    def log(self, step: int, metrics: dict[str, float], timings: dict[str, float], lines: list[Line]) -> None:
        """Records one update; `timings` are wall-clock values, kept out of the reproducible record."""
        ...


@dataclass
class Progress:
    """Where the run stands: `step` updates taken, `version` syncs made, `clock_s` seconds on the loop's clock,
    `stale_samples` rollouts trained on whose newest token was older than the trainer's version.
    """

    step: int = 0
    version: int = 0
    clock_s: float = 0.0
    stale_samples: int = 0


@dataclass(frozen=True)
class LoopSettings:
    """`steps` updates in all; `groups_per_batch` groups per update; the rest as in conf/schedule, conf/config.yaml."""

    steps: int
    groups_per_batch: int
    sync_interval: int
    pause_mode: PauseMode
    update_s: float
    sync_s: float
    checkpoint_every: int


class Loop:
    """One training run."""

    def __init__(
        self,
        *,
        settings: LoopSettings,
        clock: Clock,
        engine: Engine,
        trainer: Trainer,
        learner: Learner,
        rollouter: Rollouter,
        queue: SampleQueue,
        reopen_window: Callable[[int], None],
        tracker: Tracker,
        stopwatch: Stopwatch,
        save_checkpoint: Callable[[], None],
        progress: Progress,
        engine_weights: Weights | None,
        history: WeightHistory | None,
    ):
        """`engine_weights`: what a resumed engine held, when that is not what the trainer holds now. `history` is kept
        up to date; None: nobody needs old weights.
        """
        self._settings = settings
        self._clock = clock
        self._engine = engine
        self._trainer = trainer
        self._learner = learner
        self._rollouter = rollouter
        self._queue = queue
        self._reopen_window = reopen_window
        self._tracker = tracker
        self._stopwatch = stopwatch
        self._save_checkpoint = save_checkpoint
        self.progress = progress
        self._published = engine_weights
        self._history = history
        self.sync_seconds = 0.0

    def unsynced_engine_weights(self) -> Weights | None:
        """Returns the engine's weights; None when they are the trainer's, as right after a sync."""
        return self._published if self.progress.step % self._settings.sync_interval else None

    async def run(self) -> None:
        """Trains until `settings.steps` updates are taken.

        Raises:
            Interrupted: the user asked to stop; a checkpoint has been saved, unless the engine was still starting.
            EngineLost: the engine is gone; so has one.
            ExceptionGroup: what went wrong in a rollout, e.g. a reply that breaks the contract; so has one.
            Exception: what went wrong in an update, of which no checkpoint can be made.
        """
        if self._published is None:
            self._published = self._trainer.weights()
        if self._history is not None:
            self._history.publish(self.progress.version, self._published)
        try:
            await self._start_engine()
            self._stopwatch.begin()
            rollouts = asyncio.create_task(self._rollouter.run(), name="rollouter")
            updates = asyncio.create_task(self._train(), name="trainer")
            await asyncio.wait({rollouts, updates}, return_when=asyncio.FIRST_COMPLETED)
            if rollouts.done() and not updates.done():  # never without an error
                self._queue.interrupt()  # the update in progress ends, a checkpoint is saved
                await asyncio.wait({updates})
            for task in (rollouts, updates):
                task.cancel()
            results = await asyncio.gather(rollouts, updates, return_exceptions=True)
            errors = [e for e in results if isinstance(e, Exception)]
            if errors:
                raise errors[0]
        finally:
            await self._engine.close()

    async def _start_engine(self) -> None:
        """Brings the engine up, unless the user asks to stop first.

        Raises:
            Interrupted: the user did.
        """
        assert self._published is not None
        start = asyncio.create_task(self._engine.start(self._published, self.progress.version), name="engine start")
        stop = asyncio.create_task(self._queue.interrupted(), name="interrupt")
        try:
            await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                raise Interrupted
            await start
        finally:
            for task in (start, stop):
                task.cancel()
            await asyncio.gather(start, stop, return_exceptions=True)

    async def _train(self) -> None:
        settings, progress = self._settings, self.progress
        while progress.step < settings.steps:
            try:
                samples = await self._queue.take(settings.groups_per_batch)
            except Interrupted:
                await self._stop_here()
                raise
            progress.stale_samples += sum(sample.rollout.versions().max() < progress.version for sample in samples)
            update = await self._clock.run(
                lambda batch=samples: self._learner.step(progress.step, batch, progress.version), settings.update_s
            )
            progress.step += 1
            progress.clock_s = self._clock.now()
            metrics = update.metrics | {
                str(keys.VIRTUAL_TIME): progress.clock_s,
                str(keys.QUEUE_SIZE): self._queue.samples,
                str(keys.IN_FLIGHT): self._rollouter.open_rollouts,
                str(keys.TRAINER_VERSION): progress.version,
                str(keys.STALE_PROCESSED): progress.stale_samples,
            }
            if self._history is not None:
                metrics[keys.WEIGHTS_KEPT] = len(self._history.versions)
                metrics[keys.WEIGHTS_MIB] = self._history.nbytes / 2**20
            self._tracker.log(progress.step, metrics, self._stopwatch.lap(), update.lines)
            if progress.step % settings.sync_interval == 0:
                try:
                    await self._sync(last=progress.step == settings.steps)
                except EngineLost:  # a resumed engine starts with these weights: for it the sync is made
                    self._reopen_window(self._rollouter.open_rollouts + self._queue.samples)
                    self._save_checkpoint()
                    raise
        if progress.step % settings.sync_interval:
            await self._stop_here()

    async def _sync(self, *, last: bool) -> None:
        """Publishes the trainer's weights: pause, load, next version, resume.

        Some syncs save a checkpoint; the last one of a run does, and leaves the engine paused.
        """
        every = self._settings.checkpoint_every
        try:
            await self._engine.pause(self._settings.pause_mode)
        finally:  # also when the engine is lost here: the weights of the checkpoint are those of the next version
            started = time.perf_counter()
            self._published = self._trainer.weights()
            self.progress.version += 1
        await self._engine.load_weights(self._published, self.progress.version)
        self.sync_seconds += time.perf_counter() - started
        self._reopen_window(self._rollouter.open_rollouts + self._queue.samples)
        await self._settle()
        self._remember()
        if last or (every > 0 and self.progress.version % every == 0):
            self._save_checkpoint()
        if not last:
            await self._engine.resume()

    def _remember(self) -> None:
        """Keeps the published weights as long as a token that is unfinished or waits for the trainer needs them."""
        if self._history is None:
            return
        version = self.progress.version
        assert self._published is not None
        self._history.publish(version, self._published)
        self._history.keep({version} | self._queue.versions_in_use() | self._rollouter.versions_in_use(version))

    async def _stop_here(self) -> None:
        """Saves a checkpoint between two syncs; unfinished calls are returned first."""
        try:
            await self._engine.pause("abort")
            await self._settle()
        finally:
            self._save_checkpoint()

    async def _settle(self) -> None:
        """Lets the time of a sync pass. On the virtual clock no time passes while any coroutine can go on, so that
        afterwards every rollout has recorded what the pause returned, and every request, also of rollouts that were
        just admitted, waits at the engine in the order in which a resumed run would send it.
        """
        await self._clock.run(lambda: None, self._settings.sync_s)
        self.progress.clock_s = self._clock.now()


def first_error(error: BaseException) -> BaseException:
    """Returns the first leaf of nested exception groups: the error that a person should read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
