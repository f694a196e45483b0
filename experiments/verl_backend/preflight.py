"""Everything that can be known to be wrong before a cluster run starts, all of it at once.

`checks` is pure: it looks at the configuration that verl will read and at `Facts` about this machine. `gather_facts`
fills those in, without importing verl or torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.check import ConfigError, strategy_nodes
from experiments.schema import Config, OldLogProb, RatioLevel, TrackingMode
from experiments.verl_backend.replay_mode import ReplayMode
from experiments.verl_backend.resources import Layout, ModelSize, expected_memory

TESTED = {
    "verl": "0.9.1",
    "sglang": "0.5.12",
    "megatron-core": "0.19.2",
    "transformers": "5.9.0",
    "torch": "2.11.0",
}
"""The versions that tests/verl ran with, those of pyproject.toml."""

FIXED: dict[str, Any] = {
    "data.train_batch_size": 0,
    "data.gen_batch_size": 1,
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.actor.strategy": "megatron",
    "actor_rollout_ref.actor.use_rollout_log_probs": True,
    "actor_rollout_ref.rollout.name": "sglang",
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.skip_tokenizer_init": False,
    "async_training.partial_rollout": True,
}
"""Keys of verl that must hold these values: verl asserts them, or silently does something else."""


HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")

ACTOR_CPUS = 24
"""CPUs that verl's runner, rollouter, trainer, message queue and first agent-loop worker ask of Ray (1, 10, 10, 2, 1):
without them they wait for ever."""

POOL_CPUS_PER_GPU = {"trainer": 3, "rollout": 2}
"""verl's two groups of nodes, and the CPUs that their resource pools reserve with every GPU."""


@dataclass(frozen=True)
class Node:
    """What a node of a Ray cluster offers: GPUs and CPUs."""

    gpus: int
    cpus: int


@dataclass(frozen=True)
class Facts:
    """What a run finds on this machine, or in the Ray cluster that it joins.

    Attributes:
        nodes: those of the cluster; this machine alone where Ray starts here.
        cluster_error: why the cluster at RAY_ADDRESS does not answer; None when it does or there is none.
        versions: installed version by distribution; None where it is missing.
        import_error: why a fresh process elsewhere cannot import our packages or a strategy's class; None when it can.
        model_config: the checkpoint's config.json; None when the checkpoint is not on this node.
        model_error: why it cannot be a checkpoint; None when it can.
        missing_files: data files that do not exist.
        ray_address: a running Ray cluster to join; None: Ray starts on this node alone.
        login_error: why W&B takes no run from this node, where the record is kept; asked only for tracking=online.
    """

    nodes: tuple[Node, ...]
    cluster_error: str | None
    versions: Mapping[str, str | None]
    import_error: str | None
    model_config: Mapping[str, Any] | None
    model_error: str | None
    missing_files: tuple[str, ...]
    ray_address: str | None
    login_error: str | None = None


def gather_facts(config: Config, verl: Any) -> Facts:
    """Returns the facts for the configuration."""
    address = os.environ.get("RAY_ADDRESS")
    here = Node(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))), os.cpu_count() or 1)
    nodes, error = ((here,), None) if address is None else cluster_nodes(address)
    model_config, model_error = model_facts(_get(verl, "actor_rollout_ref.model.path"))
    return Facts(
        nodes=nodes,
        cluster_error=error,
        versions={name: _version(name) for name in TESTED},
        import_error=import_error(_get(verl, f"{WORKER_ENVIRONMENT}.PYTHONPATH"), strategy_classes(config)),
        model_config=model_config,
        model_error=model_error,
        missing_files=tuple(sorted(_missing_files(verl))),
        ray_address=address,
        login_error=login_error() if config.tracking.mode is TrackingMode.online else None,
    )


WORKER_ENVIRONMENT = "ray_kwargs.ray_init.runtime_env.env_vars"

CLUSTER_PROBE = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
print("NODES", json.dumps([[int(r.get("GPU", 0)), int(r.get("CPU", 0))] for r in alive]))
"""

CLUSTER_TIMEOUT_S = 120.0


def cluster_nodes(address: str) -> tuple[tuple[Node, ...], str | None]:
    """Returns the living nodes of the Ray cluster at `address`, or why it does not answer.

    Asks in a process of its own: a plan must not leave this one connected.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLUSTER_PROBE, address],
            capture_output=True,
            text=True,
            timeout=CLUSTER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), f"no answer within {CLUSTER_TIMEOUT_S:.0f} s"
    found = [line for line in done.stdout.splitlines() if line.startswith("NODES ")]
    if done.returncode or not found:
        return (), (done.stderr.strip().splitlines() or ["no message"])[-1]
    return tuple(Node(*node) for node in json.loads(found[-1].removeprefix("NODES "))), None


