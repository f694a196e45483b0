"""The names of megatron-core that the trainer uses, imported once, quickly and quietly. Nothing else of ours imports
megatron.

Two things happen around the import, and only around it:

* megatron-core decorates small functions with `torch.compile`. Decorating alone imports the compiler (dynamo, inductor,
  networkx: about a third of the import time), and calling them on a CPU needs a C++ compiler on the user's machine. The
  functions on our path are trivial, so they stay eager.
* The warnings that it prints about optional packages (Transformer Engine, Apex, grouped GEMM) that the CPU path does
  not use are dropped.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _eager(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Stands in for `torch.compile`, with or without arguments: returns the function itself."""
    return function if function is not None else _eager


@contextmanager
def quiet() -> Iterator[None]:
    """Drops warnings and log lines up to WARNING inside the block."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _eager_functions() -> Iterator[None]:
    original = torch.compile
    torch.compile = _eager
    try:
        yield
    finally:
        torch.compile = original


with quiet(), _eager_functions():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "GPTModel",
    "MegatronModule",
    "RouterReplay",
    "SequentialMLP",
    "TopKRouter",
    "TransformerConfig",
    "get_gpt_layer_local_spec",
    "parallel_state",
    "quiet",
    "tensor_parallel_random",
]
