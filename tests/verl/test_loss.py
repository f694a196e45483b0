"""Our loss beside verl's own, and verl's reduction of metrics."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_policy_loss_bypass_mode, compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.workers.config import ActorConfig
from verl.workers.utils import losses

from experiments import check
from experiments.metrics import ratio_keys as m
from experiments.metrics.accumulate import LogRatioAccumulator
from experiments.schema import AlgorithmConfig, RatioLevel
from experiments.verl_backend import loss as ours
from experiments.verl_backend.columns import BITS
from experiments.verl_backend.compose import lay_over, verl_defaults
from experiments.verl_backend.launch import ABSENT_IN_VERLS_YAML, Job, overrides, strategy_mode
from experiments.verl_backend.statistics import PREFIX
from experiments.verl_backend.trainer import mini_steps
from tests.conftest import compose

CAP, ROWS, WIDTH = 2.0, 8, 64
ALGORITHM = AlgorithmConfig(
    clip_low=0.2, clip_high=0.2, dual_clip=3.0, ratio_level=RatioLevel.token, importance_weight_cap=CAP
)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns current and old log-probs, advantages, mask and lags (-1: unknown); one outlier token of 3 nats."""
    generator = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(ROWS, WIDTH, generator=generator)
    now = old + 0.05 * torch.randn(ROWS, WIDTH, generator=generator)
    now[0, 5] = old[0, 5] + 3
    advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, WIDTH).contiguous()
    mask = torch.arange(WIDTH)[None] < torch.randint(8, WIDTH, (ROWS, 1), generator=generator)
    mask[3] = False  # a dropped trajectory
    return now, old, advantages, mask, torch.randint(-1, 6, (ROWS, WIDTH), generator=generator)


def actor_config() -> ActorConfig:
    return ActorConfig(strategy="megatron", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2)


def bypass_config() -> ActorConfig:
    """Returns what the actor workers get in a run: bypass mode."""
    node = compose("experiment=qwen3_30b_a3b", "strategy=slice_concat")
    config = check.load(node)
    values = overrides(Job(config, node, "slice_concat", Path("run"), "python run.py"), strategy_mode(config))
    return omega_conf_to_dataclass(lay_over(verl_defaults(), values, ABSENT_IN_VERLS_YAML).actor_rollout_ref.actor)


def run_micro_batches(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], ranks: int, config: Any = None
) -> dict[str, Any]:
    """Returns the mini-step's metrics as verl reduces them: per rank over micro-batches, then over ranks."""
    config = config or actor_config()
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda values, data: values)
    monkeypatch.setattr(ours, "no_padding_2_padding", lambda values, data: values)
    now, old, advantages, mask, lags = batch()
    per_rank, start = [], 0
    for _ in range(ranks):
        collected: dict[str, Any] = {}
        for size in sizes:
            rows = slice(start, start + size)
            data = TensorDict(
                {
                    "response_mask": mask[rows],
                    "old_log_probs": old[rows],
                    "rollout_log_probs": old[rows],
                    "advantages": advantages[rows],
                    ours.TOKEN_FIELD: lags[rows] + 1 | 1 << 2 * BITS,  # the only segment of its rollout
                },
                batch_size=[size],
            )
            for key, value in {
                "dp_size": ranks,
                "batch_num_tokens": int(mask.sum()),
                "global_batch_size": ROWS,
            }.items():
                data.set_non_tensor(key, value)
            loss = partial(ours.recording_loss, config=config, algorithm=ALGORITHM)
            _, metrics = loss(model_output={"log_probs": now[rows]}, data=data)
            for key, value in metrics.items():
                if isinstance(value, Metric):
                    collected.setdefault(key, value.init_list()).append(value)
            start += size
        per_rank.append(collected)
    return {key: [Metric.aggregate_dp([of[key] for of in per_rank])] for key in per_rank[0]}


