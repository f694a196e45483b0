"""Every key that is produced is declared, and the document is that of the registry."""

from __future__ import annotations

import ast
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from experiments.metrics import __main__ as command
from experiments.metrics import ratio_keys, route_keys
from experiments.metrics.decomposition import decompose, decomposition_metrics, rest_metrics
from experiments.metrics.merge_error import merge_metrics
from experiments.metrics.metric import under_strategy
from experiments.metrics.ratios import best_shift, floor_metrics, gap_metrics, ppo_metrics, shadow_metrics
from experiments.metrics.registry import METRICS, undeclared
from experiments.metrics.replay import replay_metrics
from experiments.metrics.rewards import reward_metrics
from experiments.metrics.routes import (
    against_exact,
    agreement_metrics,
    audit_metrics,
    churn,
    churn_metrics,
    compare_rows,
    margin_metrics,
)
from experiments.metrics.staleness import staleness_metrics
from experiments.trainers.base import ReplayCounts
from tests.unit.metrics_cases import EXPERTS, algorithm, one_view, random_batch, random_rows, view_per_segment


def everything() -> dict[str, float]:
    """Returns the metrics of one update with shadow scoring, from every function that makes any."""
    batch, exact = random_batch(1), random_batch(1, per_segment=True).table()
    table, rng = batch.table(), np.random.default_rng(0)
    views, exact_views = [one_view(r) for r in batch.rollouts], [view_per_segment(r) for r in batch.rollouts]
    agreement = compare_rows(random_rows(rng, 9), random_rows(rng, 9))
    merged = against_exact(views, exact_views)
    assert merged is not None
    parts = decomposition_metrics(decompose(table, exact, exact))
    size = len(batch.rollouts)
    return (
        gap_metrics(table, 2.0)
        | ppo_metrics([table, table], algorithm())
        | shadow_metrics(table, algorithm(), "naive_concat")
        | floor_metrics(table.log_probs, exact.log_probs)
        | best_shift(table)
        | merge_metrics(table, exact, "my-own.rule", 0.0)
        | parts
        | under_strategy(parts, "replace")
        | rest_metrics(table, exact)
        | agreement_metrics(merged)
        | under_strategy(agreement_metrics(merged), "replace")
        | agreement_metrics(agreement, "live_before")
        | agreement_metrics(agreement, "live_after")
        | audit_metrics(agreement)
        | churn_metrics(churn(batch.rollouts))
        | margin_metrics([np.ones((3, 2))])
        | staleness_metrics(batch.rollouts, 8, 0)
        | replay_metrics(ReplayCounts(1, 1, 0), [v for own in views for v in own], 1, EXPERTS, {"too_long": 1}, 4)
        | reward_metrics(batch.advantages, np.arange(size) // 4, np.full(size, 3), 1.0, 8)
    )


def test_every_key_that_is_produced_is_declared_and_every_value_is_a_finite_float():
    got = everything()
    assert undeclared(got) == []
    assert all(type(value) is float and np.isfinite(value) for value in got.values())
    assert len(got) > 400


@pytest.mark.parametrize(
    "key",
    [
        "actor/ppo_k",
        "gap/abs_by_lag/7",
        "gap/abs_by_boundary/after_0",
        "merge/abs",
        "gap_ratio/p42",
        "stale/replace/age_mean",
        "",
    ],
)
def test_a_key_that_no_metric_declares_is_found(key: str):
    assert undeclared([key, "actor/ppo_kl"]) == [key]


def test_a_bucket_that_a_metric_does_not_have_cannot_be_spelled():
    with pytest.raises(KeyError, match="no bucket '7' of split 'lag'"):
        ratio_keys.GAP_ABS.by("lag", "7")
    with pytest.raises(KeyError, match="no bucket 'after_0' of split 'boundary'"):
        ratio_keys.GAP_ABS.by("boundary", "after_0")


def test_metrics_travel_between_processes_as_plain_strings():
    copy = pickle.loads(pickle.dumps({ratio_keys.GAP_ABS: 1.0}))
    assert copy == {"gap/abs": 1.0}
    assert type(next(iter(copy))) is str


def test_keys_are_unique():
    assert [key for key, count in Counter(METRICS).items() if count > 1] == []


def test_the_document_is_up_to_date(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--check"]) == 0, capsys.readouterr().err


def test_the_check_fails_on_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "PATH", tmp_path / "docs" / "metrics.md")
    assert command.main(["--check"]) == 1
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0


def test_no_module_of_the_package_spells_a_key_that_the_registry_declares():
    keys = {str(metric) for metric in METRICS}
    homes = {Path(module.__file__ or "").name for module in (ratio_keys, route_keys)}
    for path in Path(command.__file__).parent.glob("*.py"):
        if path.name not in homes:
            strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not strings & keys, path.name


def test_no_module_of_the_package_imports_torch():
    for path in Path(command.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not any(name.split(".")[0] == "torch" for name in names), path.name
