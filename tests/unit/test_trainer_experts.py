"""The fused experts compute what megatron-core's own sequential experts compute, gradients included."""

from __future__ import annotations

import pytest
import torch

from experiments.trainers.megatron import MegatronTrainer
from experiments.trainers.upstream import SequentialMLP
from tests.unit.trainer_cases import model_config, settings, transformers_model


@pytest.mark.parametrize("counts", [[4, 3, 5, 2, 6, 1], [0, 9, 0, 12, 0, 0]], ids=["all busy", "idle experts"])
def test_outputs_and_gradients_equal_those_of_megatron_core(counts):
    config = model_config()
    generator = torch.Generator().manual_seed(0)
    rows, hidden = sum(counts), config.hidden_size
    inputs = torch.randn(rows, hidden, generator=generator)
    probs = torch.rand(rows, generator=generator)
    upstream_gradient = torch.randn(rows, hidden, generator=generator)
    results = []
    weights = transformers_model(config).state_dict()
    with MegatronTrainer(config, weights, settings=settings(), temperature=1.0) as trainer:
        experts = trainer._model.decoder.layers[0].mlp.experts
        for forward in (type(experts).forward, SequentialMLP.forward):
            leaves = [inputs.clone().requires_grad_(), probs.clone().requires_grad_(), *experts.parameters()]
            output, bias = forward(experts, leaves[0], torch.tensor(counts), leaves[1])
            assert bias is None
            results.append([output, *torch.autograd.grad(output, leaves, upstream_gradient)])
    for mine, upstream in zip(*results, strict=True):
        torch.testing.assert_close(mine, upstream, atol=1e-6, rtol=1e-5)
