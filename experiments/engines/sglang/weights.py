"""Weights as a server reads them: in the layout of Hugging Face's hub, and as folders that hold one version each.

transformers keeps all experts of a layer in one tensor; checkpoints on the hub, and SGLang, have one tensor per expert.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

PREFIX = "routemerge-weights-"
SHARED_MEMORY = Path("/dev/shm")
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def hub_tensors(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields transformers' `Qwen3MoeForCausalLM.state_dict()` by the hub's names, on the CPU, as contiguous `dtype`.

    `gate_up_proj` is `[E, 2F, H]`, gate first; `down_proj` is `[E, H, F]`. Tensors may share memory with `weights`.
    """
    for name, tensor in weights.items():
        tensor = tensor.detach().to(device="cpu", dtype=dtype)
        prefix, _, last = name.rpartition(".")
        if not name.endswith(FUSED):
            yield name, tensor.contiguous()
            continue
        for expert, matrix in enumerate(tensor):
            if last == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", matrix.contiguous()
            else:
                gate, up = matrix.chunk(2)
                yield f"{prefix}.{expert}.gate_proj.weight", gate.contiguous()
                yield f"{prefix}.{expert}.up_proj.weight", up.contiguous()


class Publisher:
    """Writes checkpoints where the server can read them, and keeps the newest two.

    Args:
        config: of the model.
        dtype: what the server computes in.
        parent: folder that the server also sees; None: shared memory where there is one, else the temporary folder.
    """

    def __init__(self, config: Qwen3MoeConfig, dtype: torch.dtype, parent: Path | None):
        if parent is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self._config, self._dtype, self._parent = copy.deepcopy(config), dtype, parent
        self._config.architectures = [Qwen3MoeForCausalLM.__name__]  # a configuration built from sizes names none
        self._config.dtype = dtype
        self._folder: Path | None = None
        self._versions: list[Path] = []

    def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> Path:
        """Returns a folder with `config.json` and `model.safetensors`, complete when it appears.

        Raises:
            OSError: it cannot be written, e.g. for want of space; nothing is left of it, older versions are.
        """
        folder = self._own_folder()
        # safetensors refuses tensors that share memory, as the experts of a layer do
        tensors = {name: tensor.clone() for name, tensor in hub_tensors(weights, self._dtype)}
        needed = sum(tensor.nbytes for tensor in tensors.values())
        for old in self._versions[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        del self._versions[:-1]
        free = shutil.disk_usage(folder).free
        what = f"weight version {version} needs {needed / 1e6:.1f} MB in {self._parent}"
        advice = "set engine.server.publish_dir to a larger folder that the server can read"
        if free < needed:
            raise OSError(f"{what}, {free / 1e6:.1f} MB are free; {advice}")
        target = folder / f"v{version}"
        partial = folder / f"v{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            self._config.save_pretrained(str(partial))
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        except SafetensorError as error:  # how safetensors reports what the file system refused, a quota for instance
            raise OSError(f"{what}: {error}; {advice}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if target not in self._versions:
            self._versions.append(target)
        return target

    def publish_config(self) -> Path:
        """Returns a folder with `config.json` alone.

        Raises:
            OSError: it cannot be written.
        """
        target = self._own_folder() / "config"
        target.mkdir(exist_ok=True)
        self._config.save_pretrained(str(target))
        return target

    def _own_folder(self) -> Path:
        if self._folder is None:
            _remove_orphans(self._parent)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=self._parent))
        return self._folder

    def close(self) -> None:
        """Removes everything that was published."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._versions = None, []


def _remove_orphans(parent: Path) -> None:
    """Removes folders of processes that ended without the chance to."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
