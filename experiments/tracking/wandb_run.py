"""One W&B run: names, settings and the end of its process. The only module that imports wandb."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from experiments.tracking.board import WandbIdentity

_START_TIMEOUT_S = 30.0
_FINISH_TIMEOUT_S = 60.0
_FLUSH_INTERVAL_S = 1.0  # a killed run loses this much of its .wandb file; metrics.jsonl loses nothing


class WandbRun:
    """A started W&B run.

    Resuming. Online, `resume="allow"` continues the run of that id; a step that the server has is not sent again, its
    first value stays (on the virtual clock both are equal). Offline, wandb 0.31 knows nothing of the earlier part: it
    writes a second `wandb/offline-run-<time>-<id>` directory with the same id, and `wandb sync` uploads the parts of
    one id in order of their start.
    """

    def __init__(self, identity: WandbIdentity):
        """Starts W&B's service process (about 1 s) and the run.

        Raises:
            RuntimeError: online and W&B cannot be reached, or there are no credentials.
        """
        try:
            self._run = wandb.init(
                id=identity.run_id,
                name=identity.name,
                group=identity.group,
                job_type=identity.job_type,
                tags=identity.tags,
                config=dict(identity.config),
                dir=str(identity.folder),
                project=identity.project,
                entity=identity.entity,
                mode=identity.mode,
                resume="allow",
                settings=_quiet_settings(),
            )
        except wandb.Error as error:
            wandb.teardown()
            raise RuntimeError(
                f"W&B did not start ({identity.mode}, project {identity.project!r}): {error}. "
                "Nothing was trained: use tracking.mode=offline and upload later with `wandb sync`, "
                "log in with `wandb login`, or use tracking.mode=disabled."
            ) from error
        self._first_step = self._run.step
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, float]) -> None:
        """Hands one row to W&B's service process, which retries while the network is away; never waits for it."""
        step = int(row["step"])
        if step >= self._first_step:
            self._run.log(dict(row), step=step)

    def finish(self, exit_code: int) -> None:
        """Ends the run and W&B's process. Online it waits 60 s for the upload; `wandb sync` sends what is left."""
        try:
            self._run.finish(exit_code=exit_code)
        finally:
            # The service process would otherwise live until this Python ends.
            wandb.teardown(exit_code=exit_code)


def _quiet_settings() -> wandb.Settings:
    """Returns settings without banner, console capture, system statistics, code upload and `latest-run` links."""
    return wandb.Settings(
        silent=True,
        console="off",
        symlink=False,
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        init_timeout=_START_TIMEOUT_S,
        finish_timeout=_FINISH_TIMEOUT_S,
        x_transaction_log_flush_interval=_FLUSH_INTERVAL_S,
    )