def login_error() -> str | None:
    """Asks W&B in a process of its own, which takes seconds; returns what is wrong with the credentials."""
    command = "import sys, wandb; sys.exit(0 if wandb.login(prompt=False) else 'there are no credentials on this node')"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


IMPORT_PROBE = """
import sys
import experiments.verl_backend.merging
from hydra.utils import get_object
for name in sys.argv[1:]:
    get_object(name)
"""


def import_error(python_path: str | None, classes: Sequence[str]) -> str | None:
    """Makes the imports that Ray workers make, as they make them: from another folder, with their PYTHONPATH alone.
    Returns what went wrong.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE, *classes],
        cwd="/",
        env={**os.environ, "PYTHONPATH": python_path or ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def strategy_classes(config: Config) -> list[str]:
    """Returns the classes of the run's strategy and those that it scores, by their full names."""
    shadows = strategy_nodes(config.shadow.strategies, "shadow.strategies").values() if config.shadow.every else []
    return list(dict.fromkeys(node["_target_"] for node in [config.strategy, *shadows]))


def model_facts(path: str | None) -> tuple[Mapping[str, Any] | None, str | None]:
    """Returns the config.json of a local checkpoint, or of a Hugging Face id in the local cache, and what is wrong with
    it; neither for an id that is not there yet.
    """
    if path is None:
        return None, "`model.checkpoint` is null: a Hugging Face folder or id expected"
    file = Path(path).expanduser() / "config.json"
    if not file.is_file() and HUB_ID.fullmatch(path) and not file.parent.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            return None, None
        file = Path(cached)
    if not file.is_file():
        return (None, None) if "://" in path else (None, f"`model.checkpoint={path}`: there is no {file}")
    try:
        return json.loads(file.read_text(encoding="utf-8")), None
    except json.JSONDecodeError as error:
        return None, f"`model.checkpoint={path}`: {file} is no JSON: {error}"


def _missing_files(verl: Any) -> Iterator[str]:
    for key in ("data.train_files", "data.val_files"):
        files = _get(verl, key)
        for file in [files] if isinstance(files, str) else list(files or []):
            if "://" not in file and not Path(file).expanduser().is_file():  # verl fetches what has a scheme
                yield f"{key}={file}"


def checks(config: Config, verl: Any, mode: ReplayMode, facts: Facts) -> list[str]:
    """Returns every failure, one line each, with the keys to change; empty when the run may start.

    Args:
        config: ours. verl: the configuration that verl will read.
        mode: how the strategy is carried out. facts: this machine.
    """
    return [
        *_versions(facts),
        *_keys(config, verl, mode),
        *_layout(config, verl),
        *_machine(verl, facts),
        *_model(config, facts),
        *_tracking(config, verl, facts),
    ]


def unchecked(config: Config, facts: Facts) -> list[str]:
    """Returns what cannot be known on this node, one line each."""
    if facts.model_config is not None or facts.model_error is not None:
        return []
    return [f"not checked: the sizes of {config.model.checkpoint}, which is not on this node yet"]


def _get(verl: Any, key: str) -> Any:
    return OmegaConf.select(verl, key)


def _versions(facts: Facts) -> Iterator[str]:
    for name, tested in TESTED.items():
        found = facts.versions.get(name)
        if found is None:
            yield f"{name} {tested} expected, it is not installed: uv sync --extra verl (docs/verl.md)"
        elif found.partition("+")[0] != tested:
            yield f"{name} {tested} expected (the tested version), {found} is installed: uv sync --extra verl"


