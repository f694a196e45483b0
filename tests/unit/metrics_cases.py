"""Rollouts and views for the metric tests: real records, random numbers, no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.metrics.tokens import TokenTable
from experiments.schema import AlgorithmConfig, RatioLevel
from strategies.types import EngineCall, ReplayView, Rollout

LAYERS, TOP_K, EXPERTS = 4, 4, 16


def algorithm(**changes: object) -> AlgorithmConfig:
    """Returns settings that no default in the code could match by accident."""
    values: dict[str, object] = {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "ratio_level": RatioLevel.token,
        "kl_coef": 0.0,
        "kl_estimator": "k2",
        "entropy_coef": 0.0,
        "importance_weight_cap": 2.0,
    }
    return AlgorithmConfig(**(values | changes))  # pyright: ignore[reportArgumentType]


def random_rows(rng: np.random.Generator, positions: int) -> NDArray[np.int16]:
    """Returns int16 `[positions, L, K]`, distinct ids in every cell."""
    scores = rng.random((positions, LAYERS, EXPERTS))
    return np.argsort(scores, axis=-1)[..., :TOP_K].astype(np.int16)


def rollout_of(
    name: str,
    prompt: int,
    segments: list[list[float]],
    versions: list[list[int]],
    rng: np.random.Generator,
    environment: int = 0,
) -> Rollout:
    """Returns a rollout; call k generated log-probs `segments[k]` under `versions[k]`, `environment` tokens between."""
    calls, fed = [], prompt
    for index, (log_probs, version) in enumerate(zip(segments, versions, strict=True)):
        last = index == len(segments) - 1
        calls.append(
            EngineCall(
                request_id=f"{name}.{index}",
                input_len=fed,
                output_ids=np.zeros(len(log_probs), np.int32),
                log_probs=np.array(log_probs, np.float32),
                rows=random_rows(rng, fed + len(log_probs) - 1),
                versions=np.array(version, np.int32),
                finish="stop" if last else "abort",
            )
        )
        fed += len(log_probs) + (0 if last else environment)
    return Rollout(name, np.zeros(fed, np.int32), prompt, tuple(calls), LAYERS, TOP_K, EXPERTS)


def one_view(rollout: Rollout) -> list[ReplayView]:
    """Returns a single view of the rollout: the newest rows, loss on all generated tokens."""
    rows = rollout.calls[-1].rows
    assert rows is not None
    return [ReplayView(rows, rollout.generated())]


def view_per_segment(rollout: Rollout) -> list[ReplayView]:
    """Returns one view per segment: the rows of its call, loss on it alone."""
    views = []
    for segment in rollout.segments():
        rows = rollout.calls[segment.call_index].rows
        assert rows is not None
        mask = np.zeros(segment.last, bool)
        mask[segment.first :] = True
        views.append(ReplayView(rows[: segment.last - 1], mask))
    return views


@dataclass(frozen=True)
class Batch:
    """Rollouts and everything a table is built from."""

    rollouts: list[Rollout]
    views: list[list[ReplayView]]
    log_probs: list[list[NDArray[np.float32]]]
    old_log_probs: list[list[NDArray[np.float32]]]
    advantages: NDArray[np.float32]
    trainer_version: int

    def table(self, bypass: bool = False) -> TokenTable:
        return TokenTable.from_views(
            self.rollouts,
            self.views,
            self.log_probs,
            old_log_probs=None if bypass else self.old_log_probs,
            advantages=self.advantages,
            trainer_version=self.trainer_version,
        )


def random_batch(seed: int, rollouts: int = 24, spread: float = 0.1, per_segment: bool = False) -> Batch:
    """Returns a batch of rollouts with 1 to 4 segments, versions 3..7, and noisy trainer log-probs."""
    rng = np.random.default_rng(seed)
    made, views, new, old = [], [], [], []
    for index in range(rollouts):
        sizes = rng.integers(1, 16, size=rng.integers(1, 5))
        version = np.sort(rng.integers(3, 8, size=len(sizes)))
        segments = [list(-rng.exponential(0.7, size)) for size in sizes]
        rollout = rollout_of(
            f"r{index}",
            int(rng.integers(2, 12)),
            segments,
            [[int(v)] * int(size) for v, size in zip(version, sizes, strict=True)],
            rng,
            environment=int(rng.integers(0, 2)),
        )
        own = view_per_segment(rollout) if per_segment else one_view(rollout)
        made.append(rollout)
        views.append(own)
        mu = rollout.log_probs()
        drift = rng.normal(0, spread, rollout.length).astype(np.float32)
        noise = rng.normal(0, spread, rollout.length).astype(np.float32)
        new.append([np.minimum(mu + drift + noise, 0)[: view.length] for view in own])
        old.append([np.minimum(mu + drift, 0)[: view.length] for view in own])
    advantages = rng.normal(size=rollouts).astype(np.float32)
    return Batch(made, views, new, old, advantages, trainer_version=8)
