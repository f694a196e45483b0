"""Recorded requests and replies: what each holds, or why it is refused.

A file is a JSON object with `request` (body of `/generate`), `response` (its answer) and `model` (`num_hidden_layers`,
`num_experts`, `num_experts_per_tok`), as one gets by writing down what a client sent and received.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from experiments.engines.sglang.audit import audit
from experiments.engines.sglang.reply import ParsedReply, parse_reply, sent_request
from strategies.reply import ReplyError, RowShape
from strategies.types import UNKNOWN_VERSION


class UnreadableFile(ValueError):
    """No recorded request and reply."""


def read_case(path: Path) -> dict[str, Any]:
    """Returns a recorded request and reply.

    Raises:
        UnreadableFile: names the file and what is missing.
    """
    try:
        case = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"{path}: {error}") from error
    missing = [key for key in ("request", "response", "model") if not isinstance(case, dict) or key not in case]
    if missing:
        raise UnreadableFile(f"{path}: an object with request, response and model expected; no {', '.join(missing)}")
    return case


def row_shape(model: Any, where: str) -> RowShape:
    """Returns the shape of a row by the names of a Hugging Face configuration.

    Raises:
        UnreadableFile: a size is missing.
    """
    try:
        experts = model["num_experts"] if "num_experts" in model else model["num_local_experts"]
        return RowShape(int(model["num_hidden_layers"]), int(model["num_experts_per_tok"]), int(experts))
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFile(
            f"{where}: num_hidden_layers, num_experts_per_tok and num_experts expected, {error!r}"
        ) from error


def check_file(path: Path, checkpoint: Path | None) -> tuple[bool, str]:
    """Returns whether the reply in `path` is valid, and one line on what it holds or why it is refused.

    With `checkpoint`, rows and log-probs must also be those of that model.

    Raises:
        UnreadableFile: no recorded request and reply.
        WrongCheckpoint: `checkpoint` is of another model.
    """
    case = read_case(path)
    shape = row_shape(case["model"], f"{path}: model")
    try:
        parsed = parse_reply(case["response"], sent_request(path.stem, case["request"]), shape)
    except ReplyError as error:
        return False, f"REFUSED  {path}: {error}"
    text = f"{path}: {describe(parsed)}"
    if checkpoint is None or not parsed.reply.call.new_tokens:
        return True, f"ok       {text}"
    tokens = np.concatenate([case["request"]["input_ids"], parsed.reply.call.output_ids]).astype(np.int32)
    temperature = float(case["request"]["sampling_params"].get("temperature", 1.0))
    found = audit(parsed.reply.call, tokens, checkpoint, temperature)
    model = f"{found.differing_cells} of {found.cells} cells differ from {checkpoint}" + (
        f" (positions {', '.join(map(str, found.differing_positions))}, ...)" if found.differing_positions else ""
    )
    good = found.differing_cells == 0 and not found.wrong_log_probs
    return (
        good,
        f"{'ok      ' if good else 'WRONG   '} {text}; {model}, log-probs by at most {found.log_prob_error:.1e}",
    )


def describe(parsed: ParsedReply) -> str:
    """Returns one line on what a valid reply holds."""
    call = parsed.reply.call
    parts = [f"{call.finish}, {call.input_len} input and {call.new_tokens} new tokens"]
    if call.rows is None:
        parts.append("no rows")
    else:
        parts.append(f"{len(call.rows)} rows from position {call.row_start} on ({parsed.reply.row_bytes} characters)")
    if call.new_tokens:
        parts.append(f"log-probs {np.nanmin(call.log_probs):.2f} to {np.nanmax(call.log_probs):.2f}")
        parts.append("versions " + ", ".join(_versions(call.versions.tolist())))
    if parsed.reply.retractions:
        parts.append(f"{parsed.reply.retractions} retractions")
    if parsed.flags:
        parts.append("flags " + ", ".join(sorted(parsed.flags)))
    return "; ".join(parts)


def _versions(versions: list[int]) -> list[str]:
    shown, start = [], 0
    for version, group in groupby(versions):
        end = start + len(list(group))
        shown.append(f"{'unknown' if version == UNKNOWN_VERSION else version} [{start}, {end})")
        start = end
    return shown
