"""How much longer a run takes with shadow scoring, and under `exact`: `python -m benchmarks.run_cost`.

Makes short runs of the default configuration in turn, in one process, and prints medians and their ratios. The first
run of each kind warms up and is not counted. The time is that of the loop: generation, scoring, training, syncs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import hydra

from experiments import check, launch, schema
from experiments.loop import Loop

CONF = Path(__file__).resolve().parents[1] / "conf"
FOUR = "shadow.strategies=[replace,naive_concat,live,last_segment]"
KINDS = {
    "slice_concat, no shadow scoring": ["strategy=slice_concat", "shadow=off"],
    "slice_concat, the default": ["strategy=slice_concat"],
    "slice_concat, four others scored every update": ["strategy=slice_concat", "shadow.every=1", FOUR],
    "exact, no shadow scoring": ["strategy=exact", "shadow=off"],
}


class _TimedLoop(Loop):
    """The loop of a run, which tells how long it took: without imports, warm start and building the models."""

    clock: Callable[[], float] = time.perf_counter
    took = 0.0

    async def run(self) -> None:
        started = _TimedLoop.clock()
        await super().run()
        _TimedLoop.took = _TimedLoop.clock() - started


def _seconds(overrides: list[str], steps: int, threads: int) -> float:
    """Returns the seconds of one run's loop."""
    with tempfile.TemporaryDirectory() as folder, hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        fixed = [f"steps={steps}", f"threads={threads}", "tracking=disabled", "tracking.progress=false"]
        node = hydra.compose("config", overrides=[*fixed, *overrides])
        strategy = overrides[0].split("=")[1]
        job = launch.Job(check.load(node), node, strategy, Path(folder) / "run", time.perf_counter(), "benchmark")
        with contextlib.redirect_stdout(io.StringIO()):
            status = launch.launch(job)
        if status != launch.COMPLETED:
            raise RuntimeError(f"a run of the benchmark ended with exit code {status}: {overrides}")
        return _TimedLoop.took


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each kind")
    parser.add_argument("--steps", type=int, default=15, help="updates of each run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu (with one thread): steady on a busy machine"
    )
    arguments = parser.parse_args()
    schema.register()
    _TimedLoop.clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    launch.Loop = _TimedLoop
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(arguments.runs + 1):
        for kind, overrides in KINDS.items():
            took = _seconds(overrides, arguments.steps, arguments.threads)
            if round_:
                times[kind].append(took)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    first = next(iter(KINDS))
    print(
        f"{arguments.steps} updates, {arguments.runs} runs each, {arguments.threads} threads, {arguments.clock} time, "
        f"medians"
    )
    for kind, seconds in median.items():
        spread = f"{min(times[kind]):.1f} .. {max(times[kind]):.1f}"
        print(f"{kind:<48}{seconds:8.1f} s  ({spread}){seconds / median[first]:8.2f} x")


if __name__ == "__main__":
    main()
