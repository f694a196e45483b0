"""Pinned resume: a prefix is prefilled again through its recorded experts; one matrix is then exact for all tokens."""

import asyncio
import copy
from collections.abc import Iterator

import numpy as np
import pytest
from transformers import Qwen3MoeForCausalLM

from experiments.buffer import Admission, SampleQueue
from experiments.engines.base import PauseMode, Reply, Request
from experiments.engines.embedded import EmbeddedEngine
from experiments.rollout import Rollouter, RolloutLimits, RowShape
from experiments.schema import ResumeRows
from experiments.trainers.base import ReplaySequence
from experiments.trainers.megatron import MegatronTrainer
from strategies import Exact, Replace, SliceConcat
from strategies.types import LIVE, Rollout
from tests.unit.engine_kit import SIZES, after_a_step, interrupted, model_of, one_thread, request, run, together
from tests.unit.trainer_cases import settings

L, K, E = SIZES["num_hidden_layers"], SIZES["num_experts_per_tok"], SIZES["num_experts"]


@pytest.fixture(scope="module")
def versions() -> list[Qwen3MoeForCausalLM]:
    """Three weight versions, each one step after the one before."""
    models = [model_of(seed=1)]
    models.append(after_a_step(models[0]))
    models.append(after_a_step(models[1]))
    return models


@pytest.fixture(scope="module")
def trainer(versions: list[Qwen3MoeForCausalLM]) -> Iterator[MegatronTrainer]:
    model = versions[0]
    with MegatronTrainer(model.config, model.state_dict(), settings=settings(), temperature=0.8) as built:
        yield built


def replayed(trainer: MegatronTrainer, model: Qwen3MoeForCausalLM, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the trainer's log-probs `[T]` under the weights of `model` with `rows` `[T-1, L, K]` replayed."""
    with trainer.using(model.state_dict()), one_thread():
        (score,) = trainer.score([ReplaySequence(tokens, rows, "r")])
    return score.log_probs


def random_rows(count: int, seed: int = 0) -> np.ndarray:
    """Returns `[count, L, K]` experts that no router chose."""
    return np.random.default_rng(seed).random((count, L, E)).argsort(-1)[..., :K].astype(np.int16)


def test_a_forced_prefill_gives_the_trainers_log_probs_under_replay_of_the_same_rows(versions, trainer):
    """Also for requests of other lengths in the same prefill, forced up to any position or not at all."""
    items = [
        request(0, length=9, rows=random_rows(8)),
        request(1, length=6, rows=random_rows(3, seed=1)),
        request(2, length=7, rows=random_rows(0)),
        request(3, length=4),
    ]
    replies = run(versions[0], together(*items))
    for item, reply in zip(items, replies, strict=True):
        tokens = np.concatenate([item.input_ids, reply.call.output_ids])
        expected = replayed(trainer, versions[0], tokens, reply.call.rows)[len(item.input_ids) :]
        np.testing.assert_allclose(reply.call.log_probs, expected, atol=1e-5, rtol=0)
        forced = item.rows if item.rows is not None else random_rows(0)
        np.testing.assert_array_equal(reply.call.rows[: len(forced)], forced)
    live = run(versions[0], together(request(0, length=9)))[0].call
    assert np.abs(live.log_probs[0] - replies[0].call.log_probs[0]) > 1e-3, "the forced experts matter"


@pytest.mark.parametrize("sizes", [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [1]}], ids=str)
def test_forcing_what_the_router_would_choose_changes_no_bit(sizes):
    model = model_of(seed=1, **sizes)
    item = request(0, length=9)
    (free,) = run(model, together(item))
    (forced,) = run(model, together(request(0, length=9, rows=free.call.rows[:8])))
    assert forced.call.log_probs.tobytes() == free.call.log_probs.tobytes()
    assert forced.call.rows.tobytes() == free.call.rows.tobytes()


def cell_set(position: int, layer: int, cell: object) -> np.ndarray:
    rows = random_rows(4)
    rows[position, layer] = cell
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (random_rows(5), r"request r0: integer rows \[m, 3, 2\] with m <= 4 .*int16 \[5, 3, 2\] came"),
        (random_rows(4)[:, :2], r"request r0: integer rows \[m, 3, 2\].*\[4, 2, 2\] came"),
        (random_rows(4)[..., 0], r"request r0: integer rows \[m, 3, 2\].*\[4, 3\] came"),
        (random_rows(4).astype(np.float32), r"request r0: integer rows.*float32"),
        (cell_set(1, 2, (0, E)), r"request r0: ids in 0..7 expected in every cell, \[0, 8\] came in row 1, layer 2"),
        (cell_set(2, 0, (3, 3)), r"request r0: distinct ids expected in every cell, \[3, 3\] came in row 2, layer 0"),
        (cell_set(3, 1, (LIVE, 2)), r"request r0: ids in 0..7 expected in every cell, \[-1, 2\] came in row 3"),
        (cell_set(3, 1, LIVE), r"request r0: recorded experts are expected at position 3 in layer 1, \[-1, -1\] came"),
    ],
    ids=["too many", "layers", "dimensions", "dtype", "range", "twice", "half live", "live"],
)
def test_rows_that_cannot_route_the_prefix_are_refused(versions, rows, message):
    with pytest.raises(ValueError, match=message):
        run(versions[0], together(request(0, rows=rows)))


def test_experts_in_a_layer_that_has_none_are_refused():
    with pytest.raises(ValueError, match=r"request r0: a cell of -1 .* expected at position 0 in layer 1, \[\d, \d\]"):
        run(model_of(seed=1, mlp_only_layers=[1]), together(request(0, rows=random_rows(4))))


