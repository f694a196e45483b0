"""The proof: under the right rows the trainer's log-probs are the real server's, and where they must differ they do.

fp32 on both sides; rollouts are interrupted by real weight updates; every comparison is on the server's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from experiments.engines.sglang.process import ServerProcess
from experiments.scoring import replay_sequence
from experiments.trainers.megatron import MegatronTrainer
from strategies import Exact, Replace, SliceConcat
from strategies.base import MergeStrategy
from strategies.types import MergeError, Rollout
from tests.sglang.kit import (
    CONFIG,
    TEMPERATURE,
    Interruption,
    interrupted_rollouts,
    play,
    sglang_engine,
    weight_versions,
)
from tests.unit.trainer_cases import settings

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

EXACT = 1e-4
WRONG = 1e-3
"""What wrong rows do at the least to the worst token of a segment: a step of the weights moves some routes."""

WEIGHTS = weight_versions(6)
NAMES = [f"rollout {i}" for i in range(4)]


@pytest.fixture(scope="module")
def trainer() -> Iterator[MegatronTrainer]:
    with MegatronTrainer(CONFIG, WEIGHTS[0], settings=settings(), temperature=TEMPERATURE) as trainer:
        yield trainer


def errors(trainer: MegatronTrainer, strategy: MergeStrategy, rollout: Rollout, version: int) -> np.ndarray:
    """Returns `[T]`: |trainer's log-prob - server's| under the weights of `version`, NaN outside the loss."""
    out = np.full(rollout.length, np.nan)
    views = strategy(rollout)
    with trainer.using(WEIGHTS[version]):
        scores = trainer.score([replay_sequence(rollout, view) for view in views])
    for view, score in zip(views, scores, strict=True):
        here = np.flatnonzero(view.loss_mask)
        out[here] = np.abs(score.log_probs[here] - rollout.log_probs()[here])
    return out


def worst_by_version(trainer: MegatronTrainer, strategy: MergeStrategy, rollouts: list[Rollout]) -> dict[int, float]:
    """Returns the largest error over the tokens that each weight version sampled, under that version's weights."""
    worst: dict[int, float] = {}
    for rollout in rollouts:
        for version in sorted(set(rollout.versions()[rollout.prompt_len :].tolist())):
            found = errors(trainer, strategy, rollout, version)[rollout.versions() == version]
            worst[version] = max(worst.get(version, 0.0), float(np.nanmax(found)))
    return worst


@pytest.fixture(params=["disk", "gloo"])
def transport(request: pytest.FixtureRequest) -> str:
    """How the updates reach the server."""
    return request.param


def roll_out(server: ServerProcess, transport: str, *interruptions: Interruption) -> list[Rollout]:
    def scenario(engine):
        return interrupted_rollouts(engine, WEIGHTS, NAMES, list(interruptions))

    first = interruptions[0].version - 1
    return play(sglang_engine(server, transport), WEIGHTS[first], first, scenario)


def test_after_aborts_exact_reproduces_every_segment_and_the_other_rules_err_where_theory_says(
    server: ServerProcess, trainer: MegatronTrainer, transport: str
):
    rollouts = roll_out(server, transport, Interruption("abort", 1), Interruption("abort", 2))
    assert all(len(list(rollout.segments())) == 3 for rollout in rollouts)
    assert all(set(rollout.versions()[rollout.prompt_len :].tolist()) == {0, 1, 2} for rollout in rollouts)
    assert max(worst_by_version(trainer, Exact(), rollouts).values()) < EXACT
    replaced = worst_by_version(trainer, Replace(), rollouts)
    assert replaced[2] < EXACT, "the newest call's rows are those of its own tokens"
    assert min(replaced[0], replaced[1]) > WRONG, "older tokens are paired with rows that newer weights chose"
    sliced = worst_by_version(trainer, SliceConcat(), rollouts)
    assert sliced[0] < EXACT, "the first segment's rows are as they were first fed"
    assert min(sliced[1], sliced[2]) > WRONG, "later segments were sampled on a prefix that was routed again"


def test_after_a_retraction_no_rule_is_exact_for_older_tokens_and_exact_says_so(
    server: ServerProcess, trainer: MegatronTrainer, transport: str
):
    rollouts = roll_out(server, transport, Interruption("retract", 4, share=0.4))
    (call,) = rollouts[0].calls
    assert call.mixed_rows
    with pytest.raises(MergeError, match="recomputed the prefix inside the call under newer weights"):
        Exact()(rollouts[0])
    worst = worst_by_version(trainer, Replace(), rollouts)
    assert worst[4] < EXACT, "all rows, and the prefix of newer tokens, are of the newer weights"
    assert worst[3] > WRONG, "older log-probs stand beside newer rows"


def test_in_place_tokens_before_the_update_are_exact_and_later_ones_match_no_single_set_of_weights(
    server: ServerProcess, trainer: MegatronTrainer, transport: str
):
    rollouts = roll_out(server, transport, Interruption("in_place", 5, share=0.4))
    for rollout in rollouts:
        assert len(Exact()(rollout)) == 1
        before, after = (rollout.versions() == version for version in (4, 5))
        assert before.any()
        assert after.any()
        assert np.nanmax(errors(trainer, Exact(), rollout, 4)[before]) < EXACT
        for version in (4, 5):
            assert np.nanmax(errors(trainer, Exact(), rollout, version)[after]) > WRONG, "a KV cache of two versions"
