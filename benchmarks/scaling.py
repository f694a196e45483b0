"""What rows cost at cluster scale: `python -m benchmarks.scaling` prints the tables of docs/scaling.md.

The first three are arithmetic on published sizes; the last is measured here, on rows of the 30B model's shape.

Legend: `T` tokens of a rollout, `C` calls it took (C-1 interruptions at equal distances), `L` layers, `K` experts per
token, `E` experts. A full reply of call k has the rows of all its positions, a delta reply those of its new ones.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.merge_speed import PROMPT, make_rollout
from experiments.recording_file import row_type
from strategies import Exact, Gated, LastSegment, Live, MaskStale, Recompute, Replace, SliceConcat
from strategies.base import needs_new_rows_only
from strategies.types import LIVE, Rollout

MIB, GIB = 2.0**20, 2.0**30


@dataclass(frozen=True)
class Model:
    """Row shape of a model, from its published configuration. `layers` counts dense ones too: engines return them."""

    name: str
    layers: int
    top_k: int
    experts: int

    def row_bytes(self, itemsize: int) -> int:
        """Returns the bytes of one position's row."""
        return self.layers * self.top_k * itemsize


MODELS = (
    Model("Qwen3-30B-A3B", 48, 8, 128),
    Model("Qwen3-235B-A22B", 94, 8, 128),
    Model("Kimi-K2 (1T)", 61, 8, 384),
)

RULES = (
    SliceConcat(),
    Replace(),
    MaskStale(),
    LastSegment(),
    Gated(max_lag=None, max_churn=0.5),
    Live(),
    Recompute(),
    Exact(),
)


def call_ends(tokens: int, calls: int) -> list[int]:
    """Returns the tokens known at the end of each call."""
    return np.linspace(PROMPT, tokens, calls + 1).astype(int)[1:].tolist()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def per_sample(tokens: int, calls: int) -> str:
    """Returns MiB of rows of one rollout, by where they are."""
    rows = []
    for model in MODELS:
        narrow = row_type(model.experts)
        full = sum(call_ends(tokens, calls))
        wire = model.row_bytes(4) * 4 / 3
        rows.append(
            [
                model.name,
                *(f"{tokens * model.row_bytes(size) / MIB:.0f}" for size in (8, 4, 2)),
                f"{tokens * model.row_bytes(narrow.itemsize) / MIB:.0f} ({narrow})",
                f"{full * wire / MIB:.0f}",
                f"{tokens * wire / MIB:.0f}",
                f"{full * model.row_bytes(narrow.itemsize) / MIB:.0f}",
            ]
        )
    head = ["model", "int64 (Megatron's targets)", "int32 (engine)", "int16 (verl's batch)", "narrowest"]
    return table([*head, "wire, full replies", "wire, delta replies", "all calls, narrowest"], rows)


def per_strategy(calls: int) -> str:
    """Returns what a rule asks of the engine and of the trainer, read off its views of a rollout."""
    rollout = make_rollout(16384, 1, 2, calls, "int16")
    rows = []
    for rule in RULES:
        views = rule(rollout)
        lengths = np.array([view.length for view in views]) / rollout.length
        live = all((view.rows == LIVE).all() for view in views)
        replies = "none" if live else "delta" if needs_new_rows_only(rule) else "full"
        cells = [replies, str(len(views)), f"{lengths.sum():.2f}", f"{(lengths**2).sum():.2f}"]
        rows.append([f"`{type(rule).__name__}`", *cells])
    return table(["rule", "replies", "forwards", "tokens fed", "attention"], rows)


def per_update(tokens: int, batch: int, seconds: float) -> str:
    """Returns GiB of rows through Ray for one update of a large cluster."""
    rows = []
    for model in MODELS:
        cells = [f"{batch * tokens * model.row_bytes(size) / GIB:.0f}" for size in (4, 2)]
        narrow = batch * tokens * model.row_bytes(row_type(model.experts).itemsize) / GIB
        rows.append([model.name, *cells, f"{narrow:.0f}", f"{8 * narrow * GIB / seconds / 1e9:.1f}"])
    return table(["model", "int32, GiB", "int16, GiB", "narrowest, GiB", "narrowest, Gbit/s"], rows)


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Returns the median of `rounds` calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measured(rollout: Rollout, rounds: int) -> str:
    """Returns sizes and times of the rows of a real rollout record, by type and by reply."""
    full = [call.rows for call in rollout.calls if call.rows is not None]
    delta = [full[0], *(after[len(before) :] for before, after in itertools.pairwise(full))]
    rows = []
    for name, parts in (("full", full), ("delta", delta)):
        for dtype in (np.int32, np.int16, np.uint8):
            typed = [np.ascontiguousarray(part, dtype=dtype) for part in parts]
            pickled = pickle.dumps(typed, protocol=5)
            encoded = sum(len(base64.b64encode(part)) for part in typed)
            took = milliseconds(lambda typed=typed: pickle.loads(pickle.dumps(typed, protocol=5)), rounds)
            rows.append(
                [f"{name}, {np.dtype(dtype)}", f"{len(pickled) / MIB:.1f}", f"{encoded / MIB:.1f}", f"{took:.1f}"]
            )
    return table(["replies, type", "pickled, MiB", "base64, MiB", "pickled and back, ms"], rows)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048, help="rollouts per update of 512 GPUs")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds per update")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"Rows of one rollout of {args.tokens} tokens in {args.calls} calls, MiB\n")
    print(per_sample(args.tokens, args.calls))
    print(f"\nWhat a rule costs, relative to one forward\n\n{per_strategy(args.calls)}")
    print(f"\nRows of one update of {args.batch} rollouts\n\n{per_update(args.tokens, args.batch, args.seconds)}")
    rollout = make_rollout(args.tokens, MODELS[0].layers, MODELS[0].top_k, args.calls, "int16")
    print(f"\nMeasured: the rows of one such rollout of {MODELS[0].name}\n\n{measured(rollout, args.rounds)}")


if __name__ == "__main__":
    main()
