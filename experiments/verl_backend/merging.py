"""From the engine's answers of one trajectory to what verl trains on: rows, loss mask, versions, counters.

Runs in verl's agent-loop workers and imports no verl, so that every row fault is tested without it. One policy decides
about rows that are truly missing; nothing is zero-filled. Placeholder rows are -1: replaying one by accident is an
index error, not expert 0.

Legend: `P` prompt tokens, `T` tokens in all, `R = T - P`, `s` input tokens of a call, `n` new tokens, `L` layers, `K`
experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strategies.base import MergeStrategy
from strategies.checks import view_length
from strategies.reply import RawReply, ReplyError, RowShape, check_reply, row_dtype_for
from strategies.types import LIVE, EngineCall, MergeError, ReplayView, Rollout, Rows

OnMissingRows = Literal["raise", "drop", "live"]
"""What becomes of a trajectory whose rows are missing: an error that fails its prompt group; no loss on it; the
trainer's router decides for the whole trajectory."""

FLAGS = ("surplus_row", "phantom_log_prob", "log_prob_missing", "rows_refused", "rows_missing", "dropped", "live")
"""Row provenance that is counted per trajectory; the trainer logs each as `replay/<flag>`."""


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
class Merged:
    """What one trajectory contributes to verl's batch.

    Attributes:
        rows: integer `[T-1, L, K]`; -1 where nothing is replayed; None when the run records no rows.
        response_mask: bool `[R]`, tokens that carry loss. With rows, R ends with the last generated token: environment
            tokens behind it train nothing and no call fed them.
        versions: int32 `[R]`, weight version of every response token, UNKNOWN_VERSION where none generated it.
        flags: how often each of FLAGS occurred.
        shadow: views by strategy name, for shadow scoring; empty when it is off or rows are missing.
    """

    rows: Rows | None
    response_mask: NDArray[np.bool_]
    versions: NDArray[np.int32]
    flags: Mapping[str, int]
    shadow: Mapping[str, list[ReplayView]] = field(default_factory=dict)


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
        shadow: further rules to score the same trajectories with, by name.
    """

    strategy: MergeStrategy
    num_layers: int
    top_k: int
    num_experts: int
    records_rows: bool
    on_missing_rows: OnMissingRows
    live_rows: bool
    max_empty_aborts: int
    shadow: Mapping[str, MergeStrategy]

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
        counted, held = dict(flags), len(prompt_ids)
        versions, mask = rollout.versions()[held:], rollout.counted()[held:]
        if not self.records_rows:
            return Merged(None, mask, versions, counted)
        try:
            views = self.strategy(rollout)
        except MergeError:
            if self.on_missing_rows == "raise":
                raise
            kind = "dropped" if self.on_missing_rows == "drop" else "live"
            counted |= {"rows_missing": 1, kind: 1}
            return Merged(self._placeholder(rollout), mask & (kind == "live"), versions, counted)
        if not views:  # no generated token: no loss, so that verl replays nothing of it
            return Merged(self._placeholder(rollout), mask, versions, counted)
        view = self._single(rollout, views)
        return Merged(view.rows, view.loss_mask[held:], versions, counted, self._shadow(rollout))

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
        """Returns the one view.

        Raises:
            MergeError: several views, one that ends early, or live rows that the trainer cannot leave to its router.
        """
        origin, name = f"rollout {rollout.rollout_id}", type(self.strategy).__name__
        if len(views) != 1 or views[0].length != rollout.length:
            raise MergeError(
                f"{origin}: one view of {rollout.length} tokens expected, {len(views)} of "
                f"{[view.length for view in views]} came from {name}; verl trains one row matrix per trajectory"
            )
        if not self.live_rows and (views[0].rows == LIVE).any():
            raise MergeError(
                f"{origin}: rows of experts expected, {name} left some to the trainer's router, though it gave none "
                "such for the trajectory that run.py tried it with; set backend.live_rows=true"
            )
        return views[0]

    def _placeholder(self, rollout: Rollout) -> Rows:
        return np.full((rollout.length - 1, self.num_layers, self.top_k), LIVE, row_dtype_for(self.num_experts))

    def _shadow(self, rollout: Rollout) -> dict[str, list[ReplayView]]:
        """Returns the views of every shadow rule; a rule that cannot merge this trajectory is left out."""
        views = {}
        for name, strategy in self.shadow.items():
            try:
                views[name] = strategy(rollout)
            except MergeError:  # counted by its absence: `merge/<strategy>/...` is over the trajectories that have it
                continue
        return views


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
