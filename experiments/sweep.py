"""A sweep: starts the jobs that are not completed through one of Hydra's launchers, and stops them together.

A job is what its run directory says (experiments/run_dir.py), whichever process or machine runs it, so that every
launcher is watched and ended in the same way. Ctrl-C touches the sweep's stop file; every running job sees it, saves
its checkpoint and ends, and later jobs do not start.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.check import ConfigError
from experiments.command_line import CONF, PlannedJob, Sweep, composing, recorded
from experiments.run_dir import Claim, Found, State, claim, claimed_elsewhere, clear, inspect, is_claimed, read_job
from experiments.summary import comparison_table, read_summary
from experiments.sweep_progress import Watch, label

COMPLETED, FAILED, BAD_CONFIGURATION, INTERRUPTED = 0, 1, 2, 130

STOP_POLL_S = 0.5

Work = Callable[[DictConfig], int]
"""Runs one job of the composed configuration and returns the exit code that a single run would have."""


class Stopped(BaseException):
    """The sweep ends while a job is still being prepared."""


@dataclass(frozen=True)
class Stop:
    """The wish to end a sweep: a file, so that jobs on other machines see it too."""

    file: Path

    def ask(self) -> None:
        """Asks every job of the sweep to end."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()

    def asked(self) -> bool:
        """Says whether the sweep shall end."""
        return self.file.exists()


# --- one job, in whichever process the launcher starts it ------------------------------------------------------------


