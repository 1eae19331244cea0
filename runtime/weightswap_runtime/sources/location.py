"""Where files are: local paths, and URLs, which may hold passwords, tokens and signatures.

Messages, logs and reports show a URL's text, so that text hides whatever may be a secret; only `Url.raw` does not.
Passwords need not be percent-encoded, so in doubt more is hidden than necessary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from weightswap_runtime.errors import Unsupported, WeightFileError

from .writing import check_replaceable

_HIDDEN = "***"
_WEB = ("http", "https")
_MLFLOW = ("models:", "runs:", "mlflow-artifacts:")
_MISTYPED = re.compile(r"https?:", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][\w+.-]+:)/")
_VERSION = re.compile(r"\?versionId=[^/?]*$|#\d+$")  # the version of an object of S3, or of Google Cloud Storage
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>]+")  # within a text
_END_OF_HOST = re.compile(r"[/?#\s]")
_HOST = re.compile(r".*@.*|(?:[^:]*|\[[^\]]*\])(?::\d*)?")  # with a user, or a name or IPv6 address with a port
# of a query; versions are not secret, and a message about an object should tell which one it means
_SECRET_VALUE = re.compile(r"([?&])(?!(?:versionId|generation)=)([^=&]*=)?[^&]*")


@dataclass(frozen=True, repr=False)
class Url:
    """fsspec URL with an interface like pathlib's. Its text hides possible secrets; `raw` does not."""

    raw: str

    def __str__(self) -> str:
        return _without_secrets(self.raw)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    @property
    def protocol(self) -> str:
        return self.raw.partition("://")[0].lower()

    @property
    def is_web(self) -> bool:
        return self.protocol in _WEB

    @property
    def name(self) -> str:
        """Last part of the path; empty if the path ends with a slash."""
        return self._split()[1].rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """URL of the folder, without a slash at its end. The query is kept: it may hold the access token."""
        scheme, path, query = self._split()
        folder, slash, _ = path.rpartition("/")
        return replace(self, raw=scheme + (folder or slash) + query)

    def with_name(self, name: str) -> Url:
        """Return the URL of a neighbour; `name` is already encoded."""
        scheme, path, query = self._split()
        folder, slash, _ = path.rpartition("/")
        return replace(self, raw=scheme + folder + slash + name + query)

    def __truediv__(self, name: str) -> Url:
        scheme, path, query = self._split()
        folder = path.rstrip("/") + "/" if path else ""
        return replace(self, raw=scheme + folder + (quote(name) if self.is_web else name) + query)

    def _split(self) -> tuple[str, str, str]:
        """Return the protocol, the path with its host or bucket, and the query, which neighbours share."""
        scheme, slashes, rest = self.raw.partition("://")
        if not self.is_web:
            return scheme + slashes, _VERSION.sub("", rest), ""
        path, mark, query = rest.partition("#")[0].partition("?")
        return scheme + slashes, path, mark + query


@dataclass(frozen=True, repr=False)
class GuardedUrl(Url):
    """URL of a web server whose redirects, and those of its neighbours, are followed only to URLs that it admits."""

    admits: Callable[[str], bool]


Location = Path | Url


def as_location(path: object) -> Location:
    """Convert an argument to a Path, or to a Url if it is a string with `://`. `file://` becomes a local path.

    Raises WeightFileError for other types and invalid URLs, and Unsupported for chained URLs.
    """
    if isinstance(path, Url):
        return path
    if not isinstance(path, str | os.PathLike):
        raise WeightFileError(
            f"expected the path or URL of a weight file, got a {type(path).__qualname__}; "
            "write one with weightswap_exporter.pack()"
        )
    if path == "":
        raise WeightFileError("the path of the weight file is empty")
    check_scheme(path)
    if not isinstance(path, str) or not is_url(path):
        return path if isinstance(path, Path) else Path(path)  # a GuardedPath stays one
    url = Url(path)
    if "::" in path:
        raise Unsupported(f"{url}: chained URLs are not supported; name the object itself")
    _check_encoded(url)
    if url.protocol != "file":
        return url
    local = unquote(path.partition("://")[2].removeprefix("localhost"))
    if not local.startswith("/"):
        raise Unsupported(f"{url}: expected file:/// and an absolute path")
    return Path(local)


def is_url(path: object) -> bool:
    """Return True for a string that is a URL; a `Path` never is."""
    return isinstance(path, str) and "://" in path


