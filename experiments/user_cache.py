"""The user's cache folder, by the XDG base directory specification, and a lock for what is built there once."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


def cache_root(cache_dir: str | None) -> Path:
    """Returns `cache_dir`, or routemerge's folder in the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "routemerge"


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds an exclusive lock on `path`; `what` names in the log what another process is preparing.

    The kernel releases the lock when its holder dies, so that no lock goes stale.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process is preparing it; waiting for %s", what, path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
