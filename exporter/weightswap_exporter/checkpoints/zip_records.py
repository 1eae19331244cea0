"""Zip files by `torch.save`: places and checksums of their records, and checks of what they say."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from weightswap_runtime.errors import CheckpointError

from .pickle_scan import Refused, Repeated, Scan, scan
from .stored import read_into

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
