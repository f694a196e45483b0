"""The token table: which tokens count, and what is known about each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.metrics.buckets import Buckets, boundary_bucket, lag_bucket, probability_bucket, segment_bucket
from experiments.metrics.metric import BOUNDARIES, LAGS, SEGMENTS, SPLITS
from experiments.metrics.ratio_keys import GAP_ABS
from experiments.metrics.tokens import NO_BOUNDARY, UNKNOWN_LAG, TokenTable
from strategies.types import UNKNOWN_VERSION, ReplayView, Rollout
from tests.unit.metrics_cases import one_view, random_batch, rollout_of, view_per_segment


def table_of(rollout: Rollout, views: list[ReplayView], trainer_version: int = 9) -> TokenTable:
    """Returns a table whose trainer log-prob of token i is -i."""
    scores = [-np.arange(view.length, dtype=np.float32) for view in views]
    return TokenTable.from_views(
        [rollout], [views], [scores], old_log_probs=None, advantages=np.array([0.5]), trainer_version=trainer_version
    )


def three_segments(**changes: object) -> Rollout:
    rng = np.random.default_rng(0)
    rollout = rollout_of("r7", 3, [[-1.0, -2.0], [-3.0], [-4.0, -5.0]], [[3, 3], [5], [6, 7]], rng, environment=1)
    return replace(rollout, **changes)  # pyright: ignore[reportArgumentType]


def test_every_counted_token_carries_its_record():
    table = table_of(three_segments(), one_view(three_segments()))
    # Prompt 0-2, call 0: 3-4, environment 5, call 1: 6, environment 7, call 2: 8-9.
    assert table.position.tolist() == [3, 4, 6, 8, 9]
    assert table.rollout_log_probs.tolist() == [-1, -2, -3, -4, -5]
    assert table.log_probs.tolist() == [-3, -4, -6, -8, -9]
    assert table.old_log_probs.tolist() == [-1, -2, -3, -4, -5]
    assert table.advantages.tolist() == [0.5] * 5
    assert table.segment.tolist() == [0, 0, 1, 2, 2]
    assert table.segments.tolist() == [3] * 5
    assert table.version.tolist() == [3, 3, 5, 6, 7]
    assert table.lag.tolist() == [6, 6, 4, 3, 2]
    assert table.boundary.tolist() == [-3, -2, 0, 0, 1]
    assert table.multi_version.all()


def test_views_of_one_rollout_make_the_same_table_as_one_view_whatever_their_order():
    rollout = three_segments()
    whole, parts = table_of(rollout, one_view(rollout)), table_of(rollout, view_per_segment(rollout)[::-1])
    for name in ("position", "log_probs", "rollout_log_probs", "segment", "version", "boundary"):
        assert getattr(whole, name).tolist() == getattr(parts, name).tolist()


def test_a_token_that_no_view_counts_is_not_there():
    rollout = three_segments()
    table = table_of(rollout, view_per_segment(rollout)[1:2])
    assert table.position.tolist() == [6]
    assert table.multi_version.all(), "the rollout stays a multi-version one"


def test_a_token_without_engine_log_prob_is_left_out_and_counted():
    rng = np.random.default_rng(0)
    rollout = rollout_of("r1", 2, [[-1.0, np.nan, -2.0]], [[4, 4, 4]], rng)
    table = table_of(rollout, one_view(rollout))
    assert table.position.tolist() == [2, 4]
    assert table.missing == 1


def test_tokens_beyond_the_cap_of_a_rollout_do_not_count():
    rollout = three_segments()
    capped = replace(rollout, tokens=rollout.tokens[:9])
    view = ReplayView(np.zeros((8, 4, 4), np.int16), capped.generated())
    assert table_of(capped, [view]).version.tolist() == [3, 3, 5, 6]


def test_an_unknown_version_is_neither_a_lag_nor_a_second_version():
    rng = np.random.default_rng(0)
    rollout = rollout_of("r1", 2, [[-1.0], [-1.0]], [[UNKNOWN_VERSION], [4]], rng)
    table = table_of(rollout, one_view(rollout), trainer_version=5)
    assert table.lag.tolist() == [UNKNOWN_LAG, 1]
    assert lag_bucket(table).tolist() == [-1, 1]
    assert not table.multi_version.any()


@pytest.mark.parametrize(
    ("name", "value"), [("log_probs", np.nan), ("log_probs", np.inf), ("rollout_log_probs", -np.inf)]
)
def test_a_value_that_is_not_finite_fails_the_step_and_names_key_count_and_rollouts(name: str, value: float):
    table = random_batch(1).table()
    broken = getattr(table, name).copy()
    broken[[0, -1]] = value
    with pytest.raises(RuntimeError, match=r"gap_ratio/nonfinite: .*log_probs .* at 2 of \d+ .*rollouts r0, r23"):
        replace(table, **{name: broken})


def test_a_view_that_counts_a_token_no_call_generated_is_an_error():
    rollout = three_segments()
    view = ReplayView(np.zeros((9, 4, 4), np.int16), np.arange(10) == 5)
    with pytest.raises(RuntimeError, match=r"rollout r7: .* position 5, which no call generated"):
        table_of(rollout, [view])


def test_log_probs_of_another_length_than_the_view_are_refused():
    rollout = three_segments()
    with pytest.raises(ValueError, match=r"rollout r7: expected log-probs of lengths \[10\], got \[9\]"):
        TokenTable.from_views(
            [rollout], [one_view(rollout)], [[np.zeros(9)]], old_log_probs=None, advantages=None, trainer_version=9
        )


def test_a_token_newer_than_the_trainer_is_an_error():
    rollout = three_segments()
    with pytest.raises(RuntimeError, match="version 7, newer than the trainer's 6"):
        table_of(rollout, one_view(rollout), trainer_version=6)


def test_concatenated_tables_keep_equal_rollouts_apart():
    table = random_batch(2).table()
    both = TokenTable.concatenate([table, table])
    assert both.size == 2 * table.size
    assert np.unique(both.rollout).size == 2 * np.unique(table.rollout).size


def test_segments_are_first_middle_last_or_only():
    rng = np.random.default_rng(0)
    three, one = three_segments(), rollout_of("r1", 2, [[-1.0]], [[4]], rng)
    assert [SEGMENTS[i] for i in segment_bucket(table_of(three, one_view(three)))] == ["first"] * 2 + ["middle"] + [
        "last"
    ] * 2
    assert [SEGMENTS[i] for i in segment_bucket(table_of(one, one_view(one)))] == ["only"]


def test_lag_and_boundary_buckets_have_the_documented_edges():
    rng = np.random.default_rng(0)
    rollout = rollout_of("r1", 2, [[-1.0] * 80, [-1.0] * 80], [[0] * 80, [1] * 80], rng)
    table = table_of(rollout, one_view(rollout), trainer_version=20)
    labels = {
        int(d): BOUNDARIES[b] if b >= 0 else None for d, b in zip(table.boundary, boundary_bucket(table), strict=True)
    }
    assert labels[-80] is None
    assert labels[-65] is None
    for distance, label in (
        (-64, "before_64_17"),
        (-17, "before_64_17"),
        (-16, "before_16_4"),
        (-4, "before_16_4"),
        (-3, "before_3_1"),
        (-1, "before_3_1"),
        (0, "after_0"),
        (1, "after_1_3"),
        (3, "after_1_3"),
        (4, "after_4_15"),
        (15, "after_4_15"),
        (16, "after_16_63"),
        (63, "after_16_63"),
        (64, "after_64plus"),
    ):
        assert labels[distance] == label
    lags = replace(table.select(np.arange(10)), lag=np.arange(10))
    expected = ["0", "1", "2", "3-4", "3-4", "5-8", "5-8", "5-8", "5-8", "9plus"]
    assert [LAGS[i] for i in lag_bucket(lags)] == expected
    single = rollout_of("r2", 2, [[-1.0] * 5], [[0] * 5], rng)
    assert table_of(single, one_view(single)).boundary.tolist() == [NO_BOUNDARY] * 5
    assert boundary_bucket(table_of(single, one_view(single))).tolist() == [-1] * 5


def test_probability_tenths_include_certainty_in_the_last():
    table = replace(random_batch(0).table().select(np.arange(3)), rollout_log_probs=np.log([1.0, 0.05, 0.55]))
    assert probability_bucket(table).tolist() == [9, 0, 5]


def test_bucket_means_weighted_by_their_counts_give_the_mean_and_empty_buckets_are_missing():
    table = random_batch(3).table()
    values = np.abs(table.log_probs)
    buckets = Buckets.of(table, ("segment", "lag", "versions"))
    means = buckets.means(GAP_ABS, values)
    for split in ("segment", "versions", "lag"):
        total = sum(
            means.get(GAP_ABS.by(split, label), 0.0) * count
            for label, count in zip(SPLITS[split], buckets.count[split], strict=True)
        )
        assert total == pytest.approx(values.sum())
    assert GAP_ABS.by("lag", "0") not in means, "no token is that fresh"
    assert all(np.isfinite(list(means.values())))
