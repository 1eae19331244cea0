"""One set of tensors in one file or several: a weight file, an index with its shards, a Hugging Face directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

from .dtypes import describe
from .errors import WeightFileError
from .manifest import MANIFEST_NAME
from .weightfile import Stamp, WeightFile

SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
GOLDENS_SUFFIX = ".goldens.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MOST_INDEX_BYTES = 256 << 20
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.safetensors|\.bin)")
_AGAIN = "Write the checkpoint again, or copy it again."


class StoredTensor(NamedTuple):
    """A tensor in a file: `nbytes` row-major bytes from `offset`, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    file: WeightFile
    offset: int
    nbytes: int


class WeightSet(AbstractContextManager["WeightSet"]):
    """Open, checked safetensors files whose tensors form one set. Made by `open_weights()`."""

    def __init__(self, where: str, files: Mapping[str, WeightFile]) -> None:
        self.where = where
        self.files = tuple(files.values())
        self.tensors = {name: tensor for file in self.files for name, tensor in _stored(file)}

    @property
    def stamp(self) -> Stamp | None:
        """What weightswap has written about the tensors; files that belong to an index have none."""
        return self.files[0].stamp if len(self.files) == 1 else None

    def check_unchanged(self) -> None:
        """Raise WeightFileError if any file was written to since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path: str | os.PathLike[str]) -> WeightSet:
    """Open a .safetensors file, a .safetensors.index.json with its shards, or a directory that holds either.

    In a directory `model.safetensors` is taken, else the only index, else the only .safetensors file that is no shard.
    Every header is read and checked, no data. Raises WeightFileError.
    """
    found = _find(Path(path)) if isinstance(path, str | os.PathLike) else path
    if isinstance(found, Path) and found.name.endswith(INDEX_SUFFIX):
        return _open_shards(found)
    return WeightSet(str(found), {"": WeightFile(found)})


def goldens_path(weights: str | os.PathLike[str]) -> Path:
    """`v1.goldens.safetensors` for `v1.safetensors`, or for the index of its shards."""
    path = Path(weights)
    suffix = next((suffix for suffix in (INDEX_SUFFIX, SUFFIX) if path.name.endswith(suffix)), "")
    return path.with_name(path.name.removesuffix(suffix) + GOLDENS_SUFFIX)


def _stored(file: WeightFile) -> Iterator[tuple[str, StoredTensor]]:
    start = file.header.data_start
    for name, (dtype, shape, begin, end) in file.tensors.items():
        yield name, StoredTensor(dtype, shape, file, start + begin, end - begin)


def _find(path: Path) -> Path:
    try:
        if not path.is_dir():
            return path
        names = sorted(entry.name for entry in path.iterdir())
    except (OSError, ValueError) as error:
        raise WeightFileError(f"{path!s:.200}: cannot be opened ({error})") from error
    return path / _meant(path, names)


def _meant(path: Path, names: Sequence[str]) -> str:
    """Which of the files in a directory to open."""
    if SINGLE_NAME in names:
        return SINGLE_NAME
    if MANIFEST_NAME in names:
        raise WeightFileError(f"{path}: an artifact, not a checkpoint; give a weight file or a checkpoint's directory")
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    singles = [name for name in names if name.endswith(SUFFIX) and not name.endswith(GOLDENS_SUFFIX)]
    if not indices and (lost := lost_index(singles)):
        raise WeightFileError(f"{path}: {lost}")
    for candidates in (indices, singles):
        if len(candidates) == 1:
            return candidates[0]
    several = indices or singles
    if several:
        raise WeightFileError(
            f"{path}: holds {len(several)} candidates ({', '.join(several[:5])}) and no {SINGLE_NAME}; name the one "
            "that is meant"
        )
    raise WeightFileError(f"{path}: {_nothing(names)}")


def lost_index(names: Sequence[str]) -> str:
    """What is wrong if the files of a directory are nothing but shards, which an index would tell apart; else empty."""
    shards = [_SHARD.fullmatch(name) for name in names]
    found = [shard for shard in shards if shard is not None and int(shard[2]) > 1]
    if not found or len(found) < len(names):
        return ""
    stem, count, suffix = found[0].groups()
    return (
        f"holds {len(found)} of {int(count)} shards, but not their index, {stem}{suffix}.index.json. Copy that, too, "
        "or save the checkpoint again"
    )


def _nothing(names: Sequence[str]) -> str:
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".distcp"))]
    if pickled:
        return (
            f"holds {pickled[0]}, which is pickled or needs torch to be read, and no .safetensors file. Pack it on the "
            "build side: weightswap pack CHECKPOINT ARTIFACT -o FILE.safetensors"
        )
    return "a directory without a .safetensors file or an index of one; give the directory of a saved model"


def _open_shards(index: Path) -> WeightSet:
    weight_map = read_index(index, SUFFIX)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(WeightFile(index.parent / name)) for name in sorted(set(weight_map.values()))
        }
        if problems := list(_index_problems(weight_map, files)):
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise WeightFileError(f"{index}: contradicts its shards: {'; '.join(problems[:5])}{more}. {_AGAIN}")
        stack.pop_all()  # the set closes them
    return WeightSet(str(index), files)


def read_index(index: Path, suffix: str) -> dict[str, str]:
    """Read and check an index of shards with this suffix: tensor -> shard, which is in the index's folder.

    Raises WeightFileError.
    """
    try:
        if not index.is_file():  # a pipe would be waited for
            raise WeightFileError(f"{index}: cannot be opened (not a regular file)")
        if index.stat().st_size > MOST_INDEX_BYTES:
            raise WeightFileError(f"{index}: larger than {MOST_INDEX_BYTES} bytes, so it is not an index")
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise WeightFileError(f"{index}: cannot be opened ({error.strerror})") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WeightFileError(f"{index}: not an index of {suffix[1:]} shards ({error}). {_AGAIN}") from error
    if not weight_map:
        raise WeightFileError(f"{index}: an index without tensors. {_AGAIN}")
    for name in sorted(set(weight_map.values())):
        _check_shard(index, name, suffix)
    return weight_map


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _check_shard(index: Path, name: str, suffix: str) -> None:
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or "\\" in name or "\0" in name or not name.endswith(suffix):
        raise WeightFileError(
            f"{index}: names the shard {name!r}; expected the name of a {suffix} file in the index's folder. "
            "Do not use this checkpoint unless you trust where it is from."
        )
    if not (index.parent / name).is_file():
        raise WeightFileError(f"{index}: names the shard {name}, which is missing. {_AGAIN}")


def _index_problems(weight_map: Mapping[str, str], files: Mapping[str, WeightFile]) -> Iterator[str]:
    for key, name in weight_map.items():
        if key not in files[name].tensors:
            yield f"{key!r} is not in {name}"
    for name, file in files.items():
        for key, tensor in file.tensors.items():
            if weight_map.get(key) != name:
                other = f"it says {weight_map[key]}" if key in weight_map else "it does not list that"
                yield f"{name} has {key!r} ({describe(tensor.dtype, tensor.shape)}), {other}"
