"""From a command line to jobs: every job is composed, checked and given its run directory before anything starts.

Imports nothing heavy: a mistake in any job of a sweep must be one line within seconds.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import os
import re
import shlex
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments import check, schema, score_plan
from experiments.tracking.run_folder import NOT_HASHED

CONF = Path(__file__).resolve().parents[1] / "conf"

LAUNCHER_INSTALLS = {
    "hydra_plugins.hydra_submitit_launcher": "uv sync --extra launch-slurm",
    "hydra_plugins.hydra_ray_launcher": "uv pip install hydra-ray-launcher==1.2.2",
}
"""Package of a launcher and what installs it."""

MULTIRUN = "hydra.mode=MULTIRUN"

_IN_THE_PATH = ("strategy", "seed", "experiment_name")
_MAX_FOLDER_NAME = 120  # file systems allow 255 bytes


@dataclass(frozen=True)
class PlannedJob:
    """One job of a sweep.

    Attributes:
        number: its place in the sweep, from 0.
        overrides: what makes it, as Hydra's launchers take it; its run directory included.
        node: the configuration that its tracker will record.
        run_dir: where it writes.
    """

    number: int
    overrides: tuple[str, ...]
    node: DictConfig
    run_dir: Path


@dataclass(frozen=True)
class Sweep:
    """The jobs of a command line with `-m`, and `config`, the composition that its launcher is built from."""

    config: DictConfig
    jobs: tuple[PlannedJob, ...]


def register() -> None:
    """Registers the schema and the resolvers that conf/ uses."""
    schema.register()
    OmegaConf.register_new_resolver("other_overrides", _other_overrides, replace=True)
    OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, replace=True)
    # The presets of conf/hydra/launcher have the names of the plugins' own, whose types then check them.
    warnings.filterwarnings("ignore", message="\\s*'hydra/launcher/\\w+' is validated against ConfigStore schema")


def jobs_at_once(threads: int) -> int:
    """Returns how many jobs of `threads` threads the usable cores hold; a job with `threads=0` takes them all."""
    cores = usable_cores()
    return max(1, cores // (threads or cores))


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def precheck(argv: list[str]) -> Sweep | None:
    """Composes and checks every job of the command line; returns the sweep of a command line with `-m`.

    Raises:
        check.ConfigError: the first job that cannot run, with the reason in one line.
    """
    args = get_args_parser().parse_args(argv)
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return None
    try:
        with composing():
            overrides = _all_overrides(args)
            if args.multirun:
                return _plan(args.config_name or "config", overrides)
            _checked(hydra.compose(args.config_name or "config", overrides=overrides), overrides)
            return None
    except (HydraException, OmegaConfBaseException) as error:
        raise check.ConfigError(_reason(error)) from error


@contextmanager
def composing() -> Iterator[None]:
    """Makes `hydra.compose` find conf/."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name="run"):
        yield


def _all_overrides(args: Namespace) -> list[str]:
    """Returns the overrides of a command line, `--config-dir` as one of them."""
    folder = [f"hydra.searchpath=[file://{Path(args.config_dir).resolve()}]"] if args.config_dir else []
    return [*args.overrides, *folder]


def _plan(config_name: str, overrides: Sequence[str]) -> Sweep:
    parser = OverridesParser.create()
    parsed = parser.parse_overrides(list(overrides))
    swept_hydra = [o.input_line for o in parsed if o.is_hydra_override() and o.is_sweep_override()]
    if swept_hydra:
        raise check.ConfigError(f"`{swept_hydra[0]}`: keys of Hydra itself cannot be swept")
    fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    config = hydra.compose(config_name, overrides=[*fixed, MULTIRUN], return_hydra_config=True)
    _check_sweeper(config)
    # How jobs are launched is no part of a job; Hydra would compose it anew in every one.
    own_of_hydra = [o.input_line or "" for o in parsed if o.is_hydra_override() and not _launches(o)]
    config.hydra.overrides.hydra = [*own_of_hydra, MULTIRUN]
    if "root" in config.hydra.hydra_logging:
        config.hydra.hydra_logging.root.level = "WARNING"  # experiments/sweep_progress.py says what starts
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    own = [o.input_line or "" for o in parsed if not o.is_hydra_override()]
    grid = BasicSweeper.split_arguments(parser.parse_overrides([*params, *own]), None)[0]
    composer = Composer(config_name, [*own_of_hydra, MULTIRUN])
    jobs = [_job(composer, job, number) for number, job in enumerate(grid)]
    _check_folders(jobs)
    return Sweep(config, tuple(jobs))


def _launches(override: Override) -> bool:
    return override.key_or_group.startswith(("hydra/launcher", "hydra.launcher"))


