"""What a report shows, in its order: for every figure its numbers, its drawing, and the words that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import markdown, merge_frames
from analysis.merge_frames import Absent
from analysis.report import curves, figures
from analysis.report.evidence import Evidence
from analysis.report.figures import Looks
from analysis.runs import Runs
from analysis.stats import LEVEL, MIN_CLUSTERS

PPO_KL = "actor/ppo_kl"
GAP = "gap/abs_by_versions/multi"
ESS = "ppo_ratio/ess_raw"
F2 = "gap_ratio/F2"
REWARD = "reward/mean"
AGE = "stale/age_mean"
PARTIAL = "fully_async/partial/partial_ratio"
PERCENTILES = tuple(f"ppo_ratio/p{q}" for q in ("0.1", "1", "5", "50", "95", "99", "99.9"))
_LOG_PERCENTILES = tuple(key.replace("ppo_ratio/", "log_ratio_") for key in PERCENTILES)
_CLIP = ("algorithm.clip_low", "algorithm.clip_high")
_SPOKEN = 24  # values in a text alternative, at most
_CHURN = "route/churn_layer/"


@dataclass(frozen=True)
class Chart:
    """A figure of the report.

    Attributes:
        name: of its files, and of its place in the page.
        title: what is shown.
        keys: metrics that it shows, where it is a matter of few.
        numbers: the plotted numbers, or why there are none.
        draw: the figure, of its title, these numbers and how each arm is drawn.
        caption: what lines, bands and points are.
        reading: how to read it, a sentence or two.
        value: column of the numbers that the text alternative speaks of, by `by`.
        by: column that tells what a value belongs to, beside the arm.
    """

    name: str
    title: str
    keys: Sequence[str]
    numbers: Callable[[Evidence], pd.DataFrame | Absent]
    draw: Callable[[str, pd.DataFrame, Looks, Evidence], Figure]
    caption: Callable[[pd.DataFrame, Evidence], str]
    reading: str
    value: str = "median"
    by: str | None = None

    def alternative(self, frame: pd.DataFrame) -> str:
        """Returns the figure in words: its title, and the median of what it shows by arm."""
        by = ["strategy", *([self.by] if self.by else [])]
        middle = frame.groupby(by, observed=True)[self.value].median()
        if len(middle) > _SPOKEN:
            middle = frame.groupby("strategy", observed=True)[self.value].median()
        entries = []
        for names, value in middle.items():
            name = " ".join(map(str, names)) if isinstance(names, tuple) else str(names)
            entries.append(f"{name} {markdown.number(float(value))}")
        return f"{self.title}. Typical values: {'; '.join(entries)}."


def missing(history: pd.DataFrame, keys: Sequence[str]) -> Absent | None:
    """Returns that no run logged any of `keys`; None where one did."""
    if any(key in history and history[key].notna().any() for key in keys):
        return None
    return Absent(f"no run logged {' or '.join(keys)}")


def silent_arms(history: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Returns the arms that logged none of `keys`."""
    logged = history[[key for key in keys if key in history]].notna().any(axis=1)
    return sorted({*map(str, history["strategy"].unique())} - {*map(str, history.loc[logged, "strategy"].unique())})


def _band(runs: Runs, key: str) -> pd.DataFrame | Absent:
    return missing(runs.history, [key]) or curves.thin_band(curves.band(runs.history, key))


def _seeds(runs: Runs) -> pd.DataFrame | Absent:
    return missing(runs.history, [PPO_KL]) or curves.seeds(runs.history, PPO_KL)


def _paired(evidence: Evidence) -> pd.DataFrame | Absent:
    names = _compared(evidence)
    frame = evidence.result.per_run
    frame = frame.assign(scalar=frame["reduce"] + " " + frame["metric"])
    frame = frame.loc[frame["scalar"].isin(names), ["scalar", "strategy", "seed", "value"]].dropna()
    frame = frame.astype({"strategy": str}).reset_index(drop=True)
    return _without_values(names) if frame.empty else frame


def _compared(evidence: Evidence) -> list[str]:
    return sorted(f"{reduce} {metric}" for metric, reduce in evidence.result.compared)


def _without_values(names: Sequence[str]) -> Absent:
    """Returns why the compared metrics, of these names, have no value."""
    return Absent(f"no whole run has {' or '.join(names)}" if names else "no run logged a metric that a study compares")


