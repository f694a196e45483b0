"""What megatron-core expects of the process: a process group of one rank, and on a CPU-only machine a few stand-ins for
CUDA.

Everything here is process-wide because torch.distributed and megatron's parallel_state are. It is shared by all
trainers of the process and taken down with the last one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from experiments.trainers.upstream import parallel_state, tensor_parallel_random


def resolve_device(name: str) -> torch.device:
    """Returns the torch device for `auto`, `cpu` or `cuda`; `auto` takes CUDA when there is one.

    Raises:
        ValueError: an unknown name, or `cuda` on a machine without it.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"trainer.device: expected auto, cpu or cuda, got {name!r}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("trainer.device=cuda, but torch sees no CUDA device; use trainer.device=cpu or auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class _ProcessGroups:
    """Counts the trainers that use the process group, so that the last one takes down what the first one set up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._owns_dist = False

    def acquire(self, device: torch.device) -> None:
        with self._lock:
            if self._users == 0:
                self._set_up(device)
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                parallel_state.destroy_model_parallel()
                if self._owns_dist:
                    dist.destroy_process_group()

    def _set_up(self, device: torch.device) -> None:
        self._owns_dist = not dist.is_initialized()
        if self._owns_dist:
            # A store in this process's memory: no port, no file, so two runs on one machine never meet.
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        elif dist.get_world_size() != 1:
            raise RuntimeError(
                f"the trainer runs in one process, but torch.distributed has {dist.get_world_size()} ranks"
            )
        parallel_state.initialize_model_parallel()
        # Nothing in this model is random (no dropout), and the default tracker forks CUDA generators in every attention
        # layer.
        tensor_parallel_random.initialize_rng_tracker(inference_rng_tracker=True)


process_groups = _ProcessGroups()

_stand_in_lock = threading.RLock()


@contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Runs megatron-core's code on `device`; on CUDA it changes nothing.

    megatron-core 0.19 names the CUDA device where it means "where the model is": routers and rotary embeddings move CPU
    tensors to `torch.cuda.current_device()` in every forward, and activation recompute saves the CUDA generator's
    state. Inside the block, and only there, the first answers `cpu` and the other two do nothing. The lock keeps two
    trainers in two threads from restoring each other's names.
    """
    if device.type == "cuda":
        yield
        return
    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: device),
        (tensor_parallel_random, "_get_cuda_rng_state", lambda *_, **__: None),
        (tensor_parallel_random, "_set_cuda_rng_state", lambda *_, **__: None),
    ]
    with _stand_in_lock:
        originals = [getattr(module, name) for module, name, _ in stand_ins]
        try:
            for module, name, stand_in in stand_ins:
                setattr(module, name, stand_in)
            yield
        finally:
            for (module, name, _), original in zip(stand_ins, originals, strict=True):
                setattr(module, name, original)
