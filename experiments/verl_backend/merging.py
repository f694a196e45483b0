"""From the engine's answers of one trajectory to what verl trains on: rows, loss mask, counters.

Runs in verl's agent-loop workers, and in its trainer for strategies that need the trainer's weight version. Imports no
verl, so that every row fault is tested without it. One policy decides about rows that are truly missing; nothing is
zero-filled. Placeholder rows are -1: replaying one by accident is an index error, not expert 0.

Legend: `P` prompt tokens, `T` tokens in all, `R = T - P`, `s` input tokens of a call, `n` new tokens, `L` layers, `K`
experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from experiments.metrics import route_keys as m
from strategies.base import MergeStrategy
from strategies.checks import view_length
from strategies.reply import RawReply, ReplyError, RowShape, check_reply, row_dtype_for
from strategies.types import LIVE, EngineCall, MergeError, ReplayView, Rollout, Rows

OnMissingRows = Literal["raise", "drop", "live"]
"""What becomes of a trajectory whose rows are missing: an error that fails its prompt group; no loss on it; the
trainer's router decides for the whole trajectory."""

FLAGS: dict[str, str] = {
    "surplus_row": m.REPLAY_SURPLUS_CALLS,
    "phantom_log_prob": m.REPLAY_PHANTOM_CALLS,
    "log_prob_missing": m.REPLAY_NO_LOG_PROB_CALLS,
    "rows_refused": m.REPLAY_REFUSED_CALLS,
    "rows_missing": m.REPLAY_INCOMPLETE,
    "dropped": m.REPLAY_DROPPED.format(reason="rows_missing"),
    "live": m.REPLAY_LIVE_ROLLOUTS,
}
"""Row provenance that is counted per trajectory, and the metric of each sum."""


@dataclass(frozen=True, eq=False)
class Answer:
    """One answer of an engine as verl's `TokenOutput` carries it.

    Attributes:
        input_len: `s`, tokens sent.
        output_ids: `n` ids; log_probs: one each, None when absent.
        rows: array `[rows, L, K]` from position 0 on, read-only perhaps; None when absent.
        version: weight version (`extra_fields["global_steps"]`); None when absent.
        finish: `stop`, `length` or `abort` (vLLM's `aborted`, `completed` are translated).
    """

    input_len: int
    output_ids: Sequence[int]
    log_probs: Sequence[float] | None
    rows: Any
    version: int | None
    finish: str


@dataclass(frozen=True, eq=False)
class MergedRows:
    """What the trainer replays of one rollout.

    Attributes:
        rows: integer `[T-1, L, K]`; -1 where nothing is replayed.
        loss_mask: bool `[T]`, tokens that carry loss.
        flags: how often each of FLAGS occurred.
    """

    rows: Rows
    loss_mask: NDArray[np.bool_]
    flags: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Merged:
    """What one trajectory contributes to verl's batch.

    Attributes:
        rows: integer `[T-1, L, K]`; -1 where nothing is replayed; None when the run records no rows.
        response_mask: bool `[R]`, tokens that carry loss. With rows, R ends with the last generated token: environment
            tokens behind it train nothing and no call fed them.
        flags: how often each of FLAGS occurred.
        rollout: the calls behind it, for statistics; with their rows where the trainer needs them (`keeps_rows`).
    """

    rows: Rows | None
    response_mask: NDArray[np.bool_]
    flags: Mapping[str, int]
    rollout: Rollout


