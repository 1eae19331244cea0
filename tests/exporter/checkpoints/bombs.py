"""Inputs of at most a megabyte that ask for more time or memory than there is, for each reader of checkpoints.

`python -m tests.exporter.checkpoints.bombs READER FOLDER [NAME...]` reads them, each in a process of its own, and
prints a line of JSON for each: what came of it, the seconds of the processor for one read, and the growth of memory in
bytes.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import re
import resource
import struct
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from tests.support.checkpoints import saved_distributed
from tests.support.tiny import TinyArtifact
from weightswap_exporter import pack
from weightswap_runtime import WeightswapError
from weightswap_tools.diff import compare_weights

SIZE = 900_000
MOST = 20  # seconds of the processor, after which a read is killed
BEGIN, END = b"\x80\x02", b"."
PRIME = (1 << 61) - 1  # whose multiples all have the hash 0


def get(index: int) -> bytes:
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def put(index: int) -> bytes:
    return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)


def doubled(first: bytes, wide: int = 2) -> bytes:
    """Make a tuple that holds the first `wide ** 60` times; `TUPLE` gets it. What else is on the stack stays there."""
    steps = (b"(" + get(index) * wide + b"t" + put(index + 1) for index in range(60))
    return first + put(0) + b"".join(steps)


TUPLE = get(60)


def key(value: bytes, again: bytes) -> bytes:
    """Return a pickle of a dict with a key, which is made and then got again."""
    return BEGIN + value + b"}" + again + b"Ns" + END


def called(function: str, arguments: bytes) -> bytes:
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n".encode() + arguments + b"R"


def keys(values: Iterable[bytes]) -> bytes:
    return BEGIN + b"}(" + b"".join(value + b"N" for value in values) + b"u" + END


def long(number: int) -> bytes:
    raw = pickle.encode_long(number)
    return b"\x8a" + bytes([len(raw)]) + raw


def signs(count: int) -> Iterable[bytes]:
    """Yield tuples of -1 and -2, whose hashes are equal."""
    both = (b"J" + struct.pack("<i", -1), b"J" + struct.pack("<i", -2))
    return (b"(" + b"".join(row) + b"t" for row in itertools.islice(itertools.product(both, repeat=14), count))


def repeated(head: bytes, part: bytes) -> bytes:
    return BEGIN + head + b"(" + part * ((SIZE - len(head)) // len(part)) + b"t" + END


NUMBERS = b"](" + b"K\x01" * 100_000 + b"e" + put(0)
LETTERS = b"X" + struct.pack("<I", 200_000) + b"a" * 200_000 + put(0)
LATIN = b"X\x06\0\0\0latin1"
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ"
    b"K\0J\0\0\0\x10\x85K\0\x85\x89ccollections\nOrderedDict\n)RtR"
)
PICKLES: dict[str, bytes] = {
    "a tuple of tuples": key(doubled(b")"), TUPLE),
    "a tuple of texts": key(doubled(b"X\x01\0\0\0a"), TUPLE),
    "a wide tuple of tuples": key(doubled(b")", 99), TUPLE),
    "a deep tuple": key(b")" + b"\x85" * SIZE + put(0), get(0)),
    "a deep tuple after a number": BEGIN + b"}K\x01)" + b"\x85" * SIZE + b"\x86Ns" + END,
    "tuples in a set": BEGIN + doubled(b")") + called("__builtin__.set", b"](" + TUPLE + b"e\x85") + END,
    "tuples in an empty set": BEGIN + doubled(b")") + b"\x8f(" + TUPLE + b"\x90" + END,
    "tuples in a frozen set": BEGIN + doubled(b")") + b"(" + TUPLE + b"\x91" + END,
    "tuples in an OrderedDict": BEGIN
    + doubled(b")")
    + called("collections.OrderedDict", b"](" + TUPLE + b"N\x86e\x85")
    + END,
    "tuples in a Counter": BEGIN + doubled(b")") + called("collections.Counter", b"](" + TUPLE + b"e\x85") + END,
    "tuples in a size": BEGIN + doubled(b")") + called("torch.Size", TUPLE + b"\x85") + END,
    "tuples as a value": BEGIN + doubled(b")") + b"}X\x05\0\0\0model" + TUPLE + b"s" + END,
    "numbers of one hash": keys(long(PRIME * number) for number in range(60_000)),
    "tuples of one hash": keys(signs(12_000)),
    "one list in many sets": repeated(NUMBERS + b"c__builtin__\nset\n" + put(1), get(1) + get(0) + b"\x85R"),
    "one dict in many dicts": repeated(
        b"}(" + b"".join(b"M" + struct.pack("<H", n) + b"N" for n in range(60_000)) + b"u" + put(0)
        + b"ccollections\nOrderedDict\n" + put(1),
        get(1) + get(0) + b"\x85R",
    ),
    "a set by another name": repeated(
        NUMBERS + b"ctorch._tensor\n_rebuild_from_type_v2\n" + put(1)
        + b"(c__builtin__\nset\nN" + get(0) + b"\x85}t" + put(2),
        get(1) + get(2) + b"R",
    ),
    "one text encoded again and again": repeated(
        LETTERS + b"c_codecs\nencode\n" + put(1) + LATIN + put(2), get(1) + get(0) + get(2) + b"\x86R"
    ),
    "a slow codec": BEGIN + LETTERS + called("_codecs.encode", get(0) + b"X\x08\0\0\0punycode\x86") + END,
    "a bytearray of a size": BEGIN + called("__builtin__.bytearray", long(10**10) + b"\x85") + END,
    "one dict as the state of many": repeated(
        NUMBERS + b"ccollections\nOrderedDict\n)R" + put(1) + b"}X\x01\0\0\0a" + get(0) + b"s" + put(2),
        get(1) + get(2) + b"b",
    ),
    "a place far away": BEGIN + b"Nr" + struct.pack("<I", 1 << 28) + END,
    "the last place": BEGIN + b"Nr" + struct.pack("<I", (1 << 32) - 1) + END,
    "a long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a" + END,
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"a" + END,
    "a long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N" + END,
    "a long number": BEGIN + b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01" + END,
    "a large number": key(b"\x8b" + struct.pack("<i", SIZE) + b"\x7f" * SIZE + put(0), get(0)),
    "large tensors": BEGIN + b"}X\x01\0\0\0a" + TENSOR + b"s" + END,
    "steps that are lists of lists": BEGIN
    + b"]" + put(0) + b"".join(b"](" + get(index) * 2 + b"e" + put(index + 1) for index in range(60))
    + TENSOR.replace(b"J\0\0\0\x10\x85K\0\x85", b"K\x01\x85" + TUPLE + b"\x85") + END,
    "a converted tensor": BEGIN + called(
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        b"(" + TENSOR + b"ctorch\nfloat64\nX\x03\0\0\0cpu\x89t",
    ) + END,
    "a storage of a size": BEGIN + called("torch.storage.UntypedStorage", long(10**9) + b"\x85") + END,
    "a list in itself": BEGIN + b"]" + put(0) + get(0) * 1 + b"a}X\x05\0\0\0model" + get(0) + b"s" + END,
    **{f"many {name}": BEGIN + part * (SIZE // len(part)) + END for name, part in {
        "dicts": b"}", "lists": b"]", "sets": b"\x8f", "marks": b"(", "nothings": b"N", "empty tuples": b")",
        "tuples": b")\x85", "names": b"ccollections\nOrderedDict\n", "copies": b"N2", "places": b"Nq\0",
    }.items()},
    "many OrderedDicts": repeated(b"ccollections\nOrderedDict\n" + put(0), get(0) + b")R"),
    "many Counters": repeated(b"ccollections\nCounter\n" + put(0), get(0) + b")\x81"),
}  # fmt: skip


def zipped(path: Path, pickled: bytes) -> Path:
    records = {"data.pkl": pickled, "byteorder": b"little", "data/0": bytes(4), "version": b"3\n"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in records.items():
            archive.writestr(f"c/{name}", raw)
    return path


def old(path: Path, pickled: bytes, place: int = 3) -> Path:
    """Write a file of before torch 1.6, one of whose pickles is given."""
    magic = 0x1950A86A20F9469CFC6C
    parts = [pickle.dumps(value, 2) for value in (magic, 1001, {"little_endian": True}, {}, [])]
    parts[place] = pickled
    path.write_bytes(b"".join(parts))
    return path


def metadata(path: Path, pickled: bytes) -> Path:
    path.mkdir()
    (path / ".metadata").write_bytes(pickled)
    return path


def chunk(path: Path, pickled: bytes) -> Path:
    """Write a distributed checkpoint whose only chunk is described by a pickle."""
    folder = saved_distributed(path, {"w": torch.zeros(1)})
    document = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = document.storage_data.values()
    (file,) = folder.glob("*.distcp")
    info.offset, info.length = 0, zipped(file, pickled).stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(document))
    return folder


def shards(path: Path, pickled: bytes) -> Path:
    path.mkdir()
    zipped(path / "pytorch_model.bin", pickled)
    return path


READERS: dict[str, Callable[[Path, bytes], Path]] = {
    "a .pt": lambda folder, pickled: zipped(folder / "c.pt", pickled),
    "before torch 1.6": lambda folder, pickled: old(folder / "c.pth", pickled),
    "before torch 1.6, the keys": lambda folder, pickled: old(folder / "d.pth", pickled, 4),
    "before torch 1.6, the magic number": lambda folder, pickled: old(folder / "e.pth", pickled, 0),
    "a folder": lambda folder, pickled: shards(folder / "hf", pickled),
    "metadata": lambda folder, pickled: metadata(folder / "dcp", pickled),
    "a chunk": lambda folder, pickled: chunk(folder / "chunk", pickled),
}


def many_records(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "c.pt", "w") as archive:
        for number in range(9000):
            archive.writestr(f"c/data/{number}", b"")
        archive.writestr("c/data.pkl", pickle.dumps({}, 2))
    return folder / "c.pt"


def deflated(folder: Path) -> Path:
    with (
        zipfile.ZipFile(folder / "c.pt", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("c/data.pkl", "w") as file,
    ):
        for _ in range(800):
            file.write(bytes(1 << 20))
    return folder / "c.pt"


def in_one_place(folder: Path) -> Path:
    """Write a zip whose thousands of records are the same bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("c/data.pkl", BEGIN + b"N0" * 100_000 + b"}" + END)
        first = archive.infolist()[0]
        for number in range(9000):
            info = zipfile.ZipInfo(f"c/data/{number}")
            info.header_offset, info.CRC, info.file_size, info.compress_size = 0, 0, first.file_size, first.file_size
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info
    (folder / "c.pt").write_bytes(made.getvalue())
    return folder / "c.pt"


