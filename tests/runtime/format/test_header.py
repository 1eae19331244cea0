"""Header of safetensors: a generator of valid files, a table of broken ones, and the reference reader as the oracle."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightswap_runtime import WeightFile, WeightFileError
from weightswap_runtime.format.canonical import pack_ranges, render_header
from weightswap_runtime.format.safetensors import MAX_HEADER, header_length, parse_header
from weightswap_runtime.tensors import DTYPES, nbytes

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
}


def raw_file(header: object, data: bytes = b"\0" * 11) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def broken(**changes: object) -> dict[str, object]:
    return {**GOOD, "b": {**GOOD["b"], **changes}}


DUPLICATES = (
    b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
)
BROKEN = {
    "empty": (b"", "0 bytes are too few"),
    "shorter than its length field": (b"\x08\0\0", "3 bytes are too few"),
    "header cut off": (struct.pack("<Q", 500) + b'{"a":', "the header claims 500 bytes, the file has 5"),
    "header over 100 MB": (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "the format allows 100000000"),
    "huge length": (b"\xff" * 8 + b"{}", "the format allows 100000000"),
    "not an object": (raw_file(b"[1, 2]"), "does not begin with '{'"),
    "padding first": (raw_file(b" {}", b""), "does not begin with '{'"),
    "not JSON": (raw_file(b'{"a": nope}'), "is not JSON"),
    "not UTF-8": (raw_file(b'{"\xff\xfe": 1}'), "is not JSON"),
    "nested beyond reason": (raw_file(b'{"a":' * 100_000), "is not JSON"),
    "duplicate keys": (raw_file(DUPLICATES, b""), "duplicate keys: a"),
    "duplicate keys of an entry": (
        raw_file(DUPLICATES[:52].replace(b"U8", b'U8","dtype":"U8') + b"}", b""),
        "keys: dtype",
    ),
    "duplicate metadata": (raw_file(b'{"__metadata__":{},"__metadata__":{}}', b""), "duplicate keys: __metadata__"),
    "duplicate keys of metadata": (raw_file(b'{"__metadata__":{"a":"","a":""}}', b""), "duplicate keys: a"),
    "no comma": (raw_file(DUPLICATES.replace(b'},"a"', b'}"b"'), b""), "is not JSON"),
    "a comma too many": (raw_file(DUPLICATES[:52] + b",}", b""), "is not JSON"),
    "no colon": (raw_file(b'{"a" 1}', b""), "is not JSON"),
    "a name that is no text": (raw_file(b"{1: 2}", b""), "is not JSON"),
    "not closed": (raw_file(DUPLICATES[:52], b""), "is not JSON"),
    "more after the end": (raw_file(DUPLICATES[:52] + b"} {}", b""), "goes on after its end"),
    "an entry of lists": (raw_file(b'{"a":[' + b"[]," * 100_000 + b"[]]}"), "a long entry"),
    "a long name": (raw_file(b'{"' + b"a" * 100_000 + b'":0}'), "is not an object with dtype"),
    "a torch checkpoint": (b"PK\x03\x04" + b"\0" * 40, "weightswap pack"),
    "an old torch checkpoint": (b"\x80\x02\x8a\x0al\xfc\x9cF" + b"\0" * 40, "a name that ends with .pt"),
    "a GGUF file": (b"GGUF\3" + b"\0" * 40, "a GGUF file, as llama.cpp reads"),
    "a git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
        "a git-lfs pointer, not the file itself. Fetch the file: git lfs pull",
    ),
    "a web page": (b"<!DOCTYPE html>" + b" " * 40, "a web page (HTML or XML), as a server answers instead of a file"),
    "a compressed file": (b"\x1f\x8b\x08\0" + b"\xff" * 40, "a compressed file. Unpack it"),
    "metadata not strings": (raw_file({**GOOD, "__metadata__": {"a": 1}}), "__metadata__ is not an object of strings"),
    "metadata begins like null": (raw_file(b'{"__metadata__":nul}', b""), "__metadata__ is not an object of strings"),
    "metadata a list": (raw_file({**GOOD, "__metadata__": []}), "__metadata__ is not an object of strings"),
    "entry not an object": (raw_file({**GOOD, "b": 3}), "'b' is not an object"),
    "entry without offsets": (raw_file({**GOOD, "b": {"dtype": "U8", "shape": [3]}}), "'b' is not an object"),
    "unknown dtype": (raw_file(broken(dtype="F31")), "unknown dtype 'F31'"),
    "dtype not a string": (raw_file(broken(dtype=[])), "unknown dtype"),
    "negative size": (raw_file(broken(shape=[-3])), "not a list of at most 64 sizes"),
    "fractional size": (raw_file(broken(shape=[3.0])), "not a list of at most 64 sizes"),
    "boolean size": (raw_file(broken(shape=[True, 3])), "not a list of at most 64 sizes"),
    "too many dimensions": (raw_file(broken(shape=[1] * 65)), "not a list of at most 64 sizes"),
    "sizes that overflow": (raw_file(broken(shape=[2**62, 4])), "bytes, but its range is [8, 11]"),
    "size beyond 64 bits": (raw_file(broken(shape=[2**63])), "not a list of at most 64 sizes"),
    "three offsets": (raw_file(broken(data_offsets=[8, 9, 11])), "not two byte offsets"),
    "end before begin": (raw_file(broken(data_offsets=[11, 8])), "but its range is [11, 8]"),
    "shape and range disagree": (raw_file(broken(shape=[4])), "4 bytes, but its range is [8, 11]"),
    "bits that fill no bytes": (raw_file(broken(dtype="F4", shape=[3])), "None bytes, but its range"),
    "overlap": (raw_file(broken(data_offsets=[7, 10])), "inside the tensor before it"),
    "hole": (raw_file(broken(data_offsets=[9, 12]), b"\0" * 12), "belong to no tensor"),
    "trailing bytes": (raw_file(GOOD, b"\0" * 12), "1 bytes follow the last tensor"),
    "data cut off": (raw_file(GOOD, b"\0" * 10), "it is truncated"),
}


@pytest.mark.parametrize(("raw", "says"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_with_a_reason(raw: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(raw)
    with pytest.raises(WeightFileError) as refused:
        WeightFile(path)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 600


def test_spaces_may_come_anywhere() -> None:
    text = json.dumps({"__metadata__": {"a": "b", "c": "}\\n"}, **GOOD}, indent=3) + "\r\n\t "
    raw = raw_file(text.encode())
    header = parse_header(raw[8:-11], len(raw), "x")
    assert (list(header.tensors), header.metadata) == (["a", "b"], {"a": "b", "c": "}\\n"})


def test_metadata_may_be_null() -> None:
    """As for the safetensors package."""
    raw = raw_file({"__metadata__": None, **GOOD})
    header = parse_header(raw[8:-11], len(raw), "x")
    assert (list(header.tensors), header.metadata) == (["a", "b"], {})


def test_ranges_may_come_in_any_order_of_names() -> None:
    reordered = {"z": GOOD["b"], "a": GOOD["a"]}
    raw = raw_file(reordered)
    header = parse_header(raw[8:-11], len(raw), "x")
    assert header.tensors["z"].begin == 8


@pytest.mark.parametrize("path", [Path("nowhere.safetensors"), Path()])
def test_unreadable_paths_are_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"cannot be (opened|read)"):
        WeightFile(tmp_path / path)


DTYPE_NAMES = st.sampled_from(sorted(DTYPES))
ROWS = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(DTYPE_NAMES, st.lists(st.integers(0, 5), max_size=4).map(tuple)).filter(lambda t: nbytes(*t) is not None),
    max_size=8,
)


@given(ROWS, st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3))
def test_a_rendered_header_can_be_parsed(
    rows: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    placed = pack_ranges([(name, dtype, shape) for name, (dtype, shape) in rows.items()])
    try:
        rendered = render_header(placed, metadata)
    except UnicodeEncodeError:
        return  # a lone surrogate in the metadata
    size = len(rendered) + max((place.end for place in placed.values()), default=0)
    assert len(rendered) % 4096 == 0
    assert header_length(rendered[:8], size, "x") == len(rendered) - 8
    header = parse_header(rendered[8:], size, "x")
    assert header == (placed, metadata, len(rendered))


@settings(max_examples=300)
@given(st.data())
def test_mutated_headers_give_named_errors_only(data: st.DataObject) -> None:
    raw = bytearray(raw_file({**GOOD, "__metadata__": {"format": "pt"}}))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position] = data.draw(st.integers(0, 255))
    try:
        length = header_length(bytes(raw[:8]), len(raw), "x")
        header = parse_header(bytes(raw[8 : 8 + length]), len(raw), "x")
    except WeightFileError:
        return
    safetensors.deserialize(bytes(raw))  # the reference accepts what we accept
    assert all(place.end <= len(raw) - header.data_start for place in header.tensors.values())
