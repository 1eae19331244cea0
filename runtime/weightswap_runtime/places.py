"""Where a weight file lies: a local path, or a URL whose credentials no message shows."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from .errors import Unsupported, WeightFileError

HIDDEN = "***"
_PUBLIC = ("versionId", "generation")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
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
        return self.protocol in ("http", "https")

    @property
    def name(self) -> str:
        """The last part of its path; empty if that ends with a slash."""
        return self._split()[1].rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The folder, without a slash at its end. A query stays: it may be what gives access."""
        scheme, path, query = self._split()
        folder, slash, _ = path.rpartition("/")
        return Url(scheme + (folder or slash) + query)

    def with_name(self, name: str) -> Url:
        """A neighbour; `name` as it stands in a URL."""
        scheme, path, query = self._split()
        folder, slash, _ = path.rpartition("/")
        return Url(scheme + folder + slash + name + query)

    def __truediv__(self, name: str) -> Url:
        scheme, path, query = self._split()
        folder = path.rstrip("/") + "/" if path else ""
        return Url(scheme + folder + (quote(name) if self.is_web else name) + query)

    def _split(self) -> tuple[str, str, str]:
        """The protocol, the path with its host or bucket, and what a neighbour's URL would share."""
        scheme, slashes, rest = self.raw.partition("://")
        if not self.is_web:
            return scheme + slashes, _VERSION.sub("", rest), ""
        path, mark, query = rest.partition("#")[0].partition("?")
        return scheme + slashes, path, mark + query


Place = Path | Url


def check_writable(path: object) -> None:
    """Raise Unsupported for a URL: files are written to local folders alone."""
    if is_url(path):
        raise Unsupported(f"{printable(path)}: files are written locally; write it here, then copy it there")


def is_url(path: object) -> bool:
    """Whether this is a text that is read as a URL; a `Path` never is."""
    return isinstance(path, str) and "://" in path


def as_place(path: object) -> Place:
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
    if not isinstance(path, str) or not is_url(path):
        return Path(path)
    url = Url(path)
    if "::" in path:
        raise Unsupported(f"{url}: chained URLs are not read; name the object itself")
    return _local(url) if url.protocol == "file" else url


def _local(url: Url) -> Path:
    path = unquote(url.raw.partition("://")[2].removeprefix("localhost"))
    if not path.startswith("/"):
        raise Unsupported(f"{url}: expected file:/// and an absolute path")
    return Path(path)


def printable(path: object) -> str:
    """The text of a path or URL, without secrets, for messages."""
    return _without_secrets(path) if isinstance(path, str) and is_url(path) else str(path)


def redact(text: str, url: str = "") -> str:
    """A message in which every URL, and `url` also without its protocol, is printed without secrets."""
    if rest := _rest(url):
        text = text.replace(rest, _rest(_without_secrets(url)))
    return _URL.sub(lambda found: _without_secrets(found[0]), text)


def _rest(url: str) -> str:
    return url.partition("://")[2].strip("/")


def _without_secrets(url: str) -> str:
    """Without user and password, without the values of a query, and without a web page's fragment."""
    text = _USER.sub(f"{HIDDEN}@", url)
    if text.lower().startswith("http"):
        text = text.partition("#")[0]
    place, mark, query = text.partition("?")
    return place + mark + "&".join(map(_without_value, query.split("&"))) if mark else text


def _without_value(parameter: str) -> str:
    name, equals, value = parameter.partition("=")
    if not equals:
        return HIDDEN
    return f"{name}={value if name in _PUBLIC else HIDDEN}"
