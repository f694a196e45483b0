"""Expected memory per GPU of a run, from the model's sizes and the parallel layout. Arithmetic only, no measurement.

Counted: parameters, gradients, optimiser, replayed rows and the largest activations of a training GPU; weights and KV
cache of a rollout GPU. Not counted: CUDA context, NCCL buffers, fragmentation and kernels' workspace.

Legend: `P` parameters, `L` layers, `K` experts per token, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2.0**30


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a Qwen3-MoE by the names of its Hugging Face configuration; `vocab_size` with untied embeddings."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    vocab_size: int

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers: three matrices each."""
        return self.num_hidden_layers * self.num_experts * 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers but their experts: attention, router, norms."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        per_layer = self.hidden_size * self.head_dim * heads + self.hidden_size * self.num_experts
        return self.num_hidden_layers * (per_layer + 2 * self.hidden_size + 2 * self.head_dim)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; the output layer has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.expert_parameters + self.layer_parameters + 2 * self.embedding_parameters + self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one position's row in verl's batch, int16."""
        return 2 * self.num_hidden_layers * self.num_experts_per_tok

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's KV cache, bf16, all layers."""
        return 2 * 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a run.

    Attributes:
        train_gpus, rollout_gpus: all nodes together.
        tensor, pipeline, context, expert, expert_tensor: Megatron's parallel sizes.
        rollout_tensor: GPUs of one engine.
        offload_optimizer, offload_parameters: to host memory outside their use.
        micro_batch_tokens: largest tokens of a micro-batch per GPU.
        recompute: full activation recomputation, layer by layer.
        sequence_tokens: prompt plus response, the longest.
        memory_fraction: share of a rollout GPU that the engine takes (`gpu_memory_utilization`).
        gpu_gib: memory of a GPU.
    """

    train_gpus: int
    rollout_gpus: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    rollout_tensor: int
    offload_optimizer: bool
    offload_parameters: bool
    micro_batch_tokens: int
    recompute: bool
    sequence_tokens: int
    memory_fraction: float
    gpu_gib: float

    @property
    def data_parallel(self) -> int:
        """Replicas of the dense part; at least 1 (preflight.py refuses sizes that do not divide the GPUs)."""
        return max(1, self.train_gpus // (self.tensor * self.pipeline * self.context))

    @property
    def expert_data_parallel(self) -> int:
        """Replicas of an expert, at least 1."""
        return max(1, self.train_gpus // (self.expert_tensor * self.pipeline * self.expert))


@dataclass(frozen=True)
class Memory:
    """GiB by purpose. A training GPU of the last pipeline stage, the fullest one, and a rollout GPU.

    Attributes:
        parameters: bf16 weights. gradients: fp32. optimizer: fp32 master weights and both moments, sharded over the
            data-parallel ranks; 0 when offloaded, `host_optimizer` then.
        activations: one micro-batch at its largest, logits included.
        rows: int64 targets that the routers hold for one micro-batch.
        rollout_weights, kv_cache: of an engine; kv_tokens: how many tokens of all its requests fit.
        batch_rows_per_trajectory: MiB of one trajectory's padded int16 rows through Ray.
    """

    parameters: float
    gradients: float
    optimizer: float
    host_optimizer: float
    activations: float
    rows: float
    rollout_weights: float
    kv_cache: float
    kv_tokens: int
    batch_rows_per_trajectory: float

    @property
    def training(self) -> float:
        """GiB of a training GPU while it updates."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.rows

    @property
    def rollout(self) -> float:
        """GiB of a rollout GPU."""
        return self.rollout_weights + self.kv_cache


def expected_memory(model: ModelSize, layout: Layout) -> Memory:
    """Returns the expected memory per GPU.

    Formulas: weights 2 bytes a parameter, gradients 4, Adam in fp32 12 (Megatron's distributed optimiser). Activations
    with full recomputation: one bf16 input of every layer that the stage keeps, one layer's working set of 34 h bytes
    a token (arXiv 2205.05198, section 4.1) plus its K experts' hidden states, and logits in bf16 and fp32.
    """
    dense = model.layer_parameters / (layout.tensor * layout.pipeline) + model.embedding_parameters / layout.tensor
    experts = model.expert_parameters / (layout.expert * layout.expert_tensor * layout.pipeline)
    sharded = dense / layout.data_parallel + experts / layout.expert_data_parallel
    optimizer = 12 * sharded / GIB
    tokens = layout.micro_batch_tokens
    layers = -(-model.num_hidden_layers // layout.pipeline)
    working = 34 * model.hidden_size + 8 * model.num_experts_per_tok * model.moe_intermediate_size
    kept = 2 * model.hidden_size * layers * layout.pipeline  # 1F1B: the first stage keeps one micro-batch per stage
    inside = working if layout.recompute else working * layers
    logits = 6 * model.vocab_size
    rollout_weights = 2 * model.parameters / layout.rollout_tensor / GIB
    kv = max(0.0, layout.gpu_gib * layout.memory_fraction - rollout_weights)
    per_token = model.kv_bytes / min(layout.rollout_tensor, model.num_key_value_heads)
    return Memory(
        parameters=2 * (dense + experts) / GIB,
        gradients=4 * (dense + experts) / GIB,
        optimizer=0.0 if layout.offload_optimizer else optimizer,
        host_optimizer=optimizer if layout.offload_optimizer else 0.0,
        activations=tokens * (kept + inside + logits) / layout.tensor / GIB,
        rows=tokens * 8 * model.num_experts_per_tok * layers / layout.tensor / GIB,
        rollout_weights=rollout_weights,
        kv_cache=kv,
        kv_tokens=int(kv * GIB // per_token),
        batch_rows_per_trajectory=model.row_bytes * layout.sequence_tokens / 2**20,
    )
