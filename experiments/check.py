"""Refuses a configuration that cannot run, before anything heavy is imported.

Every message names the config keys, what they hold and what would be right. Nothing here changes a value.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hydra.utils
from omegaconf import DictConfig, OmegaConf

from experiments.recording import FOLDER, INDEX
from experiments.schema import ClockKind, Config, EngineConfig, Mode, Pause, RatioLevel, ResumeRows, WeightTransport
from strategies.base import MergeStrategy

CHECKPOINT_FILE = Path("checkpoint") / "state.pt"
VERL_CHECKPOINT_FILE = Path("checkpoint") / "latest_checkpointed_iteration.txt"
"""Where a run directory keeps its newest checkpoint."""

OWN_SERVER_OPTIONS = ("--model-path", "--host", "--port", "--dtype", "--weight-version", "--load-format")
"""Of SGLang's server: what a run must know of a server that it starts."""

EXACT_TARGETS = ("strategies.Exact", "strategies.exact.Exact")
STRATEGY_FILES = Path(__file__).resolve().parents[1] / "conf" / "strategy"


class ConfigError(ValueError):
    """A configuration that cannot run; `run.py` prints it as one line and exits with 2."""


def load(node: DictConfig) -> Config:
    """Returns the typed configuration.

    Raises:
        ConfigError: unknown keys (`+key=value` slips past Hydra's own check), missing values, unresolvable
            interpolations.
    """
    for path, known in _unknown_keys(OmegaConf.to_container(node, resolve=False), Config, ""):
        close = difflib.get_close_matches(path.split(".")[-1], known, n=1)
        raise ConfigError(f"unknown key `{path}`" + (f"; did you mean `{close[0]}`?" if close else ""))
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise ConfigError(f"no value for `{missing[0]}`; set it on the command line or in conf/")
    try:
        config = OmegaConf.to_object(node)
    # OmegaConf raises many types for a bad interpolation; all of them are configuration errors
    except Exception as error:
        raise ConfigError(_one_line(error)) from error
    assert isinstance(config, Config)
    return config


def _unknown_keys(node: Any, schema: Any, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yields every key that the schema lacks, with the keys that stand beside it in the schema."""
    if not isinstance(node, Mapping) or not is_dataclass(schema):
        return
    known = {f.name: f for f in fields(schema)}
    for key, value in node.items():
        path = f"{prefix}{key}"
        if key not in known:
            yield path, list(known)
        else:
            default = known[key].default_factory
            yield from _unknown_keys(value, default if is_dataclass(default) else None, f"{path}.")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def build_strategy(node: Any, key: str) -> MergeStrategy:
    """Returns the merge strategy of a `_target_` node (`key` names it in errors).

    Raises:
        ConfigError: the class cannot be imported, its arguments do not fit, or it is not a merge strategy.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"`{key}` has no `_target_`; a strategy names its class, e.g. `_target_: strategies.Replace`")
    try:
        strategy = hydra.utils.instantiate(dict(node))
    except Exception as error:  # whatever a user's constructor raises is for the user to read
        cause = error.__cause__ or error
        raise ConfigError(f"`{key}`: cannot build {node['_target_']}: {_one_line(cause)}") from error
    if not isinstance(strategy, MergeStrategy) or not isinstance(strategy.single_view, bool):
        raise ConfigError(
            f"`{key}`: {node['_target_']} is not a merge strategy: it needs `__call__(rollout)` and "
            "a bool `single_view`"
        )
    return strategy


def strategy_nodes(named: Any, key: str) -> dict[str, Any]:
    """Returns name -> `_target_` node of a list whose items are names of conf/strategy files or `{name: node}`.

    Raises:
        ConfigError: not such a list, a name twice, or no such file.
    """
    known = sorted(path.stem for path in STRATEGY_FILES.glob("*.yaml"))
    nodes: dict[str, Any] = {}
    for item in named if isinstance(named, list) else [None]:
        if isinstance(item, str) and item not in known:
            raise ConfigError(
                f"`{key}`: no conf/strategy/{item}.yaml; there are {', '.join(known)}; for a class of your own write "
                f"{{{item}: {{_target_: package.Class}}}}"
            )
        if isinstance(item, str):
            found = {item: OmegaConf.to_container(OmegaConf.load(STRATEGY_FILES / f"{item}.yaml"))}
        elif isinstance(item, Mapping) and len(item) == 1:
            found = {str(name): node for name, node in item.items()}
        else:
            raise ConfigError(f"`{key}` must be a list of names and {{name: {{_target_: ...}}}}, not {named}")
        if found.keys() & nodes.keys():
            raise ConfigError(f"`{key}`: {next(iter(found))} is named twice")
        nodes |= found
    return nodes


