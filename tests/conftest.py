"""Shared by all tests: composing a configuration and running it in this process (imports are paid once)."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig

from experiments import check, schema

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"


def compose(*overrides: str) -> DictConfig:
    """Returns the configuration of a command line, as Hydra composes it for run.py."""
    schema.register()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended: exit code, folder, and what it wrote."""

    code: int
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics_bytes.decode().splitlines()]

    @property
    def metrics_bytes(self) -> bytes:
        return (self.folder / "metrics.jsonl").read_bytes()

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded study of tests/data/study, unpacked: twelve run directories `<strategy>/seed<seed>`. Read only."""
    folder = tmp_path_factory.mktemp("study")
    with tarfile.open(ROOT / "tests" / "data" / "study" / "runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def warm_start_cache(tmp_path_factory) -> Path:
    """One warm start for all runs of the session."""
    return tmp_path_factory.mktemp("warm_start")


@pytest.fixture
def smoke_run(tmp_path: Path, warm_start_cache: Path) -> Callable[..., FinishedRun]:
    """Returns a function that runs experiment=smoke with overrides in this process."""

    def run(*overrides: str, folder: str = "run") -> FinishedRun:
        from experiments.launch import Job, launch

        node = compose(
            "experiment=smoke",
            "tracking=disabled",
            "tracking.progress=false",
            "threads=1",  # so that two workers of pytest-xdist do not wait for each other's OpenMP threads
            f"task.warm_start.cache_dir={warm_start_cache}",
            *overrides,
        )
        config = check.load(node)
        check.check(config, check.build_strategies(config)[0])
        names = [o.split("=")[1].split(".")[-1] for o in overrides if o.startswith(("strategy=", "strategy._target_="))]
        name = names[0] if names else "replace"
        code = launch(Job(config, node, name, tmp_path / folder, started=0.0, command="python run.py"))
        return FinishedRun(code, tmp_path / folder)

    return run
