"""What a run did, as plain text: the closing table of one run, or one row each for several.

`python -m experiments.summary RUN_DIR...` prints it from the `summary.json` files; the README's table comes from there.
Knows files only: no engine, no trainer, no W&B.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.decision import decision_table

Summary = Mapping[str, Any]

_PHASES = ("startup", "generate", "score", "train", "sync", "other")
_COLUMNS = ("mean", "p95", "max", "last")
_TITLES = ("strategy", "seed", "kl mean", "kl p95", "kl max", "clip", "ESS", "|gap|", "|merge|", "reward first", "last")
_LABEL_WIDTH, _VALUE_WIDTH = 30, 11


def closing_table(summary: Summary) -> str:
    """Returns what the run of `summary` (the content of summary.json) did, and the next command to try.

    Statistics are over the updates; a metric that the run did not log is shown as `-`.
    """
    head = f"{summary['strategy']}, seed {summary['seed']}: {summary['status']} after {summary['steps']} updates"
    lines = ["", f"{head} in {summary['seconds']:.0f} s"]
    if summary["error"]:
        lines += ["", f"error: {summary['error']}"]
    lines += ["", " " * _LABEL_WIDTH + "".join(f"{column:>{_VALUE_WIDTH}}" for column in _COLUMNS)]
    for label, key in _metric_rows(summary["strategy"]):
        values = (_number(_statistic(summary, key, column)) for column in _COLUMNS)
        lines.append(f"{label:<{_LABEL_WIDTH}}" + "".join(f"{value:>{_VALUE_WIDTH}}" for value in values))
    first, last = (_number(_statistic(summary, "reward/mean", part)) for part in ("first_fifth", "last_fifth"))
    lines += ["", f"reward   first fifth of the updates {first}, last fifth {last}"]
    lines += [*_time_lines(summary), ""]
    if summary["old_log_prob"] == "decoupled":
        lines += [
            "ppo_kl is blind to the strategy in decoupled mode: compare |log ratio| and |merge error|.",
            "",
        ]
    if summary.get("decision"):
        lines += [*decision_table(summary["decision"]), ""]
    lines += [f"folder   {summary['folder']}", f"next     {_next_command(summary)}"]
    return "\n".join(lines)


def comparison_table(summaries: Sequence[Summary], *, commands: bool = True) -> str:
    """Returns one row per run, in the given order, and with `commands` the command that made each."""
    rows = [_TITLES, *(_comparison_row(summary) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    lines = []
    for row in rows:
        name, *values = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        cells = (name.strip().ljust(widths[0]), *values)
        lines.append("  ".join(cells).rstrip())
    lines += [
        "",
        "kl: actor/ppo_kl; clip, ESS, |gap| (log ratio trainer - engine), |merge|: means over the updates;",
        "reward: means over the first and the last fifth of the updates. - : not logged.",
    ]
    if commands:
        made = (f"{summary['strategy']}, seed {summary['seed']}:  {summary['command']}" for summary in summaries)
        lines += ["", *made]
    return "\n".join(lines)


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns the content of `folder`/summary.json.

    Raises:
        ValueError: there is none.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"no summary.json in {folder}: expected the directory of a run")
    return json.loads(path.read_text(encoding="utf-8"))


def _metric_rows(strategy: str) -> list[tuple[str, str]]:
    return [
        ("ppo_kl", "actor/ppo_kl"),
        ("clip fraction", "actor/pg_clipfrac"),
        ("ESS of the PPO ratio", "ppo_ratio/ess_raw"),
        ("ratio trainer/engine, p1", "gap_ratio/p1"),
        ("ratio trainer/engine, p50", "gap_ratio/p50"),
        ("ratio trainer/engine, p99", "gap_ratio/p99"),
        ("ratio trainer/engine, p99.9", "gap_ratio/p99.9"),
        ("|log ratio|, trainer - engine", "gap/abs"),
        ("|merge error|", f"merge/{strategy}/abs"),
        ("version lag of a token", "stale/age_mean"),
        ("partial rollouts", "fully_async/partial/partial_ratio"),
        ("reward", "reward/mean"),
    ]


def _comparison_row(summary: Summary) -> tuple[str, ...]:
    strategy = summary["strategy"]
    values = (
        ("actor/ppo_kl", "mean"),
        ("actor/ppo_kl", "p95"),
        ("actor/ppo_kl", "max"),
        ("actor/pg_clipfrac", "mean"),
        ("ppo_ratio/ess_raw", "mean"),
        ("gap/abs", "mean"),
        (f"merge/{strategy}/abs", "mean"),
        ("reward/mean", "first_fifth"),
        ("reward/mean", "last_fifth"),
    )
    note = "" if summary["status"] == "completed" else f" ({summary['status']})"
    return (
        strategy + note,
        str(summary["seed"]),
        *(_number(_statistic(summary, key, part), digits=3) for key, part in values),
    )


def _time_lines(summary: Summary) -> list[str]:
    """Returns where the time went, as shares of the wall time from the start of the process to the last update.

    On the wall clock generation and training overlap: shares may then add up to more than 100 %.
    """
    seconds = {name: _total(summary, f"time/{name}_s") for name in (*_PHASES, "models")}
    whole = (_total(summary, "time/wall_s") or 0.0) + (_total(summary, "time/startup_s") or 0.0)

    def share(name: str) -> str:
        value = seconds[name]
        return "-" if value is None or whole == 0 else f"{value / whole:.0%}"

    split = ", ".join(f"{name} {share(name)}" for name in _PHASES)
    tokens = _number(_statistic(summary, "time/tokens_per_s", "mean"))
    peak = f"{summary['host']['peak_memory_gib']:.2f}"
    return [
        f"time     {split}",
        f"models   {share('models')} of the {whole:.0f} s in the two models' forwards and backwards",
        f"speed    {tokens} generated tokens/s; peak memory {peak} GiB; {summary['host']['device']}",
    ]


def _next_command(summary: Summary) -> str:
    """Returns the run's own command with another strategy; what continues it when it was interrupted."""
    resume_mode = "backend.verl.trainer.resume_mode"
    unwanted = ("resume", "hydra.run.dir", resume_mode)
    words = [word for word in shlex.split(summary["command"]) if word.split("=")[0] not in unwanted]
    in_verl = summary["engine"] == "verl"
    if summary["status"] == "interrupted":
        folder = summary["folder"]
        more = [f"{resume_mode}=auto", f"hydra.run.dir={folder}"] if in_verl else [f"resume={folder}"]
        return shlex.join([*words, *more])
    reference = "strategy=replace" if in_verl else "strategy=exact"  # verl refuses `exact`
    other = reference if summary["strategy"] == "slice_concat" else "strategy=slice_concat"
    replaced = [other if word.startswith("strategy=") else word for word in words]
    return shlex.join(replaced if other in replaced else [*words, other])


