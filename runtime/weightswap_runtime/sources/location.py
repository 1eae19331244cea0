"""Where a weight file lies: a local path, or a URL whose credentials no message shows."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from weightswap_runtime.errors import Unsupported, WeightFileError

from .atomic import check_replaceable

HIDDEN = "***"
_WEB = ("http", "https")
_END_OF_HOST = re.compile(r"[/?#\s]")
_HOST = re.compile(r".*@.*|(?:[^:]*|\[[^\]]*\])(?::\d*)?")
_SECRET_VALUE = re.compile(r"([?&])(?!(?:versionId|generation)=)([^=&]*=)?[^&]*")
_MISTYPED = re.compile(r"https?:", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][\w+.-]+:)/")
_MLFLOW = ("models:", "runs:", "mlflow-artifacts:")
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"<>]+")
_VERSION = re.compile(r"\?versionId=[^/?]*$|#\d+$")  # the version of an object of S3, or of Google Cloud Storage


@dataclass(frozen=True, repr=False)
class Url:
    """An fsspec URL, used as pathlib's paths are. Its text hides what may be a secret; `raw` does not."""

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
        """The last part of its path; empty if that ends with a slash."""
        return self._split()[1].rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The folder, without a slash at its end. A query stays: it may be what gives access."""
        scheme, path, query = self._split()
        folder, slash, _ = path.rpartition("/")
        return replace(self, raw=scheme + (folder or slash) + query)

    def with_name(self, name: str) -> Url:
        """A neighbour; `name` as it stands in a URL."""
        scheme, path, query = self._split()
        folder, slash, _ = path.rpartition("/")
        return replace(self, raw=scheme + folder + slash + name + query)

    def __truediv__(self, name: str) -> Url:
        scheme, path, query = self._split()
        folder = path.rstrip("/") + "/" if path else ""
        return replace(self, raw=scheme + folder + (quote(name) if self.is_web else name) + query)

    def _split(self) -> tuple[str, str, str]:
        """The protocol, the path with its host or bucket, and what a neighbour's URL would share."""
        scheme, slashes, rest = self.raw.partition("://")
        if not self.is_web:
            return scheme + slashes, _VERSION.sub("", rest), ""
        path, mark, query = rest.partition("#")[0].partition("?")
        return scheme + slashes, path, mark + query


Location = Path | Url


def check_writable(path: object) -> None:
    """Raise Unsupported for a URL, as files are written to local folders alone, and for devices, pipes and sockets."""
    if is_url(path) or isinstance(path, Url):
        raise Unsupported(f"{printable(path)}: files are written locally; write it here, then copy it there")
    if isinstance(path, str | os.PathLike):
        with suppress(OSError, ValueError):  # which whoever writes will meet
            check_replaceable(Path(path))


def fixed(path: Path) -> Path:
    """The same path whatever the working directory becomes. Without one, as given."""
    try:
        return path.absolute()
    except OSError:
        return path


def fixed_text(location: Location) -> str:
    """As other processes find it: an absolute path, or the URL with its secrets."""
    return location.raw if isinstance(location, Url) else str(fixed(location))


def folder_behind(folder: Location) -> Location:
    """A folder without the links on the way, which may be turned meanwhile. Raises WeightFileError."""
    if isinstance(folder, Url):
        return folder
    try:
        return Path(os.path.realpath(folder))
    except OSError as error:
        raise WeightFileError(f"{folder}: cannot be opened ({error.strerror})") from error


def is_url(path: object) -> bool:
    """Whether this is a text that is read as a URL; a `Path` never is."""
    return isinstance(path, str) and "://" in path


def as_location(path: object) -> Location:
    """A path as given, or a URL: a text with `://` in it. `file://` is a local path.

    Raises WeightFileError for what is neither, and Unsupported for chains of URLs.
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
        return Path(path)
    url = Url(path)
    if "::" in path:
        raise Unsupported(f"{url}: chained URLs are not read; name the object itself")
    _check_encoded(url)
    return _local(url) if url.protocol == "file" else url


def check_scheme(path: str | os.PathLike[str]) -> None:
    """Raise Unsupported for MLflow's URIs, and WeightFileError for a path that must have been meant as a URL."""
    text = os.fspath(path)
    if isinstance(path, str) and _MISTYPED.match(path) and not is_url(path):
        protocol = path.partition(":")[0]
        raise WeightFileError(f"{protocol}:{HIDDEN}: not a URL; expected {protocol}:// and a host")
    scheme = _SCHEME.match(text) if isinstance(text, str) else None
    if scheme is None or os.path.exists(scheme[1]):  # noqa: PTH110 - of a folder that is called so
        return
    if scheme[1] in _MLFLOW:
        raise Unsupported(
            f"{printable(text)}: a URI of MLflow, which is not read. Download it (mlflow.artifacts.download_artifacts) "
            "and give the local path, or give the URL that it is stored under."
        )
    if isinstance(path, Path):
        raise WeightFileError(f"{scheme[1]}{HIDDEN}: a URL as a Path, which drops a slash; give it as a text")


def _check_encoded(url: Url) -> None:
    """Raise WeightFileError where the host of a web server seems to end in the middle of a password."""
    host, *late = _END_OF_HOST.split(_user(url.raw), maxsplit=1)
    if url.is_web and late and not _HOST.fullmatch(host):
        raise WeightFileError(
            f"{url}: user and password cannot be told from the rest; write them percent-encoded "
            "(urllib.parse.quote(password, safe=''))"
        )


def _local(url: Url) -> Path:
    path = unquote(url.raw.partition("://")[2].removeprefix("localhost"))
    if not path.startswith("/"):
        raise Unsupported(f"{url}: expected file:/// and an absolute path")
    return Path(path)


def printable(path: object) -> str:
    """The text of a path or URL, without secrets, for messages."""
    return _without_secrets(path) if isinstance(path, str) and is_url(path) else str(path)


def redact(text: str, url: str = "") -> str:
    """A message in which every URL, and `url` also without its protocol, is printed without secrets.

    Where `url` is taken apart in the middle of a password, nothing of the message is.
    """
    if _END_OF_HOST.search(_user(url)):
        return HIDDEN
    if rest := _rest(url):
        text = text.replace(rest, _rest(_without_secrets(url)))
    return _URL.sub(lambda found: _without_secrets(found[0]), text)


def _rest(url: str) -> str:
    return url.partition("://")[2].strip("/")


def _user(url: str) -> str:
    """What stands before the last `@`, as a password may not be percent-encoded; empty where none ends a user.

    In a key of a bucket it does not, unless a colon stands before.
    """
    protocol, _, rest = url.partition("://")
    user = rest.rpartition("@")[0]
    host = _END_OF_HOST.split(rest, maxsplit=1)[0]
    return user if protocol.lower() in _WEB or ":" in host or "@" in host else ""


def _without_secrets(url: str) -> str:
    """Without user and password, without the values of a query, and without a web page's fragment."""
    protocol, _, rest = url.partition("://")
    user = _user(url)
    if "?" in user or "#" in user:  # what follows may be a value of a query
        return f"{protocol}://{HIDDEN}"
    if user:
        rest = HIDDEN + rest[len(user) :]
    if protocol.lower() in _WEB:
        rest = rest.partition("#")[0]
    address, mark, query = rest.partition("?")
    return f"{protocol}://{address}" + _SECRET_VALUE.sub(rf"\1\2{HIDDEN}", mark + query)
