"""Directories of weight files: listings, fingerprints, headers, the order of names, and which files may go."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weightswap_runtime.errors import StageCancelled, Unsupported, WeightFileError, WeightswapError
from weightswap_runtime.format.delta import DeltaStamp, delta_stamp
from weightswap_runtime.format.safetensors import Stamp
from weightswap_runtime.format.weight_set import (
    GOLDENS_SUFFIX,
    INDEX_SUFFIX,
    SIGNATURE_SUFFIX,
    SUFFIX,
    companions,
    open_weights,
    shard_set,
)
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import Location, Url, as_location, fixed

from .desired_state import DesiredState
from .desired_store import stamp_of

_PUBLISHED = re.compile(r"(step-[0-9]+)-[0-9a-f]{12}(?:\.delta)?\.safetensors")
_DIGITS = re.compile(r"([0-9]+)")
_LISTED = (SUFFIX, INDEX_SUFFIX, SUFFIX + SIGNATURE_SUFFIX, INDEX_SUFFIX + SIGNATURE_SUFFIX)
_MOST_HEADER = 16 << 20  # bytes; a swap, which knows the model, reads what is needed of larger ones
UNKNOWN = None  # the fingerprint of a file of which only the name could be found out at this poll

AnyStamp = Stamp | DeltaStamp
_Error = TypeVar("_Error", bound=BaseException)


class Entry(NamedTuple):
    """A weight file in a listing. With equal `fingerprint` and `changed`, it has the same content, as far as is known.

    `changed` alone differs after a write that restored the time of modification, and after a change of the file's mode
    or hard links.
    """

    name: str
    path: str | Path  # the argument of a swap
    fingerprint: Hashable  # UNKNOWN says nothing
    modified: float  # seconds since the epoch; 0 if unknown
    changed: Hashable = None  # a local file's ctime
    beside: Hashable = ()  # names, fingerprints and `changed` of the files beside it that decide whether it is taken


Listing = Callable[[], list[Entry]]


def open_directory(directory: str | os.PathLike[str]) -> Listing:
    """Return a function that lists the weight files of a directory, local or behind a URL, in no order.

    An index of shards stands for those that have its name.

    The listing opens no file. It raises WeightFileError, caused by an OSError for a local directory, if the directory
    cannot be listed. `open_directory` itself raises MissingExtra and Unsupported for a URL that is not supported.
    """
    if not isinstance(directory, str | os.PathLike):
        raise Unsupported(f"expected a directory's path or URL, got a {type(directory).__qualname__}")
    location = as_location(directory)
    if isinstance(location, Url):
        from weightswap_runtime.sources.urls import check_listable  # needs fsspec

        check_listable(location)
    else:
        location = fixed(location)
    return lambda: _sets(_entries(location))


def fingerprints(paths: Iterable[str | Path], check: Check) -> dict[str | Path, Hashable]:
    """Return the fingerprints of several weights; each folder behind a URL is listed once."""
    listed: dict[Location, list[Entry]] = {}
    return {path: fingerprint(path, check, listed) for path in paths}


def fingerprint(path: str | Path, check: Check, listed: dict[Location, list[Entry]] | None = None) -> Hashable:
    """Return the fingerprint of weights and of all files that decide whether they are taken; UNKNOWN if that fails.

    Of a folder, or an index of shards, all weight files there count, and what is beside them. A web server lists none,
    so that shards behind one do not count. `check` is called during the wait for its responses. listed: listings so
    far, which are used and added to.
    """
    try:
        location = as_location(path)
        if isinstance(location, Url) and location.is_web:
            return _web_fingerprint(location, check)
        if location.name.endswith(INDEX_SUFFIX) or _is_folder(location):
            return frozenset(_entries(location.parent if location.name.endswith(INDEX_SUFFIX) else location))
        if isinstance(location, Path):
            return tuple(_local(location.with_name(name)) for name in (location.name, *companions(location.name)))
        known = {} if listed is None else listed
        if location.parent not in known:
            known[location.parent] = _weight_files(_entries(location.parent))
        return tuple(entry for entry in known[location.parent] if entry.name == location.name)
    except StageCancelled:
        raise
    except (WeightswapError, OSError, ValueError):  # such as a name that is too long
        return UNKNOWN


def _is_folder(location: Location) -> bool:
    return location.is_dir() if isinstance(location, Path) else not location.name.endswith(SUFFIX)


def _web_fingerprint(url: Url, check: Check) -> Hashable:
    from weightswap_runtime.sources.urls import find_object  # needs fsspec

    found: list[Hashable] = []
    for name in (url.name, *companions(url.name)):
        try:
            source = find_object(url.with_name(name), check)
        except WeightFileError as error:
            if error.reason != "denied":  # a signed URL opens one object only
                raise
            found.append(UNKNOWN)
        else:
            found.append(source.pin if source else "absent")
    return tuple(found)


def order(entry: Entry) -> tuple[Any, ...]:
    """Return the sort key of a file: by name, with numbers by value; of one published step, the latest last."""
    return order_of_names(entry.name), entry.modified, entry.name


def order_of_names(name: str) -> list[Any]:
    """Return the part of the sort key that depends on the name alone."""
    published = _PUBLISHED.fullmatch(name)
    stem = published[1] if published else name.removesuffix(SUFFIX)
    parts = _DIGITS.split(stem)  # text, digits, text, ...
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _weight_files(entries: list[Entry]) -> list[Entry]:
    """Return the weight files, each with the files beside it that decide whether it is taken."""
    found = {entry.name: entry for entry in entries}

    def beside(entry: Entry) -> Entry:
        others = [found[name] for name in companions(entry.name) if name in found]
        return entry._replace(beside=tuple((each.name, each.fingerprint, each.changed) for each in others))

    return [beside(each) for each in entries if each.name.endswith(SUFFIX) and not each.name.endswith(GOLDENS_SUFFIX)]


def _sets(entries: list[Entry]) -> list[Entry]:
    """Return the weight files and the indices, without the shards of these."""
    indices = {entry.name: entry for entry in entries if entry.name.endswith(INDEX_SUFFIX)}

    def has_index(entry: Entry) -> bool:
        shard = shard_set(entry.name)
        return shard is not None and shard[0] + INDEX_SUFFIX in indices

    return [each for each in _weight_files(entries) if not has_index(each)] + list(indices.values())


def _entries(folder: Location) -> list[Entry]:
    """List weight files, indices of shards, and what may be beside them."""
    if isinstance(folder, Url):
        from weightswap_runtime.sources.urls import list_files  # needs fsspec

        return [Entry(*file) for file in list_files(folder) if _is_listed(file.name)]
    try:
        with os.scandir(folder) as files:
            entries = [_local(folder / file.name) for file in files if _is_listed(file.name)]
    except FileNotFoundError as error:
        raise WeightFileError(f"{folder!s:.200}: no such directory; create it, or mount what has it") from error
    except (OSError, ValueError) as error:
        raise WeightFileError(f"{folder!s:.200}: cannot be listed ({error})") from error
    return [entry for entry in entries if entry is not None]


def _is_listed(name: str) -> bool:
    return name.endswith(_LISTED) and not name.startswith(".")  # unfinished files begin with a dot


def _local(path: Path) -> Entry | None:
    try:
        status = path.stat()
    except FileNotFoundError:  # removed meanwhile
        return None
    except (OSError, ValueError):
        return Entry(path.name, path, UNKNOWN, 0.0)
    if not stat.S_ISREG(status.st_mode):
        return None
    fingerprint = (status.st_size, status.st_mtime_ns, status.st_ino)
    return Entry(path.name, path, fingerprint, status.st_mtime, status.st_ctime_ns)


class FileHeader(NamedTuple):
    """What a file's header says."""

    weights_id: str | None = None
    base: str | None = None  # the base weights id of a delta
    error: Exception | None = None  # why the header cannot be read