def _profiles(evidence: Evidence) -> pd.DataFrame | Absent:
    frame = evidence.result.profiles
    if frame.empty:
        return _without_values(_compared(evidence))
    if frame.groupby("strategy")["share"].nunique().max() < 2:
        return Absent("it needs runs with different values")
    first = frame[["metric", "reduce"]].iloc[0]
    return frame[(frame["metric"] == first["metric"]) & (frame["reduce"] == first["reduce"])].astype({"strategy": str})


def _survival(evidence: Evidence) -> pd.DataFrame | Absent:
    if not evidence.result.collapse_times["collapsed"].any():
        return Absent("no run collapsed")
    return evidence.result.survival.astype({"strategy": str})


def _percentiles(runs: Runs) -> pd.DataFrame | Absent:
    absent = [key for key in PERCENTILES if missing(runs.history, [key])]
    if absent:
        return Absent(f"no run logged {', '.join(absent)}")
    frame = curves.percentiles(runs.history, PERCENTILES)
    frame[list(PERCENTILES)] = np.log(frame[list(PERCENTILES)])
    return frame.rename(columns=dict(zip(PERCENTILES, _LOG_PERCENTILES, strict=True)))


def _staleness(runs: Runs) -> pd.DataFrame | Absent:
    keys = [key for key in (AGE, PARTIAL) if missing(runs.history, [key]) is None]
    if not keys:
        return Absent(f"no run logged {AGE} or {PARTIAL}")
    return pd.concat(
        [curves.thin_band(curves.band(runs.history, key)).assign(key=key) for key in keys], ignore_index=True
    )


def _churn(runs: Runs) -> pd.DataFrame | Absent:
    layers = sorted(int(str(key)[len(_CHURN) :]) for key in runs.history if str(key).startswith(_CHURN))
    keys = [f"{_CHURN}{layer}" for layer in layers]
    if not keys or missing(runs.history, keys):
        return Absent(f"no run logged {_CHURN}<layer>: no rollout was interrupted, or the source does not have it")
    frame = curves.by_run(runs.history, keys)
    return frame.assign(layer=frame.pop("key").str[len(_CHURN) :].astype(int))


def _merge_errors(runs: Runs, by: Callable[..., pd.DataFrame | Absent]) -> pd.DataFrame | Absent:
    if runs.segments.empty:
        return Absent("no merge errors by segment: shadow scoring writes merge_errors.jsonl, of which W&B has no copy")
    frame = by(runs.segments, cluster=_cluster(runs.segments))
    return frame if isinstance(frame, Absent) else frame.rename(columns={"rollouts": _unit(runs.segments)})


def _cluster(segments: pd.DataFrame) -> Sequence[str]:
    """Returns the columns of a cluster: the run where there are enough, as its rollouts share its weights."""
    return ("run",) if segments["run"].nunique() >= MIN_CLUSTERS else merge_frames.ROLLOUT


def _unit(segments: pd.DataFrame) -> str:
    """Returns what a cluster is called."""
    return "runs" if _cluster(segments) == ("run",) else "rollouts"


def band_caption(frame: pd.DataFrame, _: Evidence) -> str:
    """Returns what line and band are, and how many seeds each arm has where that differs over the updates."""
    arms = frame.groupby("strategy", sort=True).agg(runs=("runs", "max"), fewest=("n", "min"), most=("n", "max"))
    counts = sorted(arms["runs"].unique(), reverse=True)
    if counts == [1]:
        text = "Line: the one run of each arm. One run has no band and bears no claim."
    else:
        text = "Line: median over the seeds, update by update. Band: interval of that median, "
        text += "; ".join(_interval(int(n)) for n in counts if n > 1) + "."
        if len(counts) > 1:
            text += f" Seeds: {', '.join(f'{name} {n}' for name, n in arms['runs'].items())}."
    partial_arms = arms[arms["fewest"] < arms["runs"]]
    if len(partial_arms):
        ranges = ", ".join(f"{name} {row.fewest} to {row.most}" for name, row in partial_arms.iterrows())
        text += f" Faint and without band where a seed of the arm is missing (seeds per update: {ranges})."
    infinite = int(np.isinf(frame["median"]).sum())
    return text + (f" {infinite} infinite medians cannot be drawn." if infinite else "")


def _interval(n: int) -> str:
    k, coverage = curves.median_interval(n)
    ends = "smallest to largest" if k == 1 else f"{k}. smallest to {k}. largest"
    return f"{ends} of {n} seeds (covers it with {coverage:.0%})"


def _seeds_caption(frame: pd.DataFrame, _: Evidence) -> str:
    return f"One line per run; {frame['run'].nunique()} runs."


