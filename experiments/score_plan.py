"""What a `mode=score` job scores, resolved from its configuration and its recording; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments import check
from experiments.recording import Recording, RecordingError, read_recording
from experiments.schema import Config
from strategies.base import MergeStrategy

READ_KEYS = ("mode", "recording", "strategies", "score", "trainer.device", "tracking", "hydra")
"""Keys that have a meaning in mode=score, and those below them; all others come from the recording."""

TRAINER, NEWEST = "trainer", "newest"
"""Values of `score.weights` beside version numbers."""


@dataclass(frozen=True, eq=False)
class ScorePlan:
    """One scoring job.

    Attributes:
        recording: what is scored.
        node: the recorded run's configuration with the job's own keys; `config`: the same, typed.
        strategy: the recorded run's own, called `recording.strategy`; always scored.
        strategies: further ones by name.
        steps: numbers of the updates.
        version: weight version to score under; None: the weights that the trainer held before each update.
    """

    recording: Recording
    node: DictConfig
    config: Config
    strategy: MergeStrategy
    strategies: dict[str, MergeStrategy]
    steps: list[int]
    version: int | None


def refuse_unread_keys(overrides: Sequence[str]) -> None:
    """Refuses overrides that mode=score would not read.

    Raises:
        ConfigError: names the first one.
    """
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0].replace("/", ".")
        if not any(key == known or key.startswith(f"{known}.") for known in READ_KEYS):
            raise check.ConfigError(
                f"`{key}` has no meaning with mode=score, the recording's own holds; set only {', '.join(READ_KEYS)}"
            )


def score_plan(job: Config) -> ScorePlan:
    """Returns what a job with `mode=score` scores.

    The recorded strategy is built from the recording's configuration: as with any `_target_`, its class is called.

    Raises:
        ConfigError: no readable recording, an unknown strategy, an update or a weights version that is not in it.
    """
    assert job.recording is not None
    try:
        recording = read_recording(job.recording)
        steps = _steps(recording, job.score.updates)
        recording.check(steps)
        version = _version(recording, job.score.weights)
        if version is not None:
            recording.check_weights(version)
    except RecordingError as error:
        raise check.ConfigError(f"`recording`: {error}") from error
    _check_names(recording, check.strategy_nodes(job.strategies, "strategies"))
    node = _merged(recording, job, steps)
    config = check.load(node)
    strategy, strategies = check.build_strategies(config)
    return ScorePlan(recording, node, config, strategy, strategies, steps, version)


def _steps(recording: Recording, wanted: list[int] | None) -> list[int]:
    if wanted is None:
        lost = sorted(set(range(1, recording.steps[-1])) - set(recording.steps))
        if lost:
            raise check.ConfigError(
                f"`recording`: {recording.folder} has updates up to {recording.steps[-1]}, but not {lost}; restore the "
                "files, or name the updates to score in `score.updates`"
            )
        return list(recording.steps)
    absent = [step for step in wanted if step not in recording.steps]
    if absent or not wanted:
        first, last = recording.steps[0], recording.steps[-1]
        raise check.ConfigError(f"`score.updates`: the recording has updates {first} to {last}, not {absent}")
    return sorted(set(wanted))


def _version(recording: Recording, wanted: str) -> int | None:
    if wanted == TRAINER:
        return None
    if wanted == NEWEST and recording.versions:
        return recording.versions[-1]
    if not wanted.isdecimal() or int(wanted) not in recording.versions:
        held = ", ".join(map(str, recording.versions))
        raise check.ConfigError(
            f"`score.weights` must be {TRAINER}, {NEWEST} or a weight version of the recording ({held}), not {wanted}"
        )
    return int(wanted)


def _check_names(recording: Recording, nodes: Mapping[str, Any]) -> None:
    if "exact" in nodes:
        raise check.ConfigError("`strategies`: exact is the reference and always scored; remove it")
    own = recording.strategy
    if own in nodes and nodes[own] != recording.config["strategy"]:
        raise check.ConfigError(
            f"`strategies.{own}`: the recorded run's own strategy has that name and is {recording.config['strategy']}; "
            "it is always scored, give the other one another name"
        )


def _merged(recording: Recording, job: Config, steps: Sequence[int]) -> DictConfig:
    """Returns the configuration of the recorded run with what the job sets."""
    config = {
        **recording.config,
        "steps": steps[-1],
        "mode": job.mode.value,
        "record": False,
        "recording": job.recording,
        "resume": None,
        "strategies": job.strategies,
        "score": {"weights": job.score.weights, "updates": job.score.updates},
        "shadow": {**recording.config["shadow"], "every": 1, "strategies": job.strategies},
        "tracking": OmegaConf.to_container(OmegaConf.structured(job.tracking), enum_to_str=True),
        "trainer": {**recording.config["trainer"], "device": job.trainer.device},
    }
    merged = OmegaConf.merge(OmegaConf.structured(Config), config)
    assert isinstance(merged, DictConfig)
    return merged
