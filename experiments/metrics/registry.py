"""All metrics of the project. A key that is not declared here is a mistake: `undeclared` finds it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from experiments.metrics import ratio_keys, route_keys
from experiments.metrics.metric import Metric

METRICS: tuple[Metric, ...] = tuple(
    value for module in (ratio_keys, route_keys) for value in vars(module).values() if isinstance(value, Metric)
)

_DECLARED = re.compile("|".join(metric.pattern() for metric in METRICS))


def undeclared(keys: Iterable[str]) -> list[str]:
    """Returns the keys that no metric declares, sorted."""
    return sorted(key for key in keys if not _DECLARED.fullmatch(key))
