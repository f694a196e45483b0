"""Seconds that `analysis.runs.load_runs` takes for run directories as the project writes them.

`uv run python -m benchmarks.load_runs` writes 100 runs of 10,000 updates and 60 keys (3 GB of JSON lines, in a
temporary folder) and loads them: with the tables that completed runs leave, without them (JSON lines), and, for one run
scaled to all, as json.loads and pandas would. The files are in the page cache, since they were just written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from analysis.runs import load_runs
from experiments.tracking import run_folder
from experiments.tracking.run_folder import JsonLines

_DISTINCT = 4
"""Runs with numbers of their own; the others are copies, which load no faster."""


def main() -> None:
    """Prints one line per way to load."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_runs", description=__doc__)
    for name, default in (("runs", 100), ("steps", 10_000), ("keys", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dir", type=Path, help="where to write the runs; default: the system's temporary folder")
    size = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=size.dir) as name:
        folder = Path(name)
        for seed in range(size.runs):
            _write_run(folder, seed, size.steps, size.keys)
        print(
            f"{size.runs} runs of {size.steps} updates and {size.keys} keys, {_gigabytes(folder):.1f} GB of JSON lines"
        )
        table = _timed("load_runs, tables of completed runs", lambda: load_runs(folder).history)
        for path in folder.glob("*/history.parquet"):
            path.unlink()
        lines = _timed("load_runs, JSON lines", lambda: load_runs(folder).history)
        pd.testing.assert_frame_equal(table, lines)
        text = folder / "seed0" / "metrics.jsonl"
        _timed("json.loads and pandas, scaled", lambda: _with_json(text), size.runs)
        _timed("pandas.read_json, scaled", lambda: pd.read_json(text, lines=True), size.runs)


def _write_run(folder: Path, seed: int, steps: int, keys: int) -> None:
    """Writes a completed run; its keys are as long as the project's own (29 characters on average)."""
    run = folder / f"seed{seed}"
    if seed >= _DISTINCT:
        shutil.copytree(folder / f"seed{seed % _DISTINCT}", run)
    else:
        (run / ".hydra").mkdir(parents=True)
        names = [f"group/statistic_by_segment/{key:02}" for key in range(keys)]
        values = np.random.default_rng(seed).normal(size=(steps, keys)) * 10.0 ** np.linspace(-6, 1, keys)  # [N, M]
        files = [JsonLines(run / f"{name}.jsonl", None) for name in ("metrics", "timings")]
        for step, row in enumerate(values.tolist(), start=1):
            files[0].append(step, dict(zip(names, row, strict=True)))
            files[1].append(step, {"time/wall_s": float(step)})
        for file in files:
            file.close()
        run_folder.write_table(run / "history.parquet", *files)
        known = run_folder.summarise(*files)
        (run / "summary.json").write_text(json.dumps({"status": "completed", "strategy": "replace", "metrics": known}))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "seed": seed}))
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "steps": steps}))


def _gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*/*.jsonl")) / 1e9


def _timed(label: str, load: Callable[[], Any], scale: int = 1) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = load()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{label:<40} {wall * scale:8.2f} s   {cpu * scale:8.2f} CPU s", flush=True)
    return result


def _with_json(path: Path) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


if __name__ == "__main__":
    main()
