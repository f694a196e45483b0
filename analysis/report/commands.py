"""How the runs of a report are made again: the command of each, or one command that sweeps them all."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable


def commands(of_runs: Iterable[str]) -> list[str]:
    """Returns the different ones of `of_runs`; where these are a whole grid over some keys (all arms with all seeds),
    the one command with `-m` that starts the same jobs.
    """
    found = list(dict.fromkeys(of_runs))
    try:
        jobs = [_by_key(command) for command in found]
    except ValueError:  # not of run.py, or not one word per key
        return found
    if len(jobs) < 2 or any(list(job) != list(jobs[0]) for job in jobs):
        return found
    values = {key: list(dict.fromkeys(job[key] for job in jobs)) for key in jobs[0]}
    if math.prod(map(len, values.values())) != len(jobs):
        return found
    words = [key if several == [None] else f"{key}={','.join(map(str, several))}" for key, several in values.items()]
    return [shlex.join(["python", "run.py", "-m", *words])]


def _by_key(command: str) -> dict[str, str | None]:
    """Returns the overrides of a command of run.py, `key` -> `value`; a word that is no override has no value.

    Raises:
        ValueError: the command is not one of run.py, it is no shell command, or a key stands there twice.
    """
    words = shlex.split(command)
    if words[:2] != ["python", "run.py"]:
        raise ValueError(f"expected `python run.py ...`, got {command!r}")
    overrides = [word.partition("=") for word in words[2:]]
    keys = [key for key, _, _ in overrides]
    if len(set(keys)) < len(keys):
        raise ValueError(f"expected every key once, got {command!r}")
    return {key: value if equals else None for key, equals, value in overrides}
