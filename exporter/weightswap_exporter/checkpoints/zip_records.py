"""Zip files by `torch.save`: places and checksums of their records."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import IO, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from .stored import read_into

PIECE = 1 << 20  # fits into the processor's cache
PICKLE_NAME = "data.pkl"
SCRIPT_NAME = "constants.pkl"  # in files by torch.jit.save alone
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\x03\x04"


class Record(NamedTuple):
    """Uncompressed record: `size` bytes of the zip from `offset` on. `crc` is 0 if none was computed."""

    offset: int
    size: int
    crc: int


def record_names(file: IO[bytes]) -> list[str]:
    """Return the names of a zip's records, without their folder. Raises BadZipFile, ValueError and OSError."""
    with ZipFile(file) as archive:
        return [_name(info) for info in archive.infolist()]


def read_records(file: IO[bytes]) -> dict[str, Record]:
    """Return the records of a zip by name, without their folder. Raises BadZipFile, ValueError and OSError."""
    with ZipFile(file) as archive:
        return {_name(info): _record(file, info) for info in archive.infolist()}


def _name(info: ZipInfo) -> str:
    return info.filename.partition("/")[2]


def _record(file: IO[bytes], info: ZipInfo) -> Record:
    if info.compress_type != ZIP_STORED:
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


def damaged_pickle(fd: int, records: Mapping[str, Record], where: str, begin: int = 0) -> bool:
    """Return whether the description of the tensors is damaged."""
    return PICKLE_NAME in records and is_damaged(fd, records[PICKLE_NAME], where, begin)
