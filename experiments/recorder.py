"""Writes a recording: a learner that stores every batch before it hands it to the run's own.

The trainer's weights before an update are stored with it. Right after a sync they are the published ones, so that
every version that a token can have been sampled under is stored by the time the token is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import ppo
from experiments.buffer import Sample
from experiments.learner import Update
from experiments.loop import Learner
from experiments.recording import FOLDER, INDEX, SUFFIX, WEIGHTS, numbers, update_name, version_name
from experiments.recording_file import FORMAT, SCHEMA, pack, shape_of, write
from experiments.tracking.run_folder import package_versions, write_atomically
from experiments.trainers.base import Trainer
from strategies.types import UNKNOWN_VERSION


def start_recording(
    run_dir: Path, *, strategy: str, config: Mapping[str, Any], model: Mapping[str, Any], step: int, version: int
) -> Path:
    """Returns the folder of the recording, its index written, without what a resumed run will write anew.

    Args:
        strategy: the run's; `config`: its configuration, resolved; `model`: transformers' configuration.
        step: updates taken so far; `version`: the trainer's weight version. Both are 0 for a new run.
    """
    folder = run_dir / FOLDER
    weights = folder / WEIGHTS
    weights.mkdir(parents=True, exist_ok=True)
    for place, kind, last in ((folder, "update", step), (weights, "update", step), (weights, "version", version)):
        for number in numbers(place, kind):
            if number > last:
                (place / f"{kind}_{number:06d}{SUFFIX}").unlink()
    for partial in folder.rglob(f".*{SUFFIX}.partial"):
        partial.unlink()
    index = {
        "format": FORMAT,
        "schema": SCHEMA,
        "kind": "index",
        "strategy": strategy,
        "seed": config["seed"],
        "config": config,
        "model": model,
        "packages": package_versions(),
    }
    write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return folder


class RecordingLearner:
    """Implements the loop's `Learner`: records the batch, then takes the update with another learner.

    A batch is written before its update, so that one that stops the run can be looked at.
    """

    def __init__(
        self, learner: Learner, *, trainer: Trainer, folder: Path, sync_interval: int, normalize_advantages: bool
    ):
        self._learner = learner
        self._trainer = trainer
        self._folder = folder
        self._sync_interval = sync_interval
        self._normalize_advantages = normalize_advantages

    def step(self, step: int, samples: list[Sample], version: int) -> Update:
        """Takes update `step`, counted from 0, on `samples`; the trainer's last sync was weight version `version`."""
        published = step % self._sync_interval == 0
        weights = version_name(version) if published else update_name(step + 1)
        tensors = {name: tensor.numpy() for name, tensor in self._trainer.weights().items()}
        write(self._folder / WEIGHTS / (weights + SUFFIX), "weights", tensors, {})
        rollouts = [sample.rollout for sample in samples]
        advantages = ppo.group_advantages(
            np.array([sample.reward for sample in samples]),
            np.array([sample.problem_index for sample in samples]),
            self._normalize_advantages,
        )
        layers, top_k, experts = shape_of(rollouts)
        sampled = {int(v) for rollout in rollouts for v in np.unique(rollout.versions())} - {UNKNOWN_VERSION}
        facts = {
            "trainer_version": version,
            "weights": weights,
            "versions": sorted(sampled),
            "layers": layers,
            "top_k": top_k,
            "experts": experts,
        }
        write(self._folder / (update_name(step + 1) + SUFFIX), "update", pack(samples, advantages), facts)
        return self._learner.step(step, samples, version)
