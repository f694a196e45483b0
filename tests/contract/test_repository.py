"""What the repository holds, and what it never holds: long files, paths of a machine, registry hosts, a lock file."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 500

# Written in parts, so that this file passes its own test.
MACHINE_PATHS = re.compile("(?<![\\w.])/(" + "|".join(("home", "root", "Users", "work")) + ")/[\\w.-]+")
REGISTRY_HOSTS = re.compile(
    "|".join(
        re.escape(".".join(parts))
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("anaconda", "org"),
            ("download", "pytorch", "org"),
            ("pypi", "nvidia", "com"),
        )
    )
    + "|[\\w-]*(artifactory|jfrog|nexus|devpi)[\\w-]*\\.[a-z]"
    + "|(index-url|extra-index-url|find-links)\\s*="
)


def tracked_files() -> list[Path]:
    """Returns what git has, or would take with `git add`; every file of an export without git."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def texts() -> list[tuple[Path, str]]:
    found = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            found.append((path.relative_to(ROOT), data.decode("utf-8")))
    return found


def matches(pattern: re.Pattern[str], text: str) -> list[str]:
    return [
        f"{number}: {line.strip()[:100]}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)
    ]


def test_no_source_file_is_longer_than_500_lines() -> None:
    long = {
        str(path): lines
        for path, text in texts()
        if path.suffix in (".py", ".yaml", ".sh", ".toml") and (lines := len(text.splitlines())) > MAX_LINES
    }
    assert long == {}


def test_no_file_names_a_path_of_a_machine_or_a_registry_host() -> None:
    found = {
        str(path): hits
        for path, text in texts()
        if (hits := matches(MACHINE_PATHS, text) + matches(REGISTRY_HOSTS, text))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "cache = '/" + "home/someone/cache'",
        "see /" + "work/main/run.py",
        "url = https://files.python" + "hosted.org/packages",
        "index" + "-url = https://example.com/simple",
        "https://artifactory" + ".example.com/api",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert matches(MACHINE_PATHS, line) + matches(REGISTRY_HOSTS, line)


def test_no_lock_file_is_committed() -> None:
    assert [path for path in tracked_files() if path.name == "uv.lock"] == []


@pytest.mark.parametrize("name", ["strategies", "experiments", "analysis"])
def test_the_generic_package_names_are_ours(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / name