def build_strategies(config: Config) -> tuple[MergeStrategy, dict[str, MergeStrategy]]:
    """Returns the run's merge strategy and those of shadow scoring by name.

    Raises:
        ConfigError: as `build_strategy`.
    """
    nodes = strategy_nodes(config.shadow.strategies, "shadow.strategies")
    shadows = {name: build_strategy(node, f"shadow.strategies.{name}") for name, node in nodes.items()}
    return build_strategy(config.strategy, "strategy"), shadows


def check_names(strategy_name: str, config: Config) -> None:
    """Refuses names under which metrics would say something else than they seem to.

    Raises:
        ConfigError: `exact` is another class, or shadow scoring has another strategy of the run's name.
    """
    strategy = plain(config.strategy)
    if strategy_name == "exact" and strategy.get("_target_") not in EXACT_TARGETS:
        raise ConfigError(
            f"`strategy=exact` is the reference of every merge error, it cannot be {strategy.get('_target_')}; "
            "give the class a YAML and a name of its own"
        )
    shadow = strategy_nodes(config.shadow.strategies, "shadow.strategies").get(strategy_name)
    if shadow is not None and plain(shadow) != strategy:
        raise ConfigError(
            f"`shadow.strategies`: {strategy_name} differs from the run's own strategy of that name ({plain(shadow)}, "
            f"{strategy}); give one of them another name"
        )


