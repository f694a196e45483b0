"""Scores under the generating weights, and the row audit: real engine, real trainer, rollouts interrupted once."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from experiments.engines.base import Request
from experiments.generating import AuditError, AuditPlan, score_generating
from experiments.trainers.megatron import MegatronTrainer
from experiments.weight_history import WeightHistory
from strategies.types import Rollout
from tests.unit.engine_kit import after_a_step, model_of, one_thread, request, run
from tests.unit.trainer_cases import settings

FIRST = model_of(0)
SECOND = after_a_step(FIRST)
NOW = after_a_step(SECOND)
FP32 = AuditPlan(limit=0.005, pinned=False)


def interrupted_rollout(index=0, mode="abort"):
    """Returns a rollout whose first tokens came from FIRST (version 0) and the rest from SECOND (version 1)."""
    item = request(index, length=6, budget=20)

    async def scenario(engine):
        task = asyncio.create_task(engine.generate(item))
        await asyncio.sleep(7.0)
        await engine.pause(mode)
        await engine.load_weights(SECOND.state_dict(), 1)
        await engine.resume()
        calls = [(await task).call]
        if calls[0].finish == "abort":
            tokens = np.concatenate([item.input_ids, calls[0].output_ids])
            again = Request(f"r{index}.1", tokens, 20 - calls[0].new_tokens, item.sample_seed)
            calls.append((await engine.generate(again)).call)
        return calls

    return rollout_of(item, run(FIRST, scenario))


def rollout_of(item, calls):
    tokens = np.concatenate([item.input_ids, *(call.output_ids for call in calls)]).astype(np.int32)
    layers, top_k = calls[0].rows.shape[1:]
    return Rollout("r", tokens, len(item.input_ids), tuple(calls), layers, top_k, FIRST.config.num_experts)


def score(rollouts, history=None, plan=FP32):
    weights = {0: FIRST.state_dict(), 1: SECOND.state_dict()} if history is None else history
    with (
        one_thread(),
        MegatronTrainer(FIRST.config, NOW.state_dict(), settings=settings(), temperature=0.8) as trainer,
    ):
        return score_generating(trainer, WeightHistory(weights), rollouts, plan)


def with_rows(rollout, index, rows):
    calls = list(rollout.calls)
    calls[index] = replace(calls[index], rows=rows)
    return replace(rollout, calls=tuple(calls))


def test_the_generating_weights_repeat_the_engines_log_probs_and_rows():
    rollout = interrupted_rollout()
    assert [call.versions[0] for call in rollout.calls] == [0, 1]
    scores = score([rollout])
    generated = rollout.generated()
    np.testing.assert_allclose(scores.log_probs[0][generated], rollout.log_probs()[generated], atol=1e-5, rtol=0)
    assert np.isnan(scores.log_probs[0][~generated]).all()
    assert scores.audited is not None
    assert scores.audited.set_mismatch == 0.0
    assert scores.audited.cells[0] == sum(len(call.rows) for call in rollout.calls)


def test_tokens_whose_weights_are_gone_have_no_score():
    rollout = interrupted_rollout()
    (values,) = score([rollout], {1: SECOND.state_dict()}).log_probs
    first, second = rollout.segments()
    assert np.isnan(values[first.first : first.last]).all()
    assert np.isfinite(values[second.first : second.last]).all()


def shifted(rows, call):
    return np.roll(rows, 1, axis=0)


def first_of_every_forward(rows, call):
    """The recorded fault of SGLang 0.5.12 with overlap scheduling on a CPU: wrong at position 0 and wherever one token
    was decoded.
    """
    out = rows.copy()
    out[[0, *range(call.input_len, len(rows))]] = np.roll(rows, 3, axis=0)[[0, *range(call.input_len, len(rows))]]
    return out


def zeros(rows, call):
    return np.broadcast_to(np.arange(rows.shape[2], dtype=rows.dtype), rows.shape).copy()


@pytest.mark.parametrize("fault", [shifted, first_of_every_forward, zeros])
def test_rows_of_the_right_shape_that_are_wrong_stop_the_run_by_request(fault):
    rollout = interrupted_rollout()
    call = rollout.calls[1]
    with pytest.raises(AuditError, match=r"request r0\.1 \(weight version 1\): \d+ of \d+ cells of its .* rows"):
        score([rollout, with_rows(rollout, 1, fault(call.rows, call))])


def test_rows_of_older_weights_are_found_too():
    """A stale prefix cache returns the rows of the call before."""
    rollout = interrupted_rollout()
    stale = rollout.calls[1].rows.copy()
    old = rollout.calls[0].rows
    assert (stale[: len(old)] != old).any(), "the step moved no route: this test would show nothing"
    stale[: len(old)] = old
    damaged = with_rows(rollout, 1, stale)
    healthy = [interrupted_rollout(index) for index in range(1, 4)]
    with pytest.raises(AuditError, match=r"in (1 of 8 requests, most in )?request r0\.1|request r0\.1 \("):
        score([*healthy, damaged])


def test_a_few_differing_cells_are_counted_but_do_not_stop_the_run():
    rollout = interrupted_rollout()
    rows = rollout.calls[1].rows.copy()
    other = next(e for e in range(FIRST.config.num_experts) if e not in rows[2, 0])
    rows[2, 0, 0] = other
    scores = score([with_rows(rollout, 1, rows)], plan=AuditPlan(limit=0.0, pinned=False))
    assert scores.audited is not None
    assert scores.audited.cells.sum() - scores.audited.identical.sum() == 1
    assert np.isfinite(scores.log_probs[0][rollout.generated()]).all(), "scored through the returned rows instead"


def test_a_call_that_spans_versions_is_scored_by_the_version_of_each_token_and_not_audited():
    rollout = interrupted_rollout(mode="in_place")
    assert len(rollout.calls) == 1
    assert set(rollout.calls[0].versions.tolist()) == {0, 1}
    scores = score([rollout])
    assert scores.audited is None
    assert np.isfinite(scores.log_probs[0][rollout.generated()]).all()
    old = rollout.versions() == 0
    np.testing.assert_allclose(scores.log_probs[0][old], rollout.log_probs()[old], atol=1e-5, rtol=0)


def test_rows_mixed_inside_a_call_are_left_out():
    rollout = interrupted_rollout(mode="retract")
    assert rollout.calls[0].mixed_rows
    scores = score([rollout])
    assert scores.audited is None
    assert np.isnan(scores.log_probs[0]).all()


def test_a_pinned_prefix_is_not_audited_the_rest_is():
    rollout = interrupted_rollout()
    rows = rollout.calls[1].rows.copy()
    rows[: len(rollout.calls[0].rows)] = np.roll(rollout.calls[0].rows, 1, axis=0)
    pinned = with_rows(rollout, 1, rows)
    scores = score([pinned], {1: SECOND.state_dict()}, plan=AuditPlan(limit=1.0, pinned=True))
    assert scores.audited is not None
    assert scores.audited.cells[0] == len(rows) - (pinned.calls[1].input_len - 1)