class Composer:
    """Composes jobs as Hydra does, but reads and merges the files of conf/ (a third of a second) only once for each
    choice of groups, so that a sweep over many seeds is planned within seconds.
    """

    def __init__(self, config_name: str, of_hydra: Sequence[str]):
        self._config_name, self._of_hydra = config_name, tuple(of_hydra)
        self._parser = OverridesParser.create()
        self._options_of = cache(GlobalHydra.instance().config_loader().get_group_options)
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Returns what Hydra composes of its own fixed overrides and `overrides`, the `hydra` node included.

        Raises:
            HydraException: an override does not fit.
        """
        parsed = self._parser.parse_overrides(list(overrides))
        groups = [o for o in parsed if self._options_of(o.key_or_group)]
        values = [o for o in parsed if o not in groups]
        choice = tuple(o.input_line or "" for o in groups)
        if choice not in self._composed:
            self._composed[choice] = hydra.compose(
                self._config_name, overrides=[*self._of_hydra, *choice], return_hydra_config=True
            )
        config = copy.deepcopy(self._composed[choice])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        config.hydra.overrides.task = list(overrides)
        job = config.hydra.job
        job.override_dirname = get_overrides_dirname(parsed, **job.config.override_dirname)
        return config


def _check_sweeper(config: DictConfig) -> None:
    target = config.hydra.sweeper._target_
    if target.rpartition(".")[2] != BasicSweeper.__name__:
        raise check.ConfigError(f"`hydra/sweeper` must be basic, a grid of jobs, not {target}")
    package = config.hydra.launcher._target_.rpartition(".")[0].rpartition(".")[0]
    if importlib.util.find_spec(package) is None:
        command = LAUNCHER_INSTALLS.get(package, f"uv pip install {package.rpartition('.')[2]}")
        raise check.ConfigError(
            f"`hydra/launcher={config.hydra.runtime.choices['hydra/launcher']}` is not installed: {command}"
        )


def _job(composer: Composer, overrides: Sequence[str], number: int) -> PlannedJob:
    composed = composer.compose(overrides)
    run_dir = _run_dir(composed, number)
    with open_dict(composed):
        del composed["hydra"]
    node = _checked(composed, overrides)
    if node.resume is not None:
        raise check.ConfigError("`resume` is for a single run: a sweep that is started again continues by itself")
    folder = [f"hydra.sweep.dir={_quoted(run_dir.parent)}", f"hydra.sweep.subdir={_quoted(run_dir.name)}"]
    return PlannedJob(number, (*overrides, *folder), node, run_dir)


def _quoted(value: Path | str) -> str:
    text = str(value).replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{text}'"


def _run_dir(composed: DictConfig, number: int) -> Path:
    """Returns where Hydra would let the job write."""
    with open_dict(composed):
        composed.hydra.job.num = composed.hydra.job.id = number
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(composed)
    try:
        sweep = composed.hydra.sweep
        return Path(os.path.abspath(os.path.join(sweep.dir, sweep.subdir)))
    finally:
        HydraConfig.instance().cfg = before


def _checked(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration that the job's tracker will record."""
    config = check.load(node)
    strategy, _ = check.build_strategies(config)
    check.check(config, strategy)
    if config.mode is not schema.Mode.score:
        return node
    score_plan.refuse_unread_keys(overrides)
    return recorded(node)


def recorded(node: DictConfig) -> DictConfig:
    """Returns the configuration that the tracker of a job composed as `node` records.

    Raises:
        check.ConfigError: `mode=score` and its recording does not serve.
    """
    config = check.load(node)
    return score_plan.score_plan(config).node if config.mode is schema.Mode.score else node


def _check_folders(jobs: Sequence[PlannedJob]) -> None:
    owners: dict[Path, PlannedJob] = {}
    for job in jobs:
        other = owners.setdefault(job.run_dir, job)
        if other is not job:
            raise check.ConfigError(
                f"jobs {other.number} and {job.number} would share {job.run_dir}: take out a value that is there "
                "twice, or let `hydra.sweep.subdir` name what differs"
            )


def _other_overrides(*, _root_: DictConfig) -> str:
    """Returns a folder name of the job's overrides that its path does not show otherwise and that change its numbers;
    empty where there are none.
    """
    root = _root_
    unhashed = tuple(".".join(path) for path in NOT_HASHED if path != ("record",))
    kept = []
    for override in OverridesParser.create().parse_overrides(list(root.hydra.overrides.task)):
        key, value = override.key_or_group, override.get_value_element_as_str()
        shown = key in _IN_THE_PATH or (key == "experiment" and value == root.experiment_name)
        if not shown and not any(key == name or key.startswith(f"{name}.") for name in unhashed):
            kept.append(f"{override.get_key_element()}={value}")
    return folder_name(",".join(sorted(kept)))


def folder_name(text: str) -> str:
    """Returns `text` as a name for a folder; one that had to be changed or cut ends in 8 hex digits of its SHA-256."""
    plain = re.sub(r"[^\w.,=+~\[\]{}:-]", "-", text, flags=re.ASCII)
    if plain == text and len(plain) <= _MAX_FOLDER_NAME:
        return plain
    return f"{plain[:_MAX_FOLDER_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def own_command(hydra_config: Any) -> str:
    """Returns the command that runs one job again: of a sweep, that job alone."""
    sources: Sequence[Mapping[str, str]] = hydra_config.runtime.config_sources
    folders = [source["path"] for source in sources if "command-line" in source["provider"]]
    config_dir = ["--config-dir", folders[0]] if folders else []
    words = [re.sub(r"\\([{}])", r"\1", word) for word in hydra_config.overrides.task]
    return shlex.join(["python", "run.py", *config_dir, *words])


def _reason(error: BaseException) -> str:
    """Returns Hydra's message and its cause in one line, without its advice (search paths, `+key`) and type dumps."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        cause = text.splitlines()[0].removeprefix(f"Error parsing override '{error.override}'")
        return f"`{error.override}`: {cause}; a value with = , or spaces needs quotes inside the shell's: key='\"a=b\"'"
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text = f"{text.rstrip('.')}: {error.__cause__}"
    advice = ("object_type=", "reference_type=", "full_key:", "To append")
    lines = [line for line in text.splitlines() if not line.strip().startswith(advice)]
    reason = " ".join(" ".join(lines).split("Config search path")[0].split())
    if "Could not override 'backend.verl." in reason:  # its schema is verl's, which is not read yet
        reason += " A key of verl that conf/ does not set is added with +: `+backend.verl...=`"
    return reason
