"""Advantages, importance weights and the policy loss against values worked out by hand and by slow loops."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from experiments.ppo import group_advantages, policy_loss, truncated_importance_weights
from experiments.schema import AlgorithmConfig, RatioLevel
from experiments.trainers.base import TokenBatch
from tests.unit.metrics_cases import algorithm


def batch_of(n: int = 40, seed: int = 0, spread: float = 0.4) -> TokenBatch:
    rng = np.random.default_rng(seed)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    old = -rng.exponential(1.0, n)
    return TokenBatch(
        log_probs=tensor(old + rng.normal(0, spread, n)).requires_grad_(),
        entropy=tensor(rng.exponential(1.0, n)).requires_grad_(),
        old_log_probs=tensor(old),
        advantages=tensor(rng.normal(size=n)),
        weights=tensor(rng.uniform(0.5, 2.0, n)),
        ref_log_probs=tensor(old + rng.normal(0, 0.3, n)),
        group=torch.tensor(np.sort(rng.integers(0, 7, n))),
    )


def part(batch: TokenBatch, keep: torch.Tensor) -> TokenBatch:
    return TokenBatch(**{name: getattr(batch, name)[keep] for name in TokenBatch.__dataclass_fields__})


def one_token(log_ratio: float, advantage: float, **changes: torch.Tensor | None) -> TokenBatch:
    batch = TokenBatch(
        log_probs=torch.tensor([log_ratio - 1.0]).requires_grad_(),
        entropy=torch.tensor([0.7]),
        old_log_probs=torch.tensor([-1.0]),
        advantages=torch.tensor([advantage]),
        weights=torch.tensor([1.0]),
        ref_log_probs=None,
        group=torch.tensor([0]),
    )
    return replace(batch, **changes)


def test_advantages_are_rewards_centred_and_scaled_within_their_group():
    rewards, groups = np.array([1.0, 0.0, 0.5, 2.0, 4.0]), np.array([7, 7, 7, 3, 3])
    got = group_advantages(rewards, groups, normalize=True)
    for index in range(5):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == groups[index]]
        assert got[index] == pytest.approx((rewards[index] - mean(own)) / (stdev(own) + 1e-6), rel=1e-6)
    assert group_advantages(rewards, groups, normalize=False).tolist() == [0.5, -0.5, 0.0, -1.0, 1.0]


@pytest.mark.parametrize("normalize", [True, False])
def test_a_group_of_one_or_of_equal_rewards_gives_exactly_zero(normalize: bool):
    rewards = np.array([0.3, 0.1, 0.1, 0.1, 1.0, 0.0])
    got = group_advantages(rewards, np.array([0, 1, 1, 1, 2, 2]), normalize)
    assert got[:4].tolist() == [0.0] * 4
    assert got[4] > 0 > got[5]


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="1 of 2 rewards are not finite, first at index 1"):
        group_advantages(np.array([1.0, np.nan]), np.array([0, 0]), normalize=True)


def test_importance_weights_are_truncated_and_stay_missing_where_a_log_prob_is():
    got = truncated_importance_weights(
        np.array([-1.0, -1.0, -1.0, np.nan]), np.array([-1.0, -3.0, -0.5, -1.0]), cap=2.0
    )
    assert got[:3] == pytest.approx([1.0, 2.0, math.exp(-0.5)])
    assert np.isnan(got[3])


def slow_token_loss(batch: TokenBatch, settings: AlgorithmConfig) -> float:
    total = 0.0
    for i in range(len(batch.group)):
        new, old, advantage = (
            float(getattr(batch, k)[i].detach()) for k in ("log_probs", "old_log_probs", "advantages")
        )
        ratio = math.exp(max(-20.0, min(20.0, new - old)))
        inside = max(1 - settings.clip_low, min(1 + settings.clip_high, ratio))
        objective = min(advantage * ratio, advantage * inside)
        if advantage < 0:
            objective = max(objective, settings.dual_clip * advantage)
        total -= float(batch.weights[i]) * objective
    return total / len(batch.group)


def slow_sequence_loss(batch: TokenBatch, settings: AlgorithmConfig) -> float:
    total = 0.0
    groups = batch.group.tolist()
    for i, group in enumerate(groups):
        own = [j for j, other in enumerate(groups) if other == group]
        ratio = math.exp(mean(float((batch.log_probs[j] - batch.old_log_probs[j]).detach()) for j in own))
        inside = max(1 - settings.clip_low, min(1 + settings.clip_high, ratio))
        advantage = float(batch.advantages[i])
        total -= float(batch.weights[i]) * min(advantage * ratio, advantage * inside)
    return total / len(groups)


@pytest.mark.parametrize("spread", [0.05, 0.4, 3.0])
def test_token_level_loss_equals_a_slow_loop(spread: float):
    batch, settings = batch_of(spread=spread), algorithm(dual_clip=1.5)
    assert policy_loss(settings, 40)(batch).item() == pytest.approx(slow_token_loss(batch, settings), rel=1e-5)


@pytest.mark.parametrize("spread", [0.05, 0.4, 1.0])
def test_sequence_level_loss_equals_a_slow_loop(spread: float):
    batch, settings = batch_of(spread=spread), algorithm(ratio_level=RatioLevel.sequence)
    assert policy_loss(settings, 40)(batch).item() == pytest.approx(slow_sequence_loss(batch, settings), rel=1e-5)


@pytest.mark.parametrize("level", list(RatioLevel))
def test_shares_of_micro_batches_add_up_to_the_loss_and_the_gradient_of_the_mini_batch(level: RatioLevel):
    settings = algorithm(ratio_level=level, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01)
    whole, parts = batch_of(), batch_of()
    loss = policy_loss(settings, 40)
    loss(whole).backward()
    pieces = [parts.group < 2, (parts.group >= 2) & (parts.group < 3), parts.group >= 3, parts.group > 99]
    total = sum(loss(part(parts, keep)) for keep in pieces)
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert total.item() == pytest.approx(loss(whole).item(), rel=1e-6)
    assert whole.log_probs.grad is not None
    assert parts.log_probs.grad is not None
    torch.testing.assert_close(parts.log_probs.grad, whole.log_probs.grad)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        (0.1, 1.0, -math.exp(0.1)),  # inside the clip range: -A r
        (0.5, 1.0, 0.0),  # r > 1 + clip_high, A > 0: clipped
        (-0.5, 1.0, -math.exp(-0.5)),  # r < 1 - clip_low, A > 0: the pessimistic side is not clipped
        (-0.5, -1.0, 0.0),  # r < 1 - clip_low, A < 0: clipped
        (0.5, -1.0, math.exp(0.5)),
        (1.5, -1.0, 0.0),  # r > dual_clip, A < 0: dual clip
    ],
)
def test_gradient_is_stopped_exactly_where_the_ratio_is_clipped(log_ratio: float, advantage: float, slope: float):
    batch = one_token(log_ratio, advantage)
    policy_loss(algorithm(), 1)(batch).backward()
    assert batch.log_probs.grad is not None
    assert batch.log_probs.grad.item() == pytest.approx(slope, rel=1e-5)


def test_a_ratio_beyond_the_clamp_gives_a_finite_loss_without_gradient():
    batch = one_token(50.0, -1.0)
    loss = policy_loss(algorithm(dual_clip=1e30), 1)(batch)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20.0), rel=1e-5)
    assert batch.log_probs.grad is not None
    assert batch.log_probs.grad.item() == 0.0


@pytest.mark.parametrize("level", list(RatioLevel))
def test_gradients_of_old_and_reference_log_probs_advantages_and_weights_are_stopped(level: RatioLevel):
    batch = batch_of()
    stopped = {
        name: getattr(batch, name).clone().requires_grad_()
        for name in ("old_log_probs", "advantages", "weights", "ref_log_probs")
    }
    settings = algorithm(ratio_level=level, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    policy_loss(settings, 40)(replace(batch, **stopped)).backward()
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in stopped.values())
    assert batch.log_probs.grad is not None
    assert batch.log_probs.grad.any()


def test_sequence_ratio_sends_each_token_the_gradient_of_its_own_log_prob_alone():
    batch = batch_of(n=3, spread=0.02)
    batch = replace(batch, group=torch.tensor([0, 0, 0]), advantages=torch.tensor([1.0, 0.0, 0.0]))
    policy_loss(algorithm(ratio_level=RatioLevel.sequence), 3)(batch).backward()
    assert batch.log_probs.grad is not None
    ratio = math.exp(float((batch.log_probs - batch.old_log_probs).detach().mean()))
    assert batch.log_probs.grad.tolist() == pytest.approx([-ratio * float(batch.weights[0]) / 3, 0.0, 0.0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_term_and_entropy_bonus_add_their_definition(estimator: str):
    x = 0.3
    value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]
    batch = one_token(0.0, 0.0, ref_log_probs=torch.tensor([-1.0 - x]))
    got = policy_loss(algorithm(kl_coef=2.0, kl_estimator=estimator, entropy_coef=0.5), 1)(batch)
    assert got.item() == pytest.approx(2.0 * value - 0.5 * 0.7, rel=1e-5)


def test_only_k2_has_an_unbiased_gradient_of_the_kl_to_the_reference():
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.7], dtype=torch.float64), 0)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    policy = torch.log_softmax(logits, 0)
    expected = gradient((policy.exp() * (policy - reference)).sum())
    got = {}
    for estimator in ("k1", "k2", "k3"):
        # The expectation over tokens sampled from the policy, by enumeration: probabilities are constants to the loss.
        policy = torch.log_softmax(logits, 0)
        batch = TokenBatch(
            policy, None, policy.detach(), torch.zeros(3), policy.detach().exp(), reference, torch.zeros(3)
        )
        per_token = [
            policy_loss(algorithm(kl_coef=1.0, kl_estimator=estimator), 1)(part_without_entropy(batch, i))
            for i in range(3)
        ]
        got[estimator] = gradient(sum((p * w for p, w in zip(per_token, batch.weights, strict=True)), torch.zeros(())))
    torch.testing.assert_close(got["k2"], expected)
    torch.testing.assert_close(got["k1"], torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    assert not torch.allclose(got["k3"], expected, rtol=1e-2)


def part_without_entropy(batch: TokenBatch, index: int) -> TokenBatch:
    keep = torch.tensor([index])
    names = [name for name in TokenBatch.__dataclass_fields__ if name != "entropy"]
    return TokenBatch(entropy=None, **{name: getattr(batch, name)[keep] for name in names})


def test_settings_that_need_what_the_batch_lacks_are_refused():
    batch = one_token(0.0, 1.0, entropy=None)
    with pytest.raises(ValueError, match="no ref_log_probs"):
        policy_loss(algorithm(kl_coef=0.1), 1)(batch)
    with pytest.raises(ValueError, match="no entropy"):
        policy_loss(algorithm(entropy_coef=0.1), 1)(batch)
    with pytest.raises(ValueError, match=r"dual_clip must exceed 1, got 1\.0"):
        policy_loss(algorithm(dual_clip=1.0), 1)
    with pytest.raises(ValueError, match="kl_estimator must be one of"):
        policy_loss(algorithm(kl_coef=0.1, kl_estimator="k4"), 1)
    with pytest.raises(ValueError, match="counted tokens, got 0"):
        policy_loss(algorithm(), 0)