@dataclass(frozen=True)
class Merging:
    """The run's strategy and policy, as the agent-loop file states them.

    Attributes:
        strategy: the run's merge rule, single-view.
        num_layers, top_k, num_experts: shape and range of a row.
        records_rows: the engine returns rows (verl's `enable_rollout_routing_replay`).
        on_missing_rows: see OnMissingRows.
        live_rows: the trainer can leave single rows to its router (live_rows.py is installed).
        max_empty_aborts: calls in a row without a token before a trajectory is an error.
        in_trainer: the strategy needs the trainer's weight version, which no agent-loop worker knows: the trainer
            merges, with `merge_rows`.
        keeps_rows: the rows of every call travel to the trainer, which merges or scores other rules on them.
    """

    strategy: MergeStrategy
    num_layers: int
    top_k: int
    num_experts: int
    records_rows: bool
    on_missing_rows: OnMissingRows
    live_rows: bool
    max_empty_aborts: int
    in_trainer: bool
    keeps_rows: bool

    def record(self, answer: Answer, request_id: str, flags: dict[str, int]) -> EngineCall:
        """Returns the checked call and counts its irregularities in `flags`.

        Surplus last rows are accepted and set aside: verl's servers differ in it from call to call. Rows that fail the
        checks are an error with `raise`, and count as missing otherwise.

        Raises:
            ReplyError: tokens, log-probs or (with `raise`) rows break the contract.
        """
        try:
            checked = check_reply(self._raw(answer, request_id, answer.rows), self._shape, "either")
        except ReplyError:
            if answer.rows is None or self.on_missing_rows == "raise":
                raise
            checked = check_reply(self._raw(answer, request_id, None), self._shape, "either")
            flags["rows_refused"] = flags.get("rows_refused", 0) + 1
        for flag in checked.flags & set(FLAGS):
            flags[flag] = flags.get(flag, 0) + 1
        return checked.call

    @property
    def _shape(self) -> RowShape:
        return RowShape(self.num_layers, self.top_k, self.num_experts)

    def _raw(self, answer: Answer, request_id: str, rows: Any) -> RawReply:
        """Returns the answer in the checker's terms. `rows_asked` is off: absence is for `on_missing_rows` to judge."""
        return RawReply(
            request_id=request_id,
            input_len=answer.input_len,
            output_ids=answer.output_ids,
            finish=answer.finish,
            log_probs=answer.log_probs,
            rows=_within(rows, answer) if self.records_rows else None,
            version=answer.version,
            rows_asked=False,
        )

    def merge(
        self,
        rollout_id: str,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        calls: Sequence[EngineCall],
        flags: Mapping[str, int],
    ) -> Merged:
        """Returns the trajectory's part of the batch.

        Args:
            prompt_ids, response_ids: `[P]`, `[R]` as verl trains on them, after its cap on the response.
            calls: every call of every turn, in order.
            flags: what `record` counted.

        Raises:
            MergeError: rows that the strategy needs are missing and the policy is `raise`; the strategy splits the
                trajectory; or it leaves single rows live and the trainer cannot.
        """
        rollout = self._rollout(rollout_id, [*prompt_ids, *response_ids], len(prompt_ids), calls)
        if self.records_rows and any(rollout.segments()):
            rollout = replace(rollout, tokens=rollout.tokens[: view_length(rollout)])
        sent = rollout if self.keeps_rows else without_rows(rollout)
        held = len(prompt_ids)
        if not self.records_rows:
            return Merged(None, rollout.counted()[held:], flags, sent)
        if self.in_trainer:
            return Merged(self._placeholder(rollout), rollout.counted()[held:], flags, sent)
        merged = self.merge_rows(rollout)
        return Merged(merged.rows, merged.loss_mask[held:], {**flags, **merged.flags}, sent)

    def merge_rows(self, rollout: Rollout) -> MergedRows:
        """Returns what the trainer replays of the rollout, whose tokens end with the last generated one.

        Raises:
            MergeError: as `merge`.
            RuntimeError: the strategy raised anything else.
        """
        mask = rollout.counted()
        try:
            views = self.strategy(rollout)
        except MergeError:
            if self.on_missing_rows == "raise":
                raise
            kind = "dropped" if self.on_missing_rows == "drop" else "live"
            return MergedRows(self._placeholder(rollout), mask & (kind == "live"), {"rows_missing": 1, kind: 1})
        except Exception as error:  # a user's class may raise anything; the reader must know for which trajectory
            raise RuntimeError(
                f"rollout {rollout.rollout_id}, strategy {type(self.strategy).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not views:  # no generated token: no loss, so that verl replays nothing of it
            return MergedRows(self._placeholder(rollout), mask, {})
        view = self._single(rollout, views)
        return MergedRows(view.rows, view.loss_mask, {})

    def _rollout(self, rollout_id: str, tokens: list[int], prompt_len: int, calls: Sequence[EngineCall]) -> Rollout:
        return Rollout(
            rollout_id=rollout_id,
            tokens=np.array(tokens, dtype=np.int32),
            prompt_len=prompt_len,
            calls=tuple(calls),
            num_layers=self.num_layers,
            top_k=self.top_k,
            num_experts=self.num_experts,
        )

    def _single(self, rollout: Rollout, views: list[ReplayView]) -> ReplayView:
        """Returns the one view. verl would fill rows that are short with zeros, and cut ids to 16 bits.

        Raises:
            MergeError: several views, one that ends early, rows of another shape, type or range, loss on a token that
                has no log-prob, or live rows that the trainer cannot leave to its router.
        """
        origin, name = f"rollout {rollout.rollout_id}", type(self.strategy).__name__
        if len(views) != 1 or views[0].length != rollout.length:
            raise MergeError(
                f"{origin}: one view of {rollout.length} tokens expected, {len(views)} of "
                f"{[view.length for view in views]} came from {name}; verl trains one row matrix per trajectory"
            )
        rows, shape = views[0].rows, (rollout.length - 1, self.num_layers, self.top_k)
        if rows.shape != shape or rows.dtype.kind not in "iu":
            raise MergeError(
                f"{origin}: integer rows of shape {shape} expected, {rows.dtype} of {rows.shape} came from {name}"
            )
        if rows.size and not LIVE <= rows.min() <= rows.max() < self.num_experts:
            raise MergeError(
                f"{origin}: expert ids in 0..{self.num_experts - 1}, or {LIVE}, expected, {rows.min()}..{rows.max()} "
                f"came from {name}"
            )
        stray = np.flatnonzero(views[0].loss_mask & ~rollout.counted())
        if len(stray):
            raise MergeError(
                f"{origin}: loss on tokens that a call generated with a log-prob expected, {name} put it on token "
                f"{stray[0]} ({len(stray)} such tokens)"
            )
        if not self.live_rows and (views[0].rows == LIVE).any():
            raise MergeError(
                f"{origin}: rows of experts expected, {name} left some to the trainer's router, though it gave none "
                "such for the trajectory that run.py tried it with; set backend.live_rows=true"
            )
        return views[0]

    def _placeholder(self, rollout: Rollout) -> Rows:
        return np.full((rollout.length - 1, self.num_layers, self.top_k), LIVE, row_dtype_for(self.num_experts))


def without_rows(rollout: Rollout) -> Rollout:
    """Returns the rollout with calls that returned no rows: tokens, log-probs and versions are a few bytes a token."""
    return replace(rollout, calls=tuple(replace(call, rows=None, surplus=None) for call in rollout.calls))


def _within(rows: Any, answer: Answer) -> Any:
    """Returns the rows without those of tokens that verl's server dropped: it empties `output_ids` when the number of
    log-probs differs (`max_new_tokens=0`), and keeps the rows.
    """
    if rows is None or len(answer.output_ids):
        return rows
    return rows[: answer.input_len]


def finish_of(stop_reason: str | None) -> str:
    """Returns `stop`, `length` or `abort` for verl's `TokenOutput.stop_reason` (SGLang's and vLLM's words)."""
    return {"aborted": "abort", "completed": "stop", None: "stop"}.get(stop_reason, str(stop_reason))
