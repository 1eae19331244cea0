"""Who may do what at the admin plane: its settings, tokens, and the paths and URLs that operators may name.

A path counts with its links resolved, and so does each file when it is opened. A URL is compared letter by letter, so
one that a server may read in two ways is refused: with escapes, dots, doubled slashes, a user, a fragment. Redirects of
an allowed server are followed to allowed hosts.
"""

from __future__ import annotations

import hmac
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightswap_runtime.errors import Unsupported, brief
from weightswap_runtime.sources.byte_source import GuardedPath
from weightswap_runtime.sources.location import GuardedUrl, Location, as_location, printable
from weightswap_server.errors import Forbidden, NotThere
from weightswap_server.settings import Settings

ENVIRONMENT = "WEIGHTSWAP_ADMIN_TOKEN"
LEAST = 16  # characters of a token
ANYBODY = "token"  # the name of an unnamed token
_LINE = re.compile(r"(?:([\w.@-]{1,64})[ \t]+)?(\S+)")
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)
UPLOAD = "upload:"
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*")  # no percent-encoding: the checked URL is the requested one
_DOTS = re.compile(r"(?:^|/)\.{1,2}(?:/|$)")
_VERSION = re.compile(r"(?:versionId=[\w.-]+)?")
_PORTS = {"http": 80, "https": 443}
_GOLDENS = ".goldens.safetensors"
_MOST_ENTRIES = 10_000  # of a folder that is looked through for links
_GIB = 1 << 30
_MIB = 1 << 20


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the admin plane. Times are in seconds, sizes in bytes. It has either a port or a socket."""

    host: str = "127.0.0.1"
    port: int | None = None  # of TCP; 0: any free one
    socket: str | None = None  # the path of a Unix socket
    token_file: str | None = None  # a token, or lines of a name and a token; None: WEIGHTSWAP_ADMIN_TOKEN
    allow: tuple[str, ...] = ()  # directories and URL prefixes that operators may name
    upload_dir: str | None = None  # None: no uploads
    max_uploads: int = 64 * _GIB  # of all uploads together
    upload_keep: int | None = None  # earlier weights whose uploads stay once others are served; None: all stay
    upload_timeout: float = 3600.0  # for one upload
    audit_log: str | None = None  # a file of JSON lines
    staged_timeout: float = 3600.0  # after which staged weights are discarded
    body_timeout: float = 30.0
    grace: float = 5.0

    def check(self) -> None:
        """Raise Unsupported for values out of range, without tokens, and unless there is one of port and socket."""
        if (self.port is None) == (self.socket is None):
            raise Unsupported("the admin plane listens on a port or on a socket: give exactly one of them")
        for name in ("max_uploads", "upload_timeout", "staged_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise Unsupported(f"{name}={getattr(self, name)}: expected more than 0")
        if self.upload_keep is not None and (self.upload_dir is None or self.upload_keep < 1):
            raise Unsupported(
                f"--upload-keep {self.upload_keep}: expected 1 or more earlier weights, and --upload-dir with them"
            )
        read_tokens(self.token_file)

    @property
    def http(self) -> Settings:
        """The HTTP limits of all requests but uploads."""
        return Settings(
            host=self.host, max_body=_MIB, body_timeout=self.body_timeout, max_connections=64, grace=self.grace
        )


class Tokens:
    """Named tokens, compared in constant time."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        """tokens: by name. Raises Unsupported without tokens, and for one that is too short."""
        if not tokens:
            raise Unsupported(f"the admin plane needs a token: --admin-token-file FILE, or {ENVIRONMENT}")
        if short := [name for name, token in tokens.items() if len(token) < LEAST]:
            raise Unsupported(
                f"the token {short[0]!r} is shorter than {LEAST} characters; `openssl rand -hex 32` makes a good one"
            )
        self._tokens = {name: token.encode() for name, token in tokens.items()}

    def name_of(self, candidate: bytes) -> str | None:
        """Return the name of a token, or None if it is unknown."""
        match = None
        for name, token in self._tokens.items():
            if hmac.compare_digest(token, candidate):
                match = name
        return match


def read_tokens(path: str | None) -> Tokens:
    """Read the tokens of a file, or without one, of the environment. Raises Unsupported."""
    if path is None:
        token = os.environ.get(ENVIRONMENT, "").strip()
        return Tokens({ANYBODY: token} if token else {})
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"{path}: the tokens cannot be read ({error})") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None or (match[1] or ANYBODY) in tokens:
            raise Unsupported(f"{path}, line {number}: expected a token, or a new name and a token")
        tokens[match[1] or ANYBODY] = match[2]
    return Tokens(tokens)


class TokenGuard:
    """An ASGI application that passes requests with a token on to another application, and refuses all others.

    `scope["state"]["who"]` is the token's name. open_paths: paths that need no token, such as a page without data.
    """

    def __init__(
        self, app: ASGIApp, tokens: Tokens, refuse: Callable[[Scope], Response], open_paths: frozenset[str]
    ) -> None:
        self._app, self._tokens, self._refuse, self._open = app, tokens, refuse, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who = self._who(scope)
        if who is None and scope["path"] not in self._open:
            await self._refuse(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["who"] = who or ""
        await self._app(scope, receive, send)

    def _who(self, scope: Scope) -> str | None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
        return self._tokens.name_of(match[1]) if match else None


class FilesInUse:
    """The files that operators' requests are reading. None is removed from the check of its path until it is staged."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._readers: Counter[str] = Counter()  # by path

    @contextmanager
    def using(self, *sources: str | Location) -> Iterator[None]:
        """Keep local files where they are within the block. It waits for a removal under way, and begins after it."""
        paths = [os.path.realpath(path) for path in map(as_location, sources) if isinstance(path, Path)]
        with self._lock:
            self._readers.update(paths)
        try:
            yield
        finally:
            with self._lock:
                self._readers -= Counter(paths)

    @contextmanager
    def frozen(self) -> Iterator[frozenset[str]]:
        """Yield the paths of the files in use. Within the block no request begins to use one."""
        with self._lock:
            yield frozenset(self._readers)


