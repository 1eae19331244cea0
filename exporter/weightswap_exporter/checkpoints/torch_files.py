"""Files by torch.save.

Since torch 1.6 such a file is a zip: `data.pkl` describes the tensors, and each storage is an uncompressed record
beside it. torch maps the file and makes tensors without reading values. Here values are read from the open file
instead, each from the place of its storage: a file of any size takes little memory, and one that is cut off meanwhile
is an error, where a mapping would kill the process. Before torch reads anything, the description is scanned and
compared with the records, as torch itself takes storages that are shorter than their tensors when it maps a file.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo, is_zipfile

import torch

from weightswap_runtime.errors import CheckpointError, WeightFileError, listed
from weightswap_runtime.format.safetensors import FOREIGN_HEAD, foreign_kind, is_safetensors
from weightswap_runtime.format.weight_set import read_index

from .nested_state_dicts import NESTED
from .pickle_scan import Refused, Repeated, Scan, as_text, scan
from .tensor import CheckpointTensor, Files, Stored, Window, dtype_of, read_into, values_of

SUFFIXES = (".pt", ".pth", ".pth.tar", ".bin", ".ckpt")
INDEX_SUFFIX = ".bin.index.json"
PICKLE_NAME = "data.pkl"
AGAIN = "Save it again, or copy it again."
PIECE = 1 << 20  # fits into the processor's cache
_SCRIPT_NAME = "constants.pkl"  # in files by torch.jit.save alone
_UNREADABLE = "not a checkpoint that torch.load can open: cut off, damaged, or something else"
_ONLY_WEIGHTS = "Save only model.state_dict(), or a .safetensors file."
_REFUSED_NAME = re.compile(r"GLOBAL (\S+)")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\x03\x04"
_HEAD = 1 << 20  # bytes of an old file that are read at first
_OLD_PICKLES = 5  # a magic number, the version, the machine, the content, the keys of the storages


class Pickled(NamedTuple):
    """Content of open files. The tensors of `tree` are mapped; `values_of` returns them for reading from the files."""

    tree: Mapping[Any, Any]
    mapped: Mapping[int, _Mapped]  # by address

    def values_of(self, tensor: torch.Tensor) -> CheckpointTensor:
        """Return a tensor with the place of its values in a file, or as it is if it is not mapped."""
        mapped = self.mapped.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if mapped is None:
            return values_of(tensor)
        if tensor.is_conj() or tensor.is_neg():  # the file has other values
            return values_of(tensor)._replace(problems=mapped.problems)
        offset = mapped.offset + int(tensor.storage_offset()) * tensor.element_size()
        shape = tuple(tensor.shape)
        stored = Stored(str(mapped.path), mapped.fd, offset, tensor.dtype, shape, tuple(tensor.stride()))
        return CheckpointTensor(
            dtype_of(tensor.dtype),
            shape,
            stored,
            stored.load,
            mapped.problems,
            parts=stored.parts,
            file=mapped.path,
            offset=offset,
        )


class _Mapped(NamedTuple):
    """Storage in an open zip."""

    storage: torch.UntypedStorage  # keeps the mapping, and thus the address
    path: Path
    fd: int
    offset: int  # in the file
    problems: Callable[[], list[str]]  # reads the storage at the first call alone


@contextmanager
def open_pickled(path: Path, files: Files) -> Iterator[Pickled]:
    """Open a file by `torch.save`; the format before torch 1.6 is read whole. Raises CheckpointError."""
    with files.open(path) as fd:
        if _is_zip(fd, path):
            records, scanned = _read_description(fd, path)
            with _noted_storages() as noted:
                tree = _load(path, path, scanned.names, mmap=True)
            yield Pickled(tree, _located(noted, scanned, records, path, fd))
        else:
            names = _check_old(fd, path)
            # not by its path: torch would try it as a tar archive first
            yield Pickled(_load(io.BufferedReader(Window(fd, 0, os.fstat(fd).st_size)), path, names), {})


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
            raise CheckpointError(f"{index}: contradicts its shards: {listed(problems, between='; ')}. {AGAIN}")
        tree = {key: value for shard in shards.values() for key, value in shard.tree.items()}
        yield Pickled(tree, {address: mapped for shard in shards.values() for address, mapped in shard.mapped.items()})


def _index_problems(weight_map: Mapping[str, str], shards: Mapping[str, Pickled]) -> Iterator[str]:
    for key, name in weight_map.items():
        if key not in shards[name].tree:
            yield f"{key!r} is not in {name}"
    for name, shard in shards.items():
        for key in shard.tree:
            if weight_map.get(key) != name:
                other = f"which is listed in {weight_map[key]}" if key in weight_map else "which is not listed"
                yield f"{name} has {key!r}, {other}"


# Which bytes of its file a mapped tensor has, torch does not say. But it shows each storage that it has just made to
# the functions that could move it to a device, and one of these notes it. (A function as `map_location` would see it,
# too, but torch takes none for tensor subclasses such as torchao's.)

_noting = threading.local()


def _note(storage: Any, _location: str) -> None:
    if (noted := getattr(_noting, "storages", None)) is not None:
        noted.append(storage)


# before all others; torch cannot sort two functions of the same priority, and its own have 10 and more
torch.serialization.register_package(-1, lambda _storage: None, _note)


@contextmanager
def _noted_storages() -> Iterator[list[torch.UntypedStorage]]:
    """Return the storages that `torch.load` makes in this thread meanwhile, in the order of their first mention."""
    _noting.storages = []
    try:
        yield _noting.storages
    finally:
        del _noting.storages


def _located(
    noted: Sequence[torch.UntypedStorage], scanned: Scan, records: Mapping[str, Record], path: Path, fd: int
) -> dict[int, _Mapped]:
    filled = [storage for storage in noted if storage.nbytes()]  # torch makes an empty one again at each mention
    names = [f"data/{key}" for key, size in scanned.storages.items() if size]
    # all are parts of one mapping of the file, so that their distances prove which is which
    begins = {storage.data_ptr() - records[name].offset for name, storage in zip(names, filled, strict=False)}
    if len(names) != len(filled) or len(begins) > 1:
        raise CheckpointError(f"{path}: torch has read other tensors than it describes; was it replaced? {AGAIN}")
    located = {}
    for name, storage in zip(names, filled, strict=True):
        problems = cache(partial(_damage, fd, records[name], name, path))
        located[storage.data_ptr()] = _Mapped(storage, path, fd, records[name].offset, problems)
    return located


def _damage(fd: int, record: Record, name: str, path: Path) -> list[str]:
    damaged = is_damaged(fd, record, str(path))
    return [f"{path}: damaged: the CRC-32 of {name} does not match the one in the file. {AGAIN}"] if damaged else []


def _is_zip(fd: int, path: Path) -> bool:
    """Return whether a file is in the format since torch 1.6. Raises CheckpointError for files of other kinds."""
    head = os.pread(fd, FOREIGN_HEAD, 0)
    if not head:
        raise CheckpointError(f"{path}: the file is empty. {AGAIN}")
    if is_safetensors(head):
        raise CheckpointError(f"{path}: a safetensors file, by its content. Give it a name that ends with .safetensors")
    if foreign := foreign_kind(head):
        raise CheckpointError(f"{path}: {foreign}")
    try:
        zipped = is_zipfile(path)
    except BadZipFile as error:
        raise CheckpointError(f"{path}: damaged ({error}). {AGAIN}") from error
    if head.startswith(_SIGNATURE) and not zipped:
        raise CheckpointError(f"{path}: cut off: the end of the zip file is missing. {AGAIN}")
    return zipped


def _read_description(fd: int, path: Path) -> tuple[Mapping[str, Record], Scan]:
    """Return the records of a zip, and the scan of its pickle, both checked. Raises CheckpointError."""
    try:
        records = read_records(io.BufferedReader(Window(fd, 0, os.fstat(fd).st_size)), partial(_check_kind, path))
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged ({error}). {AGAIN}") from error
    try:
        return records, check_description(fd, records, str(path))
    except EOFError as error:
        raise CheckpointError(f"{path}: damaged (data.pkl: {error}). {AGAIN}") from error


def _check_kind(path: Path, names: Sequence[str]) -> None:
    """Raise CheckpointError for zips without a pickled checkpoint."""
    if _SCRIPT_NAME in names:
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


def _load(source: Path | IO[bytes], path: Path, names: Collection[str], *, mmap: bool = False) -> Mapping[Any, Any]:
    """Load a file with torch, without executing code. `names` are those of classes and functions in it."""
    if any(name.startswith("torchao.") for name in names):
        _import_torchao(path)
    if any(name.startswith("torch.nested.") for name in names):
        raise CheckpointError(f"{path}: {NESTED}")
    try:
        with warnings.catch_warnings():  # that torch 2.14 checks sparse tensors, which are then refused
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            loaded = torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        name = _REFUSED_NAME.search(str(error))
        raise CheckpointError(
            f"{path}: holds more than tensors{f' (it names {name[1]})' if name else ''}, and unpickling it could run "
            f"any code, so it was not opened. {_ONLY_WEIGHTS} If you trust the source of the file, unpickle it "
            "yourself: pack(torch.load(path, weights_only=False), artifact, out=...)"
        ) from error
    except Exception as error:  # a damaged pickle can raise any error
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: {_UNREADABLE} ({reason}). {AGAIN}") from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path}: holds a {type(loaded).__qualname__}, expected a state dict")
    return loaded


def _import_torchao(path: Path) -> None:
    """Import torchao, which registers its classes with torch."""
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{path}: holds weights quantised by torchao, which cannot be imported ({error}). Install it here, or "
            "save the weights as safetensors: flatten_tensor_state_dict of torchao.prototype.safetensors"
        ) from error


# Zips by torch.save, at any place of a file: a distributed checkpoint has one for each chunk.


class Record(NamedTuple):
    """Uncompressed record of a zip, in bytes."""

    offset: int  # from the begin of the zip
    size: int
    crc: int  # 0 if none was computed


def read_records(file: IO[bytes], check_names: Callable[[Sequence[str]], None] | None = None) -> dict[str, Record]:
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


def check_description(fd: int, records: Mapping[str, Record], where: str, begin: int = 0) -> Scan:
    """Check the pickle that describes the tensors, in a zip at `begin`, before torch reads it, and return its scan.

    Raises CheckpointError, and EOFError if the pickle's end is missing.
    """
    pickled = records[PICKLE_NAME]
    if is_damaged(fd, pickled, where, begin):
        raise CheckpointError(f"{where}: damaged: the CRC-32 of data.pkl does not match the one in the file. {AGAIN}")
    order = records.get("byteorder")
    # torch would swap bytes in memory, while values are read from the file
    if order and _read(fd, order._replace(size=min(order.size, 16)), where, begin) != sys.byteorder.encode():
        raise CheckpointError(f"{where}: written on a machine with another byte order; save it as .safetensors there")
    scanned = _scanned(_read(fd, pickled, where, begin), where)
    for key, size in scanned.storages.items():
        name = f"data/{key}"
        found = records[name].size if name in records else 0
        if found != size:
            raise CheckpointError(f"{where}: damaged: {name} has {found} bytes, its tensors need {size}. {AGAIN}")
    return scanned


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


def _scanned(raw: bytes, where: str, begin: int = 0) -> Scan:
    try:
        return scan(raw, begin)
    except Repeated as error:
        raise CheckpointError(f"{where}: {error}. Save what it repeats, or a contiguous copy.") from error
    except Refused as error:
        raise CheckpointError(f"{where}: was not opened: {error}. {_ONLY_WEIGHTS}") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: {_UNREADABLE} ({error}). {AGAIN}") from error


def _read(fd: int, record: Record, where: str, begin: int) -> bytes:
    raw = bytearray(record.size)
    read_into(fd, memoryview(raw), begin + record.offset, where)
    return bytes(raw)


# The format before torch 1.6: five pickles, then the storages.


def _check_old(fd: int, path: Path) -> set[str]:
    """Check the pickles of an old file, and return the names in them. Raises CheckpointError.

    torch leaves memory as it is for a storage that the last pickle does not list.
    """
    length = os.fstat(fd).st_size
    size = min(_HEAD, length)
    while True:
        raw = bytearray(size)
        read_into(fd, memoryview(raw), 0, str(path))
        try:
            scans = _old_scans(bytes(raw), str(path))
            break
        except EOFError as error:
            if size == length:
                raise CheckpointError(f"{path}: {_UNREADABLE} ({error}). {AGAIN}") from error
            size = min(2 * size, length)
    value = scans[-1].value
    keys = {as_text(key) for key in value if isinstance(key, str | bytes)} if isinstance(value, list) else set()
    if lost := [key for key in scans[-2].storages if key not in keys]:
        raise CheckpointError(f"{path}: damaged: it does not hold the values of storage {listed(lost)}. {AGAIN}")
    return {name for each in scans for name in each.names}


def _old_scans(raw: bytes, where: str) -> list[Scan]:
    end, scans = 0, []
    for _ in range(_OLD_PICKLES):
        scans.append(_scanned(raw, where, end))
        end = scans[-1].end
    return scans
