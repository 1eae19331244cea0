"""Servers on loopback: a web server with injected faults, and moto's S3."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Event, Lock, Thread, current_thread
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit


class Request(NamedTuple):
    """Request: its path, the range of bytes, of which `stop` is the end, and its headers."""

    path: str
    start: int
    stop: int
    headers: dict[str, str]


class Content:
    """Content of an object. If `etag` or `modified` is None, the server does not send it."""

    def __init__(self, data: bytes, *, etag: str | None = "", modified: float | None = 1.7e9) -> None:
        self.data = data
        self.etag = f'"{hashlib.md5(data).hexdigest()}"' if etag == "" else etag
        self.modified = None if modified is None else formatdate(modified, usegmt=True)

    @property
    def validators(self) -> dict[str, str]:
        found = {"ETag": self.etag, "Last-Modified": self.modified}
        return {name: value for name, value in found.items() if value is not None}


Answer = Callable[["Handler", Request], None]
Fault = Callable[["Handler", Request], bool]


class WebServer(AbstractContextManager["WebServer"]):
    """Server of `contents` by path. `fault(handler, request)` may answer instead, and then returns True."""

    def __init__(self, handler: type[Handler] | None = None) -> None:
        self.contents: dict[str, Content] = {}
        self.fault: Fault | None = None
        self.preconditions = True
        self.requests: list[Request] = []
        self.sent = 0
        self.busy = self.busiest = 0
        self.released = Event()
        self.open: dict[socket.socket, Thread] = {}
        self.lock = Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler or Handler,), {"web": self}))
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.address = f"127.0.0.1:{self._http.server_port}"
        self.url = f"http://{self.address}"
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def put(self, name: str, data: bytes, **validators: str | float | None) -> str:
        """Serve bytes, and return their URL."""
        self.contents[f"/{name}"] = Content(data, **validators)  # type: ignore[arg-type]
        return f"{self.url}/{name}"

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        with self.lock:
            left = dict(self.open)
        for connection in left:  # connections that clients keep alive
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in left.values():
            thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: WebServer

    def handle(self) -> None:
        with self.web.lock:
            self.web.open[self.connection] = current_thread()
        try:
            with suppress(ConnectionError):  # clients that closed the connection
                super().handle()
        finally:
            with self.web.lock:
                del self.web.open[self.connection]

    def do_GET(self) -> None:
        web = self.web
        path = self.path.partition("?")[0]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        request = Request(path, int(first), int(last) + 1 if last else 1 << 60, dict(self.headers))
        with web.lock:
            web.requests.append(request)
            web.busy += 1
            web.busiest = max(web.busiest, web.busy)
        try:
            with suppress(ConnectionError):
                if web.fault is None or not web.fault(self, request):
                    self.serve(request)
        finally:
            with web.lock:
                web.busy -= 1

    def serve(self, request: Request) -> None:
        content = self.web.contents.get(request.path)
        if content is None:
            self.reply(404)
        elif self.web.preconditions and not self.holds(content):
            self.reply(412)
        elif request.start >= len(content.data):
            self.reply(416, headers={"Content-Range": f"bytes */{len(content.data)}"})
        else:
            self.reply(206, content.data[request.start : request.stop], self.headers_of(content, request))

    def headers_of(self, content: Content, request: Request) -> dict[str, str]:
        stop = min(request.stop, len(content.data))
        return {"Content-Range": f"bytes {request.start}-{stop - 1}/{len(content.data)}", **content.validators}

    def holds(self, content: Content) -> bool:
        """Return True if the preconditions of the request are met."""
        wanted, since = self.headers.get("If-Match"), self.headers.get("If-Unmodified-Since")
        return (wanted is None or wanted == content.etag) and (since is None or since == content.modified)

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, cut: int = 0) -> None:
        """Send a response. `cut` bytes are left out at the end, and the connection is closed."""
        with self.web.lock:
            self.web.sent += len(body) - cut
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(memoryview(body)[: len(body) - cut])
        if cut:
            self.close_connection = True

    def reset(self) -> None:
        """Reset the connection, like a crash."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


class Bucket(Protocol):
    def put(self, name: str, data: bytes) -> Any: ...
    def remove(self, name: str) -> None: ...
    def url(self, name: str) -> str: ...


class MemoryBucket:
    def __init__(self) -> None:
        import fsspec

        self._fs: Any = fsspec.filesystem("memory")
        self._fs.store.clear()
        self._fs.pseudo_dirs[:] = [""]

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"/weights/{name}", data)

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"/weights/{name}")

    def url(self, name: str) -> str:
        return f"memory://weights/{name}"


class S3Bucket:
    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, name: str, data: bytes) -> Any:
        return self.client.put_object(Bucket="weights", Key=name, Body=data)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket="weights", Key=name)

    def url(self, name: str) -> str:
        return f"s3://weights/{name}"


