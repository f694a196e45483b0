"""Reads a recording: every rollout that a run trained on, with all calls, and the weights that they refer to.

`read_recording(path)` is also for analyses outside a run: it needs numpy and safetensors, no torch. Layout:

    rollouts/index.json                          schema version, strategy, seed, configuration, package versions
    rollouts/update_000001.safetensors           the batch of update 1 (numbered as in metrics.jsonl)
    rollouts/weights/version_000000.safetensors  published weights
    rollouts/weights/update_000002.safetensors   the trainer's weights before update 2, where they were not published
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.buffer import Sample
from experiments.recording_file import RecordingError, checked_header, read, read_header, unpack

FOLDER = "rollouts"
INDEX = "index.json"
WEIGHTS = "weights"
SUFFIX = ".safetensors"


def update_name(step: int) -> str:
    """Returns the file name, without suffix, of what belongs to update `step`, 1 being the first."""
    return f"update_{step:06d}"


def version_name(version: int) -> str:
    """Returns the file name, without suffix, of published weights."""
    return f"version_{version:06d}"


def numbers(folder: Path, kind: str) -> list[int]:
    """Returns the numbers of the files `<kind>_<number>.safetensors` in `folder`, sorted."""
    names = (path.name.removesuffix(SUFFIX).removeprefix(f"{kind}_") for path in folder.glob(f"{kind}_*{SUFFIX}"))
    return sorted(int(name) for name in names if name.isdecimal())


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """The batch of one update.

    Attributes:
        step: number of the update, as in metrics.jsonl.
        trainer_version: weight version of the trainer; the rollouts carry it too.
        samples: rollouts with rewards, `[B]`.
        advantages: float32 `[B]`.
        versions: weight versions that tokens of the batch were sampled under, sorted; unknown ones left out.
    """

    step: int
    trainer_version: int
    samples: list[Sample]
    advantages: NDArray[np.float32]
    versions: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """What a run recorded; updates and weights are read when they are asked for.

    Attributes:
        folder: holds the files.
        strategy: name of the run's strategy; `seed`: of the run.
        config: the run's configuration, resolved; `model`: transformers' configuration of its model.
        packages: versions of the packages that decide numbers.
        steps: numbers of the recorded updates, sorted.
        versions: weight versions whose weights are there, sorted.
    """

    folder: Path
    strategy: str
    seed: int
    config: dict[str, Any]
    model: dict[str, Any]
    packages: dict[str, str | None]
    steps: tuple[int, ...]
    versions: tuple[int, ...]

    def update(self, step: int) -> RecordedUpdate:
        """Returns the batch of update `step`.

        Raises:
            RecordingError: it is not recorded, or its file is damaged or foreign; names the file.
        """
        path = self._update_file(step)
        header, columns = read(path, "update")
        version = int(header["trainer_version"])
        samples = unpack(path, columns, (header["layers"], header["top_k"], header["experts"]), version)
        return RecordedUpdate(step, version, samples, columns["advantage"], tuple(header["versions"]))

    def weights(self, version: int) -> dict[str, NDArray[np.float32]]:
        """Returns published weights in the layout of transformers' `state_dict()`.

        Raises:
            RecordingError: they are not recorded, or the file is damaged or foreign; names the file.
        """
        return read(self._weights_file(version_name(version)), "weights")[1]

    def weights_before(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Returns the weights that the trainer held before update `step`.

        Raises:
            RecordingError: as `weights`.
        """
        return read(self._weights_file(read_header(self._update_file(step), "update")["weights"]), "weights")[1]

    def check(self, steps: Iterable[int]) -> None:
        """Opens every file that `steps` need, weights of their tokens included, without reading arrays.

        Raises:
            RecordingError: the first file that is missing, truncated or foreign.
        """
        names: set[str] = set()
        for step in steps:
            header = read_header(self._update_file(step), "update")
            names |= {header["weights"], *map(version_name, header["versions"])}
        for name in sorted(names):
            read_header(self._weights_file(name), "weights")

    def check_weights(self, version: int) -> None:
        """Opens the file of published weights without reading them.

        Raises:
            RecordingError: it is missing, truncated or foreign.
        """
        read_header(self._weights_file(version_name(version)), "weights")

    def _update_file(self, step: int) -> Path:
        return self.folder / (update_name(step) + SUFFIX)

    def _weights_file(self, name: str) -> Path:
        return self.folder / WEIGHTS / (name + SUFFIX)


def read_recording(path: Path | str) -> Recording:
    """Returns the recording in a run directory, or in its `rollouts/`.

    Raises:
        RecordingError: there is none, its index is damaged, foreign or of another schema, or it holds no update.
    """
    folder = Path(path).expanduser()
    if (folder / FOLDER / INDEX).is_file():
        folder = folder / FOLDER
    index_file = folder / INDEX
    if not index_file.is_file():
        raise RecordingError(
            f"{path}: expected a run directory with {FOLDER}/{INDEX}, found none; a run writes it with record=true"
        )
    try:
        index = checked_header(index_file, json.loads(index_file.read_text(encoding="utf-8")), "index")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{index_file}: expected a JSON object, found a damaged file ({error})") from error
    names = ("strategy", "seed", "config", "model", "packages")
    if absent := [name for name in names if name not in index]:
        raise RecordingError(f"{index_file}: expected the keys {', '.join(names)}, found none of {', '.join(absent)}")
    steps = tuple(numbers(folder, "update"))
    if not steps:
        raise RecordingError(f"{folder}: expected files {update_name(1)}{SUFFIX} and so on, found none")
    versions = tuple(numbers(folder / WEIGHTS, "version"))
    return Recording(folder=folder, steps=steps, versions=versions, **{name: index[name] for name in names})
