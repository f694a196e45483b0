"""Router agreement: cells are sets, live cells are not compared, counts add up."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from experiments.metrics.routes import (
    RouteAgreement,
    against_exact,
    agreement_metrics,
    audit_metrics,
    churn,
    churn_metrics,
    compare_rows,
    margin_metrics,
)
from strategies.types import LIVE
from tests.unit.metrics_cases import (
    EXPERTS,
    LAYERS,
    TOP_K,
    one_view,
    random_batch,
    random_rows,
    rollout_of,
    view_per_segment,
)


def slow_overlap(a: np.ndarray, b: np.ndarray) -> list[list[int]]:
    return [
        [len(set(x) & set(y)) for x, y in zip(p, q, strict=True)] for p, q in zip(a.tolist(), b.tolist(), strict=True)
    ]


@pytest.mark.parametrize("experts", [5, 16, 64, 65, 160])
def test_agreement_equals_sets_for_any_number_of_experts(experts: int):
    rng = np.random.default_rng(experts)
    a, b = (np.argsort(rng.random((50, 3, experts)), axis=-1)[..., :4].astype(np.int16) for _ in range(2))
    b[::2] = a[::2][..., ::-1]
    overlap = np.array(slow_overlap(a, b))
    got = agreement_metrics(compare_rows(a, b))
    assert got == pytest.approx(
        {
            "route/overlap": overlap.mean() / 4,
            "route/set_mismatch": (overlap < 4).mean(),
            "route/token_any_mismatch": (overlap < 4).any(axis=1).mean(),
            "route/layers_differ": (overlap < 4).sum(axis=1).mean(),
            "route/zero_overlap": (overlap == 0).mean(),
            "route/identical_frac": (overlap == 4).mean(),
            "route/one_slot_frac": (overlap == 3).mean(),
        }
    )
    assert got["route/identical_frac"] >= 0.5


def test_slot_order_carries_no_meaning():
    rows = random_rows(np.random.default_rng(0), 20)
    assert compare_rows(rows, rows[..., ::-1]).set_mismatch == 0.0


def test_random_routes_overlap_by_k_over_e():
    rng = np.random.default_rng(1)
    got = compare_rows(random_rows(rng, 4000), random_rows(rng, 4000)).overlap_frac
    assert got == pytest.approx(TOP_K / EXPERTS, abs=0.01)


def test_cells_that_are_live_in_either_source_are_not_compared():
    rng = np.random.default_rng(2)
    a, b = random_rows(rng, 10), random_rows(rng, 10)
    b[:5] = a[:5]
    b[5:] = LIVE
    a[0, 1] = LIVE
    agreement = compare_rows(a, b)
    assert agreement.set_mismatch == 0.0
    assert agreement.cells.tolist() == [5, 4, 5, 5]
    assert agreement.positions == 5
    nothing = np.full_like(a, LIVE)
    assert agreement_metrics(compare_rows(a, nothing)) == {}


def test_agreements_of_parts_add_up_to_that_of_the_whole():
    rng = np.random.default_rng(3)
    a, b = random_rows(rng, 30), random_rows(rng, 30)
    b[::3] = a[::3]
    parts = compare_rows(a[:7], b[:7]) + compare_rows(a[7:], b[7:])
    assert agreement_metrics(parts) == agreement_metrics(compare_rows(a, b))
    assert parts.overlap_by_layer.tolist() == compare_rows(a, b).overlap_by_layer.tolist()


def test_shapes_must_agree():
    rows = random_rows(np.random.default_rng(0), 3)
    with pytest.raises(ValueError, match=r"\(3, 4, 4\) and \(2, 4, 4\)"):
        compare_rows(rows, rows[:2])


def two_calls(same_prefix: bool):
    rng = np.random.default_rng(4)
    rollout = rollout_of("r0", 3, [[-1.0] * 4, [-1.0] * 3], [[1] * 4, [2] * 3], rng)
    first, second = rollout.calls
    assert first.rows is not None
    assert second.rows is not None
    if same_prefix:
        rows = second.rows.copy()
        rows[: len(first.rows)] = first.rows
        second = replace(second, rows=rows)
    return replace(rollout, calls=(first, second))


def test_churn_compares_consecutive_calls_on_the_positions_that_both_returned():
    assert churn_metrics(churn([two_calls(same_prefix=True)]))["route/churn"] == 0.0
    rollout = two_calls(same_prefix=False)
    agreement = churn([rollout])
    assert isinstance(agreement, RouteAgreement)
    assert agreement.positions == 6, "call 0 returned rows of positions 0..5, call 1 of 0..8"
    first, second = (call.rows for call in rollout.calls)
    assert first is not None
    assert second is not None
    overlap = np.array(slow_overlap(first, second[:6]))
    got = churn_metrics(agreement)
    assert got["route/churn"] == pytest.approx(1 - overlap.mean() / TOP_K)
    for layer in range(LAYERS):
        assert got[f"route/churn_layer/{layer}"] == pytest.approx(1 - overlap[:, layer].mean() / TOP_K)


def test_delta_replies_of_a_kept_cache_and_calls_without_rows_have_no_churn():
    rollout = two_calls(same_prefix=False)
    first, second = rollout.calls
    assert second.rows is not None
    delta = replace(second, rows=second.rows[6:], row_start=6, kv_kept=True)
    assert churn([replace(rollout, calls=(first, delta))]) is None
    assert churn_metrics(None) == {}
    silent = replace(first, rows=None)
    assert churn([replace(rollout, calls=(silent, second))]) is None


def test_the_exact_strategy_agrees_with_itself_and_another_differs_in_the_prefix_it_changed():
    batch = random_batch(5, rollouts=6)
    exact = [view_per_segment(rollout) for rollout in batch.rollouts]
    same = against_exact(exact, exact)
    assert same is not None
    assert same.set_mismatch == 0.0
    replaced = against_exact([one_view(rollout) for rollout in batch.rollouts], exact)
    assert replaced is not None
    assert replaced.positions == sum(view.length - 1 for views in exact for view in views)
    assert replaced.set_mismatch > 0.1


def test_segments_without_loss_under_the_strategy_are_left_out():
    rollout = two_calls(same_prefix=False)
    exact = view_per_segment(rollout)
    agreement = against_exact([exact[1:]], [exact])
    assert agreement is not None
    assert agreement.positions == exact[1].length - 1
    assert against_exact([[]], [exact]) is None


def test_audit_margin_and_sources_have_their_own_keys():
    rng = np.random.default_rng(6)
    a, b = random_rows(rng, 200), random_rows(rng, 200)
    agreement = compare_rows(a, b)
    assert audit_metrics(agreement)["route/audit_mismatch"] > 0.99
    assert agreement_metrics(agreement, "live_before")["route/overlap_by_source/live_before"] == agreement.overlap_frac
    margins = np.arange(101, dtype=np.float32)
    assert margin_metrics([margins[:50].reshape(-1, 1), margins[50:].reshape(-1, 1)]) == {"route/margin_p5": 5.0}
    with pytest.raises(RuntimeError, match="route/margin_p5: 1 of 2 margins"):
        margin_metrics([np.array([[0.1], [np.nan]])])


def test_a_large_comparison_is_fast():
    rng = np.random.default_rng(7)
    a = rng.integers(0, 128, (8192, 48, 8), dtype=np.int16)
    start = time.process_time()
    compare_rows(a, a)
    assert time.process_time() - start < 4.0, "8k positions x 48 layers x top-8 take about 0.3 s of CPU time"
