"""`backend=verl` on a machine without GPUs: the plan, and the refusal with everything that stands in the way."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PROBE = """
import runpy, sys
sys.argv = ["run.py", *sys.argv[1:]]
try:
    runpy.run_path("run.py", run_name="__main__")
finally:
    print("heavy:", sorted({"torch", "transformers", "megatron", "verl", "ray", "sglang"} & set(sys.modules)))
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, "experiment=qwen3_30b_a3b", f"hydra.run.dir={folder}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_dry_run_prints_the_plan_without_importing_anything_heavy(tmp_path: Path):
    result = run(tmp_path, "backend=verl", "strategy=slice_concat", "dry_run=true")
    assert result.returncode == 0, result.stderr
    for part in ("Strategy", "Resources", "Expected memory per GPU", "Preflight", "router_replay", "heavy: []"):
        assert part in result.stdout


def test_a_run_that_cannot_start_lists_every_reason_and_exits_2(tmp_path: Path):
    result = run(tmp_path, "backend.verl.trainer.n_gpus_per_node=512")
    assert result.returncode == 2
    assert "preflight checks failed" in result.stderr
    for part in ("GPUs: ", "train_files", "val_files"):
        assert part in result.stderr
    assert len(result.stderr.strip().splitlines()) >= 4
    assert not (tmp_path / "agent_loops.yaml").exists()


def test_a_strategy_that_verl_cannot_carry_is_refused_in_one_line(tmp_path: Path):
    result = run(tmp_path, "strategy=exact")
    assert result.returncode == 2
    assert "Score it as a shadow instead" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