def _statistic(summary: Summary, key: str, part: str) -> float | None:
    return summary["metrics"].get(key, {}).get(part)


def _total(summary: Summary, key: str) -> float | None:
    values = summary["metrics"].get(key)
    return None if values is None else values["mean"] * values["count"]


def _number(value: float | None, digits: int = 4) -> str:
    """Returns `value` with `digits` significant digits, small and large ones in scientific notation; `-` for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:#.{digits}g}".rstrip(".")
    return f"{value:.{digits - 2}e}"


def main() -> int:
    """Prints the table of the run directories on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.summary", description="What finished runs did.")
    parser.add_argument("run_dir", nargs="+", type=Path, help="directory of a run, with its summary.json")
    try:
        summaries = [read_summary(folder) for folder in parser.parse_args().run_dir]
    except ValueError as error:
        parser.error(str(error))
    scored = [summary for summary in summaries if summary.get("mode") == "score"]
    if scored and len(summaries) > 1:
        parser.error(f"{scored[0]['folder']} scored a recording and trained nothing: give it alone")
    if scored:
        print("\n".join(decision_table(scored[0]["decision"]) if scored[0]["decision"] else ["nothing was ranked"]))
    else:
        print(closing_table(summaries[0]) if len(summaries) == 1 else comparison_table(summaries))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