def run_job(node: DictConfig, *, work: Work, stop: Stop, pid: int) -> None:
    """Runs one job of a sweep unless it is completed, is run elsewhere, or the sweep ends; never raises.

    Args:
        node: the composed configuration.
        work: runs it.
        stop: of the sweep.
        pid: of the process that started the sweep; in any other one the job leaves the screen alone.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    own = os.getpid() == pid
    if not own:
        # A terminal sends Ctrl-C to this process too; the stop file says it once, and to other machines as well.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if stop.asked():
        return
    with claim(run_dir) as claimed, _screen(node, run_dir, shared=not own):
        if claimed is None:
            print(f"run.py: {claimed_elsewhere(run_dir)}", file=sys.stderr)
            return
        status = _attempt(claimed, node, inspect(run_dir, recorded(node)), run_dir, partial(_stoppable, work, stop))
    if status == INTERRUPTED and own:
        stop.ask()  # the signal reached the job itself, which is in the sweep's own process


def _attempt(claimed: Claim, node: DictConfig, found: Found, run_dir: Path, work: Work) -> int:
    """Runs a claimed job from where its run directory stands, notes how it ended and returns its exit code."""
    if found.state is State.completed:
        claimed.note("completed")
        return COMPLETED
    if found.state is State.crashed:
        clear(run_dir)
    if found.state is State.resumable:
        _let_it_resume(node, run_dir)
    status, error = FAILED, None
    try:
        if found.state is State.foreign:
            raise ConfigError(found.reason)
        status = work(node)
    except ConfigError as refusal:
        error = f"bad configuration: {refusal}"
    except (Stopped, KeyboardInterrupt):
        status = INTERRUPTED
    except Exception as fault:
        error = f"{type(fault).__name__}: {fault}"
        (run_dir / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
    if error:
        print(f"run.py: {run_dir}: {error}", file=sys.stderr)
    claimed.note({COMPLETED: "completed", INTERRUPTED: "interrupted"}.get(status, "failed"), error)
    return status


def _let_it_resume(node: DictConfig, run_dir: Path) -> None:
    """Sets what makes the job continue from the checkpoint in its run directory."""
    with open_dict(node):
        if node.backend.name == "verl":
            OmegaConf.update(node, "backend.verl.trainer.resume_mode", "auto")
        else:
            node.resume = str(run_dir)


def _stoppable(work: Work, stop: Stop, node: DictConfig) -> int:
    """Runs the job; once the sweep's stop file is there, this process gets SIGTERM, which asks a run for a checkpoint
    between two updates.
    """

    def stopped(signum: int, frame: object) -> None:
        raise Stopped

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(STOP_POLL_S):
            if stop.asked():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return

    before = signal.signal(signal.SIGTERM, stopped)
    watcher = threading.Thread(target=watch, name="stop-file", daemon=True)
    watcher.start()
    try:
        return work(node)
    finally:
        ended.set()
        watcher.join()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _screen(node: DictConfig, run_dir: Path, *, shared: bool) -> Iterator[None]:
    """Where several jobs share the screen, sends what this one prints and logs to its `run.log` alone."""
    if not shared:
        yield
        return
    with open_dict(node):
        node.tracking.progress = False
    root = logging.getLogger()
    for handler in [h for h in root.handlers if not isinstance(h, logging.FileHandler)]:
        root.removeHandler(handler)
    with (run_dir / "run.log").open("a", encoding="utf-8") as file, redirect_stdout(file):
        yield


# --- the sweep, in the process that the user started -----------------------------------------------------------------


def run_sweep(sweep: Sweep, work: Work) -> int:
    """Runs the jobs that are not completed, shows how far they are, and returns the exit code of the whole sweep.

    Raises:
        ConfigError: a run directory holds the run of another configuration; nothing was started.
    """
    todo = _unfinished(sweep.jobs)
    folder = Path(os.path.commonpath([job.run_dir for job in sweep.jobs]))
    stop = Stop(folder / f".stop-{uuid.uuid4().hex[:8]}")
    # Workers of other processes import our packages, wherever the command was given.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CONF.parent), os.environ.get("PYTHONPATH", "")]))
    task = partial(run_job, work=work, stop=stop, pid=os.getpid())
    with Watch(sweep.jobs, todo) as watch, _interruptible(stop, watch):
        _launch(sweep.config, todo, task, stop, watch)
    interrupted = stop.asked()
    stop.file.unlink(missing_ok=True)
    return _close(sweep, folder, interrupted)


def _unfinished(jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
    """Returns the jobs to start, and says which are left alone."""
    todo = []
    for job in jobs:
        found = inspect(job.run_dir, job.node)
        if found.state is State.foreign:
            raise ConfigError(
                f"{found.reason}; choose another `experiment_name` or `hydra.sweep.dir`, or remove that directory"
            )
        if found.state is State.completed and not job.node.dry_run:  # a plan is always printed
            print(f"run.py: {label(job, jobs)}: completed before, skipped", file=sys.stderr)
        elif is_claimed(job.run_dir):
            print(f"run.py: {label(job, jobs)}: skipped, {claimed_elsewhere(job.run_dir)}", file=sys.stderr)
        else:
            todo.append(job)
    return todo


def _launch(config: DictConfig, todo: list[PlannedJob], task: partial[None], stop: Stop, watch: Watch) -> None:
    """Hands the jobs to the launcher; where it breaks (a worker was killed), the jobs that had not begun again."""
    while todo and not stop.asked():
        with composing():
            loader = GlobalHydra.instance().config_loader()
            context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
            launcher = Plugins.instance().instantiate_launcher(context, task, config)
            try:
                launcher.launch([list(job.overrides) for job in todo], initial_job_idx=0)
                return
            except Exception as error:
                if stop.asked():  # a worker that was just starting died of Ctrl-C
                    return
                print(f"run.py: the launcher broke: {type(error).__name__}: {error}", file=sys.stderr)
        begun = [job for job in todo if watch.has_begun(job)]
        if not begun:
            return
        todo = [job for job in todo if job not in begun]


@contextmanager
def _interruptible(stop: Stop, watch: Watch) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the sweep after checkpoints, a second Ctrl-C at once."""

    def ask(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, end)
        stop.ask()
        watch.say("run.py: stopping: running jobs save a checkpoint, no other starts; Ctrl-C again stops at once")

    def end(signum: int, frame: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(INTERRUPTED)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _close(sweep: Sweep, folder: Path, interrupted: bool) -> int:
    """Prints what became of the jobs and returns the exit code."""
    states = {job: inspect(job.run_dir, job.node).state for job in sweep.jobs}
    completed = [job for job, state in states.items() if state is State.completed]
    elsewhere = [job for job in sweep.jobs if job not in completed and is_claimed(job.run_dir)]
    left = [job for job in sweep.jobs if job not in completed and job not in elsewhere]
    untouched = [job for job in left if states[job] is State.new and not read_job(job.run_dir)]
    ended = [job for job in left if job not in untouched]
    summaries = [read_summary(job.run_dir) for job in completed if (job.run_dir / "summary.json").is_file()]
    trained = [summary for summary in summaries if summary["mode"] != "score"]
    if trained and not left:
        print("\n" + comparison_table(trained, commands=False))
        print(f"\nfolder   {folder}\nnext     python -m analysis report {folder} --out report")
    counts = f"run.py: {len(completed)} of {len(sweep.jobs)} jobs completed"
    kinds = (
        (elsewhere, "run by another process"),
        (ended, "interrupted or failed" if interrupted else "failed"),
        (untouched, "not started"),
    )
    for jobs, what in kinds:
        if jobs:
            counts += f"; {len(jobs)} {what}: {', '.join(label(job, sweep.jobs) for job in jobs)}"
    print(counts, file=sys.stderr)
    if interrupted and left:
        print("run.py: the same command continues the sweep", file=sys.stderr)
        return INTERRUPTED
    return FAILED if left or elsewhere else COMPLETED