class AllowList:
    """Allowed directories, with everything in them, and URL prefixes."""

    def __init__(self, entries: Sequence[str], upload_dir: Path | None = None) -> None:
        """Raises Unsupported for a directory that does not exist, and for a URL that cannot be a prefix."""
        self._prefixes = [_prefix(entry) for entry in entries if "://" in entry]
        self._roots = [_root(entry) for entry in entries if "://" not in entry]
        self._upload_dir = upload_dir
        self.files = FilesInUse()
        readable = (*self._roots, upload_dir) if upload_dir is not None else tuple(self._roots)

        class AllowedPath(GuardedPath):
            @classmethod
            def admits(cls, opened: Path) -> bool:
                return _is_inside(opened, readable)

        self._path_class = AllowedPath

    @contextmanager
    def weights(self, source: str) -> Iterator[Location]:
        """Yield the path, with links resolved, or URL of an operator's `source`, to be read only while links and
        redirects do not lead elsewhere. A local file is in use within the block. Raises Forbidden and NotThere."""
        location = self._location(source)
        with self.files.using(location):
            if source.startswith(UPLOAD) and isinstance(location, Path) and not location.exists():
                raise NotThere(f"no upload is named {location.name}")
            yield location

    def _location(self, source: str) -> Location:
        if "://" in source and not source.startswith(UPLOAD):
            return GuardedUrl(self._url(source), self._is_allowed_host)
        with _looking_at(source):
            if source.startswith(UPLOAD):
                return self._path_class(self._uploaded(source.removeprefix(UPLOAD)))
            path = self._path(source)
            for beside in _read_with(path):
                self._check_inside(Path(os.path.realpath(beside)), source)
            return self._path_class(path)

    def folder(self, desired_store: str) -> str:
        """Return the path or URL of a directory to watch or follow. Raises Forbidden."""
        if "://" in desired_store:
            return self._url(desired_store)
        with _looking_at(desired_store):
            return str(self._path(desired_store))

    def _uploaded(self, name: str) -> str:
        if self._upload_dir is None:
            raise Forbidden("this server does not accept uploads (--upload-dir)")
        path = self._upload_dir / name
        hidden = name.startswith(".")  # unfinished uploads are hidden
        if not name or hidden or path.parent != self._upload_dir or "\0" in name or path.is_symlink():
            raise Forbidden(f"{name!r} is not the name of an upload")
        return str(path)

    def _path(self, source: str) -> Path:
        if "\0" in source:
            raise Forbidden("the path contains a null byte")
        path = Path(os.path.realpath(source))
        self._check_inside(path, source)
        return path

    def _check_inside(self, path: Path, source: str) -> None:
        if not _is_inside(path, self._roots):
            raise Forbidden(f"{printable(source)}: is not allowed by this server's --admin-allow")

    def _url(self, source: str) -> str:
        if source.lower().startswith("file:"):
            raise Forbidden(f"{printable(source)}: give a local file as a path")
        url = _plain_url(source)
        if url is None or source != source.strip():
            raise Forbidden(
                f"{printable(source)}: a URL from an operator must have no user, password, fragment, encoded letters, "
                "dots as parts of its path, and no query except versionId"
            )
        if not any(prefix.covers(url) for prefix in self._prefixes):
            raise Forbidden(f"{printable(source)}: is not allowed by this server's --admin-allow")
        return source

    def _is_allowed_host(self, url: str) -> bool:
        origin = _origin(urlsplit(url))
        return any(origin == _origin(urlsplit(f"{each.scheme}://{each.host}")) for each in self._prefixes)