def _paired_caption(frame: pd.DataFrame, evidence: Evidence) -> str:
    return f"Point: one run. Grey lines join the runs of one seed; {len(frame)} values.{_undeclared(evidence)}"


def _profile_caption(frame: pd.DataFrame, evidence: Evidence) -> str:
    return (
        f"Share of an arm's runs whose {frame['reduce'].iloc[0]} {frame['metric'].iloc[0]} is at least as good as the "
        f"value below (rliable, arXiv 2108.13264).{_undeclared(evidence)}"
    )


def _undeclared(evidence: Evidence) -> str:
    """Returns that the metric was not declared, where there is no plan."""
    return "" if evidence.result.plan else " No plan declared this metric: it is shown by default."


def _fan_caption(frame: pd.DataFrame, evidence: Evidence) -> str:
    clip = _clip(evidence.runs)
    dashed = f" Dashed: PPO clips beyond {np.exp(clip[0]):g} and {np.exp(clip[1]):g} (ratio)." if clip else ""
    return (
        "Line: the 50th percentile over the tokens of an update. Shades from the inside: 5th to 95th, 1st to 99th, "
        f"0.1th to 99.9th. Each is the median over up to {int(frame['runs'].max())} seeds, and this is no "
        f"interval.{dashed}"
    )


def _layer_caption(frame: pd.DataFrame, _: Evidence) -> str:
    most = int(frame["n"].max())
    band = f"; bar: interval of that median, {_interval(most)}" if most > 1 else "; one seed, no interval"
    return f"Point: median over the seeds of a run's mean over its updates{band}. Arms are moved apart sideways."


def _merge_caption(_: pd.DataFrame, evidence: Evidence) -> str:
    segments = evidence.runs.segments
    unit = _unit(segments)
    return (
        f"Point: mean over the tokens of all {segments['run'].nunique()} runs, whatever they were trained with: "
        f"every rule is scored on the same rollouts. Bar: {LEVEL:.0%} cluster bootstrap over {unit}; none below "
        f"{MIN_CLUSTERS} {unit}. exact is zero by construction."
    )


def _clip(runs: Runs) -> tuple[float, float] | None:
    """Returns the log-ratios at which PPO clips, where all runs have the same."""
    bounds = {tuple(config.get(key) for key in _CLIP) for config in runs.configs.values()}
    low, high = bounds.pop() if len(bounds) == 1 else (None, None)
    return None if low is None or high is None else (float(np.log(1.0 - low)), float(np.log(1.0 + high)))


def _curve(
    name: str,
    title: str,
    key: str,
    label: str,
    reading: str,
    limit: tuple[float, str] | None = None,
    share: bool = False,
) -> Chart:
    return Chart(
        name,
        title,
        keys=(key,),
        numbers=lambda evidence: _band(evidence.runs, key),
        draw=lambda title, frame, looks, _: figures.curves(frame, looks, title, label, limit, share),
        caption=band_caption,
        reading=reading,
    )


