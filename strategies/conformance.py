"""Does a merge strategy hold the rules? Checks a strategy, ours or a user's own, against cases.

Two layers. **Expectations** are the rows and loss tokens that a case gives for a rule by name. The **contract** holds
for every strategy: masks are a disjoint subset of the generated tokens, every row is live or was returned by some call
for that very position, inputs stay as they were, and the answer is the same twice. A control that misplaces rows on
purpose declares `misaligned = True`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.base import MergeStrategy
from strategies.case_file import Case, Sample, build_sample
from strategies.checks import check_row_contents
from strategies.reply import ReplyError
from strategies.types import LIVE, MergeError, ReplayView, Rollout, Rows


@dataclass(frozen=True)
class CaseResult:
    """What one case found. `refused`: the strategy raised a MergeError where no expectation says otherwise."""

    case: str
    failures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Contract:
    """Faults and remarks of one merge; `partition` says whether every counted token carries loss in some view."""

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    partition: bool = True


def run_case(case: Case, strategy: MergeStrategy, rule: str | None) -> CaseResult:
    """Returns what `strategy` does wrong on `case`; `rule` names the expectations to meet, None: the contract alone."""
    wants_error = case.expect.get("error")
    try:
        sample = build_sample(case)
    except ReplyError as error:
        if case.stage == "reply" and wants_error:
            return CaseResult(case.case)
        return CaseResult(case.case, (f"no refusal at the engine boundary expected, it says: {error}",))
    if case.stage == "reply" and wants_error:
        return CaseResult(
            case.case, (f"a refusal at the engine boundary expected ({wants_error}), the reply was accepted",)
        )
    failures = check_sample(case, sample)
    expected = _expectation(case, rule)
    try:
        views, contract = merge_twice(strategy, sample.rollout)
    except MergeError as error:
        if expected is None and not wants_error:
            return CaseResult(case.case, tuple(failures), refused=str(error))
        return CaseResult(case.case, tuple(failures + _unexpected_error(case, expected, error)))
    except Exception as error:  # a strategy under test may raise anything; the report names the case
        return CaseResult(case.case, (*failures, f"a MergeError or views expected, {type(error).__name__}: {error}"))
    failures += contract.failures
    if expected is not None:
        failures += compare(case, expected, views, sample.rollout)
    return CaseResult(case.case, tuple(failures), tuple(contract.warnings))


def _expectation(case: Case, rule: str | None) -> Any:
    """Returns the case's expectation for a rule: stamps, views, `error` or `any_of`; None when it has none."""
    if rule is None:
        return None
    return {"error": case.expect["error"]} if "error" in case.expect else case.expect.get(rule)


def _unexpected_error(case: Case, expected: Any, error: MergeError) -> list[str]:
    """Returns a failure unless the case wants, or accepts, that the strategy refuses the rollout."""
    wanted = isinstance(expected, dict) and "error" in expected
    return [] if wanted or expected is None or case.or_error else [f"views expected, MergeError came: {error}"]


def check_sample(case: Case, sample: Sample) -> list[str]:
    """Returns how the recorded rollout differs from the case's expectations that no strategy decides."""
    rollout = sample.rollout
    generated = rollout.generated()
    versions = rollout.versions()[generated]
    pairs: list[tuple[str, Any, Any]] = [
        ("generated tokens", case.expect_tokens, int(generated.sum())),
        ("log-probs", case.expect_log_probs, int(rollout.counted().sum())),
        ("versions", case.expect_versions, [None if v < 0 else v for v in versions.tolist()]),
        ("budgets", case.expect_budgets, list(sample.budgets)),
        ("finish", case.expect_finish, sample.finish),
        ("flags", case.expect_flags and sorted(case.expect_flags), sorted(sample.flags)),
        ("staleness", case.expect_staleness, _staleness(rollout, versions)),
    ]
    return [
        f"{what}: {wanted} expected, {came} came"
        for what, wanted, came in pairs
        if wanted is not None and wanted != came
    ]


