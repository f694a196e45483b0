# pyright: reportMissingImports=false
"""verl's own PPO loss, with sufficient statistics of the importance ratio beside what verl reports.

Installed in the actor workers through `set_loss_fn`. The loss itself is verl's, whatever the configuration selects.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from experiments.schema import AlgorithmConfig
from experiments.verl_backend.columns import token_table
from experiments.verl_backend.statistics import PREFIX, RatioStatistics, pack

TOKEN_FIELD = "routemerge_tokens"
"""Column of the batch: int64 `[B, R]` of columns.py."""

RANKS = f"{PREFIX}ranks"


def recording_loss(
    config: Any, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None, *, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns verl's loss, and its metrics with ours added.

    Args:
        config: verl's ActorConfig; model_output, data, dp_group: as verl passes them, one micro-batch.
        algorithm: the run's PPO settings, for the share of clipped tokens and the like.

    Raises:
        RuntimeError: a log-prob of a token with loss is not finite, or no token of the whole mini-batch has loss.
    """
    if data["batch_num_tokens"] == 0:
        raise RuntimeError(
            "no token of this mini-batch carries loss: all of its trajectories were dropped (replay/dropped_samples/*) "
            "or empty; look at why rows are missing, or take fewer algorithm.mini_batches"
        )
    with torch.no_grad():
        statistics = micro_batch_statistics(no_padding_2_padding(model_output["log_probs"], data), data, algorithm)
    ranks = data["dp_size"]
    if statistics.ratios is None:
        config, neutral = without_correction(config), neutral_metrics(config)
    else:
        neutral = {}
    loss, metrics = ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    metrics = neutral | metrics
    for key, (value, reduction) in pack(statistics).items():
        metrics[key] = Metric(value=value, aggregation=AggregationType(reduction))
    metrics[RANKS] = Metric(value=float(ranks), aggregation=AggregationType.MAX)
    return loss, metrics


def without_correction(config: Any) -> Any:
    """Returns verl's ActorConfig for a micro-batch of dropped trajectories only: its bypass loss refuses one without a
    token, though with `rollout_rs=null` it is the plain clipped loss.
    """
    if config.policy_loss.loss_mode != "bypass_mode":
        return config
    return dataclasses.replace(config, policy_loss=dataclasses.replace(config.policy_loss, loss_mode="vanilla"))


def neutral_metrics(config: Any) -> dict[str, Metric]:
    """Returns every metric of the configured policy loss, as of one token without a difference: ranks must agree in the
    number of values.
    """
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    _, metrics = get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=zero, log_prob=zero, advantages=zero, response_mask=one, config=config
    )
    return Metric.from_dict(metrics, aggregation=AggregationType.MEAN)


def micro_batch_statistics(log_probs: torch.Tensor, data: TensorDict, algorithm: AlgorithmConfig) -> RatioStatistics:
    """Returns the statistics of one micro-batch; log_probs `[b, R]` under the current weights."""
    names = ("response_mask", "old_log_probs", "rollout_log_probs", "advantages", TOKEN_FIELD)
    fields = data.select(*names).to_padded_tensor()
    mask = fields["response_mask"].bool().cpu()
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask]

    def counted(values: torch.Tensor) -> Any:
        return values.detach().cpu()[mask].numpy()

    table = token_table(
        counted(fields[TOKEN_FIELD]),
        sequence.numpy(),
        counted(log_probs.double()),
        *(counted(fields[name].double()) for name in ("old_log_probs", "rollout_log_probs", "advantages")),
    )
    return RatioStatistics.of(table, algorithm)
