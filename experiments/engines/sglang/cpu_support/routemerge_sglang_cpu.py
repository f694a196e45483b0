"""SGLang plugin for hosts without CUDA: host buffers that are not pinned.

SGLang keeps the rows of all KV slots in a host buffer and registers it with CUDA whatever the device is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

ALLOCATOR = "sglang.srt.mem_cache.pool_host.common.alloc_with_host_register"


def unpinned(allocate: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns what `allocate` returns when it is asked not to pin."""
    return allocate(*args, **{**kwargs, "pin_memory": False})


def register() -> None:
    """Called by SGLang in every process of the server; does nothing where there is CUDA."""
    if not torch.cuda.is_available():
        HookRegistry.register(ALLOCATOR, unpinned, HookType.AROUND)
