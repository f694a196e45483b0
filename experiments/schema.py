"""Typed configuration: names and types only. Every value lives in exactly one YAML under `conf/`.

`strategy` is the exception: it is a `_target_` node whose constructor signature is the schema, so that a user's own
class needs no edit here. Imports nothing heavy: a configuration error must answer within seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf


class Mode(Enum):
    """What a run does."""

    train = "train"
    score = "score"  # the rollouts of a recording, without training


class OldLogProb(Enum):
    """Whose log-probs are the old policy of the PPO ratio."""

    bypass = "bypass"  # the engine's: verl's default when fully async
    # the trainer's own, recomputed before the update; truncated importance weights correct the rest
    decoupled = "decoupled"


class RatioLevel(Enum):
    """Unit of the PPO ratio."""

    token = "token"
    # geometric mean over the response (GSPO, arXiv 2507.18071): needs the whole response in one forward
    sequence = "sequence"


class ClockKind(Enum):
    """Which clock drives the loop (experiments/clock.py)."""

    virtual = "virtual"
    wall = "wall"


class Pause(Enum):
    """What the engine does with unfinished requests at a weight sync (experiments/engines/base.py)."""

    abort = "abort"
    retract = "retract"
    in_place = "in_place"


class ResumeRows(Enum):
    """Which experts a prefix goes through when it is prefilled again after a weight sync (docs/pinned_resume.md)."""

    recompute = "recompute"  # those that the new weights choose, as real engines do
    pinned = "pinned"  # those that were recorded when the position was first fed


class WeightTransport(Enum):
    """How weights reach an SGLang server (docs/sglang.md)."""

    auto = "auto"  # disk where the server certainly sees the same file system, else gloo
    disk = "disk"
    gloo = "gloo"  # broadcast, through host memory
    nccl = "nccl"  # broadcast, from GPU to GPU


class TrackingMode(Enum):
    """Where W&B writes. `metrics.jsonl` and `summary.json` are always written."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


class DType(Enum):
    """Floating-point type of a model."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class ServerConfig:
    """The SGLang server of `engine=sglang`; of one given by `engine.url` only `request_timeout_s`, `transport` and
    `publish_dir` matter.
    """

    device: str = MISSING  # auto, cpu, cuda
    host: str = MISSING  # address to listen on
    port: int = MISSING  # 0: any free one
    prefix_cache: bool = MISSING
    extra_args: list[str] = MISSING  # further arguments of sglang.launch_server
    start_timeout_s: float = MISSING
    request_timeout_s: float = MISSING  # a request without an answer for so long counts as hung
    max_restarts: int = MISSING  # of a server of ours that died
    transport: WeightTransport = MISSING
    publish_dir: str | None = MISSING  # where weights are written for the server; null: shared memory
    cache_dir: str | None = MISSING  # of the server's Python environment; null: the user cache folder


@dataclass
class EngineConfig:
    """The rollout engine."""

    name: str = MISSING
    dtype: DType = MISSING
    max_running: int = MISSING  # requests decoded in one batch
    max_prefill_tokens: int = MISSING  # padded prompt tokens forwarded in one prefill
    resume_rows: ResumeRows = MISSING
    delta_rows: bool = MISSING  # ask for new rows only, where strategy and shadow scoring need no others
    url: str | None = MISSING  # of a running SGLang server; null: start one
    server: ServerConfig | None = field(default_factory=ServerConfig)  # null: the engine runs in this process


@dataclass
class SamplingConfig:
    """How tokens are sampled; the trainer uses the same temperature."""

    temperature: float = MISSING
    top_p: float = MISSING
    max_response_tokens: int = MISSING


@dataclass
class TrainerConfig:
    """The trainer."""

    name: str = MISSING
    device: str = MISSING  # auto, cpu, cuda
    max_tokens_per_micro_batch: int = MISSING  # padded tokens
    recompute_activations: bool = MISSING
    learning_rate: float = MISSING
    adam_beta1: float = MISSING
    adam_beta2: float = MISSING
    weight_decay: float = MISSING
    max_grad_norm: float = MISSING


@dataclass
class ModelConfig:
    """A Qwen3-MoE, by the names of transformers' Qwen3MoeConfig. The vocabulary comes from the tokenizer."""

    name: str = MISSING
    checkpoint: str | None = MISSING  # Hugging Face folder; null: the sizes below, random, warm-started on the task
    num_hidden_layers: int = MISSING
    hidden_size: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = MISSING
    intermediate_size: int = MISSING
    moe_intermediate_size: int = MISSING
    num_experts: int = MISSING
    num_experts_per_tok: int = MISSING
    max_position_embeddings: int = MISSING
    initializer_range: float = MISSING
    rope_theta: float = MISSING
    rms_norm_eps: float = MISSING