def tar(folder: Path) -> Path:
    """Write what torch would open as a tar archive, with a header whose keywords take quadratic time."""
    import tarfile

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("storages")
        info.pax_headers = {"a" * 400_000: "b"}
        archive.addfile(info)
    (folder / "c.pt").write_bytes(raw.getvalue().replace(b"=b\n", b" b\n").replace(b"400005 ", b"4" * 7))
    return folder / "c.pt"


def described(folder: Path, change: Callable[[object], object]) -> Path:
    """Change the metadata of a distributed checkpoint."""
    saved_distributed(folder / "dcp", {"w": torch.zeros(2, 3), "v": torch.zeros(3)})
    document = pickle.loads((folder / "dcp" / ".metadata").read_bytes())
    change(document)
    raw = pickle.dumps(document)
    assert len(raw) <= 1 << 20
    (folder / "dcp" / ".metadata").write_bytes(raw)
    return folder / "dcp"


def overlapping(document: object) -> None:
    """Thousands of chunks that all meet each other along one dimension, and not along the other."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    entry, count = document.state_dict_metadata["w"], 9000  # type: ignore[attr-defined]
    entry.size = torch.Size([2 * count, count])
    entry.chunks = [
        ChunkStorageMetadata(torch.Size([begin, row]), torch.Size([size, 1]))
        for row in range(count)
        for begin, size in ((0, count + row % 7),)
    ]
    rest = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2 * count, count]))
    entry.chunks = [*entry.chunks[:-1], rest]


def shared_chunks(document: object) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    entries = document.state_dict_metadata  # type: ignore[attr-defined]
    entry = entries["w"]
    entry.size = torch.Size([5000])
    entry.chunks = [ChunkStorageMetadata(torch.Size([place]), torch.Size([1])) for place in range(5000)]
    entries |= {f"{number}": entry for number in range(30_000)}


def tall_chunks(document: object) -> None:
    """Chunks that tile a tensor, which sorting along its most cut dimension does not tell apart."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    entry, count = document.state_dict_metadata["w"], 6000  # type: ignore[attr-defined]
    entry.size = torch.Size([1 << 40, count])
    sizes = [((1 << 39) + row, (1 << 39) - row) for row in range(count)]
    entry.chunks = [
        ChunkStorageMetadata(torch.Size([begin, row]), torch.Size([size, 1]))
        for row, (one, other) in enumerate(sizes)
        for begin, size in ((0, one), (one, other))
    ]


