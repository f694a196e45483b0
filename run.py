"""Runs one experiment, or a sweep with `-m`. Exit codes: 0 completed, 1 failed, 2 bad configuration, 130 interrupted.

Hydra composes conf/. Every job of the command line is composed and checked here before Hydra starts, so that a mistake
is one line within seconds; torch and the engines are imported only after that.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import shlex
import sys
from itertools import product
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments import check, schema, score_plan

CONF = Path(__file__).resolve().parent / "conf"

schema.register()

starts = [STARTED]
"""When the next job of this process began, `time.perf_counter()`: only the first one waited for the imports above."""

failed_jobs: list[Path] = []
"""Run directories of a sweep's jobs that failed; the others run all the same."""


def jobs(overrides: list[str]) -> list[list[str]]:
    """Returns the overrides of every job of a sweep: the product over all values of swept keys, as Hydra's basic
    sweeper makes it.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = []
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([override.input_line or ""])
    return [list(job) for job in product(*choices)]


def precheck(argv: list[str]) -> None:
    """Composes and checks every job of the command line.

    Raises:
        check.ConfigError: the first job that cannot run, with the reason in one line.
    """
    args = get_args_parser().parse_args(argv)
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return
    overrides: list[str] = args.overrides
    if args.config_dir:
        overrides = [*overrides, f"hydra.searchpath=[file://{Path(args.config_dir).resolve()}]"]
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            for job in jobs(overrides) if args.multirun else [overrides]:
                config = check.load(hydra.compose(args.config_name or "config", overrides=job))
                strategy, _ = check.build_strategies(config)
                check.check(config, strategy)
                if config.mode is schema.Mode.score:
                    score_plan.refuse_unread_keys(job)
                    score_plan.score_plan(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise check.ConfigError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Returns Hydra's message and its cause in one line, without its advice (search paths, `+key`) and type dumps."""
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text = f"{text.rstrip('.')}: {error.__cause__}"
    advice = ("object_type=", "reference_type=", "full_key:", "To append")
    lines = [line for line in text.splitlines() if not line.strip().startswith(advice)]
    return " ".join(" ".join(lines).split("Config search path")[0].split())


def own_command(overrides: list[str]) -> str:
    """Returns the command that runs one job again: of a sweep, that job alone."""
    args = get_args_parser().parse_args(sys.argv[1:])
    config_dir = ["--config-dir", args.config_dir] if args.config_dir else []
    return shlex.join(["python", "run.py", *config_dir, *overrides])


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(node: DictConfig) -> None:
    """One job."""
    config = check.load(node)
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir)
    if config.backend.name == "verl":
        from experiments.verl_backend.launch import FAILED as FAILED_ON_CLUSTER
        from experiments.verl_backend.launch import Job as ClusterJob
        from experiments.verl_backend.launch import launch as launch_on_cluster

        try:
            status = launch_on_cluster(
                ClusterJob(
                    config,
                    node,
                    hydra_config.runtime.choices["strategy"],
                    run_dir,
                    own_command(hydra_config.overrides.task),
                )
            )
        except check.ConfigError as error:
            refuse(error)
        if status == FAILED_ON_CLUSTER and hydra_config.mode is RunMode.MULTIRUN:
            failed_jobs.append(run_dir)
        elif status:
            sys.exit(status)
        return
    from experiments.launch import FAILED, Job, launch  # torch, megatron-core and transformers, only now
    from experiments.score import score

    try:
        status = (score if config.mode is schema.Mode.score else launch)(
            Job(
                config,
                node,
                strategy_name=hydra_config.runtime.choices["strategy"],
                run_dir=run_dir,
                started=starts.pop() if starts else time.perf_counter(),
                command=own_command(hydra_config.overrides.task),
            )
        )
    except check.ConfigError as error:
        refuse(error)
    if status == FAILED and hydra_config.mode is RunMode.MULTIRUN:
        failed_jobs.append(run_dir)
    elif status:
        sys.exit(status)


def refuse(error: check.ConfigError) -> NoReturn:
    """Ends the process with the reason in one line."""
    print(f"run.py: bad configuration: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        precheck(sys.argv[1:])
    except check.ConfigError as error:
        refuse(error)
    main()
    if failed_jobs:
        print(f"run.py: {len(failed_jobs)} jobs failed: {', '.join(map(str, failed_jobs))}", file=sys.stderr)
        sys.exit(1)
