"""What a metric is: a key with its definition, the splits and the strategies it is logged by.

Two suffix and scope rules keep the set bounded:

* **Split.** A metric with splits is also logged as `<key>_by_<split>/<label>`: `gap/abs_by_segment/last`,
  `gap/abs_by_lag/1`, `actor/ppo_kl_by_versions/multi`, `actor/ppo_kl_by_mini_step/first`. An empty bucket is
  missing, never 0.
* **Strategy.** A metric that shadow scoring also computes puts the strategy after the group: `gap/replace/abs`,
  `ppo_ratio/replace/ess_raw`. Metrics that exist under a strategy only have `{strategy}` in their key:
  `merge/replace/abs`.

The keys themselves are in `ratio_keys.py` and `route_keys.py`; `docs/metrics.md` is generated from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SEGMENTS = ("first", "middle", "last", "only")
LAGS = ("0", "1", "2", "3-4", "5-8", "9plus")
BOUNDARIES = (
    "before_64_17",
    "before_16_4",
    "before_3_1",
    "after_0",
    "after_1_3",
    "after_4_15",
    "after_16_63",
    "after_64plus",
)
VERSIONS = ("single", "multi")
MINI_STEPS = ("first", "last")
DECILES = tuple(str(decile) for decile in range(10))
SOURCES = ("live_before", "live_after")

SPLITS: dict[str, tuple[str, ...]] = {
    "segment": SEGMENTS,
    "lag": LAGS,
    "versions": VERSIONS,
    "boundary": BOUNDARIES,
    "prob": DECILES,
    "mini_step": MINI_STEPS,
    "source": SOURCES,
}
"""Labels of every split. `versions`: of the token's rollout. `lag`: trainer version minus the token's version."""

PERCENTILES = ("0.1", "1", "5", "25", "50", "75", "95", "99", "99.9")

PLACEHOLDERS: dict[str, str] = {
    "strategy": r"[A-Za-z][\w.-]*",
    "ratio": "gap_ratio|ppo_ratio",
    "q": "|".join(map(re.escape, PERCENTILES)),
    "segments": "1|2|3|4plus",
    "part": "stale|merge|engine",
    "pair": "stale_merge|stale_engine|merge_engine",
    "layer": r"\d+",
    "reason": "[a-z_]+",
    "work": "[a-z_]+",
}
"""Values that the other placeholders of a key may take, as regular expressions."""

TOKEN_SPLITS = ("segment", "lag", "versions")
"""Splits of the main token statistics."""


class Metric(str):
    """A metric: the string is its key, possibly with placeholders; the attributes define it.

    Attributes:
        formula: definition in plain text.
        unit: `nats`, `1` (dimensionless), `tokens`, `versions`, `s` or a count.
        values: values that are possible.
        averaging: `mean` (numerator and denominator add up), `SS` (sufficient statistics, finalised once per step),
            `ext` (max or min), `count` (adds up), `value` (one value per step), `text`.
        source: where the definition comes from.
        in_verl: the key is verl's.
        healthy: what a healthy run shows, and when to worry.
        splits: names of SPLITS by which it is also logged.
        shadow: also logged per strategy by shadow scoring.
    """

    formula: str
    unit: str
    values: str
    averaging: str
    source: str
    in_verl: bool
    healthy: str
    splits: tuple[str, ...]
    shadow: bool

    def __new__(
        cls,
        key: str,
        formula: str,
        unit: str,
        values: str,
        averaging: str,
        *,
        source: str = "ours",
        in_verl: bool = False,
        healthy: str = "",
        splits: tuple[str, ...] = (),
        shadow: bool = False,
    ) -> Metric:
        self = super().__new__(cls, key)
        self.formula, self.unit, self.values, self.averaging = formula, unit, values, averaging
        self.source, self.in_verl, self.healthy, self.splits, self.shadow = source, in_verl, healthy, splits, shadow
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickles and copies as the plain key: metrics travel between processes, definitions do not."""
        return str, (str(self),)

    def by(self, split: str, label: str) -> str:
        """Returns the key of one bucket.

        Raises:
            KeyError: the metric has no such split, or the split no such label.
        """
        if split not in self.splits or label not in SPLITS[split]:
            raise KeyError(
                f"metric {str(self)!r} has no bucket {label!r} of split {split!r}; it has splits {self.splits}"
            )
        return f"{self}_by_{split}/{label}"

    def pattern(self) -> str:
        """Returns a regular expression of all keys of this metric."""
        group, _, rest = self.partition("/")
        scope = rf"(?:{PLACEHOLDERS['strategy']}/)?" if self.shadow else ""
        text = f"{_expand(group)}/{scope}{_expand(rest)}"
        buckets = "|".join(f"{split}/(?:{'|'.join(map(re.escape, SPLITS[split]))})" for split in self.splits)
        return text + (f"(?:_by_(?:{buckets}))?" if buckets else "")


def _expand(template: str) -> str:
    """Returns the template as a regular expression."""
    parts = re.split(r"\{(\w+)\}", template)
    return "".join(f"(?:{PLACEHOLDERS[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


def under_strategy(metrics: Mapping[str, float], strategy: str) -> dict[str, float]:
    """Returns the metrics with `strategy` after the group of every key, as in `gap/replace/abs`."""
    return {"/".join((key.partition("/")[0], strategy, key.partition("/")[2])): value for key, value in metrics.items()}
