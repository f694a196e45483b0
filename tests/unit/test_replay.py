"""What a router executes under replay: the installed rows, its own choice in live cells, and nothing left behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.trainers.base import ReplayCounts
from experiments.trainers.megatron import MegatronTrainer
from experiments.trainers.upstream import RouterReplay, TopKRouter
from strategies.types import LIVE
from tests.unit.trainer_cases import (
    live_rows,
    model_config,
    random_rows,
    settings,
    token_mean_loss,
    train_sequences,
    transformers_model,
)

CONFIG = model_config()
WEIGHTS = transformers_model(CONFIG).state_dict()
LENGTHS = [17, 9, 12, 17, 5]


def make_trainer(**changes):
    return MegatronTrainer(CONFIG, WEIGHTS, settings=settings(**changes), temperature=1.0)


@pytest.fixture(scope="module")
def trainer():
    with make_trainer() as made:
        yield made


def routers(trainer):
    return [module for module in trainer._model.modules() if isinstance(module, TopKRouter)]


def gradients(trainer, sequences, loss=None):
    """Returns every gradient of an update, as a dict, and its result."""
    kept = {}

    def keep():
        kept.update({name: parameter.grad.clone() for name, parameter in trainer._named.items()})

    original = trainer._optimizer.step
    trainer._optimizer.step = keep
    clip, trainer._settings = trainer._settings, replace(trainer._settings, max_grad_norm=1e9)
    try:
        result = trainer.update(sequences, loss or token_mean_loss(sequences), entropy=False)
    finally:
        trainer._optimizer.step, trainer._settings = original, clip
    return kept, result


def test_own_rows_replayed_give_the_same_log_probs_bit_for_bit(trainer):
    live = train_sequences(CONFIG, LENGTHS, live=True)
    first = trainer.score(live, routes=True)
    replayed = trainer.score([replace(s, rows=score.rows) for s, score in zip(live, first, strict=True)], routes=True)
    for a, b in zip(first, replayed, strict=True):
        assert a.rows.dtype == np.int16
        assert np.array_equal(a.rows, b.rows)
        assert np.array_equal(a.log_probs, b.log_probs, equal_nan=True)


def test_the_order_of_a_rows_experts_changes_no_bit(trainer):
    sequences = train_sequences(CONFIG, LENGTHS)
    flipped = [replace(sequence, rows=sequence.rows[..., ::-1]) for sequence in sequences]
    for a, b in zip(trainer.score(sequences), trainer.score(flipped), strict=True):
        assert np.array_equal(a.log_probs, b.log_probs, equal_nan=True)


def test_foreign_rows_are_executed_and_change_the_log_probs(trainer):
    sequences = train_sequences(CONFIG, LENGTHS)
    live = [replace(sequence, rows=live_rows(CONFIG, len(sequence.rows))) for sequence in sequences]
    for sequence, score, free in zip(
        sequences, trainer.score(sequences, routes=True), trainer.score(live), strict=True
    ):
        assert np.array_equal(score.rows, np.sort(sequence.rows, -1))
        assert np.abs(score.log_probs - free.log_probs)[1:].max() > 1e-3


def test_live_cells_inside_a_replayed_matrix_follow_the_live_router(trainer):
    sequence = train_sequences(CONFIG, [17])[0]
    rows = sequence.rows.copy()
    rows[::2, 1] = LIVE  # every other position of the middle layer
    rows[5] = LIVE
    used = trainer.score([replace(sequence, rows=rows)], routes=True)[0].rows
    replayed = rows[..., 0] != LIVE
    assert np.array_equal(used[replayed], np.sort(rows, -1)[replayed])
    assert (used[~replayed] >= 0).all()
    # Fixing the choice that the live cells made changes nothing.
    pinned = trainer.score([replace(sequence, rows=used)])[0]
    mixed = trainer.score([replace(sequence, rows=rows)])[0]
    assert np.array_equal(pinned.log_probs, mixed.log_probs, equal_nan=True)
    # The first layer's router sees the same input live and replayed: free here, it chooses what it chooses live.
    only_first = rows.copy()
    only_first[:, 0] = LIVE
    live = trainer.score([replace(sequence, rows=live_rows(CONFIG, 16))], routes=True)[0].rows
    assert np.array_equal(trainer.score([replace(sequence, rows=only_first)], routes=True)[0].rows[:, 0], live[:, 0])


def test_an_all_live_sequence_equals_a_model_without_targets(trainer):
    sequences = train_sequences(CONFIG, [17], live=True)
    scored = trainer.score(sequences)[0].log_probs[1:]
    reference = transformers_model(CONFIG)
    ids = torch.tensor(sequences[0].token_ids, dtype=torch.long)
    with torch.no_grad():
        expected = torch.log_softmax(reference(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    assert np.abs(scored - expected.numpy()).max() < 1e-5


def test_margins_are_those_of_the_live_router(trainer):
    sequence = train_sequences(CONFIG, [9], live=True)[0]
    live = trainer.score([sequence], routes=True)[0]
    replayed = trainer.score([replace(sequence, rows=random_rows(CONFIG, 8, np.random.default_rng(0)))], routes=True)[0]
    assert live.margins.shape == (8, CONFIG.num_hidden_layers)
    assert (live.margins >= 0).all()
    # Layer 0 sees the embeddings and attention only, which replay does not touch.
    np.testing.assert_array_equal(live.margins[:, 0], replayed.margins[:, 0])


def test_counts_tell_replayed_from_live_cells_and_leave_padding_out(trainer):
    sequences = train_sequences(CONFIG, LENGTHS)
    sequences[1].rows[:] = LIVE
    sequences[2].rows[3, 0] = LIVE
    _, result = gradients(trainer, sequences)
    layers = CONFIG.num_hidden_layers
    live = (LENGTHS[1] - 1) * layers + 1
    assert result.replay == ReplayCounts(sum(n - 1 for n in LENGTHS) * layers - live, live, 0)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ([6, 0], r"position 3, layer 1.*expected 2 different experts in 0..5"),
        ([-2, 0], "position 3, layer 1"),
        ([4, 4], "position 3, layer 1"),
        ([-1, 4], r"position 3, layer 1.*-1 in the whole cell"),
    ],
    ids=["beyond the last expert", "below live", "twice the same", "half a live cell"],
)
def test_a_cell_that_no_router_could_produce_is_refused_with_its_place(trainer, cell, message):
    sequences = train_sequences(CONFIG, LENGTHS)
    sequences[1].rows[3, 1] = cell
    with pytest.raises(ValueError, match=f"rollout 'r1', {message}"):
        trainer.score(sequences)


@pytest.mark.parametrize("shape", [(16, 3, 2), (8, 2, 2), (8, 3, 1)], ids=["positions", "layers", "experts"])
def test_rows_of_the_wrong_shape_are_refused_with_both_shapes(trainer, shape):
    sequences = train_sequences(CONFIG, LENGTHS)
    sequences[1] = replace(sequences[1], rows=np.zeros(shape, np.int16))
    with pytest.raises(ValueError, match=r"rollout 'r1'.*\[8, 3, 2\], got int16 \["):
        trainer.score(sequences)


def test_rows_that_are_not_integers_are_refused(trainer):
    sequence = train_sequences(CONFIG, [9])[0]
    with pytest.raises(ValueError, match=r"expected integer rows.*got float32"):
        trainer.score([replace(sequence, rows=sequence.rows.astype(np.float32))])


def test_two_models_side_by_side_do_not_disturb_each_other(trainer):
    sequences = train_sequences(CONFIG, LENGTHS)
    alone = trainer.score(sequences)
    other_config = model_config(num_hidden_layers=2, num_experts=4)
    other_weights = transformers_model(other_config, seed=5).state_dict()
    with MegatronTrainer(other_config, other_weights, settings=settings(), temperature=1.0) as other:

        def disturbed(batch):
            # The other model forwards between this one's forward and backward.
            other.score(train_sequences(other_config, [7, 9]))
            return token_mean_loss(sequences)(batch)

        with_neighbour = trainer.score(sequences)
        expected, _ = gradients(trainer, sequences)
        actual, _ = gradients(trainer, sequences, disturbed)
    for a, b in zip(alone, with_neighbour, strict=True):
        assert np.array_equal(a.log_probs, b.log_probs, equal_nan=True)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not RouterReplay.global_router_replay_instances


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_stays_installed_after_a_loss_that_raises(recompute):
    with make_trainer(recompute_activations=recompute) as trainer:
        sequences = train_sequences(CONFIG, LENGTHS)

        def broken(batch):
            raise KeyError("from the loss")

        before = trainer.weights()
        with pytest.raises(KeyError, match="from the loss"):
            trainer.update(sequences, broken, entropy=False)
        for router in routers(trainer):
            pins = router.router_replay
            assert pins.target_topk_idx is pins.used is pins.expected is pins.live is None
            assert pins.replay_backward_list == []
        assert all(parameter.grad is None for parameter in trainer._named.values())
        assert all(torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())
        trainer.update(sequences, token_mean_loss(sequences), entropy=False)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_activations_replay_the_same_rows_and_give_the_same_gradients(granularity):
    sequences = train_sequences(CONFIG, LENGTHS)
    for sequence in sequences[::2]:
        sequence.rows[1::3] = LIVE
    budget = 32  # three micro-batches: forward, backward, forward, backward
    with make_trainer(max_tokens_per_micro_batch=budget) as plain:
        expected, expected_result = gradients(plain, sequences)
    with make_trainer(max_tokens_per_micro_batch=budget, recompute_activations=True) as recomputing:
        if granularity == "selective":
            recomputing._model.decoder.config.recompute_granularity = "selective"
            for layer in recomputing._model.decoder.layers:
                layer.mlp.moe_layer_recompute = True
        calls = []
        for router in routers(recomputing):
            router.register_forward_hook(lambda *_: calls.append(1))
        actual, result = gradients(recomputing, sequences)
        assert len(calls) == 2 * 3 * CONFIG.num_hidden_layers  # twice per micro-batch and layer
    assert result.replay == expected_result.replay
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_router_that_ignores_its_targets_is_caught():
    with make_trainer() as trainer:
        sequences = train_sequences(CONFIG, LENGTHS)
        router = routers(trainer)[1]
        router.router_replay.get_replay_topk = lambda scores, k, groups, group_k, topk: topk(scores, k, groups, group_k)
        with pytest.raises(RuntimeError, match=r"cells used other experts than installed, first in layer 1"):
            trainer.score(sequences)
        with pytest.raises(RuntimeError, match=r"cells used other experts"):
            trainer.update(sequences, token_mean_loss(sequences), entropy=False)


def test_a_router_that_is_bypassed_is_caught():
    with make_trainer() as trainer:
        layer = trainer._model.decoder.layers[2].mlp
        layer.route = lambda hidden, mask=None: (
            torch.full((hidden.shape[0] * hidden.shape[1], CONFIG.num_experts), 0.5),
            torch.arange(CONFIG.num_experts).expand(hidden.shape[0] * hidden.shape[1], -1) < 2,
        )
        with pytest.raises(RuntimeError, match="router of layer 2 to consume its targets 1 times, it did 0"):
            trainer.score(train_sequences(CONFIG, LENGTHS))
