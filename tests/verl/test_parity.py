"""Our PPO and its metrics are verl's, within 1e-6 on random batches."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import (
    compute_grpo_outcome_advantage,
    compute_policy_loss_gspo,
    compute_policy_loss_vanilla,
    kl_penalty,
)
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.config import ActorConfig

from experiments import ppo
from experiments.metrics.ratios import gap_metrics, ppo_metrics
from experiments.metrics.tokens import TokenTable
from experiments.schema import AlgorithmConfig, RatioLevel
from experiments.trainers.base import TokenBatch
from experiments.verl_backend.columns import token_table
from experiments.verl_backend.statistics import RatioStatistics, pack, unpack

ROWS, WIDTH, CAP, CLOSE = 12, 40, 1.5, 1e-6
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.6}
VERL_CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.6}


@dataclass(frozen=True, eq=False)
class Batch:
    """A random batch in float64, `[B, R]`; every sequence has a token, log-ratios reach 3 nats and beyond the clamp."""

    now: torch.Tensor
    old: torch.Tensor
    engine: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, seed: int) -> "Batch":
        g = torch.Generator().manual_seed(seed)
        engine = -3 * torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64)
        old = (engine + 0.2 * torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)).clamp(max=0)
        now = (old + 0.3 * torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)).clamp(max=0)
        now[0, 2], now[1, 3] = old[0, 2] - 3, old[1, 3] - 25
        advantages = torch.randn(ROWS, 1, generator=g, dtype=torch.float64).expand(ROWS, WIDTH).contiguous()
        mask = torch.rand(ROWS, WIDTH, generator=g) < 0.7  # holes, as environment tokens leave them
        mask[:, 1:4] = True
        return cls(now, old, engine, advantages, mask)

    @property
    def sequence(self) -> torch.Tensor:
        """int64 `[N]`, the sequence of every counted token."""
        return torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)[self.mask]

    def tokens(self, weights: torch.Tensor | None = None) -> tuple[TokenBatch, torch.Tensor]:
        """Returns the counted tokens and the leaf whose gradient the loss gives."""
        leaf = self.now.clone().requires_grad_()
        flat = {name: getattr(self, name)[self.mask] for name in ("old", "advantages")}
        ones = torch.ones_like(flat["old"]) if weights is None else weights[self.mask]
        return TokenBatch(leaf[self.mask], None, flat["old"], flat["advantages"], ones, None, self.sequence), leaf

    def table(self, current: torch.Tensor, old: torch.Tensor) -> TokenTable:
        """Returns the table that verl's columns give: all tokens in the only segment of their rollout."""
        mask, codes = self.mask, np.full(int(self.mask.sum()), 1 | 1 << 32, np.int64)
        values = [values[mask].numpy() for values in (current, old, self.engine, self.advantages)]
        return token_table(codes, self.sequence.numpy(), *values)


def settings(level: RatioLevel = RatioLevel.token) -> AlgorithmConfig:
    return AlgorithmConfig(ratio_level=level, kl_coef=0.0, entropy_coef=0.0, importance_weight_cap=CAP, **CLIPS)


def actor_config() -> ActorConfig:
    return ActorConfig(strategy="megatron", rollout_n=1, use_dynamic_bsz=True, **VERL_CLIPS)


def through_verl(table: TokenTable) -> RatioStatistics:
    """Returns the statistics of a table after verl's reduction of two micro-batches on each of two ranks."""
    parts = [pack(RatioStatistics.of(table.select(table.rollout % 4 == part), settings())) for part in range(4)]
    how = {"sum": lambda values: sum(values) / 2, "min": min, "max": max}
    numbers = {key: how[kind]([part[key][0] for part in parts]) for key, (_, kind) in parts[0].items()}
    return unpack(numbers, 2, CAP)


def agree(ours: dict[str, float], theirs: dict[str, Any], prefix: str = "") -> None:
    """Every value of verl's that we have is ours; at least one is."""
    shared = {f"{prefix}{key}": float(value) for key, value in theirs.items() if f"{prefix}{key}" in ours}
    assert shared
    assert {key: ours[key] for key in shared} == pytest.approx(shared, rel=CLOSE, abs=CLOSE)


