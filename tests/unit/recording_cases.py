"""Random batches with everything that a recording must keep, and a recording on disk."""

from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from experiments.buffer import Sample
from experiments.recorder import RecordingLearner, start_recording
from strategies.types import EngineCall, Rollout
from tests.conftest import compose

LAYERS, TOP_K = 2, 3


def random_call(rng, request_id, input_len, experts, dtype, newest):
    new = int(rng.integers(0, 4))
    row_start = int(rng.integers(0, input_len)) if rng.random() < 0.5 else 0
    positions = max(input_len + new - 1 - row_start, 0)
    log_probs = -rng.random(new).astype(np.float32)
    log_probs[rng.random(new) < 0.3] = np.nan

    def rows(count):
        return rng.integers(0, experts, (count, LAYERS, TOP_K)).astype(dtype)

    return EngineCall(
        request_id=request_id,
        input_len=input_len,
        output_ids=rng.integers(0, 99, new).astype(np.int32),
        log_probs=log_probs,
        rows=None if rng.random() < 0.3 else rows(positions),
        versions=rng.integers(-1, newest + 1, new).astype(np.int32),
        finish=str(rng.choice(["stop", "length", "abort"])),
        row_start=row_start,
        kv_kept=bool(rng.random() < 0.5),
        mixed_rows=bool(rng.random() < 0.5),
        surplus=None if rng.random() < 0.5 else rows(1),
    )


def random_samples(seed, *, number=6, experts=16, dtype=np.int16, newest=4):
    """Returns rollouts of weight versions up to `newest` with every flag, calls without tokens, without rows, with
    delta rows; one has no call.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(number):
        tokens = rng.integers(0, 99, int(rng.integers(1, 4))).astype(np.int32)
        prompt_len = len(tokens)
        calls = []
        for place in range(int(rng.integers(0, 5)) if index else 0):
            call = random_call(rng, f"r{index}.{place}", len(tokens), experts, dtype, newest)
            calls.append(call)
            tokens = np.concatenate([tokens, call.output_ids])
        rollout = Rollout(f"r{index}", tokens, prompt_len, tuple(calls), LAYERS, TOP_K, experts, trainer_version=4)
        samples.append(Sample(rollout, index // 2, f"dätaset {index % 2}", float(rng.random()), index, 2 * index))
    return samples


def differences(ours, theirs, path=""):
    """Returns the dotted names of all fields that differ, by value and, rows aside, by type."""
    if is_dataclass(ours):
        pairs = [(f.name, getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours)]
        return [d for name, a, b in pairs for d in differences(a, b, f"{path}.{name}")]
    if isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return [path]
        return [d for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for d in differences(a, b, f"{path}[{i}]")]
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        narrowed = path.endswith((".rows", ".surplus"))
        same_type = theirs.dtype.kind == "i" if narrowed else ours.dtype == theirs.dtype  # may hold live rows
        same = same_type and np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
        return [] if same else [path]
    return [] if ours == theirs and type(ours) is type(theirs) else [path]


class Weights:
    """A trainer's weights: the number of the update that they wait for."""

    def __init__(self):
        self.value = 0.0

    def weights(self):
        return {"w": torch.full((2, 2), self.value)}


class Learner:
    """Takes no update but moves the weights, and remembers what it was given."""

    def __init__(self, trainer):
        self._trainer = trainer
        self.seen = []

    def step(self, step, samples, version):
        self.seen.append((step, samples, version))
        self._trainer.value += 1.0


@cache
def configuration():
    """Returns the default configuration as a run records it."""
    return OmegaConf.to_container(compose("strategy=replace"), resolve=True, enum_to_str=True)


def record(run_dir: Path, *, updates=4, sync_interval=1, first=0):
    """Records `updates` batches as a run would, from update `first` on; returns the batches."""
    start = {"step": first, "version": first // sync_interval, "model": {"model_type": "qwen3_moe"}}
    folder = start_recording(run_dir, strategy="replace", config=configuration(), **start)
    trainer = Weights()
    trainer.value = float(first)
    recorder = RecordingLearner(
        Learner(trainer), trainer=trainer, folder=folder, sync_interval=sync_interval, normalize_advantages=True
    )
    batches = [random_samples(step, newest=step // sync_interval) for step in range(first, updates)]
    for step, batch in zip(range(first, updates), batches, strict=True):
        recorder.step(step, batch, step // sync_interval)
    return batches
