"""Jobs of backend=verl in a sweep: what becomes of them when the sweep is started again. The cluster is scripted."""

import json
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.command_line import precheck, register
from experiments.run_dir import write_composition
from experiments.sweep import run_sweep
from experiments.tracking.run_folder import config_hash, plain_config


def test_a_failed_job_starts_anew_one_with_a_checkpoint_goes_on_and_a_completed_one_is_skipped(tmp_path: Path):
    started: list[tuple[int, str, bool]] = []

    def work(node: DictConfig) -> int:
        folder = Path(HydraConfig.get().runtime.output_dir)
        begun = (folder / "summary.json").exists()
        started.append((node.seed, node.backend.verl.trainer.resume_mode, begun))
        write_composition(folder, node)
        status = "completed" if node.seed == 2 else "failed"
        summary = {"status": status, "mode": "train", "config_hash": config_hash(plain_config(node))}
        (folder / "summary.json").write_text(json.dumps(summary))
        if node.seed == 1:
            (folder / "checkpoint").mkdir(exist_ok=True)
            (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
        return 0 if node.seed == 2 else 1

    register()
    jobs = ["experiment=qwen3_moe_tiny_verl", "strategy=replace", "seed=0,1,2"]
    for _ in range(2):
        sweep = precheck(["-m", *jobs, f"hydra.sweep.dir={tmp_path}"])
        assert sweep is not None
        assert run_sweep(sweep, work) == 1
    first = [(seed, "disable", False) for seed in range(3)]
    assert started == [*first, (0, "disable", False), (1, "auto", True)]


def test_a_sweep_of_plans_prints_them_every_time(tmp_path: Path):
    """What stood in the way may be mended in between."""
    printed: list[int] = []

    def work(node: DictConfig) -> int:
        printed.append(node.seed)
        return 0

    register()
    for _ in range(2):
        jobs = ["experiment=qwen3_moe_tiny_verl", "seed=0,1", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
        sweep = precheck(["-m", *jobs])
        assert sweep is not None
        assert run_sweep(sweep, work) == 0
    assert printed == [0, 1, 0, 1]
