"""Runs that W&B keeps: offline `.wandb` files, and a project on a server.

The full history, always: `run.history()` gives a sample of 500 rows that differs from call to call (wandb/wandb#5994,
#1783), and `scan_history(keys=...)` leaves out every row that lacks one of the keys (wandb/wandb#1742, #5391), so that
one metric logged every fifth update would hide four fifths of all others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.found import Found, Unusable, provenance
from analysis.history import STEP, History, from_rows
from analysis.load import flat
from analysis.wandb_file import WandbFile, read_wandb_file

_INTERRUPTED = 130  # exit code of a run that saved a checkpoint on Ctrl-C
_STATES = {"finished": "completed", "killed": "interrupted"}  # a server's word -> ours; the others are the same
_PROVENANCE = "provenance"  # experiments/tracking/run_folder.py
_TIMEOUT_S = 30


def wandb_files(path: Path) -> Iterator[Found | Unusable]:
    """Yields the offline runs in `path`, a `.wandb` file or a folder with such files at any depth.

    A resumed run has a file per part, all of one run id: they are read in the order of their start, and of a step that
    two parts logged the later value counts (W&B cannot join them: wandb/wandb#3841, #2423).
    """
    parts: dict[str, list[tuple[Path, WandbFile]]] = {}
    for file in sorted(path.rglob("*.wandb"), key=lambda file: file.parent.name) if path.is_dir() else [path]:
        try:
            content = read_wandb_file(file)
        except (OSError, ValueError) as error:
            yield Unusable(str(file), str(error))
            continue
        parts.setdefault(content.run_id or str(file), []).append((file, content))
    for several in parts.values():
        file, last = several[-1]
        rows = [row for _, part in several for row in part.history]
        code = last.exit_code
        status = {None: "running", 0: "completed", _INTERRUPTED: "interrupted"}.get(code, "failed")
        where = str(file) if len(several) == 1 else f"{file} and {len(several) - 1} earlier"
        config = {key: value for _, part in several for key, value in part.config.items()}
        written = max(part.stat().st_mtime for part, _ in several)
        seconds = sum(_seconds(part.summary) for _, part in several)
        yield _run(
            where,
            "wandb file",
            last.run_id,
            last.group,
            last.job_type,
            last.tags,
            status,
            config,
            written,
            seconds,
            rows,
        )


def wandb_project(path: str) -> Iterator[Found | Unusable]:
    """Yields the runs of the W&B project `entity/project` (or `project`, of the default entity), oldest first.

    WANDB_BASE_URL names another server than W&B's own; credentials are those of `wandb login` or WANDB_API_KEY.

    Raises:
        ValueError: no credentials, no such project, or the server does not answer; the message says which.
    """
    import wandb  # takes a second; run directories do without
    from wandb.errors import AuthenticationError, CommError, UsageError

    try:
        runs = wandb.Api(timeout=_TIMEOUT_S).runs(path, lazy=False)
        yield from (_server_run(run, path) for run in runs)
    except (UsageError, AuthenticationError) as error:
        raise ValueError(f"{error} (`wandb login` logs in; WANDB_BASE_URL names the server)") from error
    except (CommError, ValueError) as error:
        raise ValueError(f"{error}; expected entity/project that this login may read") from error


def _server_run(run: Any, project: str) -> Found | Unusable:
    stamp = run.heartbeat_at or run.created_at
    written = datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
    status = str(_STATES.get(run.state, run.state))
    where = f"{run.entity}/{run.project}/{run.id}"
    return _run(
        where,
        "wandb",
        run.id,
        run.group,
        run.job_type,
        run.tags,
        status,
        run.config,
        written,
        _seconds(run.summary_metrics),
        _ServerRows(run),
    )


def _seconds(summary: Mapping[str, Any]) -> float:
    """Returns the wall time that W&B counted; NaN where it did not."""
    seconds = summary.get("_runtime")
    return float(seconds) if isinstance(seconds, int | float) else math.nan


class _ServerRows:
    """The rows of a run on a server, fetched when iterated."""

    def __init__(self, run: Any):
        self._run = run

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        from wandb.errors import CommError
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError

        try:
            # Without the cache: a run that went on since would come back as it was.
            yield from self._run.scan_history(use_cache=False)
        except (CommError, WandbApiFailedError) as error:
            raise ValueError(f"W&B did not give the history of run {self._run.id}: {error}") from error


def _run(
    where: str,
    source: str,
    run_id: str,
    group: str | None,
    job_type: str | None,
    tags: Iterable[str],
    status: str,
    config: Mapping[str, Any],
    written: float,
    seconds: float,
    rows: Iterable[Mapping[str, Any]],
) -> Found | Unusable:
    settings = dict(flat({key: value for key, value in config.items() if key not in ("_wandb", _PROVENANCE)}))
    made = config.get(_PROVENANCE)
    made = made if isinstance(made, dict) else {}  # older runs do not have it
    seed, planned = settings.get("seed"), settings.get("steps")
    if not job_type or not isinstance(seed, int):
        return Unusable(where, "no strategy (job type) or no integer `seed` in its configuration: not of this project")
    return Found(
        where=where,
        source=source,
        strategy=job_type,
        seed=seed,
        status=status,
        planned=planned if isinstance(planned, int) else None,
        experiment=group or "",
        tags=tuple(tags),
        written=written,
        wandb_id=run_id,
        config=settings,
        facts={"seconds": seconds, "command": made.get("command")},
        versions=provenance(made),
        read=lambda keys: _history(rows, keys),
    )


def _history(rows: Iterable[Mapping[str, Any]], keys: Collection[str] | None) -> History:
    """Returns the history of W&B rows: `step` is ours, `_step` W&B's; what else begins with `_` is W&B's own."""
    return from_rows(
        (
            {STEP: row.get(STEP, row.get("_step")), **{k: v for k, v in row.items() if k != STEP and k[:1] != "_"}}
            for row in rows
        ),
        keys,
    )