class S3Server(AbstractContextManager["S3Server"]):
    """Server of moto. `options` are the options of s3fs that lead to it."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        address, port = self._server.get_host_and_port()
        url = f"http://{address}:{port}"
        self.options = {
            "endpoint_url": url,
            "key": "test",
            "secret": "test",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def new_bucket(self) -> S3Bucket:
        """Delete all buckets, and create an empty one."""
        import boto3
        import requests

        url = self.options["endpoint_url"]
        requests.post(f"{url}/moto-api/reset", timeout=120)
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=url, **keys)
        client.create_bucket(Bucket="weights")
        return S3Bucket(client)

    def __exit__(self, *_: object) -> None:
        self._server.stop()


class CloudStorage(Handler):
    """Handler for the requests of gcsfs to Google Cloud Storage's JSON API, for a bucket `weights`.

    https://cloud.google.com/storage/docs/json_api/v1/objects
    """

    def serve(self, request: Request) -> None:
        query = dict(parse_qsl(urlsplit(self.path).query))
        folder, _, key = unquote(request.path).partition("/b/weights/o")
        content = self.web.contents.get(key)
        if folder == "/storage/v1" and not key:
            self.list(query["prefix"])
        elif content is None or query.get("generation", content.etag) != content.etag:
            self.reply(404, b"{}")
        elif query.get("alt") == "media":
            super().serve(request._replace(path=key))
        else:
            self.reply(200, json.dumps(self.described(key)).encode())

    def described(self, key: str) -> dict[str, Any]:
        content = self.web.contents[key]
        size = str(len(content.data))
        return {
            "name": key[1:],
            "bucket": "weights",
            "size": size,
            "generation": content.etag,
            "kind": "storage#object",
        }

    def list(self, prefix: str) -> None:
        keys = [key for key in self.web.contents if key[1:].startswith(prefix)]
        files = [key for key in keys if "/" not in key[1 + len(prefix) :]]
        self.reply(200, json.dumps({"items": [self.described(key) for key in files]}).encode())


class CloudBucket:
    """Bucket of a server with `CloudStorage` as its handler."""

    def __init__(self, server: WebServer) -> None:
        self._server = server
        self._generations = count(1)

    def put(self, name: str, data: bytes) -> None:
        self._server.put(name, data, etag=str(next(self._generations)))

    def remove(self, name: str) -> None:
        del self._server.contents[f"/{name}"]

    def url(self, name: str) -> str:
        return f"gs://weights/{name}"


class Hub(Handler):
    """Handler for the requests of huggingface_hub's file system to the Hub, for a repository `org/weights`.

    https://huggingface.co/docs/hub/api
    """

    def serve(self, request: Request) -> None:
        query = dict(parse_qsl(urlsplit(self.path).query))
        path = unquote(request.path)
        if path == "/api/models/org/weights":
            self.reply(200, json.dumps({"id": "org/weights"}).encode())
        elif path.startswith("/api/models/org/weights/tree/main"):
            self.list(path.removeprefix("/api/models/org/weights/tree/main").strip("/"), query["expand"] == "true")
        elif path.startswith("/org/weights/resolve/main/"):
            super().serve(request._replace(path=path.removeprefix("/org/weights/resolve/main")))
        else:
            self.reply(404, headers={"X-Error-Code": "RepoNotFound"})

    def list(self, folder: str, expand: bool) -> None:
        inside = f"/{folder}/" if folder else "/"
        found = {key: content for key, content in self.web.contents.items() if key.startswith(inside)}
        if not found and folder:
            self.reply(404, headers={"X-Error-Code": "EntryNotFound"})
            return
        files = [self.described(key, expand) for key in found if "/" not in key[len(inside) :]]
        folders = sorted({inside + key[len(inside) :].partition("/")[0] for key in found} - found.keys())
        rows = [*files, *({"type": "directory", "path": key[1:], "oid": "0"} for key in folders)]
        self.reply(200, json.dumps(rows).encode())

    def described(self, key: str, expand: bool) -> dict[str, Any]:
        content = self.web.contents[key]
        row = {"type": "file", "path": key[1:], "size": len(content.data), "oid": content.etag}
        commit = {"id": "0", "title": "a commit", "date": "2026-01-01T00:00:00.000Z"}
        return row | {"lastCommit": commit} if expand else row


class HubBucket:
    """Repository of a server with `Hub` as its handler."""

    def __init__(self, server: WebServer) -> None:
        self.server = server

    def put(self, name: str, data: bytes) -> None:
        self.server.put(name, data)

    def remove(self, name: str) -> None:
        del self.server.contents[f"/{name}"]

    def url(self, name: str) -> str:
        return f"hf://org/weights/{name}"
