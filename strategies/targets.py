"""Finds strategies by the name of a YAML in conf/strategy or by a class path; without Hydra, for a quick start-up."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategies.base import MergeStrategy

CONF_DIR = Path(__file__).parent.parent / "conf" / "strategy"
"""Folder of the strategies' configurations."""


class TargetError(ValueError):
    """A target that cannot be found or built; the message says what to do."""


@dataclass(frozen=True)
class StrategyConfig:
    """One strategy YAML.

    Attributes:
        name: name of the file.
        target: class path.
        arguments: of the constructor.
        summary: what the comment lines say about rows, loss, exact when, used by.
        nested: the first line that is not a flat `key: value`, which only Hydra can read; None: there is none.
    """

    name: str
    target: str
    arguments: Mapping[str, Any]
    summary: Mapping[str, str]
    nested: str | None


def read_config(path: Path) -> StrategyConfig:
    """Returns what a strategy YAML says.

    Raises:
        TargetError: it has no `_target_`.
    """
    values: dict[str, Any] = {}
    nested: str | None = None
    summary: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            summary |= dict(re.findall(r"(rows|loss|exact when|used by): ([^;]+)", text))
        elif text and text != "---":
            match = re.fullmatch(r"([A-Za-z_]\w*):\s+(.+?)(?:\s+#.*)?", line)
            if match:
                values[match[1]] = parse_value(match[2])
            else:
                nested = nested or line
    target = values.pop("_target_", None)
    if not isinstance(target, str):
        raise TargetError(f"{path}: a line `_target_: package.module.Class` expected, none came")
    return StrategyConfig(path.stem, target, values, summary, nested)


def parse_value(text: str) -> Any:
    """Returns a scalar as YAML reads it: null, true, false, a number, a quoted or a plain string."""
    words = {"null": None, "~": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def all_configs() -> list[StrategyConfig]:
    """Returns every strategy found on disk, by name.

    Raises:
        TargetError: the folder is not there.
    """
    if not CONF_DIR.is_dir():
        raise TargetError(f"{CONF_DIR}: the folder of strategy configurations expected, it is not there")
    return [read_config(path) for path in sorted(CONF_DIR.glob("*.yaml"))]


def find(target: str) -> tuple[str | None, str, Mapping[str, Any]]:
    """Returns the rule's name, class path and configured arguments of a target.

    A class path has the name of the YAML that configures the class without arguments, None when there is none.

    Raises:
        TargetError: no YAML of that name, or one with nested arguments.
    """
    configs = all_configs()
    if "." in target or ":" in target:
        path = target.replace(":", ".")
        same = [
            config.name for config in configs if config.target == path and not config.arguments and not config.nested
        ]
        return (same[0] if same else None), path, {}
    for config in configs:
        if config.name == target:
            if config.nested is not None:
                raise TargetError(
                    f"conf/strategy/{target}.yaml: flat `key: value` lines expected, {config.nested!r} came; "
                    "give the class path and key=value arguments instead"
                )
            return config.name, config.target, config.arguments
    names = ", ".join(config.name for config in configs)
    raise TargetError(f"strategy {target!r}: one of {names}, or a class path package.module.Class expected")


def load_class(path: str) -> type:
    """Returns the class at `package.module.Class`.

    Raises:
        TargetError: module or class cannot be found.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TargetError(f"class {path}: it cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    if not isinstance(found, type):
        raise TargetError(f"class {path}: a class expected, {type(found).__name__} came")
    return found


def build(path: str, arguments: Mapping[str, Any]) -> MergeStrategy:
    """Returns the strategy at a class path, built with `arguments`.

    Raises:
        TargetError: arguments that do not fit the constructor, or a class without `single_view` or `__call__`.
    """
    cls = load_class(path)
    try:
        strategy: Any = cls(**arguments)
    except (TypeError, ValueError) as error:
        raise TargetError(f"{path}{inspect.signature(cls)}: {error}; give arguments as key=value") from error
    if not isinstance(strategy, MergeStrategy) or not isinstance(strategy.single_view, bool):
        raise TargetError(
            f"{path}: a merge strategy has `single_view: bool` and `__call__(rollout)` (strategies/base.py)"
        )
    return strategy
