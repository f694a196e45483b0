"""The server's own Python environment: SGLang's torch and transformers are not those of the base environment.

uv builds it once from the group `sglang-server` of pyproject.toml, in the user's cache folder, under a name that
depends on what the group asks for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from experiments.user_cache import cache_root, locked

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
GROUP = "sglang-server"
COMPLETE = "routemerge-complete"
"""Written last: without it a build was cut short, and is made again."""

OUTPUT_LINES = 20


class EnvironmentBuildError(RuntimeError):
    """The server's environment could not be built."""


def pins() -> dict[str, Any]:
    """Returns what determines the environment: the group's requirements, uv's settings, the Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    uv = project["tool"]["uv"]
    return {
        "requirements": project["dependency-groups"][GROUP],
        "exclude-newer": uv["exclude-newer"],
        "overrides": uv["override-dependencies"],
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def server_python(cache_dir: str | None) -> Path:
    """Returns the Python of the server's environment; builds it (minutes, gigabytes) when it is not cached.

    Raises:
        EnvironmentBuildError: there is no uv, or it failed; the message has its last lines.
    """
    wanted = pins()
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]
    root = cache_root(cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{GROUP}-{key}"
    python = folder / "bin" / "python"
    with locked(root / f"{folder.name}.lock", "SGLang environment"):
        if not (folder / COMPLETE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder, wanted)
            (folder / COMPLETE).write_text(json.dumps(wanted, indent=2) + "\n")
    return python


def _build(folder: Path, wanted: dict[str, Any]) -> None:
    log.warning(
        "SGLang environment: building %s once, from %s (several GB are downloaded; minutes)",
        *(folder, ", ".join(wanted["requirements"])),
    )
    started = time.monotonic()
    command = [*_uv(), "sync", "--only-group", GROUP, "--project", str(ROOT), "--python", sys.executable]
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(folder)}
    environment.pop("VIRTUAL_ENV", None)  # that of the base, which uv would warn about
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-OUTPUT_LINES:])
        raise EnvironmentBuildError(f"`{' '.join(command)}` failed with exit code {result.returncode}:\n{tail}")
    log.warning("SGLang environment: built in %.0f s", time.monotonic() - started)


def _uv() -> list[str]:
    """Returns the command of uv: the one that runs this process, the one on PATH, or the module that pip installs."""
    for candidate in (os.environ.get("UV"), shutil.which("uv")):
        if candidate:
            return [candidate]
    probe = subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False)
    if probe.returncode:
        raise EnvironmentBuildError("uv builds the SGLang environment and is not installed: `pip install uv`")
    return [sys.executable, "-m", "uv"]