@pytest.mark.parametrize(("sizes", "ranks"), [([8], 1), ([1, 3, 4], 1), ([1, 3], 2)])
def test_statistics_survive_verls_reduction(monkeypatch: pytest.MonkeyPatch, sizes: list[int], ranks: int):
    reduced = run_micro_batches(monkeypatch, sizes, ranks)
    packed = {f"actor/{key}": value for key, value in reduced.items() if key.startswith(PREFIX)}
    (step,) = mini_steps(packed, CAP)
    now, old, _, mask, lags = batch()
    x = (now.double() - old.double())[mask].numpy()
    rows = torch.arange(ROWS)[:, None].expand_as(mask)[mask].numpy()
    expected = LogRatioAccumulator.of(x, rows, CAP).ppo_metrics()
    came = step.ppo_metrics()
    assert {key: came[key] for key in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert came[m.PG_CLIPFRAC] == pytest.approx(float(clipped_by_verl()), abs=1e-7)
    assert came[m.PPO_KL.by("segment", "only")] == pytest.approx(-x.mean(), abs=1e-9)
    for label, lag in {"0": [0], "1": [1], "2": [2], "3-4": [3, 4], "5-8": [5]}.items():
        here = np.isin(lags[mask].numpy(), lag)
        assert came[m.PPO_KL.by("lag", label)] == pytest.approx(-x[here].mean(), abs=1e-9)


def clipped_by_verl() -> float:
    now, old, advantages, mask, _ = batch()
    _, metrics = compute_policy_loss_vanilla(
        old_log_prob=old, log_prob=now, advantages=advantages, response_mask=mask, config=actor_config()
    )
    return metrics["actor/pg_clipfrac"]


def test_verls_own_average_is_wrong_for_what_is_not_linear(monkeypatch: pytest.MonkeyPatch):
    """Why the statistics travel: the effective sample size of one outlier, averaged over micro-batches."""
    now, old, _, mask, _ = batch()
    ratio = torch.exp(now - old)

    def ess(rows: slice) -> float:
        r = ratio[rows][mask[rows]]
        return float(r.sum() ** 2 / (r * r).sum() / r.numel())

    averaged = np.mean([ess(slice(i, i + 1)) for i in range(ROWS) if mask[i].any()])
    (step,) = mini_steps(
        {f"actor/{k}": v for k, v in run_micro_batches(monkeypatch, [1] * ROWS, 1).items() if k.startswith(PREFIX)}, CAP
    )
    true = step.ppo_metrics()[m.RATIO_ESS.format(ratio="ppo_ratio")]
    assert true == pytest.approx(ess(slice(None)), rel=1e-5)
    assert averaged > true + 0.05


def test_a_dropped_trajectory_leaves_verls_bypass_loss_finite():
    now, old, advantages, mask, _ = batch()
    correction = {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None}
    policy_loss = OmegaConf.create({"loss_mode": "bypass_mode", "rollout_correction": correction})
    config = ActorConfig(
        strategy="megatron", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.2, policy_loss=policy_loss
    )
    bypass, metrics = compute_policy_loss_bypass_mode(
        old_log_prob=old, log_prob=now, advantages=advantages, response_mask=mask, config=config
    )
    vanilla, _ = compute_policy_loss_vanilla(
        old_log_prob=old, log_prob=now, advantages=advantages, response_mask=mask, config=actor_config()
    )
    assert float(bypass) == pytest.approx(float(vanilla), abs=1e-7)
    assert "rollout_corr/kl" in metrics


def test_a_micro_batch_of_dropped_trajectories_only_has_no_loss_and_the_same_metrics(monkeypatch: pytest.MonkeyPatch):
    """verl's bypass loss refuses it, though long trajectories often have a micro-batch of their own."""
    now, old, advantages, mask, _ = batch()
    with pytest.raises(ValueError, match="at least one valid token"):
        compute_policy_loss_bypass_mode(old[3:4], now[3:4], advantages[3:4], mask[3:4], config=bypass_config())
    whole = run_micro_batches(monkeypatch, [ROWS], 1, bypass_config())
    parts = run_micro_batches(monkeypatch, [1] * ROWS, 1, bypass_config())
    halves = run_micro_batches(monkeypatch, [1] * (ROWS // 2), 2, bypass_config())
    assert whole.keys() == parts.keys() == halves.keys()
    assert "rollout_corr/kl" in whole
    for key in ("actor/pg_loss", f"{PREFIX}ratios/n"):
        assert parts[key] == pytest.approx(whole[key], abs=1e-6)


def loss_of(mask: torch.Tensor, old: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of a micro-batch of one trajectory and the log-probs that it is of."""
    now, _, advantages, _, lags = batch()
    leaf = now[3:4].clone().requires_grad_()
    fields = {"response_mask": mask, "old_log_probs": old, "rollout_log_probs": old, "advantages": advantages[3:4]}
    data = TensorDict({**fields, ours.TOKEN_FIELD: lags[3:4] + 1 | 1 << 2 * BITS}, batch_size=[1])
    for key, value in {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": ROWS}.items():
        data.set_non_tensor(key, value)
    loss, _ = ours.recording_loss(bypass_config(), {"log_probs": leaf}, data, algorithm=ALGORITHM)
    return loss, leaf


def test_a_dropped_trajectory_alone_has_a_gradient_of_zero(monkeypatch: pytest.MonkeyPatch):
    for module in (losses, ours):
        monkeypatch.setattr(module, "no_padding_2_padding", lambda values, data: values)
    _, old, _, mask, _ = batch()
    loss, leaf = loss_of(mask[3:4], old[3:4], tokens=50)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_a_mini_batch_without_a_token_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """verl would divide by its number of tokens: NaN weights."""
    _, old, _, mask, _ = batch()
    with pytest.raises(RuntimeError, match="all of its trajectories were dropped"):
        loss_of(mask[3:4], old[3:4], tokens=0)


def test_why_a_missing_log_prob_must_be_a_number_where_the_mask_is_zero():
    """In decoupled mode verl's importance weight there is NaN, and so is the gradient (agent_loops.apply_merged)."""
    now, old, advantages, mask, _ = batch()
    mask[0, 2], gradients = False, []
    for value in (float("nan"), 0.0):
        engine = old.clone()
        engine[0, 2] = value
        weights, _ = compute_rollout_correction_weights(old - engine, mask, "token", CAP)
        leaf = now.clone().requires_grad_()
        loss, _ = compute_policy_loss_vanilla(
            old, leaf, advantages, mask, config=actor_config(), rollout_is_weights=weights
        )
        loss.backward()
        gradients.append(bool(torch.isfinite(leaf.grad).all()))
    assert gradients == [False, True]
