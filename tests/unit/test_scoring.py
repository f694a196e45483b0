"""Each distinct forward is scored once; views without loss cost nothing; R2 freezes the trainer's own routes."""

import numpy as np

from experiments.scoring import BatchScorer, freeze_live_rows, merge
from experiments.trainers.base import Score
from strategies import Exact, Live, NaiveConcat, Recompute, Replace, SliceConcat
from strategies.types import EngineCall, Rollout

L, K, E = 2, 2, 8


class CountingTrainer:
    """A fake: a log-prob is a function of the row before it, so that different rows give different numbers."""

    def __init__(self):
        self.scored = []

    def score(self, sequences, *, entropy=False, routes=False):
        self.scored += sequences
        return [self._score(sequence, routes) for sequence in sequences]

    def _score(self, sequence, routes):
        log_probs = np.full(len(sequence.token_ids), np.nan, np.float32)
        log_probs[1:] = -1.0 - sequence.rows.sum(axis=(1, 2))
        own = np.where(sequence.rows < 0, np.arange(K), sequence.rows).astype(np.int16)
        return Score(log_probs, None, own if routes else None, None)


def call(index, input_len, new_tokens, stamp, finish):
    first = stamp + np.arange(input_len + new_tokens - 1) % 3  # differs from call to call and from position to position
    rows = np.tile(np.stack([first, first + 1], -1)[:, None], (1, L, 1)).astype(np.int8)
    ids = np.full(new_tokens, 9, np.int32)
    versions = np.full(new_tokens, index, np.int32)
    return EngineCall(f"r.{index}", input_len, ids, np.full(new_tokens, -1, np.float32), rows, versions, finish)


def rollout(*calls):
    length = calls[-1].end
    tokens = np.array([1, 2, 3] + [9] * (length - 3), np.int32)
    return Rollout("r", tokens, 3, tuple(calls), L, K, E)


INTERRUPTED = rollout(call(0, 3, 2, 0, "abort"), call(1, 5, 3, 4, "stop"))
WHOLE = rollout(call(0, 3, 4, 2, "stop"))


def test_identical_views_are_scored_once():
    trainer = CountingTrainer()
    rollouts = [INTERRUPTED, WHOLE]
    rules = {"replace": Replace(), "slice_concat": SliceConcat(), "exact": Exact(), "naive_concat": NaiveConcat()}
    scorer = BatchScorer(trainer, rollouts)
    scorer.score({name: merge(rule, rollouts) for name, rule in rules.items()})
    # Interrupted: both exact views (the last is also what replace asks for), slice_concat, naive_concat. Whole: one.
    assert len(trainer.scored) == scorer.forwards == 5
    scorer.score({"again": merge(Replace(), rollouts)})
    assert scorer.forwards == 5


def test_every_token_is_taken_from_the_view_that_carries_its_loss():
    trainer = CountingTrainer()
    scored = BatchScorer(trainer, [INTERRUPTED]).score({"exact": merge(Exact(), [INTERRUPTED])})["exact"]
    (values,) = scored.per_rollout([INTERRUPTED])
    assert np.isnan(values[:3]).all()
    stamps = np.array([0, 0, 4, 4, 4]) + np.arange(2, 7) % 3
    np.testing.assert_array_equal(values[3:], -1 - L * (2 * stamps + 1))


def test_a_rollout_without_generated_tokens_costs_no_forward():
    empty = rollout(call(0, 3, 0, 0, "abort"))
    trainer = CountingTrainer()
    assert merge(Replace(), [empty]) == [[]]
    BatchScorer(trainer, [empty]).score({"replace": merge(Replace(), [empty])})
    assert not trainer.scored


def test_recompute_replays_the_routes_of_the_pass_before_the_update():
    trainer = CountingTrainer()
    ((view,),) = freeze_live_rows(trainer, [WHOLE], merge(Recompute(), [WHOLE]))
    assert (view.rows == np.arange(K)).all()
    assert not view.freeze_live
    ((live,),) = freeze_live_rows(trainer, [WHOLE], merge(Live(), [WHOLE]))
    assert (live.rows == -1).all()
    assert len(trainer.scored) == 1, "only views that ask for it are recorded"
