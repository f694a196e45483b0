"""Keeps the record of a cluster run: the same files and the same W&B run as the local loop's.

`start.py` makes it a Ray actor on the node where run.py was started, so that the run directory and the W&B login are
those of that node, wherever verl's trainer runs. Imports no verl and no Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.tracking import Tracker
from experiments.tracking.tracker import Status
from experiments.verl_backend.cycle import sort_values


class Recorder:
    """One run's `Tracker`, fed with a row per weight sync."""

    def __init__(self, open_tracker: Callable[[], Tracker]):
        """`open_tracker` is called here, in the process that keeps the record: a tracker does not travel."""
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        self._tracker = open_tracker()

    def ready(self) -> None:
        """Returns when the record is open; what `Tracker` raised comes out of this call."""

    def log(self, step: int, values: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Records one sync.

        Args:
            step: updates made so far.
            values: verl's and ours; those of the registry go to the files, verl's others to W&B alone.
            lines: of shadow scoring (experiments/shadow_report.py).

        Raises:
            RuntimeError: a value of the registry is not finite.
        """
        metrics, timings, others = sort_values(dict(values))
        self._tracker.log(step, metrics, timings, lines, others)

    def finish(self, status: Status, error: str | None) -> dict[str, Any]:
        """Ends the record and returns its summary."""
        return self._tracker.finish(status, error)