class Prompts:
    """Problem i is the prompt of `request(i)`."""

    def problem(self, index: int):
        prompt = request(index, length=3 + index).input_ids
        return type("Problem", (), {"index": index, "dataset": "random", "prompt_ids": prompt})

    def reward(self, problem: object, output_ids: np.ndarray) -> float:
        return 0.0


def rollouts(versions: list[Qwen3MoeForCausalLM], mode: PauseMode, resume_rows: ResumeRows) -> list[Rollout]:
    """Returns six rollouts of the real rollouter and engine, with the weights loaded one after the other."""

    async def scenario(engine: EmbeddedEngine) -> list[Rollout]:
        queue, admission = SampleQueue([]), Admission(6)
        rollouter = Rollouter(
            engine=engine,
            problems=Prompts(),
            queue=queue,
            admission=admission,
            limits=RolloutLimits(response=24, context=64, empty_aborts=3),
            shape=RowShape(L, K, E),
            resume_rows=resume_rows,
            delta_rows=False,
            group_size=2,
            seed=0,
            version=lambda: 0,
            open_groups=[],
            next_problem=0,
        )
        task = asyncio.create_task(rollouter.run())
        for version in (1, 2):
            await asyncio.sleep(9)
            await engine.pause(mode)
            await engine.load_weights(versions[version].state_dict(), version)
            await engine.resume()
        groups = await queue.take(3)
        task.cancel()
        return [sample.rollout for sample in groups]

    return run(versions[0], scenario, resume_rows=resume_rows)


def gap(trainer: MegatronTrainer, versions: list[Qwen3MoeForCausalLM], rollout: Rollout, rows: np.ndarray) -> float:
    """Returns the largest distance of the engine's log-probs from the trainer's, each token under its own weights and
    all of them through `rows`."""
    sampled = rollout.versions()
    gaps = []
    for version in np.unique(sampled[sampled >= 0]):
        log_probs = replayed(trainer, versions[version], rollout.tokens, rows)
        gaps.append(np.abs(log_probs - rollout.log_probs())[sampled == version].max())
    return max(gaps)


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_one_matrix_gives_every_token_its_own_distribution_when_resumes_are_pinned(versions, trainer, mode):
    recorded = rollouts(versions, mode, ResumeRows.pinned)
    assert sum(len(np.unique(r.versions()[r.prompt_len :])) == 3 for r in recorded) >= 2, "resumed twice"
    for rollout in recorded:
        assert not any(call.mixed_rows for call in rollout.calls)
        (first_fed,) = SliceConcat()(rollout)
        for call in rollout.calls:
            if call.rows is not None:
                np.testing.assert_array_equal(call.rows, first_fed.rows[: call.end - 1])
        for rule in (Exact(), Replace()):
            (view,) = rule(rollout)
            np.testing.assert_array_equal(view.rows, first_fed.rows)
            np.testing.assert_array_equal(view.loss_mask, first_fed.loss_mask)
        assert gap(trainer, versions, rollout, first_fed.rows) < 1e-5


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_no_matrix_gives_every_token_its_own_distribution_when_prefixes_are_routed_afresh(versions, trainer, mode):
    """What pinning is for, and that the test above can fail."""
    several = [r for r in rollouts(versions, mode, ResumeRows.recompute) if len(np.unique(r.versions())) > 2]
    assert several
    for rollout in several:
        for rule in (SliceConcat(), Replace()):
            (view,) = rule(rollout)
            assert gap(trainer, versions, rollout, view.rows) > 1e-3


def test_two_pinned_runs_are_equal_to_the_last_bit(versions):
    first, second = (rollouts(versions, "abort", ResumeRows.pinned) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.log_probs().tobytes() == other.log_probs().tobytes()
        assert [c.rows.tobytes() for c in one.calls if c.rows is not None] == [
            c.rows.tobytes() for c in other.calls if c.rows is not None
        ]


def test_a_retracted_request_keeps_the_rows_it_came_with_even_if_the_engine_recomputes(versions):
    """`Request.rows` binds for the life of the request; what it does not cover is routed afresh, which is said."""
    item = request(0, length=9, rows=random_rows(8))
    reply: Reply = run(versions[0], interrupted(item, "retract", versions[1]), resume_rows=ResumeRows.recompute)
    assert (reply.retractions, reply.call.mixed_rows) == (1, True)
    np.testing.assert_array_equal(reply.call.rows[:8], item.rows)
    pinned: Reply = run(versions[0], interrupted(item, "retract", versions[1]), resume_rows=ResumeRows.pinned)
    assert (pinned.retractions, pinned.call.mixed_rows) == (1, False)
    assert pinned.prefill_tokens == reply.prefill_tokens
    assert (pinned.call.rows[8:13] != reply.call.rows[8:13]).any()


def test_a_request_aborted_while_retracted_returns_the_rows_it_was_pinned_to(versions):
    """Its resume then pins the same rows: a retraction and an abort in a row lose nothing."""
    item = request(0, length=9)

    async def scenario(engine: EmbeddedEngine) -> tuple[Reply, Reply]:
        task = asyncio.create_task(engine.generate(item))
        await asyncio.sleep(5)
        await engine.pause("retract")
        await engine.load_weights(versions[1].state_dict(), 1)
        await engine.pause("abort")
        first = await task
        await engine.resume()
        tokens = np.concatenate([item.input_ids, first.call.output_ids])
        rest = Request("r0.1", tokens, 3, item.sample_seed, rows=copy.deepcopy(first.call.rows))
        return first, await engine.generate(rest)

    first, second = run(versions[0], scenario, resume_rows=ResumeRows.pinned)
    assert not first.call.mixed_rows
    assert not second.call.mixed_rows
    np.testing.assert_array_equal(second.call.rows[: len(first.call.rows)], first.call.rows)
