"""What router replay costs in a training step: `python -m benchmarks.replay_cost`.

Takes optimiser steps of the default model on the same tokens, in turn with every row replayed and verified, and with
the routers on their own (nothing installed, nothing verified). Checking and packing the rows is charged to replay in
full. Prints medians and the share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from experiments.schema import TrainerConfig
from experiments.trainers.base import ReplayCounts, TokenBatch, TrainSequence
from experiments.trainers.megatron import MegatronTrainer

CONF = Path(__file__).resolve().parents[1] / "conf"
VOCABULARY = 64


class _NoReplay:
    """Stands in for `ModelReplay`: leaves the routers alone."""

    @contextmanager
    def replaying(self, rows: torch.Tensor, fed: torch.Tensor, *, margins: bool = False) -> Iterator[None]:
        yield

    def check_executed(self, calls: int) -> ReplayCounts:
        return ReplayCounts(0, 0, 0)


def _trainer(threads: int) -> tuple[MegatronTrainer, Qwen3MoeConfig]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes: dict[str, Any] = yaml.safe_load((CONF / "model" / "tiny_moe.yaml").read_text())
    rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    kept = {name: value for name, value in sizes.items() if name not in ("name", "checkpoint")}
    config = Qwen3MoeConfig(**kept, vocab_size=VOCABULARY, norm_topk_prob=True, rope_parameters=rope)
    settings = TrainerConfig(**yaml.safe_load((CONF / "trainer" / "megatron.yaml").read_text()))
    weights = Qwen3MoeForCausalLM(config).state_dict()
    return MegatronTrainer(config, weights, settings=settings, temperature=1.0), config


def _live_sequences(config: Qwen3MoeConfig, count: int, shortest: int, longest: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    sequences = []
    for index, length in enumerate(rng.integers(shortest, longest + 1, count).tolist()):
        sequences.append(
            TrainSequence(
                token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                rows=np.full((length - 1, config.num_hidden_layers, config.num_experts_per_tok), -1, np.int16),
                rollout_id=f"r{index}",
                loss_mask=np.arange(length) >= length // 4,
                old_log_probs=np.full(length, -4.0, np.float32),
                advantages=rng.normal(size=length).astype(np.float32),
                weights=np.ones(length, np.float32),
                ref_log_probs=None,
                group=index,
            )
        )
    return sequences


def _loss(batch: TokenBatch) -> torch.Tensor:
    return -((batch.log_probs - batch.old_log_probs).exp() * batch.advantages).mean() / 2


def _ms(work: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return 1e3 * (clock() - start)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="steps of each kind")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=40, help="tokens")
    parser.add_argument("--longest", type=int, default=100, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu (with one thread): steady on a busy machine"
    )
    arguments = parser.parse_args()
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    trainer, config = _trainer(arguments.threads)
    live = _live_sequences(config, arguments.sequences, arguments.shortest, arguments.longest)
    tokens = sum(len(sequence.rows) for sequence in live)
    replay = trainer._replay
    times: dict[str, list[float]] = {"replay": [], "live": [], "rows": []}
    for step in range(arguments.steps + 1):
        trainer._replay = replay
        # The live router's own rows, so that both kinds of step load the experts alike.
        chosen = [score.rows for score in trainer.score(live, routes=True)]
        replayed = [replace(sequence, rows=rows) for sequence, rows in zip(live, chosen, strict=True)]
        took = {"rows": _ms(partial(trainer._micro_batches, replayed, counted_only=True), clock)}
        kinds = [("replay", replayed, replay), ("live", live, _NoReplay())]
        for kind, sequences, in_use in kinds if step % 2 else reversed(kinds):
            trainer._replay = in_use  # pyright: ignore[reportAttributeAccessIssue]
            took[kind] = _ms(partial(trainer.update, sequences, _loss, entropy=False), clock)
        if step:  # the first of each warms up
            for kind, ms in took.items():
                times[kind].append(ms)
    trainer.close()
    median = {name: statistics.median(values) for name, values in times.items()}
    bare = median["live"] - median["rows"]
    print(
        f"{tokens} tokens, {arguments.steps} steps each, {arguments.threads} threads, {arguments.clock} time, medians"
    )
    print(f"step with replay     {median['replay']:8.1f} ms  ({1e3 * tokens / median['replay']:.0f} tokens/s)")
    print(f"step without         {bare:8.1f} ms  (rows neither packed nor installed nor verified)")
    print(f"checking and packing {median['rows']:8.1f} ms")
    print(f"replay costs {100 * (median['replay'] / bare - 1):.1f} % of a step")


if __name__ == "__main__":
    main()
