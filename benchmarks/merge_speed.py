"""Merge speed of a long rollout, against one copy of the final matrix and against verl's way.

`python -m benchmarks.merge_speed` prints medians in ms for 32k tokens, 48 layers, top-8, 16 calls. verl's way joins
with one concatenate per call, so it copies what it already holds again at every call. Rounds are interleaved and their
order rotates, so that neither a slow moment of the machine nor what ran just before favours one of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from strategies import EngineCall, MergeStrategy, Replace, Rollout, SliceConcat
from strategies.types import Rows

PROMPT = 1024
EXPERTS = 128


def make_rollout(tokens: int, layers: int, top_k: int, calls: int, dtype: str) -> Rollout:
    """Returns a rollout that was interrupted at equal distances, every call with full rows."""
    random = np.random.default_rng(0)
    ends = np.linspace(PROMPT, tokens, calls + 1).astype(int)
    pool = np.argsort(random.random((4096, EXPERTS)), axis=-1)[:, :top_k].astype(dtype)  # distinct ids per cell
    recorded = []
    for index, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        recorded.append(
            EngineCall(
                request_id=f"bench.{index}",
                input_len=start,
                output_ids=np.zeros(end - start, np.int32),
                log_probs=np.full(end - start, -1.0, np.float32),
                rows=pool[random.integers(0, len(pool), (end - 1, layers))],
                versions=np.full(end - start, index, np.int32),
                finish="abort",
            )
        )
    return Rollout("bench", np.zeros(tokens, np.int32), PROMPT, tuple(recorded), layers, top_k, EXPERTS)


def concatenate_per_call(rollout: Rollout) -> Rows:
    """Returns the rows of `slice_concat`, joined as verl does: after each call, what is held plus its last rows."""
    held: Rows | None = None
    for call in rollout.calls:
        assert call.rows is not None
        held = call.rows if held is None else np.concatenate([held, call.rows[-call.new_tokens :]])
    assert held is not None
    return held


def milliseconds(work: Callable[[], object]) -> float:
    """Returns how long one call of `work` took."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def measure(rollout: Rollout, rounds: int) -> dict[str, float]:
    """Returns the median ms of every contestant, after checking that ours and verl's way give the same matrix."""
    slices: MergeStrategy = SliceConcat()
    final = slices(rollout)[0].rows
    if not np.array_equal(final, concatenate_per_call(rollout)):
        raise RuntimeError("merge_speed: slice_concat and one concatenate per call disagree")
    contestants: dict[str, Callable[[], object]] = {
        "copy of the final matrix": final.copy,
        "slice_concat": lambda: slices(rollout),
        "replace": lambda: Replace()(rollout),
        "one concatenate per call": lambda: concatenate_per_call(rollout),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for _ in range(rounds):
        order = order[1:] + order[:1]
        for name in order:
            times[name].append(milliseconds(contestants[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Prints the table of one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--dtype", default="int16")
    parser.add_argument("--rounds", type=int, default=16)
    args = parser.parse_args()
    rollout = make_rollout(args.tokens, args.layers, args.top_k, args.calls, args.dtype)
    medians = measure(rollout, args.rounds)
    base = medians["copy of the final matrix"]
    size = (args.tokens - 1) * args.layers * args.top_k * np.dtype(args.dtype).itemsize / 2**20
    print(
        f"{args.tokens} tokens, {args.layers} layers, top-{args.top_k}, {args.calls} calls, {args.dtype}: "
        f"{size:.1f} MiB"
    )
    for name, median in medians.items():
        print(f"{name:26s} {median:8.2f} ms  {median / base:5.2f} x copy")


if __name__ == "__main__":
    main()