CHARTS = (
    _curve(
        "ppo_kl",
        "PPO's KL estimate over training",
        PPO_KL,
        "actor/ppo_kl (nats)",
        "Mean of old minus new log-prob over the tokens of an update: near 0 when the replayed rows are those that "
        "the engine used. A rule whose line lies away from 0, or spikes, trains on ratios that the merge has spoilt.",
    ),
    Chart(
        "ppo_kl_seeds",
        "PPO's KL estimate, run by run",
        keys=(PPO_KL,),
        numbers=lambda evidence: _seeds(evidence.runs),
        draw=lambda title, frame, looks, _: figures.seeds(frame, looks, title, "actor/ppo_kl (nats)"),
        caption=_seeds_caption,
        reading="A median over seeds hides the spike of one run; here every run shows its own.",
        value="value",
    ),
    _curve(
        "gap",
        "Gap between trainer and engine, interrupted rollouts",
        GAP,
        "mean |gap| (nats)",
        "Mean |trainer minus engine log-prob| per token of the rollouts that span weight versions "
        "(gap/abs_by_versions/multi). It holds the staleness that all arms share and the merge error that sets them "
        "apart.",
    ),
    Chart(
        "paired",
        "The compared metric, run by run",
        keys=(),
        numbers=_paired,
        draw=lambda title, frame, looks, _: figures.paired(frame, looks, title),
        caption=_paired_caption,
        reading="Lines that all rise or all fall between two arms are what the paired test sees; it ignores how far "
        "apart the seeds are.",
        value="value",
        by="scalar",
    ),
    Chart(
        "ratio_percentiles",
        "Importance ratio: percentiles over the tokens",
        keys=PERCENTILES,
        numbers=lambda evidence: _percentiles(evidence.runs),
        draw=lambda title, frame, looks, evidence: figures.fans(
            frame, looks, title, "log(new / old probability) (nats)", _LOG_PERCENTILES, _clip(evidence.runs)
        ),
        caption=_fan_caption,
        reading="A healthy ratio is a narrow fan around 0. A wide or slanted fan means tokens whose probability the "
        "trainer sees many times too large or too small: 0.1 is 10 %, 0.7 a factor of 2, 2.3 a factor of 10.",
        value=_LOG_PERCENTILES[-1],
    ),
    _curve(
        "ess",
        "Effective sample size",
        ESS,
        "ppo_ratio/ess_raw (share of tokens)",
        "(Σw)² / (N Σw²) of the untruncated ratios w: 1 when all tokens weigh the same, small when a few decide the "
        "update. Drops precede collapse (arXiv 2602.17616). The axis is logarithmic in the distance from 1.",
        share=True,
    ),
    _curve(
        "F2",
        "F(2): tokens off by more than a factor of 2",
        F2,
        "gap_ratio/F2 (share of tokens)",
        "Share of tokens whose probabilities under trainer and engine differ by more than a factor of 2. With replay "
        "it is about 1e-4 or less; above 0.1 (dotted) preceded collapse (arXiv 2510.11370).",
        limit=(0.1, "0.1"),
    ),
    Chart(
        "merge_segment",
        "Merge error by segment of the rollout",
        keys=(),
        numbers=lambda evidence: _merge_errors(evidence.runs, merge_frames.part_errors),
        draw=lambda title, frame, looks, _: figures.merge_errors(
            frame, looks, title, "segment (only: not interrupted)"
        ),
        caption=_merge_caption,
        reading="What a rule costs on the same rollouts and weights: |log-prob under its rows minus log-prob under "
        "the exact rows|. Where it is 0 the rule is exact.",
        value="mean",
        by="bucket",
    ),
    Chart(
        "merge_lag",
        "Merge error by version lag",
        keys=(),
        numbers=lambda evidence: _merge_errors(evidence.runs, merge_frames.lag_errors),
        draw=lambda title, frame, looks, _: figures.merge_errors(
            frame, looks, title, "trainer version minus the segment's version"
        ),
        caption=_merge_caption,
        reading="A line that rises says that the rule errs more the older a segment is when the trainer meets it.",
        value="mean",
        by="bucket",
    ),
    Chart(
        "churn_layer",
        "Router churn by layer",
        keys=(),
        numbers=lambda evidence: _churn(evidence.runs),
        draw=lambda title, frame, looks, _: figures.by_layer(frame, looks, title, "route/churn (share of slots)"),
        caption=_layer_caption,
        reading="Share of expert slots that a resumed call routed otherwise than the call before it, on the same "
        "positions. Without it every rule agrees with exact, but naive_concat, which shifts rows, and those that leave "
        "positions to the live router.",
        by="layer",
    ),
    _curve(
        "reward",
        "Reward",
        REWARD,
        "reward/mean",
        "Mean reward of the rollouts of an update. Bands that overlap do not tell arms apart, whatever the lines do.",
    ),
    Chart(
        "staleness",
        "Staleness of what the trainer trains on",
        keys=(AGE, PARTIAL),
        numbers=lambda evidence: _staleness(evidence.runs),
        draw=lambda title, frame, looks, _: figures.stacked(
            frame, looks, title, {AGE: "token age (versions)", PARTIAL: "multi-version (share)"}
        ),
        caption=band_caption,
        reading="Above: trainer version minus the version that sampled the token, mean over tokens. Below: share of "
        "rollouts with tokens of two or more versions. Arms must agree here, or their schedules differed.",
        by="key",
    ),
    Chart(
        "survival",
        "Runs without collapse",
        keys=(),
        numbers=_survival,
        draw=lambda title, frame, looks, _: figures.survival(frame, looks, title),
        caption=lambda _, __: "Kaplan-Meier curve: a run that ends without collapse is censored there.",
        reading="A step down is a run that met a criterion of collapse (the table says which there are).",
        value="survival",
    ),
    Chart(
        "profile",
        "Performance profile of the compared metric",
        keys=(),
        numbers=_profiles,
        draw=lambda title, frame, looks, _: figures.profile(frame, looks, title),
        caption=_profile_caption,
        reading="The curve that reaches 1 at the better end first has the better runs; curves that cross have no "
        "order.",
        value="share",
    ),
)