def plain(node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a strategy's node as a plain mapping."""
    return {str(key): value for key, value in node.items()}


def check(config: Config, strategy: MergeStrategy) -> None:
    """Checks ranges and combinations.

    Raises:
        ConfigError: the first violation found.
    """
    for violated, message in _violations(config, strategy):
        if violated:
            raise ConfigError(message)


def _violations(config: Config, strategy: MergeStrategy) -> Iterator[tuple[bool, str]]:
    yield config.steps < 1, f"`steps` must be at least 1, not {config.steps}"
    yield config.seed < 0, f"`seed` must not be negative, not {config.seed}"
    yield config.threads < 0, f"`threads` must not be negative, not {config.threads}"
    yield config.checkpoint.every < 0, f"`checkpoint.every` must not be negative, not {config.checkpoint.every}"
    yield config.shadow.every < 0, f"`shadow.every` must not be negative, not {config.shadow.every}"
    yield config.shadow.probe_every < 1, f"`shadow.probe_every` must be at least 1, not {config.shadow.probe_every}"
    for dtype, limit in config.shadow.audit_limit.items():
        yield not 0 <= limit <= 1, f"`shadow.audit_limit.{dtype}` must lie in [0, 1], not {limit}"
    backend = config.backend
    yield backend.name not in ("local", "verl"), f"`backend` must be local or verl, not {backend.name}"
    yield config.dry_run and backend.name != "verl", "`dry_run` needs backend=verl"
    yield (
        backend.on_missing_rows not in ("raise", "drop", "live"),
        f"`backend.on_missing_rows` must be raise, drop or live, not {backend.on_missing_rows}",
    )
    yield (
        backend.name == "verl" and config.resume is not None,
        "`resume` needs backend=local; verl continues by its own backend.verl.trainer.resume_mode",
    )
    yield backend.name == "verl" and config.record, "`record` needs backend=local: verl's rollouts are not written"
    yield (
        backend.name == "verl" and config.mode is Mode.score,
        "`mode=score` needs backend=local: the rollouts of a recording are scored on this machine",
    )
    yield (
        config.resume is not None and not (Path(config.resume) / CHECKPOINT_FILE).is_file(),
        f"`resume`: there is no checkpoint in {config.resume}; a run saves one every `checkpoint.every` syncs, at its "
        "end and when interrupted",
    )
    yield (
        "exact" in strategy_nodes(config.shadow.strategies, "shadow.strategies"),
        "`shadow.strategies`: exact is the reference and always scored; remove it",
    )
    yield from _mode(config)
    for path, value in _numbers(config, ""):
        yield not math.isfinite(value), f"`{path}` must be finite, not {value}"
    yield from _algorithm(config, strategy)
    yield from _schedule(config, strategy)
    yield from _carried_over(config)
    if backend.name == "local":  # verl has its own engine, model and data; preflight.py checks them
        yield from _model(config)
        yield from _parts(config)


def _mode(config: Config) -> Iterator[tuple[bool, str]]:
    if config.mode is Mode.score:
        yield config.recording is None, "`mode=score` needs `recording`: the directory of a run with record=true"
        return
    for key, is_set in (
        ("recording", config.recording is not None),
        ("strategies", bool(config.strategies)),
        ("score.updates", config.score.updates is not None),
    ):
        yield is_set, f"`{key}` is read with mode=score only; a run scores other strategies with `shadow.strategies`"
    yield (
        config.resume is not None and config.record and not (Path(config.resume) / FOLDER / INDEX).is_file(),
        f"`record`: there is no {FOLDER}/{INDEX} in {config.resume}, whose recording this run would continue",
    )


def _numbers(node: Any, prefix: str) -> Iterator[tuple[str, float]]:
    """Yields every float of the configuration with its dotted key."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{prefix}{f.name}.")
        elif isinstance(value, float):
            yield f"{prefix}{f.name}", value


def _algorithm(config: Config, strategy: MergeStrategy) -> Iterator[tuple[bool, str]]:
    a = config.algorithm
    for name in ("batch_size", "group_size", "mini_batches", "epochs"):
        yield getattr(a, name) < 1, f"`algorithm.{name}` must be at least 1, not {getattr(a, name)}"
    yield (
        a.batch_size % max(a.group_size, 1) != 0,
        f"`algorithm.group_size` {a.group_size} does not divide `algorithm.batch_size` {a.batch_size}",
    )
    groups = a.batch_size // max(a.group_size, 1)
    yield (
        groups % max(a.mini_batches, 1) != 0,
        f"`algorithm.mini_batches` {a.mini_batches} does not divide the {groups} groups of a batch",
    )
    yield a.group_size == 1, "`algorithm.group_size` must be at least 2: a group of one has no advantage"
    yield not 0 < a.clip_low < 1, f"`algorithm.clip_low` must lie between 0 and 1, not {a.clip_low}"
    yield a.clip_high <= 0, f"`algorithm.clip_high` must be positive, not {a.clip_high}"
    yield a.dual_clip <= 1, f"`algorithm.dual_clip` must be above 1, not {a.dual_clip}"
    yield a.kl_coef < 0, f"`algorithm.kl_coef` must not be negative, not {a.kl_coef}"
    yield (
        a.kl_estimator not in ("k1", "k2", "k3"),
        f"`algorithm.kl_estimator` must be k1, k2 or k3, not {a.kl_estimator}",
    )
    yield (
        a.importance_weight_cap <= 0,
        f"`algorithm.importance_weight_cap` must be positive, not {a.importance_weight_cap}",
    )
    yield (
        a.ratio_level is RatioLevel.sequence and not strategy.single_view,
        f"`algorithm.ratio_level=sequence` needs the whole response in one forward, but {_name(strategy)} splits it "
        "into one view per segment; use ratio_level=token or a strategy with a single view",
    )


def _schedule(config: Config, strategy: MergeStrategy) -> Iterator[tuple[bool, str]]:
    s = config.schedule
    yield s.sync_interval < 1, f"`schedule.sync_interval` must be at least 1 update, not {s.sync_interval}"
    yield s.staleness_threshold < 0, f"`schedule.staleness_threshold` must not be negative, not {s.staleness_threshold}"
    yield s.max_empty_aborts < 1, f"`schedule.max_empty_aborts` must be at least 1, not {s.max_empty_aborts}"
    for f in fields(s.cost):
        value = getattr(s.cost, f.name)
        yield value < 0, f"`schedule.cost.{f.name}` must not be negative, not {value}"
    for name in ("decode_step_s", "sync_s"):
        yield (
            s.clock is ClockKind.virtual and getattr(s.cost, name) <= 0,
            f"`schedule.cost.{name}` must be positive on the virtual clock: events that take no time have no order",
        )
    yield (
        s.pause_mode is Pause.retract
        and config.engine.resume_rows is ResumeRows.recompute
        and not strategy.single_view,
        f"`schedule.pause_mode=retract` overwrites the rows of earlier tokens, which {_name(strategy)} needs; "
        "use abort or in_place, or engine.resume_rows=pinned",
    )


def _model(config: Config) -> Iterator[tuple[bool, str]]:
    m = config.model
    if m.checkpoint is not None:
        path = Path(m.checkpoint).expanduser() / "config.json"
        yield not path.is_file(), f"`model.checkpoint` must be a Hugging Face folder; there is no {path}"
        return
    for f in fields(m):
        value = getattr(m, f.name)
        yield isinstance(value, int | float) and value <= 0, f"`model.{f.name}` must be positive, not {value}"
    yield (
        m.num_experts_per_tok == 1,
        "`model.num_experts_per_tok` must be at least 2: the weight of one expert is always 1, the router never learns",
    )
    yield (
        m.num_experts_per_tok > m.num_experts,
        f"`model.num_experts_per_tok` {m.num_experts_per_tok} is above `model.num_experts` {m.num_experts}",
    )
    yield (
        m.num_attention_heads % max(m.num_key_value_heads, 1) != 0,
        f"`model.num_key_value_heads` {m.num_key_value_heads} does not divide "
        f"`model.num_attention_heads` {m.num_attention_heads}",
    )
    yield m.head_dim % 2 != 0, f"`model.head_dim` must be even for rotary embeddings, not {m.head_dim}"
    yield (
        config.sampling.max_response_tokens >= m.max_position_embeddings,
        f"`sampling.max_response_tokens` {config.sampling.max_response_tokens} leaves no room for a prompt within "
        f"`model.max_position_embeddings` {m.max_position_embeddings}",
    )


def _carried_over(config: Config) -> Iterator[tuple[bool, str]]:
    """Yields what both back ends read of sampling and trainer."""
    s, t = config.sampling, config.trainer
    yield s.temperature <= 0, f"`sampling.temperature` must be positive, not {s.temperature}"
    yield not 0 < s.top_p <= 1, f"`sampling.top_p` must lie in (0, 1], not {s.top_p}"
    yield s.max_response_tokens < 1, f"`sampling.max_response_tokens` must be at least 1, not {s.max_response_tokens}"
    yield t.learning_rate < 0, f"`trainer.learning_rate` must not be negative, not {t.learning_rate}"
    yield t.weight_decay < 0, f"`trainer.weight_decay` must not be negative, not {t.weight_decay}"
    yield t.max_grad_norm <= 0, f"`trainer.max_grad_norm` must be positive, not {t.max_grad_norm}"


def _parts(config: Config) -> Iterator[tuple[bool, str]]:
    e, t, w = config.engine, config.trainer, config.task.warm_start
    yield from _engine(config)
    yield t.name != "megatron", f"`trainer` must be megatron, not {t.name}"
    yield e.max_running < 1, f"`engine.max_running` must be at least 1, not {e.max_running}"
    yield e.max_prefill_tokens < 1, f"`engine.max_prefill_tokens` must be at least 1, not {e.max_prefill_tokens}"
    yield t.device not in ("auto", "cpu", "cuda"), f"`trainer.device` must be auto, cpu or cuda, not {t.device}"
    yield (
        t.max_tokens_per_micro_batch < 1,
        f"`trainer.max_tokens_per_micro_batch` must be at least 1, not {t.max_tokens_per_micro_batch}",
    )
    for name in ("adam_beta1", "adam_beta2"):
        yield not 0 <= getattr(t, name) < 1, f"`trainer.{name}` must lie in [0, 1), not {getattr(t, name)}"
    yield w.learning_rate <= 0, f"`task.warm_start.learning_rate` must be positive, not {w.learning_rate}"
    yield config.task.problems < 0, f"`task.problems` must not be negative, not {config.task.problems}"
    yield not config.task.datasets, "`task.datasets` is empty; name at least one reasoning-gym dataset"
    for i, d in enumerate(config.task.datasets):
        yield d.weight <= 0, f"`task.datasets[{i}].weight` must be positive, not {d.weight}"
    yield w.steps < 0, f"`task.warm_start.steps` must not be negative, not {w.steps}"
    yield w.batch_size < 1, f"`task.warm_start.batch_size` must be at least 1, not {w.batch_size}"


def _engine(config: Config) -> Iterator[tuple[bool, str]]:
    e, s = config.engine, config.engine.server
    yield e.name not in ("embedded", "sglang"), f"`engine` must be embedded or sglang, not {e.name}"
    yield e.name == "embedded" and s is not None, "`engine.server` must be null with engine=embedded"
    if e.name == "embedded" or s is None:
        yield e.name == "sglang", "`engine.server` must not be null with engine=sglang"
        yield e.url is not None, f"`engine.url` needs engine=sglang, not {e.name}"
        return
    yield (
        config.schedule.clock is not ClockKind.wall,
        "`engine=sglang` needs `schedule=wall`: a server does not run on the virtual clock",
    )
    yield (
        e.resume_rows is ResumeRows.pinned,
        "`engine.resume_rows=pinned` needs engine=embedded: no SGLang server routes a prefix through given rows",
    )
    yield e.url is not None and not is_http_url(e.url), f"`engine.url` must be http(s)://HOST:PORT, not {e.url}"
    yield (
        config.schedule.pause_mode is Pause.in_place and s.prefix_cache and e.url is None,
        "`schedule.pause_mode=in_place` needs `engine.server.prefix_cache=false`: the cache is not flushed, and new "
        "requests would be served from the KV cache of older weights",
    )
    yield s.device not in ("auto", "cpu", "cuda"), f"`engine.server.device` must be auto, cpu or cuda, not {s.device}"
    yield (
        weight_transport(e) is WeightTransport.disk and not _shares_files(e),
        f"`engine.server.transport=disk` needs `engine.server.publish_dir`: the server at {e.url} does not see this "
        "machine's memory; name a folder that both see, or use transport=gloo",
    )
    for key, device in (("trainer", config.trainer.device), ("engine.server", s.device)):
        yield (
            s.transport is WeightTransport.nccl and device == "cpu",
            f"`engine.server.transport=nccl` needs trainer and server on CUDA, not `{key}.device=cpu`; "
            "use transport=gloo",
        )
    yield (
        s.publish_dir is not None and not _is_writable(Path(s.publish_dir).expanduser()),
        f"`engine.server.publish_dir` must be a folder that the run can write to, not {s.publish_dir}",
    )
    for argument in s.extra_args if e.url is None else ():
        option = argument.partition("=")[0]
        yield (
            any(len(option) > 2 and own.startswith(option) for own in OWN_SERVER_OPTIONS),
            f"`engine.server.extra_args` must not hold {argument}: the run sets {', '.join(OWN_SERVER_OPTIONS)} itself "
            "(engine.server.host, engine.server.port, engine.dtype)",
        )
    yield not 0 <= s.port < 65536, f"`engine.server.port` must lie in 0..65535, not {s.port}"
    yield s.max_restarts < 0, f"`engine.server.max_restarts` must not be negative, not {s.max_restarts}"
    for name in ("start_timeout_s", "request_timeout_s"):
        yield getattr(s, name) <= 0, f"`engine.server.{name}` must be positive, not {getattr(s, name)}"


def weight_transport(engine: EngineConfig) -> WeightTransport:
    """Returns what `engine.server.transport` means for this server: never `auto`."""
    assert engine.server is not None
    if engine.server.transport is not WeightTransport.auto:
        return engine.server.transport
    return WeightTransport.disk if _shares_files(engine) else WeightTransport.gloo


def _shares_files(engine: EngineConfig) -> bool:
    """Says whether the server sees the folder that weights are written to, as far as the configuration can tell."""
    assert engine.server is not None
    if engine.url is None or engine.server.publish_dir is not None:
        return True
    return is_loopback(engine.url) or urlsplit(engine.url).hostname == socket.gethostname().lower()


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def is_http_url(url: str) -> bool:
    """Says whether `url` is http or https, with a host and, if any, a port of 1..65535."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or too large, brackets without an address
        return False


def is_loopback(url: str) -> bool:
    """Says whether `url` names this machine's loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _name(strategy: MergeStrategy) -> str:
    return type(strategy).__name__
