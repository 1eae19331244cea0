"""Documents in JSON or MessagePack, read as records.

msgspec learns the fields of a record when it reads the first one. A thread that reads such a record meanwhile finds it
half learnt, and that ends the process (seen with 0.22). Hence all records are learnt here, one at a time.
"""

from __future__ import annotations

import os
from threading import RLock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_learning = RLock()
_learnt: set[Any] = set()


def from_json(raw: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """Return a document in JSON as a record. Raises msgspec.MsgspecError, UnicodeError and RecursionError."""
    _learn(kind)
    return msgspec.json.decode(raw, type=kind)


def from_msgpack(raw: bytes, kind: type[T]) -> T:
    """Return a document in MessagePack as a record. Raises as `from_json`."""
    _learn(kind)
    return msgspec.msgpack.decode(raw, type=kind)


def converted(value: Any, kind: type[T]) -> T:
    """Return plain values, such as dictionaries, as a record. Raises msgspec.ValidationError and RecursionError."""
    _learn(kind)
    return msgspec.convert(value, kind)


def _learn(kind: Any) -> None:
    if kind not in _learnt:
        with _learning:
            msgspec.json.Decoder(kind)
            _learnt.add(kind)


# a child of a fork must not find a record half learnt, nor the lock of a thread that it does not have
os.register_at_fork(before=_learning.acquire, after_in_parent=_learning.release, after_in_child=_learning.release)