def _keys(config: Config, verl: Any, mode: ReplayMode) -> Iterator[str]:
    bypass = config.algorithm.old_log_prob is OldLogProb.bypass
    expected = FIXED | {
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": mode.records_rows,
        "actor_rollout_ref.actor.megatron.router_replay.mode": mode.mode,
        "algorithm.rollout_correction.bypass_mode": bypass,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "bypass_mode" if bypass else "vanilla",
    }
    if bypass:
        expected["actor_rollout_ref.actor.policy_loss.rollout_correction.bypass_mode"] = True
    for key, value in expected.items():
        if (came := _get(verl, key)) != value:
            yield f"`backend.verl.{key}` must be {_text(value)}, not {_text(came)}"
    pair = ("actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz")
    if _get(verl, pair[0]) != _get(verl, pair[1]):
        yield f"`backend.verl.{pair[0]}` and `{pair[1]}` must be equal: verl's actor asserts it"
    if mode.mode == "R2" and bypass:
        yield (
            "strategy recompute (R2) needs algorithm.old_log_prob=decoupled: verl records the trainer's routes in the "
            "old-log-prob pass, which bypass mode skips"
        )
    if config.algorithm.ratio_level is not RatioLevel.token:
        level = config.algorithm.ratio_level.value
        yield f"`algorithm.ratio_level={level}`: the PPO losses used inside verl are of level token"
    if config.shadow.every and not mode.records_rows:
        yield (
            "shadow scoring needs recorded rows, and this strategy runs without them (router replay "
            f"{mode.mode}): set shadow=off, or train a strategy that replays recorded rows"
        )


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def model_size(config: Config) -> ModelSize:
    """Returns the sizes that the configuration states (group `model`, `backend.vocab_size`)."""
    m = config.model
    return ModelSize(
        m.num_hidden_layers,
        m.hidden_size,
        m.num_attention_heads,
        m.num_key_value_heads,
        m.head_dim,
        m.moe_intermediate_size,
        m.num_experts,
        m.num_experts_per_tok,
        config.backend.vocab_size,
    )


def layout(config: Config, verl: Any) -> Layout:
    """Returns the parallel layout that verl's configuration describes.

    Raises:
        ConfigError: a size is no positive number.
    """
    megatron, actor = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.actor"
    recompute = _get(verl, f"{megatron}.override_transformer_config.recompute_granularity")

    def size(key: str) -> int:
        value = _get(verl, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"`backend.verl.{key}` must be a positive number, not {_text(value)}")
        return value

    return Layout(
        train_gpus=size("trainer.nnodes") * size("trainer.n_gpus_per_node"),
        rollout_gpus=size("rollout.nnodes") * size("rollout.n_gpus_per_node"),
        tensor=size(f"{megatron}.tensor_model_parallel_size"),
        pipeline=size(f"{megatron}.pipeline_model_parallel_size"),
        context=size(f"{megatron}.context_parallel_size"),
        expert=size(f"{megatron}.expert_model_parallel_size"),
        expert_tensor=size(f"{megatron}.expert_tensor_parallel_size"),
        rollout_tensor=size("actor_rollout_ref.rollout.tensor_model_parallel_size"),
        offload_optimizer=_get(verl, f"{megatron}.optimizer_offload"),
        offload_parameters=_get(verl, f"{megatron}.param_offload"),
        micro_batch_tokens=size(f"{actor}.ppo_max_token_len_per_gpu"),
        recompute=recompute == "full",
        sequence_tokens=size("data.max_prompt_length") + size("data.max_response_length"),
        memory_fraction=_get(verl, "actor_rollout_ref.rollout.gpu_memory_utilization"),
        gpu_gib=config.backend.gpu_gib,
    )


def _layout(config: Config, verl: Any) -> Iterator[str]:
    a, m, size = layout(config, verl), config.model, model_size(config)
    dense, experts = a.tensor * a.pipeline * a.context, a.expert * a.expert_tensor * a.pipeline
    divides = [
        ("tensor x pipeline x context parallel size", dense, "training GPUs", a.train_gpus),
        ("expert x expert-tensor x pipeline parallel size", experts, "training GPUs", a.train_gpus),
        ("expert parallel size", a.expert, "experts", m.num_experts),
        ("pipeline parallel size", a.pipeline, "layers", m.num_hidden_layers),
        ("tensor parallel size", a.tensor, "attention heads", m.num_attention_heads),
        ("rollout tensor parallel size", a.rollout_tensor, "rollout GPUs", a.rollout_gpus),
    ]
    rows = config.algorithm.batch_size // config.algorithm.mini_batches
    if a.train_gpus % dense == 0:
        divides.append(("data-parallel ranks", a.data_parallel, "trajectories of a mini-batch", rows))
    for what, divisor, of, number in divides:
        if divisor < 1 or number % divisor or not number:
            yield f"layout: {what} {divisor} must divide the {number} {of}"
    memory = expected_memory(size, a)
    for what, gib in (("training", memory.training), ("rollout", memory.rollout)):
        if gib > a.gpu_gib:
            yield f"memory: a {what} GPU would need about {gib:.0f} GiB of its {a.gpu_gib:.0f} (backend.gpu_gib)"
    if memory.kv_tokens < a.sequence_tokens:
        yield (
            f"memory: the KV cache of an engine holds {memory.kv_tokens} tokens, one request may need "
            f"{a.sequence_tokens}; raise rollout.tensor_model_parallel_size or gpu_memory_utilization"
        )
    if a.micro_batch_tokens * a.context < a.sequence_tokens:
        yield (
            f"`backend.verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu` {a.micro_batch_tokens} is below the "
            f"longest sequence, {a.sequence_tokens} tokens"
        )


