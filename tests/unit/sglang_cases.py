"""Recorded requests and replies of real SGLang servers (tests/data/sglang), and how tests read them."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.engines.sglang.reply import ParsedReply, Sent, parse_reply, sent_request
from strategies.reply import RowShape

RECORDED = Path(__file__).parents[1] / "data" / "sglang"
SHAPE = RowShape(num_layers=4, top_k=2, num_experts=8)
ROW_BYTES = 4 * SHAPE.num_layers * SHAPE.top_k


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


def parse(case: dict[str, Any], **sent: Any) -> ParsedReply:
    asked = sent_request(case["name"], case["request"])
    return parse_reply(case["response"], Sent(**{**vars(asked), **sent}), SHAPE)


def rows_of(response: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(response["meta_info"]["routed_experts"])
    return np.frombuffer(data, "<i4").reshape(-1, SHAPE.num_layers, SHAPE.top_k)


def with_rows(case: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    case = copy.deepcopy(case)
    case["response"]["meta_info"]["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    return case
