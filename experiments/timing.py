"""Where the wall time of a run goes: generate, score, train, sync, other; and the share spent inside the two models.

Timings depend on the machine. They are logged under `time/` and never enter `metrics.jsonl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Totals:
    """Seconds since the start, by what they were spent on.

    `models` are the seconds inside forwards and backwards of both models, a part of generate, score and train. Under
    the wall clock generation and training overlap, so that the parts may add up to more than the wall time.
    """

    generate: float
    score: float
    train: float
    sync: float
    models: float
    generated_tokens: int
    trained_tokens: int


class Stopwatch:
    """Turns running totals into one row of timings per update."""

    def __init__(self, totals: Callable[[], Totals], process_started: float):
        """`process_started`: `time.perf_counter()` at the start of the process; from there to here is start-up."""
        self._totals = totals
        self._last = Totals(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
        self._lap_started = time.perf_counter()
        self._startup: dict[str, float] = {"time/startup_s": self._lap_started - process_started}

    def begin(self) -> None:
        """Ends the start-up here instead: an engine has come up meanwhile, which is no part of the first update."""
        now = time.perf_counter()
        self._startup["time/startup_s"] += now - self._lap_started
        self._lap_started = now

    def lap(self) -> dict[str, float]:
        """Returns seconds and tokens since the last lap; `time/other_s` is what no part accounts for (0 where parts
        overlap).

        The first lap also has `time/startup_s`: imports, warm start or its cache, building the models, starting the
        engine.
        """
        now, totals = time.perf_counter(), self._totals()
        generate, score, train, sync, models, generated, trained = (
            new - old for new, old in zip(astuple(totals), astuple(self._last), strict=True)
        )
        wall = now - self._lap_started
        self._last, self._lap_started = totals, now
        startup, self._startup = self._startup, {}
        return {
            **startup,
            "time/wall_s": wall,
            "time/generate_s": generate,
            "time/score_s": score,
            "time/train_s": train,
            "time/sync_s": sync,
            "time/other_s": max(wall - generate - score - train - sync, 0.0),
            "time/models_s": models,
            "time/tokens_per_s": generated / generate if generate > 0 else 0.0,
            "time/trained_tokens_per_s": trained / train if train > 0 else 0.0,
        }
