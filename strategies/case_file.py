"""Conformance cases: the file format (strategies/cases/README.md), and how a case becomes a recorded rollout.

A case is read strictly: a key that this module does not know is an error, so that no expectation goes unchecked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from strategies.budget import call_budget, rollout_finish
from strategies.reply import Convention, RawReply, ReplyError, RowShape, VersionSpan, check_reply
from strategies.types import LIVE, UNKNOWN_VERSION, Rollout, Rows

CASES_DIR = Path(__file__).parent / "cases"
"""Folder of the cases that ship with the package."""


@dataclass(frozen=True)
class CallSpec:
    """One call of a case; fields as in the format. `log_probs` left out means one for every new token."""

    new_tokens: int
    row_start: int | None
    rows: Sequence[Any] | None
    version: int | None
    finish: str
    log_probs: int | Sequence[float | None] | Literal["all"] | None = "all"
    requested_start: int | None = None
    env_tokens: int = 0
    container: str = "ndarray"
    dtype: str = "int32"
    payload_b64: str | None = None
    prefill_rows: Sequence[Any] | None = None
    version_spans: Sequence[Mapping[str, int]] | None = None
    num_retractions: int = 0
    reply_id: str | None = None
    input_len: int | None = None
    input_ids: Sequence[int] | None = None
    output_ids: Sequence[int] | None = None
    max_new_tokens: int | None = None
    kv: str | None = None


@dataclass(frozen=True)
class Case:
    """The replies of one interrupted rollout and what must follow from them; fields as in the format."""

    case: str
    layers: int
    topk: int
    experts: int
    prompt_len: int
    calls: tuple[CallSpec, ...]
    expect: Mapping[str, Any]
    about: str = ""
    source: str = ""
    note: str = ""
    fill: str = "constant"
    convention: Convention = "seqlen-1"
    kv: str = "rebuilt"
    stage: str = "merge"
    or_error: bool = False
    response_cap: int | None = None
    length_limit: int | None = None
    context_limit: int | None = None
    trainer_version: int | None = None
    expect_tokens: int | None = None
    expect_log_probs: int | None = None
    expect_versions: Sequence[int | None] | None = None
    expect_budgets: Sequence[int] | None = None
    expect_finish: str | None = None
    expect_staleness: Mapping[str, float] | None = None
    expect_flags: Sequence[str] | None = None

    @property
    def shape(self) -> RowShape:
        """Shape and range of a row."""
        return RowShape(self.layers, self.topk, self.experts)

    def expand(self, stamps: Sequence[Any]) -> Rows:
        """Returns int32 `[rows, L, K]` of stamps: an integer fills a row, a nested list is a row, -1 is missing."""
        out = np.empty((len(stamps), self.layers, self.topk), np.int32)
        for row, stamp in zip(out, stamps, strict=True):
            ramp = self.fill == "ramp" and isinstance(stamp, int) and stamp != LIVE
            row[:] = (stamp + np.arange(self.topk)) % self.experts if ramp else stamp
        return out


@dataclass(frozen=True, eq=False)
class Sample:
    """What the replies of a case became: the rollout, every call's budget, how it ended, irregularities."""

    rollout: Rollout
    budgets: tuple[int, ...]
    finish: str
    flags: frozenset[str]


def load_cases(path: Path) -> list[Case]:
    """Returns the cases of a file, a case with a `batch` as one case per sample.

    Raises:
        ValueError: the file is no list of cases of the format; names the case and the key.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: a JSON list of cases expected ({error})") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: a JSON list of cases expected, {type(entries).__name__} came")
    return [case for entry in entries for case in _cases_of(path, entry)]


def _cases_of(path: Path, entry: dict[str, Any]) -> list[Case]:
    """Returns the case of an entry, or one case per sample of its batch; a sample inherits the entry's other fields."""
    batch = entry.get("batch")
    if batch is None:
        return [_case(path, entry)]
    shared = {key: value for key, value in entry.items() if key != "batch"}
    return [_case(path, {**shared, **sample, "case": f"{entry['case']}[{i}]"}) for i, sample in enumerate(batch)]


def _case(path: Path, entry: Mapping[str, Any]) -> Case:
    """Returns one case, after checking its keys and the values that select behaviour."""
    name = entry.get("case", "without a name")
    try:
        case = Case(**{**entry, "calls": tuple(CallSpec(**call) for call in entry.get("calls", ()))})
    except TypeError as error:
        raise ValueError(f"{path}, case {name}: a key is unknown or missing ({error})") from error
    for key, value, allowed in (
        ("fill", case.fill, ("constant", "ramp")),
        ("convention", case.convention, get_args(Convention)),
        ("kv", case.kv, ("rebuilt", "kept")),
        ("stage", case.stage, ("reply", "merge")),
    ):
        if value not in allowed:
            raise ValueError(f"{path}, case {name}: {key} is one of {', '.join(allowed)}, {value!r} came")
    return case


