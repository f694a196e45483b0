"""Stand-in for SGLang's CUDA kernel library on hosts without CUDA: every op raises when it is called.

SGLang imports names of `sgl_kernel` and of its submodules in many places, most of which a CPU never reaches. Types that
are needed at import come from the installed library, whose Python files load anywhere.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

DISTRIBUTION = "sglang-kernel"
LOADED_FROM_DISTRIBUTION = ("sgl_kernel.scalar_type",)  # plain Python: types that quantisation layers use at import

__version__ = importlib.metadata.version(DISTRIBUTION)


def _op(module: str, name: str) -> Callable[..., NoReturn]:
    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{module}.{name} needs CUDA; this host has none")

    unavailable.__name__ = name
    return unavailable


class _Ops(ModuleType):
    """A submodule whose every public name is an op that raises."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _op(self.__name__, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every `sgl_kernel.*`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel."):
            return None
        if fullname in LOADED_FROM_DISTRIBUTION:
            file = importlib.metadata.distribution(DISTRIBUTION).locate_file(fullname.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(fullname, Path(str(file)))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Ops(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names appear when they are asked for."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _op(__name__, name)


sys.meta_path.insert(0, _Submodules())
from sgl_kernel.scalar_type import ScalarType as ScalarType  # noqa: E402
from sgl_kernel.scalar_type import scalar_types as scalar_types  # noqa: E402