def long_path(document: object) -> None:
    info = next(iter(document.storage_data.values()))  # type: ignore[attr-defined]
    info.relative_path = "a/" * 100_000
    template = next(iter(document.storage_data))  # type: ignore[attr-defined]
    for place in range(3000):
        document.storage_data[type(template)("w", torch.Size([place]), place)] = info  # type: ignore[attr-defined]


def long_keys(document: object) -> None:
    path = ("k" * 200_000,) * 300
    document.planner_data = dict.fromkeys(document.state_dict_metadata, path)  # type: ignore[attr-defined]
    document.planner_data |= {str(number): path for number in range(10_000)}  # type: ignore[attr-defined]
    entries = document.state_dict_metadata  # type: ignore[attr-defined]
    entries |= {str(number): entries["w"] for number in range(10_000)}


def high(document: object) -> None:
    document.state_dict_metadata["w"].size = (1 << 62,) * 100_000  # type: ignore[attr-defined]


def huge(document: object) -> None:
    number = 1 << 1_600_000
    document.state_dict_metadata["w"].size = (number, number, number, number)  # type: ignore[attr-defined]


def texts_as_names(document: object) -> None:
    for index in list(document.storage_data):  # type: ignore[attr-defined]
        object.__setattr__(index, "fqn", ("a", ("b", 1)))


