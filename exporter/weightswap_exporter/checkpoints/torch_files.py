"""Files by torch.save."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo, is_zipfile

import torch

from weightswap_runtime.errors import CheckpointError, WeightFileError, listed
from weightswap_runtime.format.safetensors import LFS_POINTER
from weightswap_runtime.format.weight_set import read_index

from .pickle_scan import Refused, Repeated, Scan, as_text, scan
from .tensor import CheckpointTensor, Files, Stored, Window, dtype_of, read_into, values_of

PIECE = 1 << 20  # fits into the processor's cache
PICKLE_NAME = "data.pkl"
SCRIPT_NAME = "constants.pkl"  # in files by torch.jit.save alone
AGAIN = "Save it again, or copy it again."
UNREADABLE = "not a checkpoint that torch.load can open: cut off, damaged, or something else"
ONLY_WEIGHTS = "Save only model.state_dict(), or a .safetensors file."
_ORDER_NAME, _OWN_ORDER = "byteorder", sys.byteorder.encode()
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\x03\x04"


class Record(NamedTuple):
    """Uncompressed record: `size` bytes of the zip from `offset` on. `crc` is 0 if none was computed."""

    offset: int
    size: int
    crc: int


Records = Mapping[str, Record]


def read_records(file: IO[bytes], check_names: Callable[[Sequence[str]], None] | None = None) -> Records:
    """Return the records of a zip by name, without their folder; `check_names` gets the names before.

    Raises BadZipFile, ValueError and OSError, also for records that are not where the zip says, share bytes, or extend
    beyond the zip.
    """
    with ZipFile(file) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        names = [info.filename.partition("/")[2] for info in infos]
        if check_names:
            check_names(names)
        if len({name.casefold() for name in names}) < len(names):  # torch's reader ignores case
            raise BadZipFile("a name is there twice")
        records = [_record(file, info) for info in infos]
        ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
        for info, record, end in zip(infos, records, ends, strict=True):
            if record.offset + record.size > end:
                raise BadZipFile(f"{info.filename} extends beyond its place")
        return dict(zip(names, records, strict=True))


def _record(file: IO[bytes], info: ZipInfo) -> Record:
    if info.compress_type != ZIP_STORED or info.compress_size != info.file_size:
        raise ValueError(f"{info.filename} is compressed, which torch.save does not do")
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(_SIGNATURE):
        raise BadZipFile(f"{info.filename} is not where the zip directory says")
    _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    return Record(info.header_offset + _LOCAL_HEADER.size + name_length + extra_length, info.file_size, info.CRC)


def is_damaged(fd: int, record: Record, where: str, begin: int = 0) -> bool:
    """Return whether a record of the zip at `begin` in a file has a wrong CRC-32. Reads 1 MiB at a time.

    False if torch has written no CRC-32 (`torch.serialization.set_crc32_options(False)`, `skip_data()`). Raises
    CheckpointError if the file cannot be read.
    """
    if not record.crc:
        return False
    crc = 0
    memory = memoryview(bytearray(min(PIECE, record.size)))
    for done in range(0, record.size, PIECE):
        piece = memory[: min(PIECE, record.size - done)]
        read_into(fd, piece, begin + record.offset + done, where)
        crc = zlib.crc32(piece, crc)
    return crc != record.crc


def check_description(fd: int, records: Records, where: str, begin: int = 0) -> None:
    """Check the pickle that describes the tensors, in a zip at `begin`, before torch reads it. Raises CheckpointError.

    torch itself takes storages that are shorter than their tensors if it maps a file, and swaps the bytes of foreign
    machines in memory, while values are read from the file.
    """
    pickled = records[PICKLE_NAME]
    if is_damaged(fd, pickled, where, begin):
        raise CheckpointError(f"{where}: damaged: the CRC-32 of data.pkl does not match the one in the file. {AGAIN}")
    order = records.get(_ORDER_NAME)
    if order is not None and _read(fd, order._replace(size=min(order.size, 16)), where, begin) != _OWN_ORDER:
        raise CheckpointError(f"{where}: written on a machine with another byte order; save it as .safetensors there")
    for key, size in scanned(_read(fd, pickled, where, begin), where).storages.items():
        name = f"data/{key}"
        found = records[name].size if name in records else 0
        if found != size:
            raise CheckpointError(f"{where}: damaged: {name} has {found} bytes, its tensors need {size}. {AGAIN}")


def scanned(raw: bytes, where: str, begin: int = 0) -> Scan:
    """Return what a pickle would make. Raises CheckpointError, and EOFError if its end is missing."""
    try:
        return scan(raw, begin)
    except Repeated as error:
        raise CheckpointError(f"{where}: {error}. Save what it repeats, or a contiguous copy.") from error
    except Refused as error:
        raise CheckpointError(f"{where}: was not opened: {error}. {ONLY_WEIGHTS}") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: {UNREADABLE} ({error}). {AGAIN}") from error


def _read(fd: int, record: Record, where: str, begin: int) -> bytes:
    raw = bytearray(record.size)
    read_into(fd, memoryview(raw), begin + record.offset, where)
    return bytes(raw)


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX_SUFFIX = ".bin.index.json"
_MAPS = Path("/proc/self/maps")
_REFUSED_NAME = re.compile(r"GLOBAL (\S+)")
_HEAD = 1 << 20  # bytes of an old file that are read at first
_OLD_PICKLES = 5  # a magic number, the version, the machine, the content, the keys of the storages


class Storages:
    """Values in an open file by `torch.save`: each storage is a record of the zip."""

    def __init__(self, fd: int, path: Path, records: Mapping[str, Record]) -> None:
        self.fd, self.path = fd, path
        self._names = {record: name for name, record in records.items() if name.startswith("data/")}
        self._sorted = sorted(self._names)
        self._problems: dict[Record, list[str]] = {}

    def problems(self, offset: int) -> list[str]:
        """Return the problems of the storage at an offset in the file. Each storage is read once."""
        index = bisect_right(self._sorted, offset, key=attrgetter("offset"))
        return self._check(self._sorted[index - 1]) if index else []

    def all_problems(self) -> list[str]:
        return [text for record in self._sorted for text in self._check(record)]

    def _check(self, record: Record) -> list[str]:
        if record not in self._problems:
            damaged = is_damaged(self.fd, record, str(self.path))
            text = f"{self.path}: damaged: the CRC-32 of {self._names[record]} does not match the one in the file"
            self._problems[record] = [f"{text}. {AGAIN}"] if damaged else []
        return self._problems[record]


class _Mapped(NamedTuple):
    """Range of addresses to which a file is mapped from `offset` on."""

    start: int
    end: int
    offset: int
    storages: Storages


class Pickled(NamedTuple):
    """Content of open files. The tensors of `tree` are mapped; `values_of` returns them for reading from the files."""

    tree: Mapping[Any, Any]
    mapped: tuple[_Mapped, ...]

    def values_of(self, tensor: torch.Tensor) -> CheckpointTensor:
        """Return a tensor with the place of its values in a file, or as it is if it is not mapped."""
        address = tensor.data_ptr()
        for start, end, begin, storages in self.mapped if tensor.numel() else ():
            if start <= address < end:
                offset = address - start + begin
                if tensor.is_conj() or tensor.is_neg():  # the file has other values
                    return values_of(tensor)._replace(problems=partial(storages.problems, offset))
                shape, stride = tuple(tensor.shape), tuple(tensor.stride())
                stored = Stored(str(storages.path), storages.fd, offset, tensor.dtype, shape, stride)
                return CheckpointTensor(
                    dtype_of(tensor.dtype),
                    shape,
                    stored,
                    stored.load,
                    partial(storages.problems, offset),
                    parts=stored.parts,
                    file=storages.path,
                    offset=offset,
                )
        return values_of(tensor)


@contextmanager
def open_pickled(path: Path, files: Files) -> Iterator[Pickled]:
    """Open a file by `torch.save`; the format before torch 1.6 is read whole. Raises CheckpointError."""
    with files.open(path) as fd:
        if not _is_zip(fd, path):
            _check_old(fd, path)
            # not by its path: torch would try it as a tar archive first
            yield Pickled(_load(io.BufferedReader(Window(fd, 0, os.fstat(fd).st_size)), path), ())
            return
        storages = Storages(fd, path, _records(fd, path))
        tree = _load(path, path, mmap=True)
        mapped = tuple(_mapped(storages))
        if not mapped and (problems := storages.all_problems()):
            raise CheckpointError(*problems)
        yield Pickled(tree, mapped)


@contextmanager
def open_pickled_shards(index: Path, files: Files) -> Iterator[Pickled]:
    """Open an index, such as `pytorch_model.bin.index.json`, with its shards. Raises CheckpointError."""
    try:
        weight_map = read_index(index, ".bin")
    except WeightFileError as error:
        raise CheckpointError(str(error)) from error
    with ExitStack() as stack:
        names = sorted(set(weight_map.values()))
        shards = {name: stack.enter_context(open_pickled(index.parent / name, files)) for name in names}
        if problems := list(_index_problems(weight_map, shards)):
            raise CheckpointError(
                f"{index}: contradicts its shards: {listed(problems, between='; ')}. Save it again, or copy it again."
            )
        tree = {key: value for shard in shards.values() for key, value in shard.tree.items()}
        yield Pickled(tree, tuple(mapped for shard in shards.values() for mapped in shard.mapped))


def _index_problems(weight_map: Mapping[str, str], shards: Mapping[str, Pickled]) -> Iterator[str]:
    for key, name in weight_map.items():
        if key not in shards[name].tree:
            yield f"{key!r} is not in {name}"
    for name, shard in shards.items():
        for key in shard.tree:
            if weight_map.get(key) != name:
                other = f"which is listed in {weight_map[key]}" if key in weight_map else "which is not listed"
                yield f"{name} has {key!r}, {other}"


def _mapped(storages: Storages) -> Iterator[_Mapped]:
    """Yield the mappings of a file in this process; none without /proc: mapped tensors are then read in place."""
    if not _MAPS.exists():
        return
    inode = str(os.fstat(storages.fd).st_ino)
    name = os.path.realpath(storages.path)  # for file systems that show another inode in the maps
    for line in os.fsdecode(_MAPS.read_bytes()).rstrip("\n").split("\n"):
        addresses, _, offset, _, *file = line.split(maxsplit=5)
        if file[0] == inode or file[1:] == [name]:
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield _Mapped(start, end, int(offset, 16), storages)


def _is_zip(fd: int, path: Path) -> bool:
    """Return whether a file is in the format since torch 1.6. Raises CheckpointError for files of other kinds."""
    head = os.pread(fd, 64, 0)
    if not head:
        raise CheckpointError(f"{path}: the file is empty. {AGAIN}")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: {LFS_POINTER}")
    try:
        zipped = is_zipfile(path)
    except BadZipFile as error:
        raise CheckpointError(f"{path}: damaged ({error}). {AGAIN}") from error
    if head.startswith(b"PK\x03\x04") and not zipped:
        raise CheckpointError(f"{path}: cut off: the end of the zip file is missing. {AGAIN}")
    return zipped


def _records(fd: int, path: Path) -> Records:
    """Return the records of a zip. Raises CheckpointError, also if the description of the tensors is wrong."""
    file = io.BufferedReader(Window(fd, 0, os.fstat(fd).st_size))
    try:
        records = read_records(file, partial(_check_kind, path))
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged ({error}). {AGAIN}") from error
    try:
        check_description(fd, records, str(path))
    except EOFError as error:
        raise CheckpointError(f"{path}: damaged (data.pkl: {error}). {AGAIN}") from error
    return records


def _check_kind(path: Path, names: Sequence[str]) -> None:
    """Raise CheckpointError for zips without a pickled checkpoint."""
    if SCRIPT_NAME in names:
        raise CheckpointError(
            f"{path}: a TorchScript archive, expected a state dict. Save one where the model's source code is: "
            "torch.save(model.state_dict(), ...)"
        )
    if PICKLE_NAME not in names:
        content = listed(names) or "nothing"
        raise CheckpointError(
            f"{path}: a zip file without the data.pkl that torch.save writes (it holds {content}). Give a checkpoint "
            "file."
        )


def _check_old(fd: int, path: Path) -> None:
    """Check a file in the format before torch 1.6: five pickles, then the storages. Raises CheckpointError.

    torch leaves memory as it is for a storage that the last pickle does not list.
    """
    length = os.fstat(fd).st_size
    size = min(_HEAD, length)
    while True:
        raw = bytearray(size)
        read_into(fd, memoryview(raw), 0, str(path))
        try:
            storages, keys = _old_storages(bytes(raw), str(path))
            break
        except EOFError as error:
            if size == length:
                raise CheckpointError(f"{path}: {UNREADABLE} ({error}). {AGAIN}") from error
            size = min(2 * size, length)
    if lost := [key for key in storages if key not in keys]:
        raise CheckpointError(f"{path}: damaged: it does not hold the values of storage {listed(lost)}. {AGAIN}")


def _old_storages(raw: bytes, where: str) -> tuple[Collection[str], Collection[str]]:
    """Return the keys of the storages that the tensors need, and of those that follow."""
    end, scans = 0, []
    for _ in range(_OLD_PICKLES):
        scans.append(scanned(raw, where, end))
        end = scans[-1].end
    keys = scans[-1].value if isinstance(scans[-1].value, list) else ()
    return scans[-2].storages, {as_text(key) for key in keys if isinstance(key, str | bytes)}


def _load_tensors(source: Path | IO[bytes], path: Path, mmap: bool) -> Any:
    """Load a file with torch, without executing code. Importing torchao registers its classes with torch."""
    try:
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        name = _REFUSED_NAME.search(str(error))
        if name is None or not name[1].startswith("torchao."):
            raise
        _import_torchao(path)
        if not isinstance(source, Path):
            source.seek(0)
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)


def _import_torchao(path: Path) -> None:
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{path}: holds weights quantised by torchao, which cannot be imported ({error}). Install it here, or "
            "save the weights as safetensors: flatten_tensor_state_dict of torchao.prototype.safetensors"
        ) from error


def _load(source: Path | IO[bytes], path: Path, *, mmap: bool = False) -> Mapping[Any, Any]:
    try:
        loaded = _load_tensors(source, path, mmap)
    except pickle.UnpicklingError as error:
        name = _REFUSED_NAME.search(str(error))
        raise CheckpointError(
            f"{path}: holds more than tensors{f' (it names {name[1]})' if name else ''}, and unpickling it could run "
            f"any code, so it was not opened. {ONLY_WEIGHTS} If you trust the source of the file, unpickle it "
            "yourself: pack(torch.load(path, weights_only=False), artifact, out=...)"
        ) from error
    except Exception as error:  # a damaged pickle can raise any error
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: {UNREADABLE} ({reason}). {AGAIN}") from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path}: holds a {type(loaded).__qualname__}, expected a state dict")
    return loaded
