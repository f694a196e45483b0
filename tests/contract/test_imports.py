"""Who may import whom (design.md section 7): every import statement is read, those inside functions too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"strategies", "experiments", "analysis", "run"}
RECORDING_READER = ("experiments.recording", "experiments.recording_file")
"""How the files of a recording are read: the one thing that experiments and analysis share as code."""
FILES = sorted(
    path.relative_to(ROOT)
    for name in ("strategies", "experiments", "analysis", "notebooks", "benchmarks", "run.py")
    for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    if path.is_file()
)


def imports(source: str, module: str = "") -> Iterator[tuple[str, int]]:
    """Yields the full name of everything that `source` imports, and the line; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, *([base] if base else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno


def offences(path: Path, source: str) -> list[str]:
    """Returns one line for every import that `path`, relative to the root, must not have."""
    module = ".".join(path.with_suffix("").parts)
    found = []
    for name, line in imports(source, module):
        reason = forbidden(module, name)
        if reason:
            found.append(f"{path}:{line} imports {name}: {reason}")
    return found


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def forbidden(module: str, name: str) -> str | None:
    """Returns why `module` may not import `name`, or None when it may."""
    top = name.split(".")[0]
    if top == "run":
        return "nothing imports run"
    if within(module, "strategies") and top not in {"numpy", "strategies"} | sys.stdlib_module_names:
        return "strategies see numpy and the standard library only, so that they run in any worker"
    if within(module, "experiments", "run") and top in ("analysis", "notebooks"):
        return "experiments and analysis meet through files"
    if within(module, *RECORDING_READER) and not (
        within(name, *RECORDING_READER, "experiments.buffer")
        or top in {"numpy", "safetensors", "strategies"} | sys.stdlib_module_names
    ):
        return "who reads recordings needs numpy and safetensors only"
    if within(module, "analysis") and within(name, "experiments.recording"):
        return None
    if within(module, "analysis") and top in ("experiments", "torch", "megatron", "sglang", "verl", "transformers"):
        return "analysis reads files; it needs no engine and no trainer"
    if within(module, "notebooks") and top in OURS - {"analysis"}:
        return "notebooks tell a story over analysis"
    if within(module, "experiments", "run"):
        return forbidden_in_experiments(module, name, top)
    return None


def forbidden_in_experiments(module: str, name: str, top: str) -> str | None:
    if top == "megatron" and not within(module, "experiments.trainers"):
        return "only experiments/trainers names megatron"
    if top == "sglang" and not within(module, "experiments.engines.sglang", "experiments.verl_backend"):
        return "only experiments/engines/sglang.py and verl_backend/ name sglang"
    if top == "verl" and not within(module, "experiments.verl_backend"):
        return "only experiments/verl_backend names verl"
    if within(name, "experiments.verl_backend") and not within(module, "experiments.verl_backend", "run"):
        return "nothing imports verl_backend"
    if within(module, "experiments.engines") and within(name, "experiments.trainers"):
        return "engines and trainers do not see each other"
    if within(module, "experiments.trainers") and within(name, "experiments.engines"):
        return "engines and trainers do not see each other"
    blind = within(module, "experiments.loop", "experiments.rollout", "experiments.buffer", "experiments.ppo")
    if blind and within(name, "experiments.engines", "experiments.trainers"):
        allowed = within(name, "experiments.engines.base", "experiments.trainers.base")
        return None if allowed else "the loop sees engines and trainers through their base protocols only"
    return None


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_import_goes_in_the_permitted_direction(path: Path) -> None:
    assert offences(path, (ROOT / path).read_text(encoding="utf-8")) == []


def test_the_walk_finds_the_packages() -> None:
    tops = {path.parts[0] for path in FILES}
    assert tops >= {"strategies", "experiments", "analysis"}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("strategies/a.py", "import torch"),
        ("strategies/a.py", "def f():\n    from experiments import clock"),
        ("experiments/loop.py", "from experiments.engines import embedded"),
        ("experiments/loop.py", "from .trainers.megatron import MegatronTrainer"),
        ("experiments/buffer.py", "import experiments.engines.embedded"),
        ("experiments/ppo.py", "import megatron.core"),
        ("experiments/engines/embedded.py", "from experiments.trainers.base import Score"),
        ("experiments/trainers/megatron.py", "from ..engines import embedded"),
        ("experiments/launch.py", "import importlib\nimportlib.import_module('analysis.load')"),
        ("experiments/launch.py", "import verl"),
        ("analysis/load.py", "import experiments.schema"),
        ("analysis/load.py", "if True:\n    import torch.nn"),
        ("analysis/load.py", "from experiments.recorder import RecordingLearner"),
        ("experiments/recording.py", "import torch"),
        ("experiments/recording_file.py", "from experiments.check import ConfigError"),
        ("benchmarks/a.py", "from run import main"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    (offence,) = offences(Path(path), source)
    assert offence.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("strategies/a.py", "import json\nimport numpy as np\nfrom strategies.types import Rollout"),
        (
            "experiments/loop.py",
            "from experiments.engines.base import Engine\nimport experiments.trainers.base",
        ),
        ("experiments/launch.py", "from experiments.engines.embedded import EmbeddedEngine"),
        ("experiments/trainers/megatron.py", "from megatron.core import parallel_state"),
        ("analysis/load.py", "import pandas\nfrom strategies import types"),
        ("analysis/load.py", "from experiments.recording import read_recording"),
        ("run.py", "from experiments.launch import launch"),
    ],
)
def test_a_permitted_import_is_not(path: str, source: str) -> None:
    assert offences(Path(path), source) == []