FILES: dict[str, Callable[[Path], Path]] = {
    "many records": many_records,
    "a deflated description": deflated,
    "records in one place": in_one_place,
    "a tar archive": tar,
    **{
        change.__name__: lambda folder, change=change: described(folder, change)  # type: ignore[misc]
        for change in (
            overlapping, shared_chunks, tall_chunks, long_path, long_keys, high, huge, texts_as_names,
        )
    },
}  # fmt: skip


def cases(reader: str) -> dict[str, Callable[[Path], Path]]:
    """Return what writes the inputs for a reader, by name; "files" are those that are no pickles."""
    if reader == "files":
        return FILES
    return {name: lambda folder, pickled=pickled: READERS[reader](folder, pickled) for name, pickled in PICKLES.items()}  # type: ignore[misc]


def memory(field: str) -> int:
    found = re.search(field + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except WeightswapError as error:
        return type(error).__name__
    except BaseException:
        return traceback.format_exc()
    return "accepted"


def measured(name: str, path: Path, artifact: Path) -> None:
    """Print what comes of the reads of a path."""
    resource.setrlimit(resource.RLIMIT_CPU, (MOST, MOST))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory starts again
    before, outcomes, seconds = memory("VmRSS"), [], []
    reads = partial(compare_weights, path, path), partial(pack, path, artifact, out=path.parent / "out.safetensors")
    for read in reads:
        start = time.process_time()
        outcomes.append(outcome(read))
        seconds.append(time.process_time() - start)
    grown = memory("VmHWM") - before
    print(json.dumps({"name": name, "outcomes": outcomes, "seconds": max(seconds), "grown": grown}), flush=True)


def main(reader: str, folder: Path, *names: str) -> None:
    artifact = TinyArtifact(folder / "tiny.artifact").path
    for number, (name, write) in enumerate(cases(reader).items()):
        if names and name not in names:
            continue
        place = folder / str(number)
        place.mkdir()
        path = write(place)
        assert sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) <= 1 << 20, name
        if child := os.fork():
            os.waitpid(child, 0)  # a killed one prints nothing
        else:
            measured(name, path, artifact)
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
