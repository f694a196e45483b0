"""What our trainer inside verl must know of a run, as plain values under `routemerge` in verl's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.schema import AlgorithmConfig
from experiments.verl_backend.merging import MergedRows, Merging
from strategies.base import MergeStrategy
from strategies.types import Rollout


@dataclass(frozen=True)
class ShadowRules:
    """What is scored: the run's strategy by name, and others.

    Attributes:
        every: updates between two scored ones, the first included; 0: none.
    """

    own: str
    every: int
    strategies: Mapping[str, MergeStrategy]


@dataclass(frozen=True)
class TrainerSettings:
    """The run's PPO settings, its merging, and what is scored beside it."""

    algorithm: AlgorithmConfig
    merging: Merging
    shadow: ShadowRules

    @classmethod
    def of(cls, node: Any) -> TrainerSettings:
        """Returns the settings of the node that `launch.py` writes: `algorithm`, `merging`, `shadow`."""
        values = OmegaConf.to_container(node, resolve=True)
        assert isinstance(values, dict)
        algorithm = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), values["algorithm"])
        shadow = values["shadow"]
        rules = {name: instantiate(rule) for name, rule in shadow["strategies"].items()}
        typed = OmegaConf.to_object(algorithm)
        assert isinstance(typed, AlgorithmConfig)
        return cls(typed, instantiate(values["merging"]), ShadowRules(shadow["own"], shadow["every"], rules))

    def shadow_due(self, update: int) -> bool:
        """Says whether an update, counted from 1, is scored."""
        return self.shadow.every > 0 and (update - 1) % self.shadow.every == 0

    def merge(self, rollout: Rollout, trainer_version: int) -> MergedRows:
        """Returns what a trainer of that weight version replays of the rollout.

        Raises:
            MergeError: as `Merging.merge`.
        """
        return self.merging.merge_rows(replace(rollout, trainer_version=trainer_version))
