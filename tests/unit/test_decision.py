"""The ranking of merge rules: means over tokens, intervals over rollouts, and no more said than they support."""

import numpy as np
import pytest

from experiments.decision import MIN_ROLLOUTS, decide, decision_table


def lines(errors_of, rollouts=40, seed=0):
    """Returns two segments per rollout; `errors_of(rng, segment)` gives name -> error per token."""
    rng = np.random.default_rng(seed)
    out = []
    for index in range(rollouts):
        for segment in range(2):
            tokens = int(rng.integers(1, 9))
            errors = {name: [value * tokens, tokens, 0.0] for name, value in errors_of(rng, segment).items()}
            out.append({"rollout": f"r{index}", "segment": segment, "segments": 2, "tokens": tokens, "errors": errors})
    return out


def test_the_mean_is_over_tokens_and_the_smallest_comes_first():
    given = [
        {"rollout": "a", "segment": 0, "segments": 1, "tokens": 1, "errors": {"x": [1.0, 1, 0.0], "y": [0.0, 1, 0.0]}},
        {"rollout": "b", "segment": 0, "segments": 1, "tokens": 3, "errors": {"x": [0.0, 3, 0.0], "y": [6.0, 3, 0.0]}},
    ]
    first, second = decide(given)["ranking"]
    assert (first["strategy"], first["mean"]) == ("x", 0.25)
    assert (second["strategy"], second["mean"]) == ("y", 1.5)


def test_a_clear_difference_is_named_and_a_small_one_is_not():
    clear = decide(lines(lambda rng, _: {"good": 0.01 * rng.random(), "bad": 0.1 + 0.01 * rng.random()}))
    assert clear["ranking"][0]["better_than_next"] == 1.0
    assert clear["verdict"].startswith("good errs least on these 40 rollouts")
    close = decide(lines(lambda rng, _: {"one": rng.random(), "two": rng.random()}))
    assert "are not told apart" in close["verdict"]


def test_intervals_resample_whole_rollouts():
    """Errors that all tokens of a rollout share make the interval as wide as for one token per rollout."""
    rng = np.random.default_rng(1)
    levels = rng.random(40)

    def shared(per_rollout):
        return [
            {"rollout": f"r{r}", "segment": s, "segments": 2, "tokens": 5, "errors": {"x": [5 * level, 5, 0.0]}}
            for r, level in enumerate(levels)
            for s in range(per_rollout)
        ]

    one, many = (decide(shared(n))["ranking"][0] for n in (1, 8))
    assert many["high"] - many["low"] == pytest.approx(one["high"] - one["low"], rel=1e-9)
    assert one["low"] < one["mean"] < one["high"]
    expected = 2 * 1.96 * levels.std() / np.sqrt(len(levels))
    assert one["high"] - one["low"] == pytest.approx(expected, rel=0.1)


def test_a_strategy_is_judged_on_the_segments_that_it_counts():
    given = lines(lambda _, segment: {"all": 0.5, **({"last": 0.25} if segment else {})})
    by_name = {entry["strategy"]: entry for entry in decide(given)["ranking"]}
    assert by_name["all"]["loss_frac"] == 1.0
    assert 0.3 < by_name["last"]["loss_frac"] < 0.7
    assert by_name["last"]["mean"] == pytest.approx(0.25)


def test_a_strategy_that_masks_tokens_is_listed_but_wins_nothing():
    """mask_stale counts the last segments only, where most rules have no error."""
    errors = {"mask_stale": 0.0, "good": 0.1, "bad": 0.2}
    given = lines(lambda _, segment: {k: v for k, v in errors.items() if segment or k != "mask_stale"})
    decision = decide(given)
    assert decision["ranking"][0]["strategy"] == "mask_stale"
    assert decision["ranking"][0]["better_than_next"] is None
    assert decision["verdict"].startswith("good errs least")
    assert "not compared" in "\n".join(decision_table(decision))
    assert "nothing to compare" in decide(lines(lambda _, segment: {"mask_stale": 0.1} if segment else {}))["verdict"]


def test_too_few_rollouts_get_no_interval_and_no_verdict():
    few = decide(lines(lambda rng, _: {"one": 1.0, "two": 9.0}, rollouts=MIN_ROLLOUTS - 1))
    assert few["ranking"][0]["low"] is None
    assert "too few to rank" in few["verdict"]
    assert "-" in decision_table(few)[1]


def test_without_a_scored_strategy_there_is_no_decision():
    assert decide([]) is None
    assert decide([{"rollout": "a", "segment": 0, "segments": 1, "tokens": 1, "errors": {}}]) is None


def test_rules_without_any_error_are_all_named():
    decision = decide(lines(lambda rng, _: {"slice_concat": 0.0, "replace": 0.0, "live": 0.1}))
    assert decision["verdict"] == "replace, slice_concat: no merge error on these 40 rollouts"


def test_what_was_left_out_and_what_was_not_interrupted_is_said():
    given = lines(lambda rng, _: {"good": 0.01 * rng.random(), "bad": 0.1})
    assert "(25% more have no exact rows and were left out)" in decide(given, excluded_frac=0.25)["verdict"]
    whole = [{**line, "segments": 1} for line in given]
    assert decide(whole)["verdict"] == "none of these 40 rollouts was interrupted: there was nothing to merge"


def test_equal_rules_are_not_told_apart_either_way():
    decision = decide(lines(lambda rng, _: dict.fromkeys(("live", "recompute"), rng.random())))
    assert decision["ranking"][0]["better_than_next"] == 0.5
