"""The one object through which a run leaves traces: files, W&B, progress. The loop calls `log`, run.py `finish`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from experiments.decision import decide
from experiments.metrics.route_keys import MERGE_EXCLUDED
from experiments.tracking import run_folder
from experiments.tracking.board import Board, DisabledBoard, WandbBoard, WandbIdentity
from experiments.tracking.progress import Progress
from experiments.tracking.run_folder import TIME_PREFIX, JsonLines

Status = Literal["running", "completed", "failed", "interrupted"]

_EXIT_CODES: dict[str, int] = {"completed": 0, "failed": 1, "interrupted": 130}


class Tracker:
    """Writes `metrics.jsonl`, `timings.jsonl`, `history.parquet`, `summary.json` and the W&B run of one run directory.

    What depends on the machine goes to `timings.jsonl` alone, so that equal seeds give byte-identical `metrics.jsonl`.
    W&B gets both in one row.
    """

    def __init__(
        self, folder: Path, config: DictConfig, *, strategy: str, device: str, resume_after: int | None, command: str
    ):
        """Opens the run directory and writes `summary.json` with status `running`.

        Args:
            folder: the run directory; made when missing.
            config: the composed configuration (experiments/schema.py).
            strategy: name of the strategy, as on the command line.
            device: where the trainer computes, e.g. `cpu` or `cuda:0`.
            command: what runs this job again; shown in tables.
            resume_after: last update in the checkpoint that the run continues from; later rows are cut. None: new run.

        Raises:
            ValueError: the directory holds a run and `resume_after` is None, or rows up to `resume_after` are missing.
            RuntimeError: `tracking.mode=online` and W&B cannot be reached.
        """
        self.folder = folder
        self._started_s = time.monotonic()
        self._finished = False
        folder.mkdir(parents=True, exist_ok=True)
        self._config = run_folder.plain_config(config)
        self._summary_path = folder / "summary.json"
        earlier = self._earlier_summary(resume_after)
        self._metrics = JsonLines(folder / "metrics.jsonl", resume_after)
        self._timings = JsonLines(folder / "timings.jsonl", resume_after)
        shadowed = self._config["shadow"]["every"] > 0
        self._merge_errors = JsonLines(folder / "merge_errors.jsonl", resume_after) if shadowed else None
        self._last_step = int(self._metrics.rows[-1]["step"]) if self._metrics.rows else 0
        if resume_after is not None and self._last_step != resume_after:
            raise ValueError(
                f"{folder / 'metrics.jsonl'}: expected a row of step {resume_after}, where the checkpoint is, "
                f"but the last one up to there is {self._last_step}; restore the file or start a new run"
            )
        self._device = device
        self._command = command
        self._head = self._identity(strategy, earlier)
        self._board = self._open_board(strategy)
        self._progress = Progress(
            int(self._config["steps"]), self._last_step, enabled=bool(self._config["tracking"]["progress"])
        )
        self._write_summary("running", None)

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        lines: Sequence[Mapping[str, Any]] = (),
        shown: Mapping[str, float] | None = None,
    ) -> None:
        """Records update number `step`, 1 being the first; a bad row is refused before anything is written.

        Args:
            metrics: values that repeat with the seed, by the keys of experiments/metrics.
            timings: values that depend on the machine; every key starts with `time/`.
            lines: one per scored segment (experiments/shadow_report.py), when shadow scoring was due.
            shown: further values for W&B alone.

        Raises:
            RuntimeError: a value is NaN or infinite, a key is in the wrong mapping, or `step` is not above the last.
            TypeError: a value is not a number.
        """
        if step <= self._last_step:
            raise RuntimeError(f"step {step} was logged after step {self._last_step}: steps must grow")
        misplaced = [key for key in metrics if key.startswith(TIME_PREFIX) or key == "step"]
        misplaced += [key for key in timings if not key.startswith(TIME_PREFIX)]
        if misplaced:
            raise RuntimeError(
                f"step {step}: timings, and only they, start with {TIME_PREFIX!r}; misplaced: {misplaced}"
            )
        values, seconds = run_folder.clean_row(step, metrics), run_folder.clean_row(step, timings)
        self._metrics.append(step, values)
        self._timings.append(step, seconds)
        if self._merge_errors is not None:
            for line in lines:
                self._merge_errors.append(step, line)
        self._last_step = step
        self._board.log({**(shown or {}), "step": step, **values, **seconds})
        self._progress.update(step, values)

    def finish(self, status: Status, error: str | None = None) -> dict[str, Any]:
        """Ends the run and returns its summary (for `experiments.summary.closing_table`). Call it in a `finally`, once.

        The files are complete before W&B is ended, so that nothing is lost if W&B fails there.

        Args:
            status: `completed`, `failed` or `interrupted`.
            error: what went wrong, for `failed`.

        Raises:
            RuntimeError: called twice.
        """
        if self._finished:
            raise RuntimeError(f"the run in {self.folder} was finished already")
        self._finished = True
        self._progress.close()
        summary = self._write_summary(status, error)
        self._metrics.close()
        self._timings.close()
        if self._merge_errors is not None:
            self._merge_errors.close()
        if status == "completed":
            run_folder.write_table(self.folder / "history.parquet", self._metrics, self._timings)
        self._board.finish(_EXIT_CODES[status])
        return summary

    def _earlier_summary(self, resume_after: int | None) -> dict[str, Any]:
        if not self._summary_path.exists():
            return {}
        if resume_after is None:
            raise ValueError(
                f"{self.folder} holds a run already: continue it with resume={self.folder}, "
                "or choose another hydra.run.dir"
            )
        return json.loads(self._summary_path.read_text(encoding="utf-8"))

    def _identity(self, strategy: str, earlier: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the part of the summary that does not change while the run goes on."""
        sha, dirty = run_folder.git_state()
        disabled = self._config["tracking"]["mode"] == "disabled"
        backend = self._config["backend"]["name"]
        return {
            "mode": self._config["mode"],
            "recording": self._config["recording"],
            "experiment": self._config["experiment_name"],
            "strategy": strategy,
            "seed": self._config["seed"],
            "engine": self._config["engine"]["name"] if backend == "local" else backend,
            "pause_mode": self._config["schedule"]["pause_mode"],
            "old_log_prob": self._config["algorithm"]["old_log_prob"],
            "config_hash": run_folder.config_hash(self._config),
            "git_sha": sha,
            "git_dirty": dirty,
            "versions": run_folder.package_versions(),
            "command": self._command,
            "wandb_run_id": earlier.get("wandb_run_id") or (None if disabled else uuid.uuid4().hex[:12]),
            "seconds_before_resume": earlier.get("seconds", 0.0),
        }

    def _open_board(self, strategy: str) -> Board:
        tracking = self._config["tracking"]
        if tracking["mode"] == "disabled":
            return DisabledBoard()
        identity = WandbIdentity(
            run_id=self._head["wandb_run_id"],
            name=f"{strategy}-s{self._config['seed']}",
            group=self._config["experiment_name"],
            job_type=strategy,
            tags=(strategy, self._head["engine"], self._head["pause_mode"]),
            config={**self._config, run_folder.PROVENANCE: self._provenance()},
            folder=self.folder,
            project=tracking["project"],
            entity=tracking["entity"],
            mode=tracking["mode"],
        )
        return WandbBoard(identity)

    def _provenance(self) -> dict[str, Any]:
        """Returns what W&B is told beside the configuration, so that a comparison of its runs sees other versions."""
        facts = run_folder.host_facts(self._device)
        host = {key: facts[key] for key in ("cpus", "platform", "device")}  # the peak memory is not known yet
        return {**{key: self._head[key] for key in ("command", "git_sha", "git_dirty", "versions")}, "host": host}

    def _decision(self) -> dict[str, Any] | None:
        if self._merge_errors is None:
            return None
        excluded = [row[MERGE_EXCLUDED] for row in self._metrics.rows if MERGE_EXCLUDED in row]
        return decide(self._merge_errors.rows, sum(excluded) / len(excluded) if excluded else 0.0)

    def _write_summary(self, status: Status, error: str | None) -> dict[str, Any]:
        head = dict(self._head)
        seconds = head.pop("seconds_before_resume") + time.monotonic() - self._started_s
        summary: dict[str, Any] = {
            "status": status,
            "error": error,
            "steps": self._last_step if self._config["mode"] == "train" else len(self._metrics.rows),
            **head,
            "host": run_folder.host_facts(self._device),
            "seconds": round(seconds, 3),
            "folder": str(self.folder),
            "decision": self._decision(),
            "metrics": run_folder.summarise(self._metrics, self._timings),
        }
        run_folder.write_atomically(self._summary_path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
        return summary
