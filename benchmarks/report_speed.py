"""How long a report takes once the runs are loaded: `python -m benchmarks.report_speed`.

By default of 100 runs of 10,000 updates and 60 metrics.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.load import SEGMENT_COLUMNS
from analysis.report.charts import AGE, ESS, F2, GAP, PARTIAL, PERCENTILES, PPO_KL, REWARD
from analysis.report.command import write
from analysis.report.content import report
from analysis.report.evidence import Evidence
from analysis.runs import Runs

ARMS = ("replace", "slice_concat", "naive_concat", "exact")
SHOWN = (
    PPO_KL,
    GAP,
    ESS,
    F2,
    REWARD,
    AGE,
    PARTIAL,
    *PERCENTILES,
    *(f"route/churn_layer/{layer}" for layer in range(4)),
)


def synthetic(runs: int, steps: int, keys: int) -> Runs:
    """Returns runs of all ARMS with random curves under the keys that the report shows, and others up to `keys`."""
    generator = np.random.default_rng(0)
    names = [f"{ARMS[index % len(ARMS)]}-s{index // len(ARMS)}" for index in range(runs)]
    arm = np.repeat([index % len(ARMS) for index in range(runs)], steps)
    columns = [*SHOWN, *(f"other/{index}" for index in range(keys - len(SHOWN)))][:keys]
    table = pd.DataFrame(np.exp(generator.normal(size=(runs * steps, len(columns)))) / 100, columns=columns)
    table.insert(0, "run", pd.Categorical.from_codes(np.repeat(np.arange(runs), steps), categories=names))
    table.insert(1, "strategy", pd.Categorical.from_codes(arm, categories=list(ARMS)))
    table.insert(2, "seed", np.repeat([index // len(ARMS) for index in range(runs)], steps))
    table.insert(3, "step", np.tile(np.arange(1, steps + 1), runs))
    facts = {"status": "completed", "steps": steps, "planned": steps, "experiment": "synthetic", "seconds": 60.0}
    rows = [{"run": name, "strategy": name.rsplit("-s", 1)[0], "seed": int(name.rsplit("-s", 1)[1]), **facts}
            for name in names]  # fmt: skip
    return Runs(
        history=table,
        runs=pd.DataFrame(rows).set_index("run"),
        configs={name: {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2} for name in names},
        versions={name: {"torch": "2.11.0"} for name in names},
        segments=pd.DataFrame(columns=["run", *SEGMENT_COLUMNS]),
        excluded=pd.DataFrame(columns=["run", "where", "reason"]),
    )


def main() -> None:
    """Prints the seconds of each part, and the size of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("runs", 100), ("steps", 10_000), ("keys", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    runs = synthetic(arguments.runs, arguments.steps, arguments.keys)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter(), time.process_time()
        evidence = Evidence.of(runs, None)
        print(f"statistics {time.perf_counter() - begin[0]:.1f} s")
        found = report(evidence, "python -m benchmarks.report_speed")
        print(f"and figures {time.perf_counter() - begin[0]:.1f} s")
        write(found, Path(folder))
        print(f"in all {time.perf_counter() - begin[0]:.1f} s ({time.process_time() - begin[1]:.1f} s of CPU time)")
        print(f"page {Path(folder, 'report.html').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
