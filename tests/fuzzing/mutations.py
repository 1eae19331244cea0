"""Mutations of files: of their bytes, of the JSON in them, and of what the JSON says about the bytes."""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from weightswap_runtime.format.delta import DATA, DELTA_KEY, ROWS, RUNS
from weightswap_runtime.format.manifest import Manifest, graph_identity
from weightswap_runtime.format.safetensors import METADATA_KEY
from weightswap_runtime.tensors import digest_of

Json = Any
NUMBERS = (0, 1, -1, 2, 7, 8, 63, 64, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
DEEP, HUGE = "<deep>", "<huge>"
ODD: tuple[Json, ...] = (
    *NUMBERS, -(2**63), 0.5, 1e308, float("nan"), float("inf"), True, False, None, "", "a", "\0", "é" * 40, "\ud800",
    "\N{RIGHT-TO-LEFT OVERRIDE}x", "../up", "/etc/passwd", "x" * 5000, "F32", "F4", "I64", "BOOL", [], {}, [[]], [0, 0],
    [2**62, 4], [1] * 65, {"": None}, "0" * 64, DEEP, HUGE,
)  # fmt: skip


FORMAT = (
    ValueError, LookupError, TypeError, OverflowError, RuntimeError, EOFError, struct.error, zlib.error,
    msgspec.MsgspecError, zipfile.BadZipFile,
)  # fmt: skip


def mutated(choose: random.Random, raw: bytes, others: Sequence[bytes], edit: Callable[..., bytes]) -> bytes:
    """`raw` with one to four changes; `edit` makes those that know the format."""
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        try:
            raw = edit(choose, raw) if choose.random() < 0.6 else choose.choice(BYTES)(choose, raw, others)
        except FORMAT:
            raw = choose.choice(BYTES)(choose, raw, others)  # an earlier change has left no format
    return raw


# bytes


def flip(choose: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(raw or b"\0")
    for _ in range(choose.choice((1, 1, 2, 8))):
        changed[choose.randrange(len(changed))] ^= 1 << choose.randrange(8)
    return bytes(changed)


def cut(choose: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    return raw[: choose.randrange(len(raw) + 1)]


def remove(choose: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    start = choose.randrange(len(raw) + 1)
    return raw[:start] + raw[start + choose.randrange(1, 64) :]


def insert(choose: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    start = choose.randrange(len(raw) + 1)
    return raw[:start] + choose.randbytes(choose.randrange(1, 64)) + raw[start:]


def splice(choose: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    other = choose.choice(others)
    return raw[: choose.randrange(len(raw) + 1)] + other[choose.randrange(len(other) + 1) :]


def relength(choose: random.Random, raw: bytes, others: Sequence[bytes]) -> bytes:
    """Another number where a safetensors file has the length of its header."""
    near = int.from_bytes(raw[:8], "little") + choose.choice((-1, 1, 8, -8))
    return struct.pack("<Q", choose.choice((near, *NUMBERS)) % 2**64) + raw[8:]


BYTES = (flip, cut, remove, insert, splice, relength)


# JSON


def edit_json(choose: random.Random, document: Json) -> Json:
    """A copy with one place changed: another value, a key or an item gone, doubled, or renamed."""
    if not isinstance(document, dict | list) or not document or choose.random() < 0.15:
        return odd(choose, document)
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = choose.choice(keys)
    if choose.random() < 0.7:
        changed = document.copy()
        changed[key] = edit_json(choose, document[key])
        return changed
    return _edit_dict(choose, document, key) if isinstance(document, dict) else _edit_list(choose, document, key)


def odd(choose: random.Random, value: Json) -> Json:
    if type(value) is int and choose.random() < 0.5:
        return value + choose.choice((-1, 1, 8, -8, 4096))
    return choose.choice(ODD)


def _edit_dict(choose: random.Random, document: dict[str, Json], key: str) -> Json:
    kind = choose.randrange(3)
    rest = {name: value for name, value in document.items() if name != key}
    if kind == 0:
        return rest
    name = str(choose.choice((*ODD, *document)))
    return {**rest, name: document[key]} if kind == 1 else {**document, name: odd(choose, document[key])}


def _edit_list(choose: random.Random, document: list[Json], index: int) -> Json:
    kind = choose.randrange(3)
    if kind == 0:
        return document[:index] + document[index + 1 :]
    return [*document, document[index]] if kind == 1 else document[::-1]


def render(choose: random.Random, document: Json) -> bytes:
    text = json.dumps(document, ensure_ascii=choose.random() < 0.5)
    depth = choose.choice((10, 300, 900, 100_000))
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth).replace(f'"{HUGE}"', "9" * depth)
    if choose.random() < 0.1 and text.startswith("{") and ":" in text:  # a key twice
        first = text[1 : text.index(":")]
        text = f"{text[:-1]},{first}:null}}"
    return text.encode(errors="surrogatepass")


# files of weights


def edit_weights(choose: random.Random, raw: bytes) -> bytes:
    """Change the header, or the stamp in it, or the data with digests that fit."""
    header, data = _parse(raw)
    metadata = header.get("__metadata__", {})
    key = next((key for key in (METADATA_KEY, DELTA_KEY) if key in metadata), None)
    kind = choose.randrange(4)
    if kind == 0 or key is None:
        return _join(choose, edit_json(choose, header), data)
    stamp = json.loads(metadata[key])
    if kind == 1:
        stamp = edit_json(choose, stamp)
    else:
        data = (_edit_places if key == DELTA_KEY and kind == 2 else _edit_data)(choose, header, data)
        stamp["digests"] = _digests(header, data)
    metadata[key] = render(choose, stamp).decode(errors="replace")
    return _join(choose, header, data)


def _parse(raw: bytes) -> tuple[dict[str, Json], bytes]:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    if not isinstance(header, dict):
        raise TypeError(header)
    return header, raw[8 + length :]


def _join(choose: random.Random, header: Json, data: bytes) -> bytes:
    text = render(choose, header)
    return struct.pack("<Q", len(text)) + text + data


def _digests(header: dict[str, Json], data: bytes) -> dict[str, str]:
    entries = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: digest_of([memoryview(data)[begin:end]]) for name, (begin, end) in entries.items()}


def _edit_data(choose: random.Random, header: dict[str, Json], data: bytes) -> bytes:
    return flip(choose, data, ())


def _edit_places(choose: random.Random, header: dict[str, Json], data: bytes) -> bytes:
    """Other byte ranges or rows in a delta."""
    names = [name for name in header if name.startswith((RUNS, ROWS))]
    begin, end = header[choose.choice(names)]["data_offsets"]
    places = np.frombuffer(data[begin:end], "<i8").copy()
    place = choose.randrange(len(places))
    old, first = int(places[place]), int(places[0])
    places[place] = choose.choice((*NUMBERS[:16], -1, -8, old + 1, old - 1, first))
    return data[:begin] + places.tobytes() + data[end:]


def shrink_delta(raw: bytes) -> bytes:
    """A delta that says of one weight that nothing changes: no runs, and no data."""
    header, data = _parse(raw)
    stamp = json.loads(header["__metadata__"][DELTA_KEY])
    name = next(iter(stamp["changes"]))
    kept = {key: entry for key, entry in header.items() if key not in (DATA + name, RUNS + name)}
    parts = [data[slice(*entry["data_offsets"])] for key, entry in kept.items() if key != "__metadata__"]
    place = 0
    for key, part in zip([key for key in kept if key != "__metadata__"], parts, strict=True):
        kept[key] = {**kept[key], "data_offsets": [place, place + len(part)]}
        place += len(part)
    empty = {"data_offsets": [place, place]}
    kept[DATA + name] = {"dtype": "U8", "shape": [0], **empty}
    kept[RUNS + name] = {"dtype": "I64", "shape": [0, 2], **empty}
    stamp["digests"] = {**stamp["digests"], DATA + name: blake3().hexdigest(), RUNS + name: blake3().hexdigest()}
    kept["__metadata__"] = {**header["__metadata__"], DELTA_KEY: json.dumps(stamp)}
    text = json.dumps(kept).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


# pickles


PARTS = (
    b"N", b"K\x01", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\x7f" * 8, b"X\x01\0\0\0a", b")", b"]", b"}", b"\x8f", b"(",
    b"t", b"\x85", b"\x86", b"\x87", b"q\x00", b"h\x00", b"h\x01", b"h\x02", b"r\xff\xff\xff\x7f", b"j\x03\0\0\0", b"R",
    b"\x81", b"b", b"s", b"u", b"a", b"e", b"Q", b"\x90", b"\x91", b"ccollections\nOrderedDict\n",
    b"c__builtin__\nset\n", b"ctorch\nSize\n",
    b"h\x00h\x00\x86q\x00h\x00h\x00\x86q\x00" * 9, b"0", b".", b"\x95" + b"\xff" * 8, b"\x8d" + b"\xff" * 8,
)  # fmt: skip


def edit_pickle(choose: random.Random, raw: bytes) -> bytes:
    """Remove, repeat, exchange or insert operations, or change one's argument."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of escapes, in an inserted name
        places = [place for _, _, place in pickletools.genops(raw) if place is not None]
    operations = [raw[begin:end] for begin, end in pairwise([*places, len(raw)])]
    place, other = (choose.randrange(len(operations)) for _ in range(2))
    kind = choose.randrange(5)
    if kind == 0:
        del operations[place]
    elif kind == 1:
        operations[place] *= choose.choice((2, 3, 100))
    elif kind == 2:
        operations[place], operations[other] = operations[other], operations[place]
    elif kind == 3:
        operations.insert(place, choose.choice(PARTS))
    else:
        operations[place] = operations[place][:1] + choose.randbytes(len(operations[place]) - 1)
    return b"".join(operations)


def edit_zip(choose: random.Random, raw: bytes) -> bytes:
    """Change one record of a zip, mostly with a checksum that fits: its operations if it is a pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(made, "w") as new:
        names = old.namelist()
        pickles = [name for name in names if name.endswith("data.pkl")]
        changed = choose.choice(pickles if pickles and choose.random() < 0.8 else names)
        for name in names:
            content = old.read(name)
            if name == changed:
                edit = edit_pickle if name in pickles else lambda choose, raw: choose.choice(BYTES)(choose, raw, [raw])
                content = edit(choose, content)
            new.writestr(name, content)
    return made.getvalue()


# documents


def edit_document(choose: random.Random, raw: bytes) -> bytes:
    return render(choose, edit_json(choose, json.loads(raw)))


def edit_manifest(choose: random.Random, raw: bytes) -> bytes:
    """Change a manifest, mostly with the graph id that then belongs to it."""
    document = edit_json(choose, json.loads(raw))
    if choose.random() < 0.8:
        document["graph_id"] = graph_identity(msgspec.json.decode(render(choose, document), type=Manifest))
    return render(choose, document)