def read_header(path: str | Path, check: Callable[[], None]) -> FileHeader:
    """Read a file's header. `check` is called during the wait for a response, and may raise StageCancelled."""
    try:
        with open_weights(path, check, _MOST_HEADER) as weights:
            if delta := delta_stamp(weights):
                return FileHeader(delta.weights_id, delta.base)
            return FileHeader(weights.stamp.weights_id if weights.stamp else None)
    except StageCancelled:
        raise
    except Exception as error:  # a swap will raise it again
        without_traceback(error)
        return FileHeader(error=error)


def without_traceback(error: _Error) -> _Error:
    """Return the error without the tracebacks of it and its causes, whose frames keep the model alive."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


# Files that nobody needs any more: those of `publish(keep=)`, and uploads to a server.


def in_use(state: DesiredState, keep: int) -> set[str]:
    """Return the ids of weights whose files a desired store may need.

    These are the desired ones, the last `keep` of the history and of those withdrawn, which an operator may set again,
    and the bases of all these.
    """
    kept = [*state.history[-keep:], *state.withdrawn[-keep:], *((state.weights,) if state.weights else ())]
    return {each.weights_id for each in kept} | {base.weights_id for each in kept for base in each.bases or ()}


def stamps_in(folder: Path) -> dict[Path, AnyStamp | None]:
    """Read the stamps of the weight files in a folder. Raises WeightFileError for an unreadable one: perhaps a delta"""
    return {
        path: stamp_of(path)
        for path in sorted(folder.iterdir())
        if path.name.endswith(SUFFIX) and not path.name.endswith(GOLDENS_SUFFIX) and path.is_file()
    }


def unused(
    stamps: Mapping[Path, AnyStamp | None], used: set[str], may_go: Callable[[Path, AnyStamp], bool]
) -> list[Path]:
    """Return the weight files of a folder that may be removed.

    A file stays if its weights are among `used`, if a file that stays is a delta from them, or a copy of them, and if
    `may_go` does not give it up. Links, folders, and files that weightswap has not written stay, too.
    """
    staying, going = set(used), []
    for path, stamp in stamps.items():
        if stamp is not None and stamp.weights_id not in used and not path.is_symlink() and may_go(path, stamp):
            going.append((path, stamp))
        elif stamp is not None:
            staying |= _needed(stamp)
    # what stays may need others, and these again others
    while needed := [stamp for _, stamp in going if stamp.weights_id in staying]:
        staying.update(*(_needed(stamp) for stamp in needed))
        going = [(path, stamp) for path, stamp in going if stamp.weights_id not in staying]
    return [path for path, _ in going]


def _needed(stamp: AnyStamp) -> set[str]:
    return {stamp.weights_id, stamp.base} if isinstance(stamp, DeltaStamp) else {stamp.weights_id}


def remove(path: Path) -> None:
    """Remove a weight file with the goldens and the signature beside it. Raises OSError."""
    # the weights first: who finds them shall find their goldens, too
    for each in (path, *(path.with_name(name) for name in companions(path.name))):
        each.unlink(missing_ok=True)
