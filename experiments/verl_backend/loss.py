# pyright: reportMissingImports=false
"""verl's own PPO loss, with sufficient statistics of the importance ratio beside what verl reports.

Installed in the actor workers through `set_loss_fn`. The loss itself is verl's, whatever the configuration selects.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from experiments.verl_backend.statistics import PREFIX, StepStatistics, pack

LAG_FIELD = "routemerge_lag"
"""Column of the batch: int64 `[B, R]`, index into LAGS of every response token, -1 for unknown."""

RANKS = f"{PREFIX}ranks"


def recording_loss(
    config: Any, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None, *, cap: float
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns verl's loss, and its metrics with ours added.

    Args:
        config: verl's ActorConfig; model_output, data, dp_group: as verl passes them, one micro-batch.
        cap: C of the truncated weights.

    Raises:
        RuntimeError: a log-ratio is not finite.
    """
    with torch.no_grad():
        statistics = micro_batch_statistics(no_padding_2_padding(model_output["log_probs"], data), data, cap)
    ranks = data["dp_size"]
    loss, metrics = ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    for key, (value, reduction) in pack(statistics).items():
        metrics[key] = Metric(value=value, aggregation=AggregationType(reduction))
    metrics[RANKS] = Metric(value=float(ranks), aggregation=AggregationType.MAX)
    return loss, metrics


def micro_batch_statistics(log_probs: torch.Tensor, data: TensorDict, cap: float) -> StepStatistics:
    """Returns the statistics of one micro-batch; log_probs `[b, R]` under the current weights."""
    fields = data.select("response_mask", "old_log_probs", LAG_FIELD).to_padded_tensor()
    mask = fields["response_mask"].bool().cpu()
    x = (log_probs.detach().double().cpu() - fields["old_log_probs"].double().cpu())[mask]
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    return StepStatistics.of(x.numpy(), sequence.numpy(), fields[LAG_FIELD].cpu()[mask].numpy(), cap)
