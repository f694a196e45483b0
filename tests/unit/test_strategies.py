"""What each merge rule returns, on rows whose values tell their call k and position i: 10 * (k + 1) + i."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from strategies import (
    LIVE,
    UNKNOWN_VERSION,
    EngineCall,
    Exact,
    Gated,
    LastSegment,
    Live,
    MaskStale,
    MergeError,
    MergeStrategy,
    NaiveConcat,
    Recompute,
    Replace,
    Rollout,
    Shuffled,
    SliceConcat,
)
from strategies.budget import call_budget, rollout_finish

PROMPT = 4
SINGLE: list[MergeStrategy] = [
    Replace(),
    SliceConcat(),
    NaiveConcat(),
    Live(),
    LastSegment(),
    MaskStale(),
    Shuffled(seed=0),
]


def call(index: int, input_len: int, new: int, **fields: object) -> EngineCall:
    """Returns call `index` with full rows, all sampled by weight version `index`."""
    count = input_len + new - 1
    values: dict[str, object] = {
        "request_id": f"r.{index}",
        "input_len": input_len,
        "output_ids": np.arange(input_len, input_len + new, dtype=np.int32),
        "log_probs": np.full(new, -0.5, np.float32),
        "rows": np.broadcast_to(10 * (index + 1) + np.arange(count, dtype=np.int16)[:, None, None], (count, 2, 1)),
        "versions": np.full(new, index, np.int32),
        "finish": "abort",
    }
    return EngineCall(**{**values, **fields})  # pyright: ignore[reportArgumentType]


def rollout(*calls: EngineCall, length: int | None = None, trainer_version: int | None = None) -> Rollout:
    tokens = np.arange(calls[-1].end if length is None else length, dtype=np.int32)
    return Rollout("r", tokens, PROMPT, calls, 2, 1, 64, trainer_version)


def two_calls(trainer_version: int | None = None) -> Rollout:
    return rollout(call(0, 4, 3), call(1, 7, 2), trainer_version=trainer_version)


def stamps(strategy: MergeStrategy, of: Rollout) -> list[int]:
    """Returns the stamp of every row of the only view."""
    (view,) = strategy(of)
    assert (view.rows == view.rows[:, :1, :1]).all()
    return view.rows[:, 0, 0].tolist()


def test_last_segment_keeps_the_rows_that_predict_it_and_frees_the_rest():
    assert stamps(LastSegment(), two_calls()) == [-1] * 6 + [26, 27]


def test_mask_stale_trains_on_the_last_segment_through_the_newest_rows():
    (view,) = MaskStale()(two_calls())
    assert np.flatnonzero(view.loss_mask).tolist() == [7, 8]
    assert view.rows[:, 0, 0].tolist() == list(range(20, 28))


def test_live_and_recompute_need_no_rows_and_differ_in_when_routes_are_fixed():
    without = rollout(call(0, 4, 3, rows=None), call(1, 7, 2, rows=None))
    for strategy, frozen in ((Live(), False), (Recompute(), True)):
        (view,) = strategy(without)
        assert (view.rows == LIVE).all()
        assert view.rows.shape == (8, 2, 1)
        assert view.freeze_live is frozen
        assert np.flatnonzero(view.loss_mask).tolist() == [4, 5, 6, 7, 8]


def test_shuffled_permutes_by_seed_and_rollout():
    first = stamps(Shuffled(seed=0), two_calls())
    assert sorted(first) == sorted(stamps(SliceConcat(), two_calls()))
    assert first != stamps(SliceConcat(), two_calls())
    assert first == stamps(Shuffled(seed=0), two_calls())
    assert first != stamps(Shuffled(seed=1), two_calls())
    assert first != stamps(Shuffled(seed=0), dataclasses.replace(two_calls(), rollout_id="other"))


def test_gated_by_lag_frees_rows_older_than_the_limit_and_rows_of_unknown_version():
    """Rows 0..5 are of version 0, rows 6 and 7 of version 1."""
    of = two_calls(trainer_version=3)
    kept = stamps(SliceConcat(), of)
    assert stamps(Gated(max_lag=3, max_churn=None), of) == kept
    assert stamps(Gated(max_lag=2, max_churn=None), of) == [-1] * 6 + kept[6:]
    assert stamps(Gated(max_lag=1, max_churn=None), of) == [-1] * 8
    unknown = rollout(call(0, 4, 3), call(1, 7, 2, versions=np.full(2, UNKNOWN_VERSION)), trainer_version=3)
    assert stamps(Gated(max_lag=3, max_churn=None), unknown) == kept[:6] + [-1] * 2


def test_gated_by_lag_dates_a_row_by_the_token_that_it_predicted():
    """An in-place pause: tokens 4 and 5 are of version 0, token 6 of version 1, so row 5 is the first of version 1."""
    of = rollout(call(0, 4, 3, versions=np.array([0, 0, 1], np.int32)), trainer_version=1)
    assert stamps(Gated(max_lag=0, max_churn=None), of) == [-1] * 5 + [15]


def test_gated_by_lag_needs_the_trainers_version():
    with pytest.raises(MergeError, match=r"rollout r: gated with max_lag=0 needs Rollout.trainer_version"):
        Gated(max_lag=0, max_churn=None)(two_calls())


def churned(*shares: tuple[int, int]) -> Rollout:
    """Returns one layer pair, top-4: position i of call 1 differs from call 0 in shares[i] experts of layer 0 and 1."""
    old = np.tile(np.arange(4, dtype=np.int16), (6, 2, 1))
    new = np.tile(np.arange(3, -1, -1, dtype=np.int16), (8, 2, 1))  # the same set in another order
    for position, layers in enumerate(shares):
        for layer, differing in enumerate(layers):
            new[position, layer, :differing] = 10 + np.arange(differing)
    return dataclasses.replace(two_calls(), top_k=4, calls=(call(0, 4, 3, rows=old), call(1, 7, 2, rows=new)))


def test_gated_by_churn_compares_sets_and_frees_rows_above_the_limit():
    of = churned((0, 0), (1, 1), (2, 0), (2, 1), (4, 4))

    def freed(limit: float) -> list[int]:
        return np.flatnonzero((Gated(None, limit)(of)[0].rows == LIVE).all(axis=(1, 2))).tolist()

    assert freed(0.0) == [1, 2, 3, 4]
    assert freed(0.25) == [3, 4]
    assert freed(0.5) == [4]
    assert freed(1.0) == []


def test_churn_leaves_out_layers_without_routes():
    of = churned((4, 2))
    for recorded in of.calls:
        assert recorded.rows is not None
        recorded.rows[:, 0] = LIVE
    assert not (Gated(None, 0.5)(of)[0].rows[0, 1] == LIVE).any()
    assert (Gated(None, 0.49)(of)[0].rows[0, 1] == LIVE).all()


def test_nothing_churns_behind_a_kept_cache():
    kept = call(1, 7, 2, kv_kept=True, row_start=6, rows=np.full((2, 2, 1), 30, np.int16))
    assert stamps(Gated(None, 0.0), rollout(call(0, 4, 3), kept)) == [*range(10, 16), 30, 30]


@pytest.mark.parametrize(("lag", "churn"), [(None, None), (-1, None), (None, 1.5)])
def test_gated_refuses_limits_without_a_meaning(lag: int | None, churn: float | None):
    with pytest.raises(ValueError, match="gated"):
        Gated(lag, churn)


def test_exact_refuses_a_retracted_call_and_says_what_to_do():
    with pytest.raises(
        MergeError, match=r"rollout r, call 0 \(request r.0\): .* pause with abort or in_place, or drop the rollout"
    ):
        Exact()(rollout(call(0, 4, 3, mixed_rows=True)))


def test_a_retraction_rebuilds_a_kept_cache():
    """The prefix of a retracted call is routed again, whatever was kept before."""
    assert stamps(Replace(), rollout(call(0, 4, 3), call(1, 7, 2, kv_kept=True, mixed_rows=True))) == list(
        range(20, 28)
    )


def test_missing_rows_name_rollout_call_expected_and_actual():
    without = rollout(call(0, 4, 3), call(1, 7, 2, rows=None), call(2, 9, 1))
    with pytest.raises(
        MergeError, match=r"rollout r, call 1 \(request r.1\): rows of positions 6..7 expected, the call returned no"
    ):
        SliceConcat()(without)
    late = rollout(call(0, 4, 3), call(1, 7, 2, row_start=6, rows=np.zeros((2, 2, 1), np.int16)))
    with pytest.raises(MergeError, match=r"call 1 .*: rows of positions 0..5 expected, only 6..7 came"):
        Replace()(late)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": np.zeros((7, 2, 1), np.int16)}, r"rows of shape \(8, 2, 1\) expected .*, \(7, 2, 1\) came"),
        ({"rows": np.zeros((8, 3, 1), np.int16)}, r"rows of shape \(8, 2, 1\) expected .*, \(8, 3, 1\) came"),
        ({"rows": np.zeros((8, 2, 1))}, "integer rows expected, float64 came"),
        ({"row_start": -1}, r"rows of shape \(9, 2, 1\) expected"),
        ({"log_probs": np.zeros(1, np.float32)}, "1 log_probs for 2 tokens"),
        ({"versions": np.zeros(3, np.int32)}, "3 versions for 2 tokens"),
        ({"output_ids": np.array([7, 9], np.int32)}, "tokens 7..8 are not those that the call generated"),
        ({"surplus": np.zeros((2, 2, 1), np.int16)}, r"a surplus row of shape \(1, 2, 1\) expected"),
    ],
)
@pytest.mark.parametrize("strategy", [*SINGLE, Exact()], ids=lambda s: type(s).__name__)
def test_every_strategy_refuses_an_inconsistent_call(strategy: MergeStrategy, fields: dict[str, object], message: str):
    with pytest.raises(MergeError, match=message):
        strategy(rollout(call(0, 4, 3), call(1, 7, 2, **fields)))


def test_a_call_that_was_fed_too_little_is_refused():
    with pytest.raises(MergeError, match=r"at least 7 input tokens expected .*, 6 were fed"):
        Live()(rollout(call(0, 4, 3), call(1, 6, 2)))


def test_rows_keep_their_type_where_calls_agree_and_are_promoted_where_not():
    wide = call(1, 7, 2, rows=call(1, 7, 2).rows.astype(np.int64))  # pyright: ignore[reportOptionalMemberAccess]
    assert SliceConcat()(two_calls())[0].rows.dtype == np.int16
    assert SliceConcat()(rollout(call(0, 4, 3), wide))[0].rows.dtype == np.int64
    unsigned = rollout(call(0, 4, 3, rows=np.full((6, 2, 1), 200, np.uint8)))
    assert Replace()(unsigned)[0].rows.dtype == np.uint8
    assert Live()(unsigned)[0].rows.dtype == np.int16
    mixed = rollout(call(0, 4, 3, rows=np.zeros((6, 2, 1), np.uint64)), call(1, 7, 2))
    with pytest.raises(MergeError, match="no integer type holds rows of int16, uint64"):
        Replace()(mixed)


def test_merged_rows_are_writable_though_recorded_ones_are_not():
    for strategy in [*SINGLE, Exact()]:
        for view in strategy(two_calls()):
            view.rows[0] = LIVE
    assert two_calls().calls[0].rows is not None


def test_a_token_without_a_log_prob_carries_loss_nowhere():
    scored = call(0, 4, 3, log_probs=np.array([-0.5, np.nan, -0.5], np.float32))
    for strategy in [*SINGLE, Exact()]:
        assert not any(view.loss_mask[5] for view in strategy(rollout(scored)))


def test_a_rollout_without_a_token_needs_no_rows():
    """With rows of the prompt there is a view without loss, without them none. Exact has no view either way."""
    for strategy in SINGLE:
        (view,) = strategy(rollout(call(0, 4, 0)))
        assert view.rows.shape == (3, 2, 1)
        assert not view.loss_mask.any()
        assert strategy(rollout(call(0, 4, 0, rows=None))) == []
    assert Exact()(rollout(call(0, 4, 0))) == []


def test_environment_tokens_behind_the_last_generated_one_need_no_rows():
    for strategy in SINGLE:
        (view,) = strategy(rollout(call(0, 4, 3), length=10))
        assert (view.length, view.rows.shape) == (7, (6, 2, 1))


def test_naive_concat_raises_when_all_replies_together_are_too_short():
    with pytest.raises(MergeError, match="8 rows expected, all calls together returned 6"):
        NaiveConcat()(rollout(call(0, 4, 3), call(1, 7, 2, rows=None)))


def test_the_budget_is_the_tightest_limit_and_never_negative():
    assert call_budget(input_len=19, generated=9, response_cap=24, context_limit=40) == 15
    assert call_budget(input_len=19, generated=9, response_cap=24, context_limit=24) == 5
    assert call_budget(input_len=19, generated=9, response_cap=None, context_limit=None, length_limit=20) == 1
    assert call_budget(input_len=30, generated=26, response_cap=24, context_limit=40) == 0
    with pytest.raises(ValueError, match="all are None"):
        call_budget(input_len=1, generated=0, response_cap=None, context_limit=None)


def test_an_abort_with_a_spent_budget_ends_by_length():
    assert [rollout_finish("abort", 0), rollout_finish("abort", 1), rollout_finish("stop", 0)] == [
        "length",
        "abort",
        "stop",
    ]
