"""Tests against verl's own classes, on a CPU. They run in the environment of the extra `verl` (docs/verl.md)."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["test_*.py"]
elif not Path("/proc/driver/nvidia").is_dir():  # SGLang's kernels need libcuda; the stand-in lets it be imported
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "engines" / "sglang" / "cpu_support"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/verl/" in item.path.as_posix():
            item.add_marker(pytest.mark.verl)
            item.add_marker(pytest.mark.slow)
