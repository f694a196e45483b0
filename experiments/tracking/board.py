"""Where rows go for people to look at: W&B, or nowhere. Both have the same methods, so that nobody asks which it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from experiments.tracking.wandb_run import WandbRun


@dataclass(frozen=True)
class WandbIdentity:
    """What a run is called in W&B.

    Attributes:
        run_id: unique per run directory; a resumed run passes the id that its directory holds.
        name: `<strategy>-s<seed>`.
        group: the experiment.
        job_type: the strategy.
        tags: strategy, engine, pause mode.
        config: the resolved configuration, and `run_folder.PROVENANCE` beside it.
        folder: the run directory; W&B writes to `wandb/` in it.
    """

    run_id: str
    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    folder: Path
    project: str
    entity: str | None
    mode: Literal["online", "offline"]


class Board(Protocol):
    """Takes one row per update."""

    def log(self, row: Mapping[str, float]) -> None:
        """Shows one row; it has `step`."""
        ...

    def finish(self, exit_code: int) -> None:
        """Ends the record; 0 is success."""
        ...


class DisabledBoard:
    """Shows nothing and never imports wandb."""

    def log(self, row: Mapping[str, float]) -> None:
        """Drops the row."""

    def finish(self, exit_code: int) -> None:
        """Does nothing."""


class WandbBoard:
    """A W&B run that starts beside the caller's own work when it is offline, and before it when it is online.

    Importing wandb and starting its process takes 3 to 5 s on two slow cores, about as long as building the models. An
    online run waits, because missing credentials must be known before work starts.
    """

    def __init__(self, identity: WandbIdentity):
        """Starts the run.

        Raises:
            RuntimeError: online and W&B cannot be reached. Offline, the first `log` or `finish` raises what went wrong.
        """
        if identity.mode == "offline":
            # Offline means that nothing leaves the machine; wandb would send its own crash reports.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb-start")
        self._run = pool.submit(_start, identity)
        pool.shutdown(wait=False)
        if identity.mode == "online":
            self._run.result()

    def log(self, row: Mapping[str, float]) -> None:
        """Hands the row to W&B once it has started."""
        self._run.result().log(row)

    def finish(self, exit_code: int) -> None:
        """Ends the run and its process."""
        self._run.result().finish(exit_code)


def _start(identity: WandbIdentity) -> WandbRun:
    # Imported here, in the starting thread: the import is most of what takes the time.
    from experiments.tracking.wandb_run import WandbRun

    return WandbRun(identity)
