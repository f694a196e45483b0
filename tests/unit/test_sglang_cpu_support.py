"""The server's plugin for hosts without CUDA: inert where there is CUDA. What it does there, tests/sglang shows."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from experiments.engines.sglang.process import HERE

FOLDER = HERE / "cpu_support"


@pytest.fixture
def hooks(monkeypatch) -> list[tuple[object, ...]]:
    """Calls of SGLang's hook registry, which is not in this environment."""
    calls: list[tuple[object, ...]] = []
    registry = SimpleNamespace(register=lambda *hook: calls.append(hook))
    module = ModuleType("sglang.srt.plugins.hook_registry")
    vars(module).update(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "routemerge_sglang_cpu", raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    return calls


@pytest.mark.parametrize(("cuda", "hooked"), [(True, 0), (False, 1)])
def test_the_plugin_does_nothing_where_there_is_cuda(hooks, monkeypatch, cuda, hooked):
    (entry,) = entry_points(FOLDER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    entry.load()()
    assert len(hooks) == hooked


def test_host_buffers_are_asked_for_without_pinning(hooks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    entry_points(FOLDER)[0].load()()
    ((name, around, kind),) = hooks
    assert (name, kind) == ("sglang.srt.mem_cache.pool_host.common.alloc_with_host_register", "around")
    assert around(lambda *args, **kwargs: (args, kwargs), 1, pin_memory=True, device="cpu") == (
        (1,),
        {"pin_memory": False, "device": "cpu"},
    )


def entry_points(folder: Path) -> list[importlib.metadata.EntryPoint]:
    """Returns what the folder offers under SGLang's group of plugins."""
    found = importlib.metadata.distributions(path=[str(folder)])
    return [point for d in found for point in d.entry_points if point.group == "sglang.srt.plugins"]
