"""A W&B server on the loopback interface: answers what wandb 0.31's client asks over HTTP when it lists runs and scans
their history (queries recorded from that client), and keeps what it was asked.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import polars as pl

KEY = "0123456789" * 4
ENTITY, PROJECT = "team", "study"


@dataclass
class ServerRun:
    """A run as the server holds it.

    Attributes:
        rows: the history; NaN and infinity as W&B's JSON has them, strings.
        seconds: how long it ran, as its summary says.
        exported: how many of the rows the server has moved to a parquet file; the rest is "live".
    """

    name: str
    job_type: str | None = "replace"
    config: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[dict[str, Any]] = ()
    exported: int = 0
    seconds: float | None = None
    state: str = "finished"
    group: str = "pr6046"
    tags: Sequence[str] = ("replace",)
    heartbeat: str = "2026-11-01T01:00:00Z"


class WandbServer:
    """The server: `runs` by what it holds, `requests` by what it was asked: (operation, variables)."""

    def __init__(self, runs: Sequence[ServerRun]):
        self.runs = list(runs)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.failures: list[int] = []
        """HTTP statuses to answer the next `Runs` queries with."""
        self.url = ""

    def operations(self) -> list[str]:
        """The names of the queries, in order."""
        return [name for name, _ in self.requests]

    def answer(self, query: str, variables: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns HTTP status and body of one GraphQL query."""
        match = re.search(r"query (\w+)", query)
        assert match, query
        operation = match[1]
        self.requests.append((operation, variables))
        if operation in ("Viewer", "GetDefaultEntity"):
            viewer = {"id": "1", "entity": ENTITY, "username": "u", "email": "", "flags": "{}", "teams": {"edges": []}}
            return 200, {"data": {"viewer": viewer}}
        if (variables["entity"], variables["project"]) != (ENTITY, PROJECT):
            return 200, {"data": {"project": None}}
        if operation == "Runs":
            return (self.failures.pop(0), {}) if self.failures else (200, self._runs(variables))
        (name,) = (variables[key] for key in ("name", "runName", "run") if key in variables)
        run = next(run for run in self.runs if run.name == name)
        return 200, {"data": {"project": {"run": getattr(self, f"_{operation}")(run, variables)}}}

    def _runs(self, variables: dict[str, Any]) -> dict[str, Any]:
        begin = int(variables.get("cursor") or 0)
        end = begin + variables["perPage"]
        edges = [
            {"node": _node(run), "cursor": str(index)}
            for index, run in enumerate(self.runs[begin:end], start=begin + 1)
        ]
        page = {"endCursor": edges[-1]["cursor"] if edges else None, "hasNextPage": end < len(self.runs)}
        project = {"internalId": "7", "runCount": len(self.runs), "readOnly": False}
        return {"data": {"project": {**project, "runs": {"edges": edges, "pageInfo": page}}}}

    def _RunHistoryKeys(self, run: ServerRun, variables: dict[str, Any]) -> dict[str, Any]:
        return {"historyKeys": _history_keys(run)}

    def _RunParquetHistory(self, run: ServerRun, variables: dict[str, Any]) -> dict[str, Any]:
        live = [{"_step": row["_step"]} for row in run.rows[run.exported :]]
        urls = [f"{self.url}/exports/{run.name}.parquet"] if run.exported else []
        return {"parquetHistory": {"parquetUrls": urls, "liveData": live}}

    def _HistoryPage(self, run: ServerRun, variables: dict[str, Any]) -> dict[str, Any]:
        low, high = variables["minStep"], variables["maxStep"]
        return {"history": [json.dumps(row) for row in run.rows if low <= row["_step"] < high]}

    def export(self, name: str) -> bytes:
        """Returns the parquet file of a run's exported rows."""
        run = next(run for run in self.runs if run.name == name)
        rows = [{key: _number(value) for key, value in row.items()} for row in run.rows[: run.exported]]
        file = io.BytesIO()
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(file)
        return file.getvalue()


def _number(value: Any) -> Any:
    spelled = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    return spelled.get(value, value) if isinstance(value, str) else value


def _history_keys(run: ServerRun) -> dict[str, Any]:
    return {"lastStep": max((row["_step"] for row in run.rows), default=-1), "keys": {}, "sets": []}


def _node(run: ServerRun) -> dict[str, Any]:
    return {
        "id": f"storage-{run.name}",
        "projectId": "7",
        "name": run.name,
        "displayName": run.name,
        "state": run.state,
        "group": run.group,
        "jobType": run.job_type,
        "tags": list(run.tags),
        "config": json.dumps({key: {"value": value} for key, value in run.config.items()}),
        "summaryMetrics": json.dumps({} if run.seconds is None else {"_runtime": run.seconds}),
        "systemMetrics": "{}",
        "historyLineCount": len(run.rows),
        "historyKeys": _history_keys(run),
        "sweepName": None,
        "commit": None,
        "readOnly": False,
        "createdAt": "2026-11-01T00:00:00Z",
        "heartbeatAt": run.heartbeat,
        "description": "",
        "notes": "",
        "user": {"name": "u", "username": "u"},
    }


@contextmanager
def serve(*runs: ServerRun) -> Iterator[WandbServer]:
    """Yields a running server on a free port of the loopback interface."""
    server = WandbServer(runs)
    authorization = f"Basic {base64.b64encode(f'api:{KEY}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, server.export(self.path.removeprefix("/exports/").removesuffix(".parquet")))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if self.path != "/graphql":  # the client's own telemetry
                return self._send(200, b"{}")
            if self.headers["Authorization"] != authorization:
                return self._send(401, b'{"errors": [{"message": "user is not logged in"}]}')
            asked = json.loads(body)
            status, answer = server.answer(asked["query"], asked.get("variables") or {})
            self._send(status, json.dumps(answer).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
