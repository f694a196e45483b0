"""`load_runs`: run directories, offline W&B runs or a W&B project as one tidy table.

Every run that was found and is not used stands in `Runs.excluded`, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.found import Found, Unusable, run_directories
from analysis.history import STEP, History
from analysis.load import SEGMENT_COLUMNS
from analysis.wandb_runs import wandb_files, wandb_project

INCOMPLETE = "incomplete"
"""Status of a run that calls itself completed and has not every update that it was asked for."""

_PROJECT = re.compile(r"[\w.-]+(/[\w. -]+)?")
_SHOWN = 6


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of one or more arms, as tidy tables. A run is named `<strategy>-s<seed>`.

    Attributes:
        history: one row per run and update, sorted by them: `run`, `strategy` (categorical), `seed`, `step`, then one
            float64 column per metric, NaN where it was not logged.
        runs: one row per run, its name the index: `strategy`, `seed`, `status`, `steps` (rows logged), `planned`
            (updates configured), `experiment`, `group` (its name in W&B), `tags`, `source`, `where`, `wandb_id`,
            `seconds` (wall time, NaN when unknown), `command` (missing when unknown), and what the source knows besides
            (`config_hash`, `git_sha`, ...).
        configs: run -> flat configuration, `trainer.learning_rate` -> 1e-4.
        versions: run -> packages, commit and host; empty where the source does not say.
        segments: merge errors per scored segment: `run` and `analysis.load.SEGMENT_COLUMNS`; empty from W&B.
        excluded: every run that was found and is not used: `run` (empty when unknown), `where`, `reason`.
    """

    history: pd.DataFrame
    runs: pd.DataFrame
    configs: dict[str, dict[str, Any]]
    versions: dict[str, dict[str, Any]]
    segments: pd.DataFrame
    excluded: pd.DataFrame

    def describe(self) -> str:
        """Returns which runs are used, in one line, and those that are not (`not_used`)."""
        arms = self.runs.groupby("strategy", sort=False)["seed"].apply(lambda seeds: ", ".join(map(str, seeds)))
        used = "; ".join(f"{arm}, seeds {seeds}" for arm, seeds in arms.items())
        return "\n".join([f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}: {used}", *self.not_used()])

    def not_used(self) -> list[str]:
        """Returns a line for every run that was found and is not used, with the reason."""
        return [f"not used: {where}: {reason}" for where, reason in self.excluded[["where", "reason"]].to_numpy()]


def load_runs(
    *sources: str | Path,
    states: Collection[str] = ("completed",),
    groups: Collection[str] | None = None,
    tags: Collection[str] | None = None,
    strategies: Collection[str] | None = None,
    keys: Collection[str] | None = None,
) -> Runs:
    """Returns the runs of all `sources`.

    Args:
        sources: a folder with run directories at any depth; a folder with offline W&B runs (`*.wandb`) and no run
            directory, or one such file; or a W&B project, `entity/project`.
        states: statuses to use: `completed`, `running`, `failed`, `interrupted`, `crashed`, or `incomplete`: called
            completed, with fewer rows than the configuration asks for (one per update; in verl one per weight sync).
            Not the tracker's word alone: W&B calls a run finished whose process ended well.
        groups: experiments to use (group in W&B); None: all.
        tags: a run needs one of them; None: all.
        strategies: arms to use; None: all.
        keys: metrics to load; None: all.

    Of several runs with equal settings, strategy and seed the newest completed and whole one is used; the same W&B run
    in a directory and elsewhere is read from the directory. The others are excluded.

    Raises:
        ValueError: a source is nothing of these; no run is left; or two runs of one strategy and seed differ in their
            configuration.
    """
    if not sources:
        raise ValueError("expected a run folder, a folder of .wandb files or a W&B project, got nothing")
    found: list[Found] = []
    excluded: list[tuple[str, str, str]] = []
    for source in dict.fromkeys(map(str, sources)):
        for run in _discover(source):
            if isinstance(run, Unusable):
                excluded.append(("", run.where, run.reason))
            else:
                reason = _unwanted(run, groups, tags, strategies)
                excluded += [(_name(run), run.where, reason)] if reason else []
                found += [] if reason else [run]
    read = []
    for candidates in _candidates(found, states, excluded):
        read += _first_usable(candidates, states, keys, excluded)
    excluded_table = pd.DataFrame(excluded, columns=["run", "where", "reason"], dtype=str)
    if not read:
        lines = [f"  {where}: {reason}" for _, where, reason in excluded[:_SHOWN]]
        more = [f"  and {len(excluded) - _SHOWN} more"] if len(excluded) > _SHOWN else []
        raise ValueError("\n".join([f"no run to use in {', '.join(map(str, sources))}", *lines, *more]))
    read.sort(key=lambda item: (item[0].strategy, item[0].seed))
    return Runs(
        history=_history_table([(run, history) for run, history, _, _ in read]),
        runs=_run_table([(run, history, status) for run, history, status, _ in read]),
        configs={_name(run): run.config for run, *_ in read},
        versions={_name(run): run.versions for run, *_ in read},
        segments=_segment_table([(run, segments) for run, _, _, segments in read]),
        excluded=excluded_table,
    )


def _name(run: Found) -> str:
    return f"{run.strategy}-s{run.seed}"


def _discover(source: str) -> Iterable[Found | Unusable]:
    path = Path(source)
    if not path.exists():
        if not _PROJECT.fullmatch(source):
            raise ValueError(f"{source}: no such file or folder, and not the name of a W&B project (entity/project)")
        try:
            return list(wandb_project(source))
        except ValueError as error:
            raise ValueError(f"{source}: no such folder here, so taken for a W&B project: {error}") from error
    runs = list(run_directories(path)) or list(wandb_files(path))
    if not runs:
        raise ValueError(f"{source}: no run directory (summary.json and metrics.jsonl) and no .wandb file below it")
    return runs


def _unwanted(
    run: Found, groups: Collection[str] | None, tags: Collection[str] | None, strategies: Collection[str] | None
) -> str | None:
    if groups is not None and run.experiment not in groups:
        return f"group {run.experiment!r} is none of {sorted(groups)}"
    if tags is not None and not set(tags) & set(run.tags):
        return f"tags {list(run.tags)}: none of {sorted(tags)}"
    if strategies is not None and run.strategy not in strategies:
        return f"strategy {run.strategy!r} is none of {sorted(strategies)}"
    return None


def _candidates(
    found: Sequence[Found], states: Collection[str], excluded: list[tuple[str, str, str]]
) -> Iterator[list[Found]]:
    """Yields, for every strategy and seed, the runs that may be used, the preferred one first.

    Raises:
        ValueError: two runs of one strategy and seed differ in their configuration.
    """
    wanted: dict[tuple[str, int], list[Found]] = {}
    for run in found:
        if run.status in states or (run.status == "completed" and INCOMPLETE in states):
            wanted.setdefault((run.strategy, run.seed), []).append(run)
        else:
            excluded.append((_name(run), run.where, f"{run.status}; states={sorted({*states, run.status})} takes it"))
    for runs in wanted.values():
        runs.sort(key=lambda run: (run.status == "completed", run.source == "directory", run.written), reverse=True)
        for other in runs[1:]:
            _refuse_different(runs[0], other)
        yield runs


def _refuse_different(first: Found, other: Found) -> None:
    if _same_run(first, other) or first.settings == other.settings:
        return
    keys = sorted(first.settings.keys() | other.settings.keys())
    different = [key for key in keys if first.settings.get(key) != other.settings.get(key)]
    raise ValueError(
        f"{first.where} and {other.where} are both {_name(first)} and differ in {', '.join(different[:_SHOWN])}: load "
        "one experiment at a time; choose with groups, tags or strategies, or give its folder"
    )


def _same_run(first: Found, other: Found) -> bool:
    return bool(first.wandb_id) and first.wandb_id == other.wandb_id


def _first_usable(
    candidates: Sequence[Found],
    states: Collection[str],
    keys: Collection[str] | None,
    excluded: list[tuple[str, str, str]],
) -> list[tuple[Found, History, str, pd.DataFrame]]:
    """Returns the first candidate that can be read and has a status of `states`, read; the others are excluded."""
    for index, run in enumerate(candidates):
        try:
            history = run.read(keys)
            status = _status(run, history)
            if status in states:
                used = run, history, status, run.segments()
                for other in candidates[index + 1 :]:
                    what = "the same W&B run as" if _same_run(run, other) else "the same settings and seed as"
                    excluded.append((_name(other), other.where, f"{what} {run.where}, which is used"))
                return [used]
            reason = f"{status}: {len(history)} of {run.planned_rows} rows; states={sorted({*states, status})} takes it"
        except ValueError as error:
            reason = str(error)
        excluded.append((_name(run), run.where, reason))
    return []


def _status(run: Found, history: History) -> str:
    short = run.planned_rows is not None and len(history) < run.planned_rows
    return INCOMPLETE if run.status == "completed" and short else run.status


def _history_table(read: Sequence[tuple[Found, History]]) -> pd.DataFrame:
    """Returns `Runs.history`. The metrics lie in one block of memory: a study has hundreds of columns."""
    lengths = [len(history) for _, history in read]
    begin = np.cumsum([0, *lengths])
    keys = sorted({key for _, history in read for key in history.columns})
    values = np.full((len(keys), begin[-1]), np.nan)
    for (_, history), first, last in zip(read, begin[:-1], begin[1:], strict=True):
        for index, key in enumerate(keys):
            column = history.columns.get(key)
            if column is not None:
                values[index, first:last] = column
    table = pd.DataFrame(values.T, columns=keys, copy=False)
    names = [_name(run) for run, _ in read]
    arms = [run.strategy for run, _ in read]
    table.insert(0, "run", pd.Series(pd.Categorical(np.repeat(names, lengths), categories=names)))
    categories = list(dict.fromkeys(arms))
    table.insert(1, "strategy", pd.Series(pd.Categorical(np.repeat(arms, lengths), categories=categories)))
    table.insert(2, "seed", np.repeat([run.seed for run, _ in read], lengths))
    table.insert(3, STEP, np.concatenate([history.steps for _, history in read]))
    return table


def _run_table(read: Sequence[tuple[Found, History, str]]) -> pd.DataFrame:
    rows = [
        {
            "run": _name(run),
            "strategy": run.strategy,
            "seed": run.seed,
            "status": status,
            "steps": len(history),
            "planned": run.planned,
            "experiment": run.experiment,
            "group": run.experiment,
            "tags": run.tags,
            "source": run.source,
            "where": run.where,
            "wandb_id": run.wandb_id,
            **run.facts,
        }
        for run, history, status in read
    ]
    return pd.DataFrame(rows).set_index("run").astype({"planned": "Int64"})


def _segment_table(read: Sequence[tuple[Found, pd.DataFrame]]) -> pd.DataFrame:
    tables = [segments.assign(run=_name(run)) for run, segments in read if not segments.empty]
    columns = ["run", *SEGMENT_COLUMNS]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)
