"""The paths and URLs that operators may name: those allowed at the server's start, and uploads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.sources.location import printable

from .errors import Forbidden

UPLOAD = "upload:"
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*")  # no percent-encoding: the checked URL is the requested one
_DOTS = re.compile(r"(?:^|/)\.{1,2}(?:/|$)")
_VERSION = re.compile(r"(?:versionId=[\w.-]+)?")
_GOLDENS = ".goldens.safetensors"
_MOST_ENTRIES = 10_000


class _Prefix(NamedTuple):
    scheme: str
    host: str
    path: str

    def covers(self, url: SplitResult) -> bool:
        """True if a URL is below the prefix, by whole segments of its path."""
        same = (url.scheme.lower(), url.netloc.lower()) == (self.scheme, self.host)
        return same and f"{url.path}/".startswith(self.path)


class Allowed:
    """Allowed directories, with everything in them, and URL prefixes."""

    def __init__(self, entries: Sequence[str], upload_dir: Path | None = None) -> None:
        """Raises Unsupported for a directory that does not exist, and for a URL that cannot be a prefix."""
        self._prefixes = [_prefix(entry) for entry in entries if "://" in entry]
        self._roots = [_root(entry) for entry in entries if "://" not in entry]
        self._upload_dir = upload_dir

    def weights(self, source: str) -> str:
        """Return the path, with links resolved, or URL of an operator's `source`. Raises Forbidden."""
        if source.startswith(UPLOAD):
            return self._uploaded(source.removeprefix(UPLOAD))
        if "://" in source:
            return self._url(source)
        path = self._path(source)
        for beside in _read_with(path):
            self._check_inside(Path(os.path.realpath(beside)), source)
        return str(path)

    def folder(self, place: str) -> str:
        """Return the path or URL of a directory to watch or follow. Raises Forbidden."""
        return self._url(place) if "://" in place else str(self._path(place))

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
        if not any(path.is_relative_to(root) for root in self._roots):
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
