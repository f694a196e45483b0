"""The same weights in transformers and in megatron-core: conversions invert each other and the models agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from experiments.trainers.convert import check_supported, to_huggingface, to_megatron
from experiments.trainers.megatron import MegatronTrainer
from experiments.trainers.runtime import megatron_on
from tests.unit.trainer_cases import model_config, settings, train_sequences, transformers_model

MODEL_YAML = Path(__file__).parents[2] / "conf" / "model" / "tiny_moe.yaml"


def default_config():
    sizes = yaml.safe_load(MODEL_YAML.read_text())
    rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    for name in ("name", "checkpoint"):
        sizes.pop(name)
    return model_config(**sizes, rope_parameters=rope, vocab_size=60)


def odd_config(**changes):
    """Three query heads per group, a head dim that does not follow from the hidden size, odd counts everywhere."""
    return model_config(
        **{
            "vocab_size": 19,
            "num_hidden_layers": 2,
            "hidden_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "moe_intermediate_size": 12,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        }
        | changes
    )


@pytest.mark.parametrize("tied", [False, True])
def test_both_conversions_are_exact_inverses(tied):
    config = odd_config(tie_word_embeddings=tied)
    weights = transformers_model(config).state_dict()
    state = to_megatron(weights, config)
    back = to_huggingface(state, config)
    assert list(back) == list(weights)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    again = to_megatron(back, config)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


both_models = pytest.mark.parametrize(
    "config",
    [default_config(), odd_config(), odd_config(tie_word_embeddings=True), odd_config(norm_topk_prob=False)],
    ids=["default model", "grouped queries, odd shapes", "tied embeddings", "top-k weights not normalised"],
)


@both_models
def test_megatron_gives_the_logits_of_transformers(config):
    reference = transformers_model(config)
    ids = torch.randint(0, config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(2))
    weights = reference.state_dict()
    with MegatronTrainer(config, weights, settings=settings(), temperature=1.0) as trainer, torch.no_grad():
        with megatron_on(trainer.device):
            logits = trainer._model(ids, torch.arange(40).expand_as(ids), None)
        expected = reference(ids).logits
    assert expected.abs().max() > 0.5, "logits that are all near zero would agree by accident"
    assert (logits - expected).abs().max() < 1e-5


@both_models
def test_megatron_gives_the_log_probs_of_transformers(config):
    reference = transformers_model(config)
    sequence = train_sequences(config, [48], live=True)[0]
    with MegatronTrainer(config, reference.state_dict(), settings=settings(), temperature=1.0) as trainer:
        scored = trainer.score([sequence])[0]
    ids = torch.tensor(sequence.token_ids, dtype=torch.long)
    with torch.no_grad():
        expected = torch.log_softmax(reference(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    assert (torch.tensor(scored.log_probs[1:]) - expected).abs().max() < 1e-5


def test_weights_come_back_as_they_went_in():
    config = odd_config()
    weights = transformers_model(config).state_dict()
    with MegatronTrainer(config, weights, settings=settings(), temperature=1.0) as trainer:
        returned = trainer.weights()
    assert list(returned) == list(weights)
    assert all(torch.equal(returned[name], weights[name]) for name in weights)


def test_weights_that_do_not_fit_are_refused_by_name():
    config = odd_config()
    weights = dict(transformers_model(config).state_dict())
    weights["model.layers.9.mlp.gate.weight"] = weights.pop("model.layers.1.mlp.gate.weight")
    weights["model.norm.weight"] = torch.ones(7)
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.mlp\.gate\.weight") as error:
        to_megatron(weights, config)
    assert "unknown model.layers.9.mlp.gate.weight" in str(error.value)
    assert "model.norm.weight has shape [7], expected [40]" in str(error.value)


def test_a_tied_head_that_differs_is_refused():
    config = odd_config(tie_word_embeddings=True)
    weights = dict(transformers_model(config).state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="ties them"):
        to_megatron(weights, config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mlp_only_layers", [1]),
        ("decoder_sparse_step", 2),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        ("num_experts_per_tok", 1),
        ("attention_dropout", 0.1),
    ],
)
def test_a_setting_that_the_trainer_does_not_have_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=r"Qwen3MoeConfig\.\w+=.* is not supported"):
        check_supported(model_config(**{name: value}))


def test_a_sliding_window_is_refused():
    with pytest.raises(ValueError, match="use_sliding_window"):
        check_supported(model_config(use_sliding_window=True, sliding_window=16))
