"""verl's own configuration under run.py: composed by verl's YAML, with the values of `backend.verl` laid over it.

Nothing of verl's configuration is copied. What a run needs at a fixed value is in conf/backend/verl.yaml, in verl's
names; what depends on the strategy or the run directory is set here. Imports no torch: verl's YAML files are found
through its metadata, without importing it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.check import ConfigError

CONFIG_NAME = "fully_async_ppo_megatron_trainer"


def verl_folder() -> Path:
    """Returns the folder of the installed verl, without importing it.

    Raises:
        ConfigError: verl is not installed in this environment.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "backend=verl: verl is not installed here; uv sync --extra verl in an environment of its own (docs/verl.md)"
        )
    return Path(spec.origin).parent


def verl_defaults() -> DictConfig:
    """Returns verl's fully-asynchronous Megatron configuration as verl composes it.

    Raises:
        ConfigError: verl is missing, or its configuration does not compose.
    """
    folder = verl_folder()
    previous = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # inside run.py's own Hydra job, whose configuration is built already
    try:
        with initialize_config_dir(str(folder / "experimental" / "fully_async_policy" / "config"), version_base=None):
            return compose(CONFIG_NAME, overrides=[f"hydra.searchpath=[file://{folder / 'trainer' / 'config'}]"])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"backend=verl: verl's {CONFIG_NAME} does not compose: {error}") from error
    finally:
        GlobalHydra.instance().hydra = previous


def lay_over(base: DictConfig, values: Mapping[str, Any], new: tuple[str, ...]) -> DictConfig:
    """Returns `base` with `values` over it. Keys that start with one of `new` may be absent in `base`: verl reads them,
    its YAML does not list them.

    Raises:
        ConfigError: any other key that verl's YAML does not have.
    """
    unknown = [key for key in _unknown(values, base, "") if not key.startswith(new)]
    if unknown:
        raise ConfigError(f"`backend.verl`: verl 0.9.1 has no {', '.join(unknown)}")
    with open_dict(base):
        merged = OmegaConf.merge(base, OmegaConf.create(dict(values)))
    assert isinstance(merged, DictConfig)
    return merged


def _unknown(values: Mapping[str, Any], base: Any, prefix: str) -> Iterator[str]:
    known = list(base.keys()) if OmegaConf.is_dict(base) else []  # `key in base` is False where its value is ???
    for key, value in values.items():
        if key not in known:
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping) and OmegaConf.is_dict(base[key]):
            yield from _unknown(value, base[key], f"{prefix}{key}.")
