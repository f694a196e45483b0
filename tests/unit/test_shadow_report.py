"""The lines of merge_errors.jsonl and the metrics, on two rollouts whose numbers can be worked out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from experiments.generating import GeneratingScores
from experiments.reporting import MiniStep
from experiments.scoring import BatchScorer, ScoredViews, merge
from experiments.shadow import EXACT, Probe, ShadowScores
from experiments.shadow_report import ShadowReport, noise_floor
from strategies import Exact, LastSegment, Live, Replace
from strategies.types import UNKNOWN_VERSION
from tests.conftest import compose
from tests.unit.test_scoring import INTERRUPTED, WHOLE, CountingTrainer

RULES = {"replace": Replace(), "last_segment": LastSegment(), "live": Live(), EXACT: Exact()}


@pytest.fixture(scope="module")
def algorithm():
    from experiments import check

    return check.load(compose()).algorithm


def report(rollouts, algorithm, generating=None):
    """Returns the report of `rollouts` under RULES; CountingTrainer's log-probs are -1 - (sum of the row before)."""
    trainer = CountingTrainer()
    scored = BatchScorer(trainer, rollouts).score({name: merge(rule, rollouts) for name, rule in RULES.items()})
    nothing = [np.full(rollout.length, np.nan, np.float32) for rollout in rollouts]
    live = [np.zeros((rollout.length - 1, 2, 2), np.int16) for rollout in rollouts]
    margins = [np.ones((rollout.length - 1, 2), np.float32) for rollout in rollouts]
    scores = ShadowScores(scored, Probe(GeneratingScores(generating or nothing, None), live, margins))
    return ShadowReport(rollouts, 2, scores, np.zeros(len(rollouts)), False, algorithm)


def test_there_is_one_line_per_segment_with_the_error_of_every_rule_that_counts_it(algorithm):
    first, last, whole = report([INTERRUPTED, replace(WHOLE, rollout_id="w")], algorithm).lines()
    assert (first["rollout"], first["segment"], first["segments"], first["tokens"], first["lag"]) == ("r", 0, 2, 2, 2.0)
    assert (last["segment"], last["tokens"], last["lag"]) == (1, 3, 1.0)
    assert (whole["rollout"], whole["segment"], whole["segments"]) == ("w", 0, 1)
    # The rows of call 1 are 4 higher than those of call 0: in two layers of two experts, 16 nats per token.
    assert first["errors"]["replace"] == [32.0, 2, pytest.approx(1.0)]
    assert last["errors"]["replace"] == [0.0, 3, 0.0]
    assert last["errors"]["last_segment"][:2] == [0.0, 3]
    assert last["errors"]["last_segment"][2] > 0, "its prefix is live"
    assert whole["errors"]["live"][2] == 1.0, "no engine row was used"
    assert EXACT not in first["errors"]


def test_a_token_of_unknown_version_leaves_the_lag_open(algorithm):
    calls = list(INTERRUPTED.calls)
    calls[0] = replace(calls[0], versions=np.array([0, UNKNOWN_VERSION], np.int32))
    first, last = report([replace(INTERRUPTED, calls=tuple(calls))], algorithm).lines()
    assert (first["lag"], last["lag"]) == (None, 1.0)


def test_without_the_generating_weights_the_rest_is_not_called_staleness(algorithm):
    metrics = report([INTERRUPTED], algorithm).metrics("replace", None)
    assert metrics["decomp/coverage"] == 0.0
    assert "decomp/stale_abs" not in metrics
    assert metrics["decomp/rest_abs"] > 0


def test_the_parts_are_over_the_tokens_whose_weights_are_known(algorithm):
    generating = np.full(INTERRUPTED.length, np.nan, np.float32)
    generating[5:] = -2.0  # the second segment
    metrics = report([INTERRUPTED], algorithm, [generating]).metrics("replace", None)
    assert metrics["decomp/coverage"] == pytest.approx(3 / 5)
    assert metrics["decomp/engine_mean"] == pytest.approx(-1.0), "the engine's log-probs are -1"
    assert metrics["decomp/merge_abs"] == 0.0
    assert metrics["decomp/residual_max"] < 1e-6
    assert "route/overlap_by_source/live_before" in metrics
    assert "route/overlap_by_source/live_after" not in metrics


def test_the_noise_floor_is_how_far_two_forwards_of_the_same_views_differ():
    views = merge(Replace(), [INTERRUPTED, WHOLE])
    scored = BatchScorer(CountingTrainer(), [INTERRUPTED, WHOLE]).score({"replace": views})["replace"]
    result: Any = None  # read by nobody here
    trained = [[log_probs + np.float32(0.5) for log_probs in scored.log_probs[index]] for index in (1,)]
    step = MiniStep(np.array([1]), trained, trained, result, None)
    assert noise_floor(scored, step)["gap/floor_abs"] == 0.5
    without = ScoredViews([views[0], []], [scored.log_probs[0], []])  # the engine mixed the rows of the second one
    assert noise_floor(without, step) == {}
