"""Is this the server that the run needs? Asked once, before any rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen3MoeConfig

from experiments.engines.base import Request
from experiments.engines.sglang.client import Sampling, ServerRefused, SGLangClient, request_body
from experiments.engines.sglang.reply import Sent, parse_reply
from strategies.reply import ReplyError, RowShape

REQUIRED: dict[str, tuple[Any, str]] = {
    "enable_return_routed_experts": (True, "start it with --enable-return-routed-experts, or no rows come"),
    "speculative_algorithm": (None, "rows are not recorded reliably with speculative decoding"),
    "enable_eplb": (False, "expert load balancing records physical instead of logical expert ids"),
    "pp_size": (1, "pipeline stages record the rows of their own layers only"),
    "disaggregation_mode": ("null", "a decode worker never routed the prompt"),
}
"""Settings of a server whose rows can be replayed, and why."""

DTYPE_NAMES = {"half": "float16", "float": "float32"}
"""Other names that SGLang takes."""

SIZES = (
    *("num_hidden_layers", "num_experts", "num_experts_per_tok", "vocab_size", "hidden_size"),
    *("moe_intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Of a model's configuration: what weights must fit."""


async def check_identity(client: SGLangClient, folder: Path) -> None:
    """Raises unless the server that answers was started on `folder`, whose name no other run has.

    A port that was free when ours was told to take it may have become another server's before ours got there.

    Raises:
        ServerRefused: names both folders.
    """
    held = (await client.model_info()).get("model_path")
    if held != str(folder):
        raise ServerRefused(
            f"{client.url}: a server of {folder} expected, one of {held} answers: another program took the port while "
            "ours was starting; start again, or set engine.server.port to a free port"
        )


async def check_settings(client: SGLangClient, prefix_cache: bool) -> None:
    """Raises unless the server's settings allow its rows to be replayed. `prefix_cache`: it may keep one.

    Raises:
        ServerRefused: names the setting, its value and what is needed.
    """
    info = await client.server_info()
    for name, (wanted, reason) in REQUIRED.items():
        if info.get(name, wanted) != wanted:
            raise ServerRefused(f"{client.url}: {name}={wanted} expected, {info[name]} came: {reason}")
    if not prefix_cache and not info.get("disable_radix_cache", False):
        raise ServerRefused(
            f"{client.url}: disable_radix_cache=True expected, False came: after an update in place new requests would "
            "be served from the KV cache of older weights; start it with --disable-radix-cache"
        )


async def check_dtype(client: SGLangClient, dtype: str) -> None:
    """Raises unless the server computes in `dtype`.

    Raises:
        ServerRefused: names both.
    """
    came = (await client.server_info()).get("dtype", dtype)
    if DTYPE_NAMES.get(came, came) != dtype:
        hint = " (float16 for a float32 checkpoint)" if came == "auto" else ""
        raise ServerRefused(
            f"{client.url}: dtype={dtype} expected, {came} came{hint}: start it with --dtype {dtype}, or set "
            "engine.dtype to what it computes in"
        )


async def check_sizes(client: SGLangClient, config: Qwen3MoeConfig) -> None:
    """Raises unless weights of `config` fit the model that the server was started on, where its folder can be read.

    Weights of other sizes are not simply refused: SGLang leaves out what it has no place for.

    Raises:
        ServerRefused: names the first size that differs.
    """
    path = Path(str((await client.server_info()).get("model_path"))) / "config.json"
    if not path.is_file():
        return
    # Not the JSON's own keys: transformers 5 writes num_experts as num_local_experts.
    theirs = Qwen3MoeConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    for name in SIZES:
        ours = getattr(config, name)
        if (came := getattr(theirs, name, ours)) != ours:
            raise ServerRefused(f"{client.url}: {name}={ours} expected, {came} came ({path})")


async def check_model(client: SGLangClient, shape: RowShape, sampling: Sampling, name: str) -> None:
    """Raises unless one generated token comes back with rows of the model's layers and experts.

    Raises:
        ServerRefused: names what was expected and what came.
    """
    request = Request(f"{name}-probe", np.arange(3, dtype=np.int32), max_new_tokens=1, sample_seed=0)
    body = await client.generate(request_body(request, sampling, request.request_id))
    try:
        parse_reply(numbered(body), Sent(request.request_id, 3, 1, rid=request.request_id), shape)
    except ReplyError as error:
        raise ServerRefused(
            f"{client.url}: a model of {shape.num_layers} layers and {shape.top_k} of {shape.num_experts} experts is "
            f"expected, its first reply does not fit: {error}"
        ) from error


def numbered(body: Any) -> Any:
    """Returns the reply without its weight version where that is no number of syncs, as on a server fresh from its
    start.
    """
    meta = body.get("meta_info") if isinstance(body, dict) else None
    if isinstance(meta, dict) and meta.get("weight_version") == "default":
        kept = {key: value for key, value in meta.items() if key not in ("weight_version", "weight_versions")}
        return {**body, "meta_info": kept}
    return body