def _staleness(rollout: Rollout, versions: NDArray[np.int32]) -> dict[str, float]:
    """Returns the trainer's version minus the known tokens' versions: of the last one, the oldest, and the mean."""
    known = versions[versions >= 0]
    if rollout.trainer_version is None or not known.size:
        return {}
    lags = rollout.trainer_version - known
    return {"last_segment": int(lags[-1]), "oldest": int(lags.max()), "mean": float(lags.mean())}


def merge_twice(strategy: MergeStrategy, rollout: Rollout) -> tuple[list[ReplayView], Contract]:
    """Returns the views of `rollout` and how they break the contract; merges twice to compare.

    Raises:
        MergeError: the strategy refuses the rollout.
    """
    untouched = copy.deepcopy(rollout)
    views, again = strategy(rollout), strategy(copy.deepcopy(rollout))
    contract = check_views(strategy, untouched, views)
    if not _same_arrays(untouched, rollout):
        contract.failures.append("inputs unmodified expected, the strategy wrote into the rollout")
    if any(np.shares_memory(v.rows, c.rows) for v in views for c in rollout.calls if c.rows is not None):
        contract.failures.append("rows of their own expected, a view shares memory with a recorded call")
    if len(views) != len(again) or not all(
        np.array_equal(a.rows, b.rows) and np.array_equal(a.loss_mask, b.loss_mask)
        for a, b in zip(views, again, strict=True)
    ):
        contract.failures.append("the same views twice expected, two merges of one rollout differ")
    return views, contract


def _same_arrays(before: Rollout, after: Rollout) -> bool:
    """Returns whether tokens and all arrays of all calls are equal."""
    pairs = [(before.tokens, after.tokens)]
    for a, b in zip(before.calls, after.calls, strict=True):
        pairs += [(getattr(a, name), getattr(b, name)) for name in ("output_ids", "log_probs", "versions", "rows")]
    return all(
        x is y or np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in pairs
        if x is not None or y is not None
    )


def check_views(strategy: MergeStrategy, rollout: Rollout, views: Sequence[ReplayView]) -> Contract:
    """Returns how `views` break the contract that every strategy holds."""
    failures: list[str] = []
    warnings: list[str] = []
    counted = rollout.counted()
    carried = np.zeros(rollout.length, dtype=int)
    if strategy.single_view and len(views) != 1 and counted.any():
        failures.append(f"one view expected (single_view), {len(views)} came")
    for index, view in enumerate(views):
        shape = (view.length - 1, rollout.num_layers, rollout.top_k)
        if view.rows.shape != shape or not 1 <= view.length <= rollout.length or view.loss_mask.dtype != bool:
            failures.append(
                f"view {index}: rows of shape {shape} and a bool mask of at most {rollout.length} tokens expected, "
                f"{view.rows.shape} and {view.loss_mask.dtype} {view.loss_mask.shape} came"
            )
            continue
        if not view.rows.flags.writeable:
            failures.append(f"view {index}: writable rows expected")
        carried[: view.length] += view.loss_mask
        try:
            check_row_contents(view.rows, rollout.num_experts, f"view {index}")
        except ValueError as error:
            failures.append(str(error))
        strayed = misplaced(rollout, view.rows)
        if strayed:
            (warnings if getattr(strategy, "misaligned", False) else failures).append(
                f"view {index}, position {strayed[0]}: a live row or one that a call returned for this position "
                f"expected, {view.rows[strayed[0]].tolist()} came ({len(strayed)} such positions)"
            )
    for what, bad in (("more than one view", carried > 1), ("a view without being counted", (carried > 0) & ~counted)):
        if bad.any():
            failures.append(f"token {int(np.argmax(bad))}: it carries loss in {what} ({int(bad.sum())} such tokens)")
    partition = bool((carried[counted] == 1).all())
    if not partition:
        warnings.append(f"{int((carried[counted] == 0).sum())} of {int(counted.sum())} counted tokens carry no loss")
    return Contract(failures, warnings, partition)


