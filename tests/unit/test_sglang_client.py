"""HTTP to the server: what a connection, a proxy or a reply of another program does to it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from experiments.engines.sglang.client import ConnectionLost, ServerRefused, SGLangClient
from tests.unit.sglang_kit import loopback_server


@contextmanager
def answering(*pieces: bytes, every_s: float = 0.0) -> Iterator[str]:
    """Yields the URL of a server that answers the first request with `pieces`, one after another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                for piece in pieces:
                    try:
                        connection.sendall(piece)
                    except OSError:  # the client has given up
                        return
                    time.sleep(every_s)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def ask(url: str, what: str, *arguments, timeout_s: float = 30.0):
    """Returns the result of one call of a client."""

    async def call():
        client = SGLangClient(url, max_connections=1, request_timeout_s=timeout_s)
        try:
            return await getattr(client, what)(*arguments)
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(call(), 20))


def test_a_reply_that_trickles_counts_as_hung():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
    with answering(head, *[b"{"] * 200, every_s=0.1) as url:
        started = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"/generate: no answer within 0.5 s") as error:
            ask(url, "generate", {}, timeout_s=0.5)
        assert error.value.hung
        assert time.monotonic() - started < 10


def test_a_reply_that_is_cut_off_is_a_lost_connection():
    with (
        answering(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"output_ids"') as url,
        pytest.raises(ConnectionLost),
    ):
        ask(url, "generate", {})


def test_bytes_that_are_not_what_they_are_said_to_be_are_a_lost_connection():
    with (
        answering(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}") as url,
        pytest.raises(ConnectionLost, match="DecodingError"),
    ):
        ask(url, "generate", {})


PAGE = b"<html><body>Welcome</body></html>"
HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE)


def test_a_page_instead_of_json_is_no_answer_of_a_server():
    with answering(HTML) as url, pytest.raises(ServerRefused, match=r"/server_info: an object expected, .*<html>"):
        ask(url, "server_info")
    with answering(HTML) as url:
        assert "<html>" in ask(url, "generate", {})["error"]["message"]


def test_no_proxy_stands_between_us_and_the_loopback_interface(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with loopback_server() as server:
        assert ask(server.url, "healthy")


def test_a_url_may_end_in_a_slash():
    with loopback_server() as server:
        assert ask(f"{server.url}/", "healthy")
        assert server.calls == ["/health"]
