"""The rule `gated`: replay fresh rows; the trainer's router decides where they are stale or contested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strategies.checks import Span, calls_with_tokens, check_rollout, one_view, prompt_view, row_dtype
from strategies.slice_concat import first_fed_rows
from strategies.types import LIVE, UNKNOWN_VERSION, MergeError, ReplayView, Rollout, Rows


def row_versions(rollout: Rollout, spans: list[Span]) -> NDArray[np.int32]:
    """Returns int32 `[t-1]`: the weight version that chose each row, UNKNOWN_VERSION where it is not known.

    A row of position i is chosen by the weights that sampled token i+1 in the same call; a re-fed prefix by those of
    the call's first token.
    """
    versions = np.full(spans[-1].stop, UNKNOWN_VERSION, dtype=np.int32)
    for span in spans:
        call = rollout.calls[span.call]
        if call.new_tokens:
            sampled = np.arange(span.start, span.stop) + 1 - call.input_len
            versions[span.start : span.stop] = call.versions[np.maximum(sampled, 0)]
    return versions


def row_churn(rollout: Rollout, rows: Rows) -> NDArray[np.float64]:
    """Returns float64 `[t-1]`: share of a position's experts that the newest known row of that position does not have.

    1 - |used ∩ newest| / K as sets, mean over the layers that both rows know. The newest row is that of the last call
    with tokens that returned one. Under a kept KV cache a position is routed once: its churn is 0.
    """
    newest = rows.copy()
    settled = np.zeros(len(rows), dtype=bool)
    for index in reversed(calls_with_tokens(rollout)):
        call = rollout.calls[index]
        if call.rows is not None:
            here = np.arange(call.row_start, min(call.end - 1, len(rows)))
            here = here[~settled[here]]
            newest[here] = call.rows[here - call.row_start]
            settled[here] = True
    shared = np.zeros(rows.shape[:2])  # [t-1, L]
    for slot in range(rows.shape[2]):  # one slot at a time: all pairs at once would need K times the memory
        shared += (rows == newest[..., slot, None]).any(axis=-1)
    shared /= rows.shape[2]
    known = (rows[..., 0] != LIVE) & (newest[..., 0] != LIVE)
    return ((1.0 - shared) * known).sum(axis=-1) / np.maximum(known.sum(axis=-1), 1)


@dataclass(frozen=True)
class Gated:
    """One view: `slice_concat`, live where the lag exceeds `max_lag` or the churn `max_churn`; loss on all tokens.

    Attributes:
        max_lag: largest `trainer_version` minus the version that chose the row, in weight versions; None: no limit. A
            row of unknown version cannot be shown to be fresh and is live.
        max_churn: largest share of experts, 0 to 1, in which the row may differ from the newest row of its position;
            None: no limit.
    """

    max_lag: int | None
    max_churn: float | None
    single_view: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_lag is None and self.max_churn is None:
            raise ValueError("gated: max_lag or max_churn expected, both are null; use slice_concat for no gate")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"gated: max_lag >= 0 expected, {self.max_lag} came")
        if self.max_churn is not None and not 0.0 <= self.max_churn <= 1.0:
            raise ValueError(f"gated: max_churn in 0..1 expected, {self.max_churn} came")

    def __call__(self, rollout: Rollout) -> list[ReplayView]:
        check_rollout(rollout)
        if not any(rollout.segments()):
            return prompt_view(rollout)
        spans, rows = first_fed_rows(rollout)
        gate = np.zeros(len(rows), dtype=bool)
        if self.max_lag is not None:
            if rollout.trainer_version is None:
                raise MergeError(
                    f"rollout {rollout.rollout_id}: gated with max_lag={self.max_lag} needs Rollout.trainer_version, "
                    "it is None; set it before merging, or set max_lag=null"
                )
            versions = row_versions(rollout, spans)
            gate |= (versions == UNKNOWN_VERSION) | (rollout.trainer_version - versions > self.max_lag)
        if self.max_churn is not None:
            gate |= row_churn(rollout, rows) > self.max_churn
        rows: NDArray[Any] = rows.astype(row_dtype(rollout, signed=True), copy=False)
        rows[gate] = LIVE
        return one_view(rollout, rows)
