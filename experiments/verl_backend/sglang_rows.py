"""Where verl 0.9.1's SGLang server looks for the function that reads rows out of an answer.

With SGLang 0.5.12, which verl pins, neither of its branches works: with `skip_tokenizer_init=true` it calls `.numpy()`
on base64 text; with `false` it imports a module that SGLang has moved, and an abort in the waiting queue, which has no
rows, would fail there. verl imports this module in the server's process (`model.external_lib`); importing it puts a
module of that name in place. No attribute of verl or SGLang is changed.
"""

from __future__ import annotations

import base64
import sys
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOVED = "sglang.srt.layers.moe.routed_experts_capturer"


def extract_routed_experts_from_meta_info(data: dict[str, Any]) -> NDArray[np.int32]:
    """Returns int32 `[rows * L * K]`, writable: the rows of one answer of SGLang 0.5.10 or newer, none for an abort in
    the waiting queue.

    Raises:
        ValueError: the payload is no base64 text of int32 numbers.
    """
    payload = data["meta_info"].get("routed_experts")
    if payload is None:
        return np.empty(0, np.int32)
    return np.frombuffer(base64.b64decode(payload, validate=True), dtype="<i4").astype(np.int32)


def install() -> None:
    """Puts the module in place, unless SGLang still has its own."""
    if MOVED not in sys.modules:
        module = ModuleType(MOVED)
        setattr(module, extract_routed_experts_from_meta_info.__name__, extract_routed_experts_from_meta_info)
        sys.modules[MOVED] = module


install()
