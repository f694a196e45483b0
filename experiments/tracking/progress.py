"""Signs of life on stderr: a bar on a terminal, a line every tenth of the run in a log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from tqdm import tqdm

_LOG = logging.getLogger("experiments.tracking")

_SHOWN = (
    ("ppo_kl", "actor/ppo_kl", ".1e"),
    ("reward", "reward/mean", ".3f"),
    ("lag", "stale/age_mean", ".2f"),
    ("partial", "fully_async/partial/partial_ratio", ".0%"),
)
"""Label, metric key, format."""


class Progress:
    """Shows how far a run is, with the current ppo_kl, reward, version lag and share of partial rollouts."""

    def __init__(self, total: int, done: int, *, enabled: bool):
        """`total` updates of which `done` are behind us. `enabled=False` shows neither bar nor lines."""
        self._total, self._enabled = total, enabled
        terminal = enabled and sys.stderr.isatty()
        self._lines = enabled and not terminal
        self._next_line = done + 1
        self._bar = tqdm(total=total, initial=done, unit="update", disable=not terminal, file=sys.stderr, leave=True)

    def update(self, step: int, row: Mapping[str, float]) -> None:
        """Shows update number `step`; a metric that `row` lacks is shown as `-`."""
        parts = {label: format(row[key], spec) if key in row else "-" for label, key, spec in _SHOWN}
        self._bar.set_postfix(parts, refresh=False)
        self._bar.update(step - self._bar.n if not self._bar.disable else 0)
        if self._lines and (step >= self._next_line or step == self._total):
            _LOG.info("update %d/%d  %s", step, self._total, "  ".join(f"{k} {v}" for k, v in parts.items()))
            self._next_line = step + max(1, self._total // 10)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._bar.close()
