"""A stand-in for an SGLang server on the loopback interface: HTTP and states of the real one, no model behind it.

It answers as SGLang 0.5.23 does to the requests of the engine, at a fixed number of tokens per second, and misbehaves
on demand. What only a model can show is tested against the real server (tests/sglang).
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

LAYERS, TOP_K, EXPERTS, VOCAB = 3, 2, 8, 32
TOKEN_S = 0.002


class LoopbackServer(ThreadingHTTPServer):
    """State of the pretended server.

    Attributes:
        faults: by path, what the next call of it does instead: `drop` (closes the connection), `hang`, or a status and
            a JSON body.
        settings: of /server_info.
        calls: paths that were asked for, in order; `bodies`: of /generate.
        held, config: tensors and configuration of the last update.
        groups: process groups that were joined; broadcasts: of each, how many bytes, and what else was asked for.
    """

    daemon_threads = True
    request_queue_size = 128  # many clients at once; beyond it the kernel resets connections

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Condition()
        self.version, self.model_path = "default", ""
        self.paused = False
        self.aborted = 0
        self.retracted = 0
        self.layers, self.top_k = LAYERS, TOP_K
        self.token_s = TOKEN_S
        self.faults: dict[str, list[Any]] = {}
        self.settings: dict[str, Any] = {"enable_return_routed_experts": True, "disable_radix_cache": True}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.held: dict[str, np.ndarray] = {}
        self.config: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}
        self.broadcasts: list[tuple[int, dict[str, Any]]] = []
        self.updating = False
        self.most_under_way = self.under_way = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are gone are part of the tests."""

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns a reply; blocks while paused and for `token_s` per token."""
        with self.lock:
            self.bodies.append(body)
            self.lock.wait_for(lambda: not self.paused)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            aborted, retracted = self.aborted, self.retracted
        versions: list[str] = []
        finish: dict[str, Any] = {"type": "length", "length": body["sampling_params"]["max_new_tokens"]}
        while len(versions) < body["sampling_params"]["max_new_tokens"]:
            with self.lock:
                if self.aborted > aborted:
                    finish = {"type": "abort", "message": "Aborted", "status_code": None}
                    break
                self.lock.wait_for(lambda: not self.paused or self.aborted > aborted)
                if self.aborted == aborted:
                    versions.append(self.version)
            time.sleep(self.token_s)
        with self.lock:
            self.under_way -= 1
            retractions = self.retracted - retracted
        return self.reply(body, versions, finish, retractions)

    def reply(
        self, body: dict[str, Any], versions: list[str], finish: dict[str, Any], retractions: int
    ) -> dict[str, Any]:
        """Returns the JSON of tokens 1, 2, 3, ... with log-probs -0.1, -0.2, ... and rows that encode the position."""
        s, n = len(body["input_ids"]), len(versions)
        positions = np.arange(body["routed_experts_start_len"], max(s + n - 1, 0))
        rows = (positions[:, None, None] + np.arange(self.top_k)) % EXPERTS
        rows = np.broadcast_to(rows, (len(positions), self.layers, self.top_k))
        edges = [0, *(i for i in range(1, n) if versions[i] != versions[i - 1]), n]
        spans = [
            {"version": versions[start] if n else self.version, "start": start, "end": end}
            for start, end in itertools.pairwise(edges)
        ]
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": s,
            "completion_tokens": n,
            "cached_tokens": 0,
            "num_retractions": retractions,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "output_token_logprobs": [[-(i + 1) / 10, (i + 1) % VOCAB, None] for i in range(n)],
            "output_token_logprobs_length": n,
        }
        if self.settings["enable_return_routed_experts"] and not (n == 0 and finish["type"] == "abort"):
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return {"output_ids": [(i + 1) % VOCAB for i in range(n)], "meta_info": meta}

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Takes the weights of a folder."""
        self.held = dict(load_file(Path(body["model_path"]) / "model.safetensors"))
        self.config = json.loads((Path(body["model_path"]) / "config.json").read_text())
        self.version, self.model_path = body["weight_version"], body["model_path"]
        return {"success": True, "message": "Succeeded to update model weights."}

    def join(self, group: dict[str, Any]) -> dict[str, Any]:
        """Joins as rank 1 of two, by the keys that torch's own helper uses."""
        name, timeout = group["group_name"], timedelta(seconds=10)
        store: Any = dist.TCPStore(group["master_address"], group["master_port"], 2, timeout=timeout)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.groups[name] = dist.ProcessGroupGloo(store, group["rank_offset"], group["world_size"], timeout)
        return {"success": True, "message": "joined"}

    def receive(self, body: dict[str, Any]) -> dict[str, Any]:
        """Takes the tensors of one broadcast."""
        if not self.updating:
            return {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        self.groups[body["group_name"]].broadcast(data, 0).wait()
        for name, dtype, shape, piece in zip(body["names"], dtypes, body["shapes"], data.split(sizes), strict=True):
            self.held[name] = piece.clone().view(dtype).reshape(shape).numpy()
        self.broadcasts.append((len(data), {key: body[key] for key in ("flush_cache", "weight_version")}))
        self.version = body["weight_version"] or self.version
        return {"success": True, "message": "Succeeded to update parameter online."}

    def session(self, opens: bool) -> dict[str, Any]:
        """Opens or closes an update."""
        if self.updating == opens:
            return {"success": False, "message": "a session is already open" if opens else "no session is open"}
        self.updating = opens
        return {"success": True, "message": "Success"}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the JSON of one call."""
        if path == "/generate":
            return self.generate(body)
        if path == "/init_weights_update_group":
            return self.join(body)
        if path == "/update_weights_from_distributed":
            return self.receive(body)
        if path in ("/begin_weight_update", "/end_weight_update"):
            return self.session(path.startswith("/begin"))
        if path == "/destroy_weights_update_group":
            return {"success": self.groups.pop(body["group_name"], None) is not None, "message": ""}
        with self.lock:
            if path == "/pause_generation":
                self.paused = True
                self.aborted += body["mode"] == "abort"
                self.retracted += body["mode"] == "retract"
            elif path == "/continue_generation":
                self.paused = False
            elif path == "/abort_request":
                self.aborted += 1
            elif path == "/update_weights_from_disk":
                return self.update(body)
            elif path == "/model_info":
                return {"weight_version": self.version, "model_path": self.model_path}
            elif path == "/server_info":
                return self.settings
            self.lock.notify_all()
        return {"status": "ok"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackServer

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        self.server.calls.append(self.path)
        faults = self.server.faults.get(self.path)
        fault = faults.pop(0) if faults else None
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
        elif fault == "hang":
            time.sleep(1.0)
            self.close_connection = True
        elif fault is not None:
            self.write(*fault)
        elif self.path == "/health" and self.server.paused:  # it is asked to generate a token
            self.write(503, {})
        else:
            self.write(200, self.server.answer(self.path, body))

    do_GET = do_POST

    def write(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The tests read `calls`."""


@contextmanager
def loopback_server() -> Iterator[LoopbackServer]:
    """Yields a running stand-in."""
    server = LoopbackServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        with server.lock:
            server.paused, server.aborted = False, server.aborted + 1
            server.lock.notify_all()
        server.shutdown()
        thread.join()
        server.server_close()
