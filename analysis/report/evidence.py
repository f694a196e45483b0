"""What a report is made from: the runs that its study compares, and what the study found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from analysis.plan import Plan
from analysis.runs import Runs
from analysis.study import StudyResult, study


@dataclass(frozen=True, eq=False)
class Evidence:
    """Runs and results of one study.

    Attributes:
        runs: the runs of the arms and seeds that the study compares.
        result: what it found.
    """

    runs: Runs
    result: StudyResult

    @classmethod
    def of(cls, runs: Runs, plan: Plan | None) -> Evidence:
        """Returns the evidence of `runs` under `plan`; a run that the plan does not name is in no figure.

        Raises:
            ValueError: no run belongs to the plan.
        """
        result = study(runs, plan)
        rows = runs.runs
        kept = rows[rows["strategy"].isin(list(result.arms)) & rows["seed"].isin(list(result.seeds))]
        if kept.empty:
            raise ValueError(
                f"none of the {len(rows)} runs belongs to the plan: expected arms {', '.join(result.arms)} and seeds "
                f"{', '.join(map(str, result.seeds))}, found {', '.join(map(str, rows.index[:6]))}"
            )
        if len(kept) < len(rows):
            names = list(kept.index)
            runs = dataclasses.replace(
                runs,
                runs=kept,
                history=runs.history[runs.history["run"].isin(names)],
                segments=runs.segments[runs.segments["run"].isin(names)],
                configs={name: runs.configs[name] for name in names if name in runs.configs},
                versions={name: runs.versions[name] for name in names if name in runs.versions},
            )
        return cls(runs, result)