def misplaced(rollout: Rollout, rows: Rows) -> list[int]:
    """Returns the positions whose row is neither live nor what some call returned for that very position."""
    here = (rows == LIVE).all(axis=(1, 2))
    for call in rollout.calls:
        if call.rows is not None:
            stop = min(call.end - 1, len(rows))
            returned = call.rows[: max(stop - call.row_start, 0)]
            here[call.row_start : stop] |= (rows[call.row_start : stop] == returned).all(axis=(1, 2))
    return np.flatnonzero(~here).tolist()


def compare(case: Case, expected: Any, views: Sequence[ReplayView], rollout: Rollout) -> list[str]:
    """Returns how `views` differ from an expectation: stamps of one matrix, a list of views, `error` or `any_of`."""
    if isinstance(expected, dict) and "any_of" in expected:
        readings = [compare(case, option, views, rollout) for option in expected["any_of"]]
        return [] if any(not reading for reading in readings) else readings[0]
    if isinstance(expected, dict):
        return [f"a MergeError expected ({expected['error']}), {len(views)} views came"]
    if expected and isinstance(expected[0], dict):
        return _compare_views(case, expected, views, rollout)
    if not expected and not views:
        return []
    return _compare_matrix(case.expand(expected), views, rollout)


def _compare_matrix(expected: Rows, views: Sequence[ReplayView], rollout: Rollout) -> list[str]:
    """Returns how one view differs from a matrix `[T-1, L, K]` with loss on every counted token.

    A view may end with the last generated token: environment tokens behind it predict nothing that is trained.
    """
    if len(views) != 1:
        return [f"one view expected, {len(views)} came"]
    view = views[0]
    trailing = rollout.generated()[view.length :]
    if len(view.rows) > len(expected) or trailing.any():
        return [f"{len(expected)} rows expected, {len(view.rows)} came"]
    failures = _compare_rows(expected[: len(view.rows)], view.rows, "view 0")
    if not np.array_equal(view.loss_mask, rollout.counted()[: view.length]):
        failures.append(f"loss on tokens {_where(rollout.counted())} expected, on {_where(view.loss_mask)} came")
    return failures


def _compare_views(
    case: Case, expected: Sequence[dict[str, Any]], views: Sequence[ReplayView], rollout: Rollout
) -> list[str]:
    """Returns how views differ from expected ones: tokens that carry loss, and the rows that predict them.

    Views may be cut differently than expected: a token is right when the rows before it are.
    """
    failures: list[str] = []
    counted = rollout.counted()
    wanted = np.zeros(rollout.length, dtype=bool)
    came = np.zeros(rollout.length, dtype=bool)
    for view in views:
        came[: view.length] |= view.loss_mask
    for number, option in enumerate(expected):
        first, last = option["tokens"]
        tokens = np.zeros(rollout.length, dtype=bool)
        tokens[first:last] = counted[first:last]
        wanted |= tokens
        rows = case.expand(option["rows"])
        for index, view in enumerate(views):
            shared = np.flatnonzero(view.loss_mask & tokens[: view.length])
            if shared.size:
                stop = int(shared[-1])
                failures += _compare_rows(rows[:stop], view.rows[:stop], f"view {index} (expected view {number})")
    if not np.array_equal(wanted, came):
        failures.append(f"loss on tokens {_where(wanted)} expected, on {_where(came)} came")
    return failures


def _compare_rows(expected: Rows, came: Rows, what: str) -> list[str]:
    """Returns the first position at which two matrices differ, with both rows."""
    if len(expected) != len(came):
        return [f"{what}: {len(expected)} rows expected, {len(came)} came"]
    wrong = np.flatnonzero((expected != came).any(axis=(1, 2)))
    if not wrong.size:
        return []
    at = int(wrong[0])
    return [
        f"{what}, position {at}: row {expected[at].tolist()} expected, {came[at].tolist()} came "
        f"({wrong.size} of {len(came)} rows differ)"
    ]


def _where(mask: NDArray[np.bool_]) -> list[int]:
    """Returns the token indices of a mask."""
    return np.flatnonzero(mask).tolist()