def without_clamped(batch: Batch) -> Batch:
    """verl does not clamp in k3_kl; ours does, and counts the tokens (docs/metrics.md)."""
    now = batch.now.clone()
    now[1, 3] = batch.old[1, 3]
    return replace(batch, now=now)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_clipped_loss_its_gradient_and_its_metrics(seed: int, decoupled: bool):
    batch = Batch.of(seed)
    leaf = batch.now.clone().requires_grad_()
    weights = None
    if decoupled:
        weights, _ = compute_rollout_correction_weights(batch.old - batch.engine, batch.mask, "token", CAP)
    theirs, metrics = compute_policy_loss_vanilla(
        batch.old, leaf, batch.advantages, batch.mask, config=actor_config(), rollout_is_weights=weights
    )
    theirs.backward()
    tokens, ours_leaf = batch.tokens(weights)
    ours = ppo.policy_loss(settings(), int(batch.mask.sum()))(tokens)
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=CLOSE)
    assert torch.allclose(ours_leaf.grad, leaf.grad, rtol=0, atol=CLOSE)
    table = batch.table(batch.now, batch.old)
    for values in (ppo_metrics([table], settings()), through_verl(table).ppo_metrics()):
        agree(values, metrics)
        assert {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"} <= metrics.keys() & values.keys()
    assert metrics["actor/pg_clipfrac"] > 0
    assert metrics["actor/pg_clipfrac_lower"] > 0


@pytest.mark.parametrize("seed", range(5))
def test_the_sequence_level_loss(seed: int):
    batch = without_clamped(Batch.of(seed))
    leaf = batch.now.clone().requires_grad_()
    theirs, metrics = compute_policy_loss_gspo(
        batch.old, leaf, batch.advantages, batch.mask, loss_agg_mode="token-mean", config=actor_config()
    )
    theirs.backward()
    tokens, ours_leaf = batch.tokens()
    ours = ppo.policy_loss(settings(RatioLevel.sequence), int(batch.mask.sum()))(tokens)
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=CLOSE)
    assert torch.allclose(ours_leaf.grad, leaf.grad, rtol=0, atol=CLOSE)
    agree(ppo_metrics([batch.table(batch.now, batch.old)], settings(RatioLevel.sequence)), metrics)


@pytest.mark.parametrize("seed", range(5))
def test_importance_weights_and_their_metrics(seed: int):
    batch = Batch.of(seed)
    weights, metrics = compute_rollout_correction_weights(batch.old - batch.engine, batch.mask, "token", CAP)
    ours = ppo.truncated_importance_weights(batch.old.numpy(), batch.engine.numpy(), CAP)
    assert np.allclose(ours[batch.mask.numpy()], weights[batch.mask].numpy(), rtol=0, atol=CLOSE)
    table = batch.table(batch.old, batch.engine)
    for values in (gap_metrics(table, CAP), through_verl(table).gap_metrics()):
        agree(values, metrics, "rollout_corr/")
        named = ("mean", "std", "min", "max", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")
        assert {f"rollout_corr/rollout_is_{name}" for name in named} <= values.keys()


@pytest.mark.parametrize("seed", range(5))
def test_off_policy_metrics_and_differences_of_probabilities(seed: int):
    batch = without_clamped(Batch.of(seed))
    metrics = compute_offpolicy_metrics(batch.now, batch.engine, batch.mask)
    fields = {"rollout_log_probs": batch.engine, "old_log_probs": batch.now, "response_mask": batch.mask}
    debug = calculate_debug_metrics(DataProto.from_dict({**fields, "responses": torch.zeros(ROWS, WIDTH)}))
    table = batch.table(batch.now, batch.engine)
    for values in (gap_metrics(table, CAP), through_verl(table).gap_metrics()):
        agree(values, metrics, "rollout_corr/")
        agree(values, debug)
        missing = metrics.keys() - {key.removeprefix("rollout_corr/") for key in values}
        assert missing == {"training_log_ppl", "rollout_log_ppl"}  # logarithms of what is there, averaged


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("normalize", [False, True])
def test_group_advantages(seed: int, normalize: bool):
    random = np.random.default_rng(seed)
    rewards, groups = random.normal(size=ROWS), np.repeat(np.arange(ROWS // 4), 4)
    rewards[:4] = 0.3  # a group without a signal
    scores = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    scores[:, -1] = torch.from_numpy(rewards)
    theirs, _ = compute_grpo_outcome_advantage(
        scores, torch.ones(ROWS, WIDTH, dtype=torch.float64), groups, norm_adv_by_std_in_grpo=normalize
    )
    assert np.allclose(ppo.group_advantages(rewards, groups, normalize), theirs[:, 0].numpy(), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalties(estimator: str):
    batch = Batch.of(0)
    ours = ppo.KL_ESTIMATORS[estimator](batch.now - batch.old)
    assert torch.allclose(ours, kl_penalty(batch.now, batch.old, estimator), rtol=0, atol=CLOSE)
