"""The one place that imports reasoning_gym: without pycosat, and without its SyntaxWarnings reaching the user.

reasoning_gym imports pycosat at its top although only `zebra_puzzles` uses it; pycosat has no wheel, so that a machine
without a C compiler could not import any dataset. Importing one dataset alone imports the whole package all the same.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class MissingModule(ModuleType):
    """A stand-in for a package that is not installed: it can be imported; the first use of it raises ImportError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system probes these
            raise AttributeError(name)
        raise ImportError(
            f"{self.__name__}.{name} is needed by this dataset, but {self.__name__} is not installed: "
            f"install it (`uv pip install {self.__name__}`, needs a C compiler) or take another dataset"
        )


def _import_reasoning_gym() -> ModuleType:
    """Returns the reasoning_gym package; a stand-in for a missing pycosat is visible to it alone."""
    missing = find_spec("pycosat") is None
    if missing:
        sys.modules["pycosat"] = MissingModule("pycosat")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes, reported when its sources are compiled
            import reasoning_gym
    finally:
        if missing:
            del sys.modules["pycosat"]
    return reasoning_gym


reasoning_gym = _import_reasoning_gym()