class _Prefix(NamedTuple):
    scheme: str
    host: str
    path: str

    def covers(self, url: SplitResult) -> bool:
        """True if a URL is below the prefix, by whole segments of its path."""
        same = (url.scheme.lower(), url.netloc.lower()) == (self.scheme, self.host)
        return same and f"{url.path}/".startswith(self.path)


def _plain_url(text: str) -> SplitResult | None:
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    plain = (
        url.netloc
        and "@" not in url.netloc
        and not url.fragment
        and _VERSION.fullmatch(url.query)
        and _PLAIN.fullmatch(url.path)
        and _PLAIN.fullmatch(url.netloc)
        and not _DOTS.search(url.path)
        and "//" not in url.path
        and "::" not in url.geturl()
    )
    return url if plain else None


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    scheme = url.scheme.lower()
    return scheme, url.hostname, url.port or _PORTS.get(scheme)


def _prefix(entry: str) -> _Prefix:
    url = _plain_url(entry)
    if url is None or url.query or url.scheme.lower() == "file":
        raise Unsupported(
            f"--admin-allow {printable(entry)}: expected a directory, or a URL with only a host and a path"
        )
    return _Prefix(url.scheme.lower(), url.netloc.lower(), url.path.rstrip("/") + "/")


def _root(entry: str) -> Path:
    path = Path(os.path.realpath(entry))
    if not path.is_dir():
        raise Unsupported(f"--admin-allow {entry}: no such directory")
    return path


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


@contextmanager
def _looking_at(source: str) -> Iterator[None]:
    """Raise Forbidden for what the system cannot look at: names that are too long, links that change meanwhile."""
    try:
        yield
    except OSError as error:
        raise Forbidden(f"{brief(source)}: cannot be looked at ({error.strerror})") from error


def _read_with(path: Path) -> Iterator[Path]:
    """Yield the files that are read beside a file, or the links in a folder: a link may lead elsewhere."""
    folder = path if path.is_dir() else path.parent if path.name.endswith(".index.json") else None
    if folder is None:
        yield path.with_name(path.name.removesuffix(".safetensors") + _GOLDENS)
        return
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_ENTRIES:
                raise Forbidden(f"{path}: has more than {_MOST_ENTRIES} files beside it")
            if entry.is_symlink():
                yield Path(entry.path)
