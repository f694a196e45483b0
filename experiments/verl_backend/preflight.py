"""Everything that can be known to be wrong before a cluster run starts, all of it at once.

`checks` is pure: it looks at the configuration that verl will read and at `Facts` about this machine. `gather_facts`
fills those in, without importing verl or torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.schema import Config, OldLogProb
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


@dataclass(frozen=True)
class Facts:
    """What a run finds on this machine.

    Attributes:
        gpus: GPUs of this node.
        versions: installed version by distribution; None where it is missing.
        import_error: why a fresh process elsewhere cannot import our packages; None when it can.
        model_config: the checkpoint's config.json; None when the path is no local folder.
        missing_files: data files that do not exist.
        ray_address: a running Ray cluster to join; None: Ray starts on this node alone.
    """

    gpus: int
    versions: Mapping[str, str | None]
    import_error: str | None
    model_config: Mapping[str, Any] | None
    missing_files: tuple[str, ...]
    ray_address: str | None


def gather_facts(verl: Any, root: Path) -> Facts:
    """Returns the facts for verl's configuration; `root` is our repository, which Ray workers must import from."""
    return Facts(
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        versions={name: _version(name) for name in TESTED},
        import_error=_import_error(root),
        model_config=_model_config(str(_get(verl, "actor_rollout_ref.model.path"))),
        missing_files=tuple(sorted(_missing_files(verl))),
        ray_address=os.environ.get("RAY_ADDRESS"),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_error(root: Path) -> str | None:
    """Tries the import that Ray workers make, as they make it: from another folder, with PYTHONPATH alone."""
    done = subprocess.run(
        [sys.executable, "-c", "import experiments.verl_backend.merging"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _model_config(path: str) -> Mapping[str, Any] | None:
    file = Path(path).expanduser() / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _missing_files(verl: Any) -> Iterator[str]:
    for key in ("data.train_files", "data.val_files"):
        files = _get(verl, key)
        for file in [files] if isinstance(files, str) else list(files or []):
            if not Path(file).expanduser().is_file():
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
        *_tracking(config, verl),
    ]


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
    if config.shadow.every and not mode.records_rows:
        yield (
            "shadow scoring needs recorded rows, and this strategy runs without them (router replay "
            f"{mode.mode}): set shadow=off, or train a strategy that replays recorded rows"
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    """Returns the parallel layout that verl's configuration describes."""
    megatron, actor = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.actor"
    recompute = _get(verl, f"{megatron}.override_transformer_config.recompute_granularity")
    return Layout(
        train_gpus=_get(verl, "trainer.nnodes") * _get(verl, "trainer.n_gpus_per_node"),
        rollout_gpus=_get(verl, "rollout.nnodes") * _get(verl, "rollout.n_gpus_per_node"),
        tensor=_get(verl, f"{megatron}.tensor_model_parallel_size"),
        pipeline=_get(verl, f"{megatron}.pipeline_model_parallel_size"),
        context=_get(verl, f"{megatron}.context_parallel_size"),
        expert=_get(verl, f"{megatron}.expert_model_parallel_size"),
        expert_tensor=_get(verl, f"{megatron}.expert_tensor_parallel_size"),
        rollout_tensor=_get(verl, "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        offload_optimizer=_get(verl, f"{megatron}.optimizer_offload"),
        offload_parameters=_get(verl, f"{megatron}.param_offload"),
        micro_batch_tokens=_get(verl, f"{actor}.ppo_max_token_len_per_gpu"),
        recompute=recompute == "full",
        sequence_tokens=_get(verl, "data.max_prompt_length") + _get(verl, "data.max_response_length"),
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
    nodes = _get(verl, "trainer.nnodes") + _get(verl, "rollout.nnodes")
    per_node = {name: _get(verl, f"{name}.n_gpus_per_node") for name in ("trainer", "rollout")}
    if facts.ray_address is None:
        needed = sum(_get(verl, f"{name}.nnodes") * gpus for name, gpus in per_node.items())
        if facts.gpus < needed:
            yield (
                f"GPUs: {needed} expected ({nodes} pools of nodes), this machine has {facts.gpus}; for a cluster start "
                "Ray on all nodes and set RAY_ADDRESS"
            )
    elif facts.gpus < max(per_node.values()):
        yield f"GPUs: {max(per_node.values())} expected on every node, this one has {facts.gpus}"
    if facts.import_error is not None:
        yield f"Ray workers cannot import our packages from PYTHONPATH: {facts.import_error}"
    for file in facts.missing_files:
        yield f"data: there is no file `backend.verl.{file}`"


def _model(config: Config, facts: Facts) -> Iterator[str]:
    came = facts.model_config
    if came is None:
        return
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


def _tracking(config: Config, verl: Any) -> Iterator[str]:
    mode = config.tracking.mode.value
    came = _get(verl, "ray_kwargs.ray_init.runtime_env.env_vars.WANDB_MODE")
    if came != mode:
        yield f"W&B: WANDB_MODE={mode} expected in ray_kwargs.ray_init.runtime_env.env_vars, {came} came"
    if "wandb" not in (_get(verl, "trainer.logger") or []) and mode != "disabled":
        yield "W&B: `backend.verl.trainer.logger` must hold wandb, or set tracking=disabled"
