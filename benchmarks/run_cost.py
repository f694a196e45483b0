"""How much longer a run takes with shadow scoring, and under `exact`: `python -m benchmarks.run_cost`.

Makes short runs of the default configuration in turn, in one process, and prints medians and their ratios. The first
run of each kind warms up and is not counted. The time is that of the updates: generation, scoring, training, syncs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import hydra

from experiments import check, schema
from experiments.launch import COMPLETED, Job, launch

CONF = Path(__file__).resolve().parents[1] / "conf"
FOUR = "shadow.strategies=[replace,naive_concat,live,last_segment]"
KINDS = {
    "slice_concat, no shadow scoring": ["strategy=slice_concat", "shadow=off"],
    "slice_concat, the default": ["strategy=slice_concat"],
    "slice_concat, four others scored every update": ["strategy=slice_concat", "shadow.every=1", FOUR],
    "exact, no shadow scoring": ["strategy=exact", "shadow=off"],
}


def _seconds(overrides: list[str], steps: int, threads: int, clock: str) -> float:
    """Returns the seconds of one run's updates; with `clock=cpu` the processor seconds of the whole run."""
    with tempfile.TemporaryDirectory() as folder, hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        fixed = [f"steps={steps}", f"threads={threads}", "tracking=disabled", "tracking.progress=false"]
        node = hydra.compose("config", overrides=[*fixed, *overrides])
        config = check.load(node)
        started = time.process_time()
        job = Job(config, node, overrides[0].split("=")[1], Path(folder) / "run", time.perf_counter(), "benchmark")
        with contextlib.redirect_stdout(io.StringIO()):
            status = launch(job)
        cpu = time.process_time() - started
        if status != COMPLETED:
            raise RuntimeError(f"a run of the benchmark ended with exit code {status}: {overrides}")
        rows = [json.loads(line) for line in (job.run_dir / "timings.jsonl").read_text().splitlines()]
        return cpu if clock == "cpu" else sum(row["time/wall_s"] for row in rows)


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
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(arguments.runs + 1):
        for kind, overrides in KINDS.items():
            took = _seconds(overrides, arguments.steps, arguments.threads, arguments.clock)
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
