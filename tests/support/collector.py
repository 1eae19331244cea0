"""Collector of spans sent by OTLP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple


class Collected(NamedTuple):
    """Requests that were posted, as path and body, and the environment for a process that sends spans here."""

    posts: list[tuple[str, bytes]]
    environment: dict[str, str]


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posts.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def collecting() -> Iterator[Collected]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as collector:
        where = f"http://127.0.0.1:{collector.server_address[1]}"
        collected = Collected([], {"OTEL_EXPORTER_OTLP_ENDPOINT": where})
        collector.posts = collected.posts  # type: ignore[attr-defined]
        thread = Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collected
        finally:
            collector.shutdown()
            thread.join()
