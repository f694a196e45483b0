"""F10 to F12: verl's own `SGLangHttpServer.generate` with what SGLang 0.5.12 sends, without and with our module."""

import asyncio
import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verl.workers.rollout.sglang_rollout import async_sglang_server as server_module

from experiments.verl_backend import sglang_rows

ROWS = np.arange(9 * 4 * 2, dtype=np.int32).reshape(9, 4, 2)
PAYLOAD = base64.b64encode(ROWS.tobytes()).decode()


def generate(skip: bool, meta: dict[str, Any], layers: int = 4, top_k: int = 2, ids: tuple = (11, 12, 13, 14)) -> Any:
    server = object.__new__(server_module.SGLangHttpServer)
    server._disaggregation_role, server._pd_decode_peers, server.global_steps, server.replica_rank = "null", [], 7, 0
    server.config = SimpleNamespace(
        max_model_len=128,
        response_length=16,
        prompt_length=16,
        enable_rollout_routing_replay=True,
        skip_tokenizer_init=skip,
        mtp=None,
    )
    hf_config = SimpleNamespace(num_hidden_layers=layers, num_experts_per_tok=top_k)
    server.model_config = SimpleNamespace(hf_config=hf_config, lora_rank=0, lora={})
    scores = [(-0.1, token, None) for token in ids]

    async def reply():
        yield {
            "output_ids": list(ids),
            "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": scores, **meta},
        }

    server.tokenizer_manager = SimpleNamespace(generate_request=lambda request, _: reply())
    return asyncio.run(server.generate(list(range(6)), {"logprobs": True}, "r"))


@pytest.fixture(autouse=True)
def no_lora(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module.SGLangHttpServer, "lora_as_adapter", False)


def test_f10_upstreams_default_branch_cannot_read_base64():
    with pytest.raises(AttributeError, match="numpy"):
        generate(True, {"routed_experts": PAYLOAD})


def test_f11_upstreams_other_branch_imports_a_module_that_moved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, sglang_rows.MOVED, raising=False)
    with pytest.raises(ModuleNotFoundError):
        generate(False, {"routed_experts": PAYLOAD})


def test_f10_f11_with_our_module_the_rows_arrive():
    sglang_rows.install()
    output = generate(False, {"routed_experts": PAYLOAD})
    assert np.array_equal(output.routed_experts, ROWS)
    assert output.routed_experts.flags.writeable


def test_f12_an_abort_in_the_waiting_queue_has_no_rows_and_is_no_error():
    sglang_rows.install()
    assert generate(False, {}, ids=()).routed_experts.shape == (0, 4, 2)


def test_a_recorded_reply_of_sglang_goes_through_verls_server():
    folder = Path(__file__).parents[1] / "data" / "sglang" / "0.5.12"
    meta = json.loads((folder / "abort_segment_1.json").read_text())
    reply = meta.get("response", meta)["meta_info"]
    sglang_rows.install()
    rows = np.frombuffer(base64.b64decode(reply["routed_experts"]), np.int32)
    output = generate(False, {"routed_experts": reply["routed_experts"]}, layers=4, top_k=2)
    assert np.array_equal(output.routed_experts.ravel(), rows)
