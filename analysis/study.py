"""A study: runs and a plan in, everything that its report prints out. What the plan does not declare is exploratory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import collapse
from analysis import study_tables as tables
from analysis.compare import CONFIRMATORY_SEEDS, LEVEL, MIN_SEEDS, RESAMPLES, PairedDifference, paired
from analysis.differences import differences
from analysis.plan import ALPHA, CRITERIA, Plan
from analysis.runs import Runs
from analysis.scalars import SCALAR_COLUMNS, scalars
from analysis.study_tables import Key
from analysis.verdict import Verdict, family_warning, interval_warning, verdicts

SECONDARY: tuple[Key, ...] = (
    ("gap/abs_by_versions/multi", "mean"),
    ("gap/abs", "mean"),
    ("gap_ratio/F2", "mean"),
    ("gap_ratio/p99.9", "mean"),
    ("gap_ratio/p99.9", "max"),
    ("ppo_ratio/ess_raw", "mean"),
    ("ppo_ratio/ess_raw", "min"),
    ("actor/pg_clipfrac", "mean"),
    ("actor/ppo_kl", "mean"),
    ("actor/ppo_kl", "sd"),
    ("reward/mean", "auc"),
    ("reward/mean", "last_fifth"),
)
"""Compared in every study that logs them, for every pair of arms; exploratory. Without a plan the first of them that
was logged stands where a plan's primary metric would.
"""


@dataclass(frozen=True, eq=False)
class StudyResult:
    """Everything that a report of a study prints. In brackets: the function of study_tables.py that names the columns.

    Attributes:
        plan: None where none was given: then every result is exploratory.
        verdict: one sentence per declared comparison.
        verdicts: the same with their numbers, in the order of the plan.
        warnings: sentences to be read before any result.
        notes: sentences about what was left out and how numbers were made.
        arms, seeds: compared.
        completeness: the runs found against the grid (`completeness`).
        excluded: runs that were found and not used: `run`, `where`, `reason`.
        per_run: `scalars` of every metric below, one row per run and scalar.
        summary: arms, one by one (`summary`).
        primary: the declared comparisons (`comparisons`), with `p_holm` and `outcome`.
        secondary: the same metrics and SECONDARY for every pair of arms that is not declared (`comparisons`);
            exploratory, p not adjusted.
        compared: the primary metrics; without a plan the first of SECONDARY that was logged.
        improvement, profiles: of `compared` (`improvement`, `profiles`).
        offline, offline_pairs: merge rules on the same rollouts (`offline`, `comparisons`); exploratory.
        collapse_times, survival, collapse: tables of collapse.py.
        collapse_tests: arms against each other (`collapse_tests`); exploratory.
        power: what the primary comparisons could have seen (`power`); the secondary ones where no plan was given.
        differences: what arms differ in beside their strategy (differences.py); empty in a clean study.
    """

    plan: Plan | None
    verdict: str
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    completeness: pd.DataFrame
    excluded: pd.DataFrame
    per_run: pd.DataFrame
    summary: pd.DataFrame
    primary: pd.DataFrame
    secondary: pd.DataFrame
    compared: tuple[Key, ...]
    improvement: pd.DataFrame
    profiles: pd.DataFrame
    offline: pd.DataFrame
    offline_pairs: pd.DataFrame
    collapse_times: pd.DataFrame
    survival: pd.DataFrame
    collapse: pd.DataFrame
    collapse_tests: pd.DataFrame
    power: pd.DataFrame
    differences: pd.DataFrame


def study(runs: Runs, plan: Plan | None = None) -> StudyResult:
    """Returns the results of `runs` under `plan`. Runs that the plan does not name enter no result.

    To count collapses, `runs` must hold failed runs too (`load_runs(states=("completed", "failed"))`): they have no
    scalar and are named as incomplete.

    Raises:
        ValueError: there is no run, or none of the arms and seeds of the plan.
    """
    if runs.runs.empty:
        raise ValueError(f"a study needs runs, found none ({len(runs.excluded)} excluded)")
    found = runs.runs.sort_values(["seed", "strategy"])
    arms = plan.arms if plan else tuple(dict.fromkeys(map(str, found["strategy"])))
    seeds = plan.seeds if plan else tuple(dict.fromkeys(map(int, found["seed"])))
    completeness = tables.completeness(runs, arms, seeds)
    runs = _only(runs, arms, seeds)
    pairs = [(b, a) for a, b in itertools.combinations(arms, 2)]
    primary = list(dict.fromkeys((c.metric, c.reduce) for c in plan.primary)) if plan else []
    secondary = [key for key in SECONDARY if key[0] in runs.history and key not in primary]
    compared = tuple(primary or secondary[:1])
    values = {key: scalars(runs, *key) for key in (*primary, *secondary)}
    floors = {metric: tables.noise_floor(runs, metric) for metric, _ in values}
    declared = [paired(values[c.metric, c.reduce], c.a, c.b, floors[c.metric]) for c in plan.primary] if plan else []
    known = {(result.metric, result.reduce, frozenset((result.a, result.b))) for result in declared}
    fresh = [(key, pair) for key in values for pair in pairs if (*key, frozenset(pair)) not in known]
    explored = [paired(values[key], *pair, floors[key[0]]) for key, pair in fresh]
    alpha = plan.alpha if plan else ALPHA
    confounds = [list(differences(runs, (result.a, result.b))["key"]) for result in declared]
    decided = verdicts(declared, confounds, alpha)
    offline = tables.offline(runs)
    times = collapse.collapse_times(runs, plan.collapse if plan else CRITERIA)
    different = differences(runs, arms)
    return StudyResult(
        plan=plan,
        verdict=" ".join(each.sentence for each in decided) or _no_plan(arms, completeness),
        verdicts=tuple(decided),
        warnings=tuple(_warnings(plan, declared or explored, different, completeness)),
        notes=tuple(_notes(runs, values, floors, offline, times)),
        arms=arms,
        seeds=seeds,
        completeness=completeness,
        excluded=runs.excluded,
        per_run=pd.concat(values.values(), ignore_index=True) if values else pd.DataFrame(columns=SCALAR_COLUMNS),
        summary=tables.summary(values, arms),
        primary=tables.comparisons(declared).assign(
            p_holm=[each.p_holm for each in decided], outcome=[each.outcome for each in decided]
        ),
        secondary=tables.comparisons(explored),
        compared=compared,
        improvement=tables.improvement(compared, values, pairs),
        profiles=tables.profiles(compared, values),
        offline=offline,
        offline_pairs=tables.comparisons(tables.offline_pairs(offline, arms)),
        collapse_times=times,
        survival=collapse.survival(times),
        collapse=collapse.collapse_table(times),
        collapse_tests=tables.collapse_tests(times, pairs),
        power=tables.power(declared or explored, alpha / max(1, len(declared))),
        differences=different,
    )


def _only(runs: Runs, arms: Sequence[str], seeds: Sequence[int]) -> Runs:
    found = runs.runs
    kept = found[found["strategy"].isin(list(arms)) & found["seed"].isin(list(seeds))]
    if kept.empty:
        came = _members(found["strategy"].unique(), sorted(found["seed"].unique()))
        raise ValueError(f"none of the {len(found)} runs is of the plan: expected {_members(arms, seeds)}, came {came}")
    if len(kept) == len(runs.runs):
        return runs
    return dataclasses.replace(runs, runs=kept, history=runs.history[runs.history["run"].isin(list(kept.index))])


def _members(arms: Iterable[str], seeds: Iterable[int]) -> str:
    return f"arms {', '.join(map(str, arms))}, seeds {', '.join(map(str, seeds))}"


def _no_plan(arms: Sequence[str], completeness: pd.DataFrame) -> str:
    complete = int((completeness["state"] == "complete").sum())
    return (
        f"No claim: no plan was declared before these runs, so that every result is exploratory ({complete} complete "
        f"run{'s' * (complete != 1)} of {', '.join(arms)})."
    )


def _warnings(
    plan: Plan | None, results: Sequence[PairedDifference], different: pd.DataFrame, completeness: pd.DataFrame
) -> Iterator[str]:
    """Yields what a reader must know before any result."""
    planned = completeness[completeness["state"] != "not planned"]
    states = planned["state"].value_counts()
    if set(states.index) != {"complete"}:
        rest = planned[planned["state"] != "complete"].groupby(["strategy", "state"], sort=False)["seed"]
        cells = [f"{arm} seed {', '.join(map(str, seeds))} ({state})" for (arm, state), seeds in rest]
        yield f"{states.get('complete', 0)} of {len(planned)} planned runs are complete; not: {'; '.join(cells)}."
    fewest = min((result.n for result in results), default=0)
    if not results:
        yield "Nothing was compared: there is one arm, or no run logged a metric of this study."
    elif fewest < MIN_SEEDS:
        seeds = f"{fewest} paired seed{'s' * (fewest != 1)}"
        yield f"A comparison has {seeds}: with fewer than {MIN_SEEDS} nothing is claimed."
    elif fewest < CONFIRMATORY_SEEDS:
        yield f"Screening only: a claim needs {CONFIRMATORY_SEEDS} paired seeds, a comparison has {fewest}."
    if plan and (family := family_warning(results, plan.alpha)):
        yield family
    if len(different):
        yield f"Confounded: arms differ in more than their strategy: {', '.join(different['key'])}."
    if narrow := interval_warning(results):
        yield narrow


def _notes(
    runs: Runs,
    values: Mapping[Key, pd.DataFrame],
    floors: Mapping[str, float],
    offline: pd.DataFrame,
    times: pd.DataFrame,
) -> Iterator[str]:
    """Yields what was left out, and how numbers were made."""
    for _, row in runs.excluded.iterrows():
        yield f"Excluded: {row['run'] or 'a run'} ({row['where']}): {row['reason']}."
    for (metric, reduce), frame in values.items():
        unfit = frame[(frame["reason"] != "") & ~frame["run"].isin(_incomplete(runs))]
        for run, reason in zip(unfit["run"], unfit["reason"], strict=True):
            yield f"{run} has no {reduce} {metric}: {reason}."
        logged = frame.loc[frame["reason"] == ""].set_index("run")["updates"]
        if (logged < runs.runs["steps"].reindex(logged.index)).any():
            some = f"{logged.min()} to {logged.max()}" if logged.min() < logged.max() else str(logged.max())
            yield f"{metric} was logged by {some} of {runs.runs['steps'].max()} updates of a run: {reduce} over these."
    if all(floor != floor for floor in floors.values()):
        yield f"No noise floor was measured ({tables.FLOOR}): a difference is compared with none."
    if len(offline) and offline["runs"].min() < offline["runs"].max():
        yield f"Merge errors of a seed are means over {offline['runs'].min()} to {offline['runs'].max()} runs."
    lost = times[~times["collapsed"] & (times["reason"] != "planned end")]
    for run, time, reason in zip(lost["run"], lost["time"], lost["reason"], strict=True):
        yield f"{run} counts as not collapsed up to update {time:.0f}, where it stopped ({reason})."
    yield (
        f"Intervals: {LEVEL:.0%} percentile bootstrap over seeds, {RESAMPLES} resamples, both arms of a seed together. "
        "p: exact sign-flip test over all sign patterns, two-sided; adjusted (Holm) for declared comparisons only."
    )


def _incomplete(runs: Runs) -> list[str]:
    return [str(run) for run, facts in runs.runs.iterrows() if tables.unusable(facts)]
