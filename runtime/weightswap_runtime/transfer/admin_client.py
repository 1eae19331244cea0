"""Client of the admin plane of a server (`weightswap serve`), over HTTP or a Unix socket."""

from __future__ import annotations

import http.client
import math
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from weightswap_runtime.errors import Unsupported, WeightswapError, seconds_left
from weightswap_runtime.sources.location import printable

ENVIRONMENT = "WEIGHTSWAP_ADMIN_TOKEN"
_CHUNK = 1 << 20  # bytes of a file that are read at once
Piece = bytes | memoryview
_PATIENCE = 10.0  # seconds to connect, and to send each chunk of a request


class AdminRefused(WeightswapError):
    """The server refused a call; what it serves did not change."""

    def __init__(self, *lines: str, status: int = 0, kind: str = "", reason: str = "") -> None:
        """kind, reason: the class of the server's error, and its `reason`; or empty."""
        super().__init__(*lines)
        self.status, self.kind, self.reason = status, kind, reason


class AdminUnreachable(WeightswapError):
    """No server answers at the URL."""


class AdminClient:
    """Client of the admin plane of one server."""

    def __init__(self, url: str, token: str) -> None:
        """url: http://HOST:PORT, https://..., or unix:///PATH. Raises Unsupported."""
        self.where = printable(url)
        self._connect = _connector(url)
        self._headers = {"Authorization": f"Bearer {token}"}

    def get(self, path: str, timeout: float | None = None) -> Any:
        """Fetch a document. timeout: seconds for the answer. Raises AdminRefused and AdminUnreachable."""
        return self._call("GET", path, None, {}, timeout)

    def post(self, path: str, document: Any) -> Any:
        """Request a change and wait for it, without a timeout. Raises as `get`."""
        return self._call("POST", path, msgspec.json.encode(document), {"Content-Type": "application/json"})

    def upload(self, path: Path, name: str, digest: str, progress: Callable[[int, int], None]) -> Any:
        """Upload a file. progress: called with bytes sent and bytes in all. Raises as `get`, and OSError."""
        with path.open("rb") as file:
            headers = {"Content-Length": str(size_of(file)), "X-Weightswap-Blake3": digest}
            return self._call("PUT", f"/admin/uploads/{quote(name)}", pieces_of(file, progress), headers)

    def send(
        self,
        model: str,
        change: str,
        pieces: Iterable[Piece],
        size: int,
        options: Mapping[str, Any],
        timeout: float | None = None,
    ) -> Any:
        """Let a model take weights that come as they are sent: the `size` bytes of a safetensors file.

        change: "stage" or "swap". options: the fields of its request. timeout: seconds for all of it; None: no limit.
        Raises as `get`, and what the pieces raise.
        """
        path = f"/admin/models/{quote(model, safe='')}/{change}?" + urlencode({"options": msgspec.json.encode(options)})
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        return self._call("PUT", path, pieces, headers, timeout, waits=True)

    def _call(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        timeout: float | None = None,
        waits: bool = False,
    ) -> Any:
        """waits: the server may take long to read the body, within the timeout."""
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        with closing(self._connect()) as connection:
            try:
                connection.connect()
            except OSError as error:
                raise AdminUnreachable(f"{self.where}: no server answers there ({error})") from error
            try:
                if waits:
                    body = _until_answered(connection, body, deadline)
                self._send(connection, method, path, body, {**self._headers, **headers})
                connection.sock.settimeout(seconds_left(deadline))  # staging may take minutes
                response = connection.getresponse()
                content = response.read()
            except TimeoutError as error:
                raise AdminUnreachable(f"{self.where}: no answer in time; it may still do what it was asked") from error
            except (OSError, http.client.HTTPException) as error:
                raise AdminUnreachable(f"{self.where}: the connection was lost ({error!r})") from error
        if response.status >= 300:
            raise _refusal(self.where, response.status, content)
        return msgspec.json.decode(content) if content else None

    @staticmethod
    def _send(connection: Any, method: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
        try:
            connection.request(method, path, body, dict(headers))
        except (BrokenPipeError, ConnectionResetError):  # an upload refused midway: the response says why
            if method != "PUT":
                raise


def size_of(file: BinaryIO) -> int:
    """Return the bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def pieces_of(file: BinaryIO, progress: Callable[[int, int], None]) -> Iterator[bytes]:
    """Yield the content of a file. progress: called with the bytes that were taken and those in all."""
    done, size = 0, size_of(file)
    while piece := file.read(_CHUNK):
        yield piece
        done += len(piece)
        progress(done, size)


def read_token(path: Path | None) -> str:
    """Return the token of a file (the last word of the first line but comments) or environment. Raises Unsupported."""
    if path is None:
        token = os.environ.get(ENVIRONMENT, "").strip()
        if not token:
            raise Unsupported(f"no token: give --token-file FILE, or set {ENVIRONMENT}")
        return token
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"{path}: the token cannot be read ({error})") from error
    token = next((words[-1] for words in lines if words and not words[0].startswith("#")), "")
    if not token or not token.isascii():
        raise Unsupported(f"{path}: contains no token")
    return token


def _until_answered(
    connection: http.client.HTTPConnection, pieces: Iterable[Piece], deadline: float
) -> Iterator[Piece]:
    """Yield the pieces of a body, until the server answers: it has refused it, and does not want the rest."""
    answers = select.poll()
    if not isinstance(connection.sock, ssl.SSLSocket):  # which also gets what is no answer
        answers.register(connection.sock, select.POLLIN)
    for piece in pieces:
        connection.sock.settimeout(seconds_left(deadline))
        if answers.poll(0):
            return
        yield piece


def _connector(url: str) -> Callable[[], http.client.HTTPConnection]:
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        return lambda: _UnixConnection(path)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise Unsupported(f"{printable(url)}: is not a URL ({error})") from error
    if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/") or parts.query or "@" in url:
        raise Unsupported(f"{printable(url)}: expected http://HOST:PORT, https://HOST:PORT or unix:///PATH")
    if parts.scheme == "https":
        return lambda: http.client.HTTPSConnection(host, port, timeout=_PATIENCE)
    return lambda: http.client.HTTPConnection(host, port, timeout=_PATIENCE)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_PATIENCE)
        self.sock.connect(self._path)


def _refusal(where: str, status: int, content: bytes) -> AdminRefused:
    try:
        document = msgspec.json.decode(content)
        text, kind, reason = str(document["error"]), str(document.get("kind", "")), str(document.get("reason", ""))
        if status == 404 and not kind:  # no such endpoint
            text = f"{text}. Is {where} the port for operators?"
        return AdminRefused(*text.split("\n"), status=status, kind=kind, reason=reason)
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return AdminRefused(f"{where}: status {status}, without a reason; is it an admin plane?", status=status)