def build_sample(case: Case) -> Sample:
    """Returns the recorded rollout of a case.

    Every id that the case leaves open is the token's position. Where the case has no `trainer_version`, it is the
    newest version of any call.

    Raises:
        ReplyError: a reply breaks the engine contract.
    """
    limits: dict[str, Any] = {
        "response_cap": case.response_cap,
        "context_limit": case.context_limit,
        "length_limit": case.length_limit,
    }
    limited = any(limit is not None for limit in limits.values())
    tokens = list(range(case.prompt_len))
    calls, budgets, flags, generated = [], [], set(), []
    reply_ids: set[str] = set()
    for index, spec in enumerate(case.calls):
        tokens.extend(range(len(tokens), len(tokens) + spec.env_tokens))
        if limited:
            budgets.append(call_budget(input_len=len(tokens), generated=len(generated), **limits))
        if spec.reply_id is not None:
            if spec.reply_id in reply_ids:
                raise ReplyError(f"request {case.case}.{index}: a new reply expected, reply {spec.reply_id} came again")
            reply_ids.add(spec.reply_id)
        rows_held = max((call.end - 1 for call in calls if call.rows is not None), default=0)
        checked = check_reply(_raw_reply(case, index, tokens, rows_held), case.shape, case.convention)
        flags |= checked.flags
        calls.append(checked.call)
        generated.extend(range(len(tokens), len(tokens) + checked.call.new_tokens))
        tokens.extend(checked.call.output_ids.tolist())
    length = len(tokens)
    if case.response_cap is not None and len(generated) > case.response_cap:
        length = generated[case.response_cap]
    if case.length_limit is not None:
        length = min(length, case.length_limit)
    finish = case.calls[-1].finish if case.calls else "abort"
    if limited:
        finish = rollout_finish(finish, call_budget(input_len=len(tokens), generated=len(generated), **limits))
    newest = max((int(call.versions.max()) for call in calls if call.new_tokens), default=UNKNOWN_VERSION)
    rollout = Rollout(
        rollout_id=case.case,
        tokens=np.array(tokens[:length], dtype=np.int32),
        prompt_len=case.prompt_len,
        calls=tuple(calls),
        num_layers=case.layers,
        top_k=case.topk,
        num_experts=case.experts,
        trainer_version=newest if case.trainer_version is None else case.trainer_version,
    )
    return Sample(rollout, tuple(budgets), finish, frozenset(flags))


def _raw_reply(case: Case, index: int, tokens: list[int], rows_held: int) -> RawReply:
    """Returns the reply to call `index`, which sent `tokens`; rows of positions 0..rows_held-1 are held."""
    spec = case.calls[index]
    held = len(tokens)
    if spec.input_ids is not None and list(spec.input_ids) != tokens:
        raise ReplyError(f"request {case.case}.{index}: tokens {tokens} were held, {list(spec.input_ids)} were sent")
    output_ids = list(range(held, held + spec.new_tokens)) if spec.output_ids is None else list(spec.output_ids)
    kept = (spec.kv or case.kv) == "kept"
    return RawReply(
        request_id=f"{case.case}.{index}",
        input_len=held,
        output_ids=output_ids,
        finish=spec.finish,
        log_probs=_log_probs(spec),
        rows=_wire_rows(case, spec, spec.rows) if spec.payload_b64 is None else spec.payload_b64,
        version=spec.version,
        version_spans=None if spec.version_spans is None else [VersionSpan(**span) for span in spec.version_spans],
        row_start=spec.row_start,
        requested_start=_requested_start(spec, rows_held),
        max_new_tokens=spec.max_new_tokens,
        fed_len=spec.input_len,
        prefill_rows=_wire_rows(case, spec, spec.prefill_rows),
        retractions=spec.num_retractions,
        kv_kept=kept,
        in_place=kept,
    )


def _requested_start(spec: CallSpec, rows_held: int) -> int:
    """Returns the start that was asked for; by default the reply's own, or the rows held when that is null."""
    if spec.requested_start is not None:
        return spec.requested_start
    return rows_held if spec.row_start is None else spec.row_start


def _log_probs(spec: CallSpec) -> Sequence[float | None] | None:
    """Returns log-probs of a count (each -0.5), a list as it is, or None."""
    if spec.log_probs is None:
        return None
    if isinstance(spec.log_probs, str):
        return [-0.5] * spec.new_tokens
    return [-0.5] * spec.log_probs if isinstance(spec.log_probs, int) else spec.log_probs


def _wire_rows(case: Case, spec: CallSpec, stamps: Sequence[Any] | None) -> NDArray[Any] | list[Any] | None:
    """Returns rows as the engine would hand them over: an array of the call's dtype, or nested lists."""
    if stamps is None:
        return None
    rows = case.expand(stamps)
    return rows.tolist() if spec.container == "list" else rows.astype(spec.dtype)
