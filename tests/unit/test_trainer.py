"""The megatron trainer: log-probs, updates, padding, micro-batches, borrowed weights and exact resumption."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from experiments.trainers.batching import group_by_length
from experiments.trainers.megatron import MegatronTrainer
from experiments.trainers.upstream import RouterReplay
from tests.unit.trainer_cases import model_config, settings, token_mean_loss, train_sequences, transformers_model

CONFIG = model_config()
WEIGHTS = transformers_model(CONFIG).state_dict()
LENGTHS = [17, 9, 12, 17, 5]


def make_trainer(temperature=1.0, **changes):
    return MegatronTrainer(CONFIG, WEIGHTS, settings=settings(**changes), temperature=temperature)


def state_after(trainer, updates):
    for seed in range(updates):
        sequences = train_sequences(CONFIG, LENGTHS, seed=seed)
        trainer.update(sequences, token_mean_loss(sequences), entropy=False)
    return trainer.state_dict()


def assert_same_state(a, b):
    assert a["steps"] == b["steps"]
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        assert list(a[part]) == list(b[part])
        for name, tensor in a[part].items():
            assert torch.equal(tensor, b[part][name]), (part, name)


def test_log_probs_and_entropy_are_those_of_the_tempered_distribution():
    sequence = train_sequences(CONFIG, [12], live=True)[0]
    ids = torch.tensor(sequence.token_ids, dtype=torch.long)
    with torch.no_grad():
        logits = transformers_model(CONFIG)(ids[None]).logits[0, :-1] / 0.7
    distribution = torch.distributions.Categorical(logits=logits)
    with make_trainer(temperature=0.7) as trainer:
        score = trainer.score([sequence], entropy=True)[0]
        assert trainer.score([sequence])[0].entropy is None
    np.testing.assert_allclose(score.log_probs[1:], distribution.log_prob(ids[1:]), atol=1e-5)
    np.testing.assert_allclose(score.entropy[1:], distribution.entropy(), atol=1e-5)
    assert np.isnan(score.log_probs[0])
    assert np.isnan(score.entropy[0])


def test_padding_changes_neither_log_probs_nor_the_step():
    sequences = train_sequences(CONFIG, LENGTHS)
    with make_trainer(max_tokens_per_micro_batch=1) as alone, make_trainer(max_tokens_per_micro_batch=256) as padded:
        for a, b in zip(alone.score(sequences), padded.score(sequences), strict=True):
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-6)
        results = [t.update(sequences, token_mean_loss(sequences), entropy=True) for t in (alone, padded)]
        assert (alone.stats().padded_tokens, padded.stats().padded_tokens) == (0, 2 * (5 * 16 - sum(LENGTHS) + 5))
        assert results[0].replay == results[1].replay
        assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
        assert results[0].entropy == pytest.approx(results[1].entropy, rel=1e-5)
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
        moments = [trainer.state_dict()["exp_avg"] for trainer in (alone, padded)]
    for name, tensor in moments[0].items():
        torch.testing.assert_close(tensor, moments[1][name], atol=1e-7, rtol=1e-4)


def test_what_stands_in_the_padding_does_not_matter():
    sequences = train_sequences(CONFIG, [17, 5])
    with make_trainer() as trainer:
        (batch,) = trainer._micro_batches(sequences, counted_only=True)
        expected = trainer._forward_backward(batch, sequences, token_mean_loss(sequences), False)
        gradients = {name: parameter.grad.clone() for name, parameter in trainer._named.items()}
        trainer._optimizer.zero_grad()
        batch.token_ids[1, 4:] = 7
        actual = trainer._forward_backward(batch, sequences, token_mean_loss(sequences), False)
        torch.testing.assert_close(actual[0].log_probs, expected[0].log_probs, atol=2e-6, rtol=0)
        for name, parameter in trainer._named.items():
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4)


def test_shares_of_a_token_mean_add_up_whatever_the_micro_batches():
    sequences = train_sequences(CONFIG, LENGTHS)
    results = []
    for budget in (1, 33, 256):
        with make_trainer(max_tokens_per_micro_batch=budget) as trainer:
            results.append(trainer.update(sequences, token_mean_loss(sequences), entropy=False))
    for other in results[1:]:
        assert other.loss == pytest.approx(results[0].loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)


def test_micro_batches_keep_the_budget_and_every_sequence_once():
    lengths = [3, 9, 2, 9, 40, 1]
    groups = group_by_length(lengths, 20)
    assert sorted(index for group in groups for index in group) == list(range(6))
    assert groups[0] == [4]  # longer than the budget: alone
    assert all(len(group) * lengths[group[0]] <= 20 for group in groups[1:])


def test_update_returns_the_log_probs_before_the_step_at_counted_tokens():
    sequences = train_sequences(CONFIG, LENGTHS)
    with make_trainer() as trainer:
        before = trainer.score(sequences)
        result = trainer.update(sequences, token_mean_loss(sequences), entropy=False)
        after = trainer.score(sequences)
    for sequence, old, seen, new in zip(sequences, before, result.log_probs, after, strict=True):
        mask = sequence.loss_mask
        np.testing.assert_allclose(seen[mask], old.log_probs[mask], atol=1e-6)
        assert np.isnan(seen[~mask]).all()
        assert np.abs(new.log_probs - old.log_probs)[mask].max() > 1e-4


def test_the_gradient_is_clipped_to_the_global_norm():
    sequences = train_sequences(CONFIG, LENGTHS)
    with make_trainer(max_grad_norm=0.01) as clipped, make_trainer(max_grad_norm=1e9) as free:
        norms = [t.update(sequences, token_mean_loss(sequences), entropy=False).grad_norm for t in (clipped, free)]
        small, large = (t.state_dict()["exp_avg"] for t in (clipped, free))
    assert norms[0] == norms[1]
    assert norms[0] > 0.01
    for name, tensor in large.items():
        torch.testing.assert_close(small[name], tensor * (0.01 / norms[0]), rtol=1e-3, atol=1e-9)


def test_the_same_inputs_give_the_same_bits():
    states = []
    for _ in range(2):
        with make_trainer() as trainer:
            states.append(state_after(trainer, 2))
    assert_same_state(*states)


def test_saving_and_loading_continues_bit_for_bit():
    with make_trainer() as straight:
        expected = state_after(straight, 2)
    with make_trainer() as first:
        saved = state_after(first, 1)
    with make_trainer() as resumed:
        state_after(resumed, 3)  # a state that loading must replace
        resumed.load_state_dict(saved)
        assert_same_state(resumed.state_dict(), saved)
        sequences = train_sequences(CONFIG, LENGTHS, seed=1)
        resumed.update(sequences, token_mean_loss(sequences), entropy=False)
        assert_same_state(resumed.state_dict(), expected)


def test_a_state_from_before_the_first_step_can_be_loaded():
    with make_trainer() as fresh, make_trainer() as other:
        saved = fresh.state_dict()
        state_after(other, 2)
        other.load_state_dict(saved)
        assert_same_state(state_after(fresh, 1), state_after(other, 1))


def test_borrowed_weights_are_scored_and_the_own_ones_come_back_exactly():
    other = transformers_model(CONFIG, seed=9).state_dict()
    sequences = train_sequences(CONFIG, LENGTHS)
    with make_trainer() as trainer, MegatronTrainer(CONFIG, other, settings=settings(), temperature=1.0) as reference:
        own = state_after(trainer, 1)
        with trainer.using(other):
            borrowed = trainer.score(sequences)
            with pytest.raises(RuntimeError, match="borrowed"):
                trainer.update(sequences, token_mean_loss(sequences), entropy=False)
        for a, b in zip(borrowed, reference.score(sequences), strict=True):
            assert np.array_equal(a.log_probs, b.log_probs, equal_nan=True)
        assert_same_state(trainer.state_dict(), own)
        with pytest.raises(KeyError), trainer.using(other):
            raise KeyError
        assert_same_state(trainer.state_dict(), own)
        assert trainer.stats().swaps == 2


def test_weights_are_copies():
    with make_trainer() as trainer:
        taken = trainer.weights()
        for tensor in taken.values():
            tensor.zero_()
        assert all(torch.equal(WEIGHTS[name], tensor) for name, tensor in trainer.weights().items())


def test_groups_and_reference_log_probs_reach_the_loss_at_counted_tokens():
    sequences = [
        replace(sequence, ref_log_probs=sequence.old_log_probs - 1) for sequence in train_sequences(CONFIG, LENGTHS)
    ]
    seen = []

    def loss(batch):
        seen.append(batch)
        return batch.log_probs.sum()

    with make_trainer() as trainer:
        trainer.update(sequences, loss, entropy=True)
    (batch,) = seen
    assert torch.equal(batch.ref_log_probs, batch.old_log_probs - 1)
    assert batch.entropy.requires_grad
    for sequence in sequences:
        mine = batch.group == sequence.group
        assert np.array_equal(batch.advantages[mine], sequence.advantages[sequence.loss_mask])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_its_rollouts_and_takes_no_step(bad):
    sequences = train_sequences(CONFIG, LENGTHS)
    with make_trainer() as trainer:
        with pytest.raises(RuntimeError, match=r"loss is (nan|-?inf) on rollouts \['r0', 'r3'"):
            trainer.update(sequences, lambda batch: batch.log_probs.sum() * bad, entropy=False)
        assert all(torch.equal(WEIGHTS[name], tensor) for name, tensor in trainer.weights().items())


def test_a_gradient_that_is_not_finite_names_its_rollouts_and_takes_no_step():
    sequences = train_sequences(CONFIG, LENGTHS)
    with make_trainer(max_tokens_per_micro_batch=32) as trainer:

        def loss(batch):
            share = token_mean_loss(sequences)(batch)
            if (batch.group == 1).any():
                share.register_hook(lambda gradient: gradient * float("inf"))
            return share

        with pytest.raises(RuntimeError, match=r"gradient norm is (nan|inf) after rollouts \['r2', 'r1'\]"):
            trainer.update(sequences, loss, entropy=False)
        assert all(torch.equal(WEIGHTS[name], tensor) for name, tensor in trainer.weights().items())


def test_a_loss_without_gradient_is_refused():
    with make_trainer() as trainer, pytest.raises(RuntimeError, match="scalar with gradient"):
        trainer.update(train_sequences(CONFIG, LENGTHS), lambda batch: batch.log_probs.detach().sum(), entropy=False)


def refused(field, value):
    sequences = train_sequences(CONFIG, LENGTHS)
    sequences[1] = replace(sequences[1], **{field: value})
    return sequences


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        (refused("loss_mask", np.zeros(9, bool)), "'r1'.*at least one token"),
        (refused("loss_mask", np.ones(9, bool)), "'r1'.*not token 0"),
        (refused("old_log_probs", np.full(9, np.nan, np.float32)), "'r1', position 4: old_log_probs.*nan"),
        (refused("advantages", np.zeros(8, np.float32)), r"'r1': advantages has shape \[8\], expected \[t\] = \[9\]"),
        (refused("ref_log_probs", np.zeros(9, np.float32)), "some have none: .*'r0'"),
        (refused("token_ids", np.full(9, 99, np.int32)), "'r1', position 0: token id 99"),
    ],
    ids=["nothing", "nothing counted", "token 0 counted", "nan", "wrong length", "half a reference", "vocabulary"],
)
def test_an_update_that_could_only_be_wrong_is_refused_by_name(sequences, message):
    with make_trainer() as trainer, pytest.raises(ValueError, match=message):
        trainer.update(sequences, token_mean_loss(sequences), entropy=False)


def test_a_sequence_without_loss_can_be_scored_and_one_too_long_cannot():
    with make_trainer() as trainer:
        silent = [replace(s, loss_mask=np.zeros(9, bool)) for s in train_sequences(CONFIG, [9])]
        assert np.isfinite(trainer.score(silent)[0].log_probs[1:]).all()
        assert trainer.score([]) == []
        with pytest.raises(ValueError, match=r"'r0': 66 tokens; a forward needs 2\.\.65"):
            trainer.score(train_sequences(CONFIG, [66]))


def test_stats_count_fed_tokens():
    sequences = train_sequences(CONFIG, LENGTHS)
    with make_trainer() as trainer:
        trainer.score(sequences)
        trainer.score(sequences)
        trainer.update(sequences, token_mean_loss(sequences), entropy=False)
        stats = trainer.stats()
    fed = sum(LENGTHS) - len(LENGTHS)
    assert (stats.score_tokens, stats.update_tokens) == (2 * fed, fed)
    assert stats.score_s > 0
    assert stats.update_s > 0


def test_closing_leaves_nothing_behind():
    current_device = torch.cuda.current_device
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = make_trainer(), make_trainer()
    first.close()
    first.close()
    assert dist.is_initialized()
    second.score(train_sequences(CONFIG, LENGTHS))
    second.close()
    assert not dist.is_initialized()
    assert torch.cuda.current_device is current_device
    assert not RouterReplay.global_router_replay_instances


@pytest.mark.parametrize(("device", "message"), [("gpu", "expected auto, cpu or cuda"), ("cuda", "no CUDA device")])
def test_a_device_that_is_not_there_is_refused(device, message):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match=message):
        make_trainer(device=device)
    assert not dist.is_initialized()