def check_scheme(path: str | os.PathLike[str]) -> None:
    """Raise Unsupported for MLflow's URIs, and WeightFileError for a path that looks like a mistyped URL."""
    text = os.fspath(path)
    if isinstance(path, str) and _MISTYPED.match(path) and not is_url(path):
        protocol = path.partition(":")[0]
        raise WeightFileError(f"{protocol}:{_HIDDEN}: not a URL; expected {protocol}:// and a host")
    scheme = _SCHEME.match(text) if isinstance(text, str) else None
    if scheme is None or os.path.exists(scheme[1]):  # noqa: PTH110 - a folder may have the scheme's name
        return
    if scheme[1] in _MLFLOW:
        raise Unsupported(
            f"{printable(text)}: an MLflow URI, which is not supported. Download it "
            "(mlflow.artifacts.download_artifacts) and give the local path, or give the URL where it is stored."
        )
    if isinstance(path, Path):
        raise WeightFileError(f"{scheme[1]}{_HIDDEN}: a URL as a Path, which drops a slash; give it as a string")


def _check_encoded(url: Url) -> None:
    """Raise WeightFileError if the host of a web server seems to end in the middle of a password."""
    host, *rest = _END_OF_HOST.split(_user(url.raw), maxsplit=1)
    if url.is_web and rest and not _HOST.fullmatch(host):
        raise WeightFileError(
            f"{url}: user and password cannot be separated from the rest; percent-encode them "
            "(urllib.parse.quote(password, safe=''))"
        )


def check_writable(path: object) -> None:
    """Raise Unsupported for a URL, because files are only written locally, and for devices, pipes and sockets."""
    if is_url(path) or isinstance(path, Url):
        raise Unsupported(f"{printable(path)}: only local files can be written; write it here, then copy it there")
    if isinstance(path, str | os.PathLike):
        with suppress(OSError, ValueError):  # the write will raise it
            check_replaceable(Path(path))


def fixed(path: Path) -> Path:
    """Return the absolute path, or the path unchanged if there is no working directory."""
    try:
        return path.absolute()
    except OSError:
        return path


def fixed_text(location: Location) -> str:
    """Return a location as text for other processes: an absolute path, or the URL with its secrets."""
    return location.raw if isinstance(location, Url) else str(fixed(location))


def folder_behind(folder: Location) -> Location:
    """Resolve the links in a folder's path, which may change during a read. Raises WeightFileError."""
    if isinstance(folder, Url):
        return folder
    try:
        return type(folder)(os.path.realpath(folder))
    except OSError as error:
        raise WeightFileError(f"{folder}: cannot be opened ({error.strerror})") from error


def printable(path: object) -> str:
    """Return the text of a path or URL for messages, without secrets."""
    return _without_secrets(path) if isinstance(path, str) and is_url(path) else str(path)


def redact(text: str, url: str = "") -> str:
    """Return a message without the secrets of any URL in it, nor of `url` where it appears without its protocol.

    If the password of `url` contains characters that end a host, the whole message is hidden.
    """
    if _END_OF_HOST.search(_user(url)):
        return _HIDDEN
    if rest := _rest(url):
        text = text.replace(rest, _rest(_without_secrets(url)))
    return _URL.sub(lambda match: _without_secrets(match[0]), text)


def _without_secrets(url: str) -> str:
    """Remove user and password, the values of the query, and the fragment of a web URL."""
    protocol, _, rest = url.partition("://")
    user = _user(url)
    if "?" in user or "#" in user:  # the rest may be a value of a query
        return f"{protocol}://{_HIDDEN}"
    if user:
        rest = _HIDDEN + rest[len(user) :]
    if protocol.lower() in _WEB:
        rest = rest.partition("#")[0]
    address, mark, query = rest.partition("?")
    return f"{protocol}://{address}" + _SECRET_VALUE.sub(rf"\1\2{_HIDDEN}", mark + query)


def _user(url: str) -> str:
    """Return the text before the last `@`, as passwords may not be percent-encoded; empty if there is no user.

    In URLs of buckets an `@` may be part of a key; it ends a user only if the host part has a colon or an `@`.
    """
    protocol, _, rest = url.partition("://")
    user = rest.rpartition("@")[0]
    host = _END_OF_HOST.split(rest, maxsplit=1)[0]
    return user if protocol.lower() in _WEB or ":" in host or "@" in host else ""


def _rest(url: str) -> str:
    return url.partition("://")[2].strip("/")
