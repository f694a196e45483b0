"""From runs and a plan to what may be said: every verdict, and what a reader is told before it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from analysis.plan import CRITERIA, Comparison, Criterion, Plan
from analysis.study import SECONDARY, StudyResult, study
from tests.unit.study_kit import METRIC, make_runs, one_run, two_arms

PRIMARY = Comparison(METRIC, "mean", "slice_concat", "replace")
SMALLER = [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]


def plan(seeds: int = 6, *more: Comparison, **changes) -> Plan:
    return Plan(("replace", "slice_concat"), tuple(range(seeds)), (PRIMARY, *more), **changes)


def outcome(result: StudyResult) -> tuple[str, str]:
    (verdict,) = result.verdicts
    assert result.verdict == verdict.sentence
    return verdict.outcome, verdict.sentence


# Verdicts.


def test_six_differences_of_one_sign_support_the_claim() -> None:
    result = study(two_arms(SMALLER), plan())
    kind, sentence = outcome(result)
    assert kind == "supported"
    assert sentence.startswith(
        f"slice_concat has a smaller mean {METRIC} than replace: slice_concat minus replace -0.35 ["
    )
    assert sentence.endswith("; exact sign-flip p = 0.031, 6 paired seeds.")
    row = result.primary.iloc[0]
    assert (row["p"], row["p_holm"], row["smallest_p"], row["standing"]) == (2 / 64, 2 / 64, 2 / 64, "confirmatory")


def test_a_difference_in_the_other_direction_is_said_as_such() -> None:
    assert "slice_concat has a larger mean" in study(two_arms([-d for d in SMALLER]), plan()).verdict


def test_what_is_not_significant_is_not_shown_and_says_what_could_have_been_seen() -> None:
    kind, sentence = outcome(study(two_arms([0.1, -0.2, -0.3, -0.4, -0.5, -0.6]), plan()))
    assert kind == "not supported"
    assert sentence.startswith(f"No difference between the mean {METRIC} of slice_concat and replace is shown")
    assert "not significant at 0.05" in sentence
    assert "With 6 paired seeds this study could have seen a difference of" in sentence


@pytest.mark.parametrize(
    ("seeds", "reason"),
    [
        (3, "3 paired seeds allow no p below 0.25"),
        (5, "5 paired seeds allow no p below 0.062"),
    ],
)
def test_three_to_five_seeds_only_screen(seeds: int, reason: str) -> None:
    result = study(two_arms(SMALLER[:seeds]), plan(seeds))
    kind, sentence = outcome(result)
    assert kind == "cannot be tested"
    assert f"cannot be tested: {reason}. Seen: slice_concat minus replace -0." in sentence
    assert any(text.startswith("Screening only") for text in result.warnings)
    assert result.power.iloc[0]["detectable"] == math.inf


def test_a_lenient_alpha_does_not_make_screening_a_claim() -> None:
    kind, sentence = outcome(study(two_arms(SMALLER[:5]), plan(5, alpha=0.2)))
    assert kind == "cannot be tested"
    assert "5 paired seeds are for screening, a claim needs 6" in sentence


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_claim_nothing_and_say_why(seeds: int) -> None:
    result = study(two_arms([-5.0] * seeds), plan(seeds))
    kind, sentence = outcome(result)
    assert kind == "too few seeds"
    assert "with fewer than 3 a difference cannot be told from chance between seeds" in sentence
    assert result.primary[["low", "high", "p"]].isna().all(axis=None)
    assert result.summary[["low", "high"]].isna().all(axis=None)
    assert result.improvement[["low", "high"]].isna().all(axis=None)


def test_a_missing_arm_gives_no_pairs() -> None:
    result = study(make_runs(*(one_run("replace", seed, {METRIC: 1.0}) for seed in range(6))), plan())
    kind, sentence = outcome(result)
    assert kind == "no pairs"
    assert "no seed has both" in sentence
    assert "slice_concat seed 0, 1, 2, 3, 4, 5 (missing)" in result.warnings[0]


def test_a_family_larger_than_its_seeds_bear_is_announced_before_any_result() -> None:
    extra = [Comparison("reward/mean", reduce, "slice_concat", "replace") for reduce in ("mean", "auc")]
    runs = two_arms(SMALLER)
    result = study(runs, plan(6, *extra))
    assert "6 paired seeds bear 1 test at 0.05, the plan declares 3: none can be rejected." in result.warnings
    assert result.verdicts[0].outcome == "cannot be tested"
    assert "Holm asks one of 3 tests for p <= 0.017 first" in result.verdicts[0].sentence


def test_holm_runs_over_the_declared_family() -> None:
    extra = Comparison(METRIC, "median", "slice_concat", "replace")
    result = study(two_arms([*SMALLER, -0.7]), plan(7, extra))
    assert result.primary["p"].tolist() == [2 / 128] * 2
    assert result.primary["p_holm"].tolist() == [4 / 128] * 2
    assert [verdict.outcome for verdict in result.verdicts] == ["supported"] * 2
    assert "0.031 after Holm over 2" in result.verdict


def test_a_difference_below_the_noise_floor_is_not_distinguishable_whatever_its_p() -> None:
    runs = two_arms(SMALLER)
    history = runs.history.assign(**{"gap/floor_abs": 0.5})
    kind, sentence = outcome(study(dataclasses.replace(runs, history=history), plan()))
    assert kind == "not distinguishable"
    assert "below the noise floor of 0.5" in sentence


def test_without_a_measured_floor_the_notes_say_so() -> None:
    assert any(text.startswith("No noise floor was measured") for text in study(two_arms(SMALLER), plan()).notes)


def test_equal_arms_are_not_distinguishable() -> None:
    assert outcome(study(two_arms([0.0] * 6), plan())) == (
        "not distinguishable",
        f"The mean {METRIC} of slice_concat and replace are equal in all 6 paired seeds.",
    )


def test_arms_that_differ_in_more_than_their_strategy_are_confounded() -> None:
    runs = two_arms(SMALLER, config={"trainer.learning_rate": 3e-4, "tracking.project": "other"})
    result = study(runs, plan())
    kind, sentence = outcome(result)
    assert kind == "confounded"
    assert sentence.startswith(
        "Confounded: slice_concat and replace also differ in trainer.learning_rate, so no difference is the strategy's."
    )
    assert result.differences.to_dict("records") == [
        {"key": "trainer.learning_rate", "kind": "configuration", "replace": "0.0001", "slice_concat": "0.0003"}
    ]
    assert "Confounded: arms differ in more than their strategy: trainer.learning_rate." in result.warnings


def test_another_version_confounds_and_another_host_load_does_not() -> None:
    runs = two_arms(SMALLER, versions={"torch": "2.12.0", "host": {"peak_memory_gib": 3.0}})
    result = study(runs, plan())
    assert result.differences[["key", "kind"]].to_numpy().tolist() == [["torch", "version"]]


def test_the_order_of_keys_in_a_setting_is_no_difference() -> None:
    runs = two_arms(SMALLER)
    for run, config in runs.configs.items():
        params = {"a": 1, "b": 2} if run.startswith("replace") else {"b": 2, "a": 1}
        config["task.datasets"] = [params]
    assert study(runs, plan()).differences.empty


def test_versions_that_a_source_does_not_know_are_no_difference() -> None:
    runs = two_arms(SMALLER, versions={"torch": "2.12.0"})
    versions = {run: {} if run.startswith("replace") else facts for run, facts in runs.versions.items()}
    assert study(dataclasses.replace(runs, versions=versions), plan()).differences.empty


def test_without_a_plan_everything_is_exploratory() -> None:
    result = study(two_arms(SMALLER))
    assert result.verdict == (
        "No claim: no plan was declared before these runs, so that every result is exploratory (12 complete runs of "
        "replace, slice_concat)."
    )
    assert result.verdicts == ()
    assert result.primary.empty
    assert set(result.secondary["metric"]) == {METRIC, "reward/mean"}
    assert result.compared == ((METRIC, "mean"),)
    assert result.arms == ("replace", "slice_concat")


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="a study needs runs, found none"):
        study(make_runs(), plan())


# Completeness.


def test_every_missing_incomplete_repeated_excluded_or_unplanned_run_is_named() -> None:
    runs = make_runs(
        one_run("replace", 0, {METRIC: 1.0}),
        one_run("replace", 1, {METRIC: 1.0}, steps=4, planned=10, status="failed"),
        one_run("replace", 2, {METRIC: 1.0}, name="one"),
        one_run("replace", 2, {METRIC: 1.0}, name="two"),
        one_run("slice_concat", 0, {METRIC: 1.0}),
        one_run("exact", 0, {METRIC: 1.0}),
        excluded=[("slice_concat-s1", "runs/a", "running: 4 of 10 updates"), ("", "runs/b", "no summary.json")],
    )
    result = study(runs, plan(3))
    states = {(row.strategy, row.seed): (row.state, row.note) for row in result.completeness.itertuples()}
    assert states == {
        ("replace", 0): ("complete", ""),
        ("replace", 1): ("incomplete", "failed after 4 of 10 updates"),
        ("replace", 2): ("repeated", ""),
        ("slice_concat", 0): ("complete", ""),
        ("slice_concat", 1): ("excluded", "running: 4 of 10 updates"),
        ("slice_concat", 2): ("missing", ""),
        ("exact", 0): ("not planned", ""),
    }
    assert result.warnings[0].startswith("2 of 6 planned runs are complete; not: replace seed 1 (incomplete); ")
    assert "Excluded: a run (runs/b): no summary.json." in result.notes
    assert "exact" not in set(result.per_run["strategy"])
    assert any(text.startswith("replace-s1 counts as not collapsed up to update 4") for text in result.notes)


def test_a_curve_that_is_not_finite_leaves_its_pair_out_by_name_and_counts_as_a_collapse() -> None:
    runs = two_arms(SMALLER)
    history = runs.history.copy()
    history.loc[(history["run"] == "slice_concat-s2") & (history["step"] == 3), METRIC] = np.inf
    result = study(dataclasses.replace(runs, history=history), plan())
    assert result.verdict.endswith("Left out: seed 2: slice_concat not finite at update 3.")
    assert result.primary.iloc[0]["n"] == 5
    assert f"slice_concat-s2 has no mean {METRIC}: not finite at update 3." in result.notes
    assert result.collapse.set_index("strategy")["collapsed"].to_dict() == {"slice_concat": 1, "replace": 0}


def test_updates_that_did_not_log_a_metric_are_counted_in_the_notes() -> None:
    runs = two_arms(SMALLER)
    history = runs.history.copy()
    history.loc[(history["run"] == "replace-s0") & (history["step"] <= 2), METRIC] = np.nan
    notes = study(dataclasses.replace(runs, history=history), plan()).notes
    assert f"{METRIC} was logged by 8 to 10 of 10 updates of a run: mean over these." in notes


def test_narrow_intervals_are_announced() -> None:
    assert (
        "95% bootstrap intervals from 6 seeds are too narrow: of normal differences they would hold the true mean "
        "about 87% of the time."
    ) in study(two_arms(SMALLER), plan()).warnings
    assert not any("narrow" in text for text in study(two_arms([*SMALLER, -0.7, -0.8]), plan(8)).warnings)


# Tables.


def test_rules_are_compared_offline_within_each_seed() -> None:
    def errors(seed: int, extra: float) -> dict[str, float]:
        return {METRIC: 1.0, "merge/replace/abs": 4 + seed + extra, "merge/slice_concat/abs": 1 + seed + extra}

    runs = make_runs(
        *(
            one_run(arm, seed, errors(seed, extra))
            for seed in range(6)
            for arm, extra in (("replace", 0), ("slice_concat", 2))
        )
    )
    result = study(runs, plan())
    assert result.offline.groupby("strategy")["value"].apply(list).to_dict() == {
        "replace": [5, 6, 7, 8, 9, 10],  # means over the two arms of a seed
        "slice_concat": [2, 3, 4, 5, 6, 7],
    }
    row = result.offline_pairs.iloc[0]
    assert (row["a"], row["b"], row["mean"], row["p"], row["n"]) == ("slice_concat", "replace", -3, 2 / 64, 6)


def test_every_pair_of_arms_is_compared_on_every_secondary_metric_that_was_logged() -> None:
    metrics = {metric: 1.0 for metric, _ in SECONDARY}
    runs = make_runs(
        *(one_run(arm, seed, metrics) for seed in range(3) for arm in ("replace", "exact", "naive_concat"))
    )
    result = study(runs)
    assert len(result.secondary) == 3 * len(SECONDARY)
    assert set(result.secondary["standing"]) == {"screening"}


def test_a_primary_metric_of_pairs_that_are_not_declared_is_exploratory() -> None:
    runs = make_runs(*(one_run(arm, 0, {METRIC: 1.0}) for arm in ("replace", "slice_concat", "exact")))
    result = study(runs, Plan(("replace", "slice_concat", "exact"), (0,), (PRIMARY,)))
    pairs = result.secondary.loc[result.secondary["metric"] == METRIC, ["a", "b"]].to_numpy().tolist()
    assert pairs == [["exact", "replace"], ["exact", "slice_concat"]]


def test_one_arm_alone_has_nothing_to_compare() -> None:
    result = study(make_runs(one_run("replace", 0, {"reward/mean": 1.0})))
    assert result.warnings == ("Nothing was compared: there is one arm, or no run logged a metric of this study.",)
    assert result.secondary.empty


# Plans.


def test_the_plan_of_pr6046_is_read() -> None:
    found = Plan.read(Path(__file__).parents[2] / "analysis" / "plans" / "pr6046.yaml")
    assert found.arms == ("replace", "slice_concat", "naive_concat", "exact")
    assert found.seeds == (0, 1, 2, 3, 4, 5)
    assert found.primary == (PRIMARY,)
    assert found.collapse == CRITERIA


GOOD = """
arms: [replace, exact]
seeds: [0, 1]
primary:
  - {metric: gap/abs, reduce: mean, pairs: [[exact, replace]]}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "the plan: expected a mapping with"),
        (GOOD.replace("seeds", "seed"), "the plan: no `seeds`, unknown key `seed`"),
        (GOOD.replace("[0, 1]", "[0, 0]"), "`seeds`: expected each value once"),
        (GOOD.replace("[0, 1]", "[0, true]"), "`seeds`: expected a list of int"),
        (GOOD + "alpha: 5", "`alpha`: expected a number between 0 and 1, got 5"),
        (GOOD.replace("reduce: mean", "reduce: average"), "`primary[0].reduce`: expected one of mean"),
        (GOOD.replace("[[exact, replace]]", "[[exact, live]]"), "two different ones of the arms replace, exact, got"),
        (GOOD.replace("reduce: mean", "reduce: [mean]"), "`primary[0].reduce`: expected one of mean"),
        (GOOD.replace("[[exact, replace]]", "[[[exact], replace]]"), "two different ones of the arms replace, exact"),
        (GOOD.replace("[[exact, replace]]", "[[exact, replace], [replace, exact]]"), "stands there twice"),
        (GOOD.replace("[[exact, replace]]", "[]"), "`primary[0].pairs`: expected a list of pairs"),
        (GOOD.replace("[[exact, replace]]", "[[exact, replace], [exact, replace]]"), "stands there twice"),
        (GOOD + "collapse: {reward: {updates: 3}}", "`collapse.reward`: expected exactly one of above, below"),
        (GOOD + "collapse: {kl: {above: 3, updates: 3}}", "`collapse.kl`: needs `metric`"),
        (GOOD + "collapse: {reward: {above: 3, updates: 0}}", "`updates`: expected a number of updates, 1 or more"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"plan\.yaml: ") as raised:
        Plan.read(path)
    assert message in str(raised.value)


def test_a_plan_may_name_other_criteria(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(GOOD + "collapse: {kl: {metric: actor/ppo_kl, above: 1, updates: 3}}", encoding="utf-8")
    assert Plan.read(path).collapse == (Criterion("kl", "actor/ppo_kl", "above", 1.0, 3),)
    assert Plan.read(path).alpha == 0.05