@dataclass
class DatasetConfig:
    """One reasoning-gym dataset of a task."""

    name: str = MISSING
    weight: float = MISSING
    params: dict[str, Any] = MISSING  # arguments of the dataset, as reasoning-gym names them
    prompt: str = MISSING  # the prompt; fields of the entry's metadata in braces


@dataclass
class WarmStartConfig:
    """Supervised steps on the task's own answers before PPO; the result is cached."""

    steps: int = MISSING
    batch_size: int = MISSING
    learning_rate: float = MISSING
    seed: int = MISSING
    cache_dir: str | None = MISSING  # null: the user cache folder


@dataclass
class TaskConfig:
    """Problems and their verifier."""

    name: str = MISSING
    problems: int = MISSING  # distinct training problems, revisited in a new order every pass; 0: never the same twice
    datasets: list[DatasetConfig] = MISSING
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


@dataclass
class AlgorithmConfig:
    """PPO."""

    name: str = MISSING
    batch_size: int = MISSING  # rollouts per update
    group_size: int = MISSING  # rollouts per problem
    mini_batches: int = MISSING  # optimiser steps per pass over the batch
    epochs: int = MISSING
    clip_low: float = MISSING
    clip_high: float = MISSING
    dual_clip: float = MISSING
    ratio_level: RatioLevel = MISSING
    normalize_advantages: bool = MISSING  # divide by the group's standard deviation
    kl_coef: float = MISSING
    kl_estimator: str = MISSING  # k1, k2, k3
    entropy_coef: float = MISSING
    old_log_prob: OldLogProb = MISSING
    importance_weight_cap: float = MISSING  # C of the truncated importance weights, decoupled mode


@dataclass
class CostConfig:
    """Virtual seconds of the work (virtual clock only)."""

    decode_step_s: float = MISSING
    prefill_token_s: float = MISSING
    update_s: float = MISSING
    sync_s: float = MISSING


@dataclass
class ScheduleConfig:
    """When weights move and which rollouts may start."""

    name: str = MISSING
    clock: ClockKind = MISSING
    sync_interval: int = MISSING  # updates between weight syncs
    # verl's: admits (1 + threshold) * sync_interval * batch_size rollouts between syncs
    staleness_threshold: float = MISSING
    pause_mode: Pause = MISSING
    max_empty_aborts: int = MISSING  # calls in a row without a token before a rollout is an error
    cost: CostConfig = field(default_factory=CostConfig)


@dataclass
class ShadowConfig:
    """Scoring of the same rollouts under other strategies, without training on them."""

    every: int = MISSING  # updates; 0: never
    strategies: Any = MISSING  # list of names of conf/strategy files, or {name: _target_ node}
    probe_every: int = MISSING  # of the scored updates, those whose number is a multiple of this are probed too
    audit_limit: dict[str, float] = MISSING  # by engine.dtype: largest share of a batch's cells


@dataclass
class ScoreConfig:
    """What of a recording is scored (mode=score)."""

    weights: str = MISSING  # trainer: those held before each update; newest; or a weight version
    updates: list[int] | None = MISSING  # numbers as in metrics.jsonl; null: all


@dataclass
class TrackingConfig:
    """Where metrics go."""

    mode: TrackingMode = MISSING
    project: str = MISSING
    entity: str | None = MISSING
    progress: bool = MISSING


@dataclass
class CheckpointConfig:
    """Saving and continuing."""

    every: int = MISSING  # weight syncs; 0: only when interrupted


@dataclass
class BackendConfig:
    """Where the loop runs. Of backend=local only the name matters."""

    name: str = MISSING
    on_missing_rows: str = MISSING  # raise, drop, live: what becomes of a trajectory whose rows are missing
    live_rows: bool | None = MISSING  # the trainer can leave single rows to its router; null: if the strategy needs it
    gpu_gib: float = MISSING  # memory of a GPU
    vocab_size: int = MISSING  # of the model, for the memory estimate
    verl: Any = MISSING  # values laid over verl's own configuration, in verl's names


@dataclass
class Config:
    """A run."""

    seed: int = MISSING
    steps: int = MISSING  # PPO updates
    experiment_name: str = MISSING
    resume: str | None = MISSING  # run directory to continue
    threads: int = MISSING  # CPU threads of torch; 0: one per core
    mode: Mode = MISSING
    record: bool = MISSING  # write all rollouts to rollouts/ in the run directory
    recording: str | None = MISSING  # mode=score: run directory with a recording
    strategies: Any = MISSING  # mode=score: as shadow.strategies
    dry_run: bool = MISSING  # backend=verl: print the plan and the preflight, start nothing
    strategy: Any = MISSING
    backend: BackendConfig = field(default_factory=BackendConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    shadow: ShadowConfig = field(default_factory=ShadowConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def register() -> None:
    """Registers what `conf/config.yaml` refers to: the schema, and a resolver that returns its first argument that is
    not null.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("first", lambda *values: next(v for v in values if v is not None), replace=True)
