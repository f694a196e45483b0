"""Runs one experiment, or a sweep with `-m`. Exit codes: 0 completed, 1 failed, 2 bad configuration, 130 interrupted.

Hydra composes conf/. Every job of the command line is composed and checked here before Hydra starts, so that a mistake
is one line within seconds; torch and the engines are imported only after that.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments import check, command_line, schema
from experiments.run_dir import claim, claimed_elsewhere

command_line.register()


def run_job(node: DictConfig, started: float | None = None) -> int:
    """Runs the job that Hydra composed and returns its exit code; `started` is `time.perf_counter()` at its beginning.

    Raises:
        check.ConfigError: it cannot run.
    """
    started = time.perf_counter() if started is None else started
    config = check.load(node)
    hydra_config = HydraConfig.get()
    command = command_line.own_command(hydra_config)
    run_dir, strategy_name = Path(hydra_config.runtime.output_dir), hydra_config.runtime.choices["strategy"]
    if config.backend.name == "verl":
        from experiments.verl_backend.launch import Job as ClusterJob
        from experiments.verl_backend.launch import launch as launch_on_cluster

        return launch_on_cluster(ClusterJob(config, node, strategy_name, run_dir, command))
    from experiments.launch import Job, launch  # torch, megatron-core and transformers, only now
    from experiments.score import score

    job = Job(config, node, strategy_name, run_dir, started, command)
    return score(job) if config.mode is schema.Mode.score else launch(job)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(node: DictConfig) -> None:
    """A single run."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with claim(run_dir) as claimed:
            if claimed is None:
                raise claimed_elsewhere(run_dir)
            status = run_job(node, STARTED)
            claimed.note({0: "completed", 130: "interrupted"}.get(status, "failed"))
    except check.ConfigError as error:
        refuse(error)
    if status:
        sys.exit(status)


def refuse(error: check.ConfigError) -> NoReturn:
    """Ends the process with the reason in one line."""
    print(f"run.py: bad configuration: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        sweep = command_line.precheck(sys.argv[1:])
        if sweep is not None:
            from experiments.sweep import run_sweep

            sys.exit(run_sweep(sweep, run_job))
    except check.ConfigError as error:
        refuse(error)
    main()