def _machine(verl: Any, facts: Facts) -> Iterator[str]:
    if facts.cluster_error is not None:
        yield f"RAY_ADDRESS={facts.ray_address}: no Ray cluster answers: {facts.cluster_error}"
    else:
        yield from _resources(verl, facts)
    if facts.import_error is not None:
        yield (
            f"Ray workers cannot import our packages and the strategies from PYTHONPATH: {facts.import_error}; a class "
            "of your own must be in a folder of PYTHONPATH on every node, or installed there"
        )
    for file in facts.missing_files:
        yield f"data: there is no file `backend.verl.{file}`"


def _resources(verl: Any, facts: Facts) -> Iterator[str]:
    pools = {name: (_get(verl, f"{name}.nnodes"), _get(verl, f"{name}.n_gpus_per_node")) for name in POOL_CPUS_PER_GPU}
    where = "this machine" if facts.ray_address is None else f"the cluster at {facts.ray_address}"
    free = sorted((node.gpus for node in facts.nodes), reverse=True)
    wanted = sorted((gpus for count, gpus in pools.values() for _ in range(count)), reverse=True)
    for gpus in wanted:
        # The fullest node that still has room: pools of several sizes then fit whenever they can.
        fitting = [index for index, left in enumerate(free) if left >= gpus]
        if not fitting:
            text = ", ".join(f"{name} {count} x {gpus}" for name, (count, gpus) in pools.items())
            nodes = ", ".join(str(node.gpus) for node in facts.nodes) or "none"
            advice = "; for a cluster start Ray on all nodes and set RAY_ADDRESS" if facts.ray_address is None else ""
            yield f"GPUs: {sum(wanted)} expected (nodes x GPUs: {text}), {where} has {nodes} by node{advice}"
            break
        free[min(fitting, key=lambda index: free[index])] -= gpus
    cpus = sum(node.cpus for node in facts.nodes)
    if facts.ray_address is None:
        cpus = _get(verl, "ray_kwargs.ray_init.num_cpus") or cpus
    needed = ACTOR_CPUS + sum(POOL_CPUS_PER_GPU[name] * count * gpus for name, (count, gpus) in pools.items())
    if cpus < needed:
        yield f"CPUs: {needed} expected for verl's actors and pools, which wait for ever without, {where} has {cpus}"


def _model(config: Config, facts: Facts) -> Iterator[str]:
    if facts.model_error is not None:
        yield f"model: {facts.model_error}"
    came = facts.model_config
    if came is None:
        return
    if "num_local_experts" in came:  # transformers 5 writes it so
        came = {"num_experts": came["num_local_experts"], **came}
    if not came.get("num_experts"):
        yield f"model: {config.model.checkpoint} is no MoE (its config.json has no num_experts)"
        return
    if came.get("mlp_only_layers") or came.get("decoder_sparse_step", 1) != 1:
        yield "model: every layer must have experts; rows of dense layers are left unwritten by the engine"
    sizes = [f for f in ModelSize.__dataclass_fields__ if f != "vocab_size"]
    for name, stated in [(name, getattr(config.model, name)) for name in sizes] + [
        ("vocab_size", config.backend.vocab_size)
    ]:
        if name in came and came[name] != stated:
            yield f"model: `{name}` is {came[name]} in its config.json, {stated} in conf/"


def _tracking(config: Config, verl: Any, facts: Facts) -> Iterator[str]:
    mode = config.tracking.mode.value
    came = _get(verl, f"{WORKER_ENVIRONMENT}.WANDB_MODE")
    if came != mode:
        yield f"W&B: WANDB_MODE={mode} expected in {WORKER_ENVIRONMENT}, {came} came"
    if facts.login_error is not None:
        yield f"W&B: tracking=online, and {facts.login_error}: `wandb login`, or tracking=offline"
