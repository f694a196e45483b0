"""The plan of a study, declared before its runs: arms, seeds, primary comparisons and when a run has collapsed.

What a plan does not declare is exploratory (study.py). `analysis/plans/` holds the plans of this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from analysis.scalars import REDUCTIONS

ALPHA = 0.05

Kind = Literal["above", "below", "below_share_of_running_max"]
_KINDS: tuple[Kind, ...] = ("above", "below", "below_share_of_running_max")


@dataclass(frozen=True)
class Comparison:
    """One primary comparison: `a` minus `b` of a metric, one scalar per run."""

    metric: str
    reduce: str
    a: str
    b: str


@dataclass(frozen=True)
class Criterion:
    """A run that meets it has collapsed.

    Attributes:
        name: as the plan calls it.
        metric: key that it reads.
        kind: the value lies above or below `threshold`, or below `threshold` times its running maximum.
        threshold: in the unit of the metric, or a share.
        updates: consecutive updates (of those that logged the metric) for which it must hold.
    """

    name: str
    metric: str
    kind: Kind
    threshold: float
    updates: int


# R3 (arXiv 2510.11370) measures F(2) between the probabilities of trainer and engine: that is `gap_ratio`.
_METRIC_OF_CRITERION = {"reward": "reward/mean", "F2": "gap_ratio/F2"}

CRITERIA = (
    Criterion("reward", "reward/mean", "below_share_of_running_max", 0.5, 20),
    Criterion("F2", "gap_ratio/F2", "above", 0.1, 5),
)
"""Used where no plan declares others. A metric that is not finite is a collapse under any plan."""


@dataclass(frozen=True)
class Plan:
    """What a study compares.

    Attributes:
        arms: strategies, the reference of secondary comparisons first.
        seeds: paired seeds of every arm.
        primary: the declared family of tests.
        alpha: family-wise error rate.
        collapse: criteria of collapse.
    """

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    primary: tuple[Comparison, ...]
    alpha: float = ALPHA
    collapse: tuple[Criterion, ...] = CRITERIA

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Returns the plan in the YAML file `path`.

        Raises:
            ValueError: the file cannot be read, or a key is missing, unknown or of the wrong kind; names file and key.
        """
        path = Path(path)
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); expected the YAML plan of a study") from error
        try:
            return _plan(tree)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _plan(tree: Any) -> Plan:
    node = _mapping(tree, "the plan", required={"arms", "seeds", "primary"}, optional={"alpha", "collapse"})
    arms = _distinct(node["arms"], "arms", str)
    alpha = node.get("alpha", ALPHA)
    if not isinstance(alpha, float) or not 0 < alpha < 1:
        raise ValueError(f"`alpha`: expected a number between 0 and 1, got {alpha!r}")
    if not isinstance(node["primary"], list) or not node["primary"]:
        raise ValueError(f"`primary`: expected a list of metrics with `pairs`, got {node['primary']!r}")
    primary = [
        comparison
        for index, entry in enumerate(node["primary"])
        for comparison in _comparisons(entry, f"primary[{index}]", arms)
    ]
    if len({(each.metric, each.reduce, frozenset((each.a, each.b))) for each in primary}) < len(primary):
        raise ValueError("`primary`: a comparison stands there twice; Holm would count it twice")
    collapse = CRITERIA
    if "collapse" in node:
        if not isinstance(node["collapse"], dict):
            raise ValueError(f"`collapse`: expected criteria by name, got {node['collapse']!r}")
        collapse = tuple(_criterion(str(name), entry) for name, entry in node["collapse"].items())
    return Plan(arms, _distinct(node["seeds"], "seeds", int), tuple(primary), alpha, collapse)


def _comparisons(entry: Any, where: str, arms: tuple[str, ...]) -> list[Comparison]:
    node = _mapping(entry, f"`{where}`", required={"metric", "reduce", "pairs"})
    if not isinstance(node["reduce"], str) or node["reduce"] not in REDUCTIONS:
        raise ValueError(f"`{where}.reduce`: expected one of {', '.join(REDUCTIONS)}, got {node['reduce']!r}")
    if not isinstance(node["metric"], str):
        raise ValueError(f"`{where}.metric`: expected a key of docs/metrics.md, got {node['metric']!r}")
    pairs = node["pairs"]
    if not isinstance(pairs, list) or not pairs:
        raise ValueError(f"`{where}.pairs`: expected a list of pairs of arms, got {pairs!r}")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1] or any(arm not in arms for arm in pair):
            raise ValueError(f"`{where}.pairs`: expected two different ones of the arms {', '.join(arms)}, got {pair}")
    return [Comparison(node["metric"], node["reduce"], a, b) for a, b in pairs]


def _criterion(name: str, entry: Any) -> Criterion:
    where = f"`collapse.{name}`"
    node = _mapping(entry, where, required={"updates"}, optional={"metric", *_KINDS})
    kinds: list[Kind] = [kind for kind in _KINDS if kind in node]
    if len(kinds) != 1:
        raise ValueError(f"{where}: expected exactly one of {', '.join(_KINDS)}, got {', '.join(kinds) or 'none'}")
    metric = node.get("metric", _METRIC_OF_CRITERION.get(name))
    if not isinstance(metric, str):
        known = ", ".join(_METRIC_OF_CRITERION)
        raise ValueError(f"{where}: needs `metric`, a key of docs/metrics.md (known without one: {known})")
    threshold, updates = node[kinds[0]], node["updates"]
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise ValueError(f"{where}: `{kinds[0]}`: expected a number, got {threshold!r}")
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 1:
        raise ValueError(f"{where}: `updates`: expected a number of updates, 1 or more, got {updates!r}")
    return Criterion(name, metric, kinds[0], float(threshold), updates)


def _mapping(node: Any, where: str, required: set[str], optional: set[str] | None = None) -> Mapping[str, Any]:
    known = required | (optional or set())
    if not isinstance(node, dict):
        raise ValueError(f"{where}: expected a mapping with {', '.join(sorted(known))}, got {node!r}")
    missing, unknown = sorted(required - node.keys()), sorted(map(str, node.keys() - known))
    if missing or unknown:
        problems = [f"no `{key}`" for key in missing] + [f"unknown key `{key}`" for key in unknown]
        raise ValueError(f"{where}: {', '.join(problems)}; expected {', '.join(sorted(known))}")
    return node


def _distinct[T](values: Any, key: str, kind: type[T]) -> tuple[T, ...]:
    if not isinstance(values, list) or not values or any(type(value) is not kind for value in values):
        raise ValueError(f"`{key}`: expected a list of {kind.__name__}, got {values!r}")
    if len(set(values)) < len(values):
        raise ValueError(f"`{key}`: expected each value once, got {values}")
    return tuple(values)
