"""verl's replay in a tiny Megatron model on a CPU: F6, F15 and live rows. Real patch, mask, packing and router."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

LENGTH, PROMPT, LAYERS, EXPERTS, TOP_K = 14, 6, 4, 8, 2


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("MASTER_ADDR", "127.0.0.1")
    patch.setenv("MASTER_PORT", os.environ.get("ROUTEMERGE_TEST_PORT", "29531"))
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    dist.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.utils.megatron import router_replay_utils
    from verl.utils.megatron.router_replay_patch import apply_router_replay_patch

    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)
    patch.setattr(router_replay_utils, "device_name", "cpu")
    apply_router_replay_patch()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=64,
        use_cpu_initialization=True,
        moe_enable_routing_replay=True,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        params_dtype=torch.float32,
        qk_layernorm=True,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=True
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).eval()
    from experiments.verl_backend.live_rows import allow_live_rows

    plain = {id(router): type(router) for _, router in router_replay_utils.iter_model_routers(model)}
    assert allow_live_rows(model) == LAYERS
    assert len(plain) == LAYERS
    yield model, config, torch.randint(0, 64, (LENGTH,))
    dist.destroy_process_group()
    patch.undo()


def log_probs(tiny: Any) -> torch.Tensor:
    model, _, ids = tiny
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(ids[None], torch.arange(LENGTH)[None], mask)[0]
    return torch.log_softmax(logits.float(), -1)[:-1].gather(-1, ids[1:, None])[:, 0]


def recorded(tiny: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probs under the model's own routes and those routes `[T, L, K]`."""
    from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    scores = log_probs(tiny)
    rows = torch.stack(RouterReplay.get_recorded_data(), 1)
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    return scores, rows


def replayed(tiny: Any, rows: torch.Tensor, loss: bool = True) -> torch.Tensor:
    from verl.utils.megatron import router_replay_utils as utils
    from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction

    model, config, ids = tiny
    ids_nested = torch.nested.as_nested_tensor([ids], layout=torch.jagged)
    nested = torch.nested.as_nested_tensor([rows.to(torch.int16)], layout=torch.jagged)
    response = torch.full((1, LENGTH - PROMPT), int(loss), dtype=torch.long)
    try:
        nested = utils.align_r3_router_replay_data(nested, ids_nested)
        mask = utils.build_r3_replay_mask(ids_nested, response)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        utils.set_router_replay_data(nested, None, config, replay_mask=mask, model=model)
        return log_probs(tiny)
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


def test_own_rows_reproduce_the_log_probs_exactly(tiny: Any):
    scores, rows = recorded(tiny)
    assert torch.equal(replayed(tiny, rows[:-1]), scores)


def test_f6_zero_rows_would_be_replayed_as_expert_0(tiny: Any):
    scores, rows = recorded(tiny)
    rows[-5:-1] = 0
    assert (replayed(tiny, rows[:-1]) - scores).abs().max() > 1e-3


def test_live_rows_leave_the_decision_to_the_router(tiny: Any):
    scores, rows = recorded(tiny)
    wrong = (rows + 1) % EXPERTS
    assert (replayed(tiny, wrong[:-1]) - scores).abs().max() > 1e-3
    wrong[:] = -1
    assert torch.equal(replayed(tiny, wrong[:-1]), scores)
    rows[PROMPT:] = -1
    assert torch.equal(replayed(tiny, rows[:-1]), scores)


def test_a_dropped_trajectory_is_not_replayed(tiny: Any):
    scores, rows = recorded(tiny)
    assert torch.equal(replayed(tiny, torch.full_like(rows[:-1], -1), loss=False), scores)


def test_f15_an_id_beyond_the_model_a_mixed_row_and_a_missing_layer_are_errors(tiny: Any):
    _, rows = recorded(tiny)
    high, mixed = rows.clone(), rows.clone()
    high[3, 0, 0], mixed[3, 0, 0] = EXPERTS, -1
    with pytest.raises((RuntimeError, IndexError)):
        replayed(tiny, high[:-1])
    with pytest.raises(RuntimeError, match="1 rows hold experts and -1 side by side"):
        replayed(tiny, mixed[:-1])
    with pytest.raises(RuntimeError, match="does not cover every forwarded MoE layer"):
        replayed(tiny, rows[:-1, : LAYERS - 1])
    with pytest.raises(RuntimeError, match="route rows for"):
        replayed(tiny, rows[:-2])


def test_without_our_class_a_row_of_minus_one_is_an_error(tiny: Any):
    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.utils.megatron.router_replay_utils import iter_model_routers

    from experiments.verl_backend.live_rows import allow_live_rows

    _, rows = recorded(tiny)
    rows[3] = -1
    try:
        for _, router in iter_model_routers(tiny[0]):
            router.__class__ = RouterReplay
        with pytest.raises((RuntimeError, IndexError)):
            replayed(tiny, rows[:-1])
    finally:
        allow_live_rows(tiny[0])


def test_our_engine_lets_the_routers_of_what_verl_builds_leave_rows_live(tiny: Any, monkeypatch: pytest.MonkeyPatch):
    from verl.utils.megatron.router_replay_patch import RouterReplay
    from verl.utils.megatron.router_replay_utils import iter_model_routers
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from experiments.verl_backend.live_rows import LiveRowReplay, LiveRowsEngine

    monkeypatch.setattr(MegatronEngineWithLMHead, "_build_megatron_module", lambda self: [tiny[0]])
    engine = object.__new__(LiveRowsEngine)
    for replays, expected in ((False, RouterReplay), (True, LiveRowReplay)):
        for _, router in iter_model_routers(tiny[0]):
            router.__class__ = RouterReplay
        engine.enable_routing_replay = replays
        assert engine._build_megatron_module() == [tiny[0]]
        assert {type(router) for _, router in iter_model_routers(tiny[0])} == {expected}


def test_verls_registry_prefers_our_engine_on_nvidia(monkeypatch: pytest.MonkeyPatch):
    from verl.workers.engine.base import EngineRegistry

    from experiments.verl_backend.live_rows import LiveRowsEngine

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert EngineRegistry.get_engine_cls("language_model", "megatron") is LiveRowsEngine
