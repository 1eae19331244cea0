"""Weight sets: tensors in one file or several, as a weight file, an index with shards, a Hugging Face directory, or the
parts that each rank of torch's HuggingFaceStorageWriter has saved.

What a path or a URL means is decided here, and by names alone: in a folder several files may be weights, and taking the
wrong one would serve it. So anything but one candidate is an error that names the candidates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, NamedTuple, Self

import msgspec

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import Unsupported, WeightFileError, listed, warn
from weightswap_runtime.sources.arriving import Arriving
from weightswap_runtime.sources.byte_source import ByteSource, Check, LocalFile
from weightswap_runtime.sources.location import Location, Url, as_location, folder_behind
from weightswap_runtime.sources.opening import read_small
from weightswap_runtime.sources.rectangles import Rectangle, Rectangles, grid_problem
from weightswap_runtime.sources.writing import is_file
from weightswap_runtime.tensors import DTYPES, describe

from .manifest import CONSTANTS_NAME, MANIFEST_NAME
from .model_config import CONFIG_NAME, MOST_CONFIG
from .safetensors import MAX_HEADER, FileTensor, Stamp, WeightFile, holds_goldens

SUFFIX = ".safetensors"
GOLDENS_SUFFIX = ".goldens.safetensors"
SIGNATURE_SUFFIX = ".sig"
INDEX_SUFFIX = ".safetensors.index.json"
TORCH_SUFFIXES = (".bin", ".bin.index.json", ".ckpt", ".distcp", ".pt", ".pth", ".pth.tar")
_SINGLE_NAME = "model.safetensors"  # of transformers' save_pretrained
_INDEX_NAME = "model" + INDEX_SUFFIX
PEFT_CONFIG_NAME = "adapter_config.json"  # of PEFT's save_pretrained
_PEFT_STEM = "adapter_model"
_OLD_PEFT_NAME = _PEFT_STEM + ".bin"  # of PEFT's save_pretrained without safetensors
_MOST_OPEN = 32  # shards; a process needs its descriptors for connections, too
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.safetensors|\.bin)")
# names and metadata that torch.distributed.checkpoint gives to the file of a rank (its _hf_utils.py)
_PART = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
_OFFSETS_KEY = "DCP_SHARDING_INFO"
_AGAIN = "Write the checkpoint again, or copy it again."
_ALL_PARTS = "Copy the files of all ranks, and none of another save, or save the checkpoint again into an empty folder."
_LOST_PART = "Shapes are those that the files of the ranks in the folder add up to; one may be missing. " + _ALL_PARTS


class StoredTensor(NamedTuple):
    """Tensor with the source of its bytes, which are in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    source: ByteSource
    offset: int  # from the start of the source
    nbytes: int


class WeightSet:
    """Named tensors that form one set, each with the source of its bytes, which the set checks and closes.

    where: what messages and receipts call it. location: of the file or the index; None for weights that are in no file,
    which nobody can read again. stamp: what weightswap wrote into the file; None for several files. metadata: of the
    file; empty for several. advice: what to do if the tensors are not those that are wanted; empty if nothing special.
    config: content of the configuration of a transformers model beside it, if a folder was given.
    """

    location: Location | None = None
    advice = ""
    stamp: Stamp | None = None
    metadata: Mapping[str, str] = MappingProxyType({})
    config: bytes | None = None

    def __init__(self, where: str, tensors: Mapping[str, StoredTensor], sources: Iterable[ByteSource]) -> None:
        self.where, self.tensors, self.sources = where, tensors, tuple(sources)

    @property
    def holds_goldens(self) -> bool:
        """True if the set holds recorded calls instead of weights."""
        return holds_goldens(self.metadata)

    @property
    def comes_once(self) -> bool:
        """True if the bytes come in order, and only once."""
        return any(isinstance(source, Arriving) for source in self.sources)

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Raise WeightFileError or SourceChanged if any source was written to since it was opened, or may have been.

        proven: True if the caller has compared everything it read with digests in the file.
        """
        for source in self.sources:
            source.check_unchanged(proven=proven)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def without_place(self, where: str) -> WeightSet:
        """Return the same tensors as those of a file that nobody else can open, called `where`."""
        weights = WeightSet(where, self.tensors, self.sources)
        weights.stamp, weights.metadata = self.stamp, self.metadata
        return weights

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileSet(WeightSet):
    """Open, checked safetensors files whose tensors form one set. Made by `open_weights()`."""

    location: Location

    def __init__(
        self, location: Location, files: Iterable[WeightFile], tensors: Mapping[str, StoredTensor] | None = None
    ) -> None:
        """tensors: None for those of the files, each of which is in one of them."""
        self.files = tuple(files)
        only = self.files[0] if len(self.files) == 1 else None
        if tensors is None:
            tensors = {name: _stored(file, tensor) for file in self.files for name, tensor in file.tensors.items()}
        super().__init__(str(location), tensors, [file.source for file in self.files])
        self.location = location
        self.stamp = only.stamp if only else None
        self.metadata = only.header.metadata if only else {}


def open_weights(
    path: str | os.PathLike[str] | Url, check: Check | None = None, most_header: int = MAX_HEADER
) -> FileSet:
    """Open a .safetensors file, a .safetensors.index.json with its shards, or a directory that holds either.

    path: a local path or an fsspec URL. In a directory `model.safetensors` is opened, else the only index, else all
    files if they have the names that torch's HuggingFaceStorageWriter gives to parts of ranks, else the only
    .safetensors file that is not a shard. Every header is read and checked; no data is read. check: a callback, called
    every few milliseconds while waiting for a remote response; an exception that it raises ends the wait. most_header:
    the most bytes of all headers together, or of each part, as each may name all tensors; see `Manifest.most_header`.

    Parts do not say which shape the whole has: it is what they add up to. Without the last one it is too small, which
    only who knows the shape can see.

    Raises WeightFileError, and Unsupported or MissingExtra for a kind of URL that cannot be read here.
    """
    location = as_location(path)
    names = local_names(location) if isinstance(location, Path) else _remote_names(location, check)
    if names is None:
        return _open_file(location, check, most_header)
    config = read_small(location / CONFIG_NAME, MOST_CONFIG, check) if CONFIG_NAME in names else None
    if parts := _parts_among(names):
        weights = _open_parts(location, parts, check, most_header)
    else:
        chosen = _choose(location, names)
        check_no_peft(location, names, chosen)
        weights = _open_file(location / chosen, check, most_header)
    weights.config = config
    return weights


def _open_file(location: Location, check: Check | None, most_header: int) -> FileSet:
    if location.name.endswith(INDEX_SUFFIX):
        return _open_shards(location, check, most_header)
    return FileSet(location, [WeightFile(location, check, most_header)])


def goldens_path(weights: str | os.PathLike[str]) -> Path:
    """Return `v1.goldens.safetensors` for `v1.safetensors`, or for the index of its shards."""
    path = weights if isinstance(weights, Path) else Path(weights)
    return path.with_name(goldens_name(path.name))


def check_weights_name(path: str | os.PathLike[str]) -> None:
    """Raise Unsupported for a name of goldens: they would be lost, and no folder lists such a file as weights."""
    if Path(path).name.endswith(GOLDENS_SUFFIX):
        raise Unsupported(f"{path}: names in *{GOLDENS_SUFFIX} are for goldens; give the weight file another name")


def companions(name: str) -> tuple[str, str]:
    """Return the names of the files beside weights of this name that decide whether they are taken."""
    return goldens_name(name), name + SIGNATURE_SUFFIX


def goldens_name(name: str) -> str:
    """Return the name of the goldens beside weights of this name, like `goldens_path`."""
    suffix = next((suffix for suffix in (INDEX_SUFFIX, SUFFIX) if name.endswith(suffix)), "")
    return name.removesuffix(suffix) + GOLDENS_SUFFIX


def local_names(path: Path) -> list[str] | None:
    """Return the sorted names in a directory; None for anything else. Raises WeightFileError."""
    try:
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else None
    except (OSError, ValueError) as error:
        raise WeightFileError(f"{path!s:.200}: cannot be opened ({error})") from error


def _remote_names(url: Url, check: Check | None) -> list[str] | None:
    if url.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return None
    from weightswap_runtime.sources.urls import list_names  # needs fsspec

    return list_names(url, (_SINGLE_NAME, _INDEX_NAME, PEFT_CONFIG_NAME, CONFIG_NAME), check)


def _choose(path: Location, names: Sequence[str]) -> str:
    if _SINGLE_NAME in names:
        if _INDEX_NAME in names and len(_weight_names(names)) > 1:  # a program that saved twice leaves the former file
            warn(
                f"{path}: holds {_SINGLE_NAME}, which is taken, as transformers does, and also {_INDEX_NAME} with "
                "shards; remove what is old, or give the path of the one you mean"
            )
        return _SINGLE_NAME
    if MANIFEST_NAME in names:
        raise WeightFileError(f"{path}: an artifact, not a checkpoint; give a weight file or a checkpoint's directory")
    if CONSTANTS_NAME in names and "graphs" in names:
        raise WeightFileError(f"{path}: looks like an artifact whose {MANIFEST_NAME} is missing; export it again")
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    singles = _weight_names(names)
    if not indices and (lost := lost_index(singles)):
        raise WeightFileError(f"{path}: {lost}")
    several = indices or singles
    if len(several) == 1:
        return several[0]
    if several:
        raise WeightFileError(
            f"{path}: holds {len(several)} candidates ({listed(several)}) and no {_SINGLE_NAME}; give the path of "
            "the one you mean"
        )
    raise WeightFileError(f"{path}: {_no_candidate(names)}")


def _weight_names(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(SUFFIX) and not name.endswith(GOLDENS_SUFFIX)]


def _parts_among(names: Sequence[str]) -> list[str]:
    """Return the weight files of a directory if all are parts of ranks, and there is no index; otherwise none."""
    parts = _weight_names(names)
    is_other = any(name == MANIFEST_NAME or name.endswith(INDEX_SUFFIX) for name in names)
    return parts if not is_other and all(map(_PART.fullmatch, parts)) else []


def check_no_peft(path: Location, names: Collection[str], chosen: str) -> None:
    """Raise WeightFileError if a PEFT adapter is beside the model's weights: transformers would load both."""
    if PEFT_CONFIG_NAME in names and not chosen.startswith(_PEFT_STEM):
        raise WeightFileError(
            f"{path}: holds a PEFT adapter ({PEFT_CONFIG_NAME}) beside {chosen}, and transformers would load both. "
            "Merge it into the model (model.merge_and_unload()), and save that into another folder; for the model "
            f"without it, give the path of {chosen}"
        )


def peft_alone(names: Collection[str]) -> str:
    """Return a message if a directory without safetensors files has a PEFT adapter; otherwise an empty string."""
    if _OLD_PEFT_NAME not in names:
        return ""
    return (
        f"holds {_OLD_PEFT_NAME}, a PEFT adapter and not a model's weights. Merge it into the model first "
        "(model.merge_and_unload()), and save or pack that; for a variant of a model that was exported with its "
        "adapter, save it again as .safetensors (save_pretrained)"
    )


def _no_candidate(names: Sequence[str]) -> str:
    if conversion := peft_alone(names):
        return conversion
    if pickled := [name for name in names if is_torch_name(name)]:
        return (
            f"holds {pickled[0]}, which is pickled or needs torch to be read, and no .safetensors file. Pack it on the "
            "build side: weightswap pack CHECKPOINT ARTIFACT -o FILE.safetensors"
        )
    return "a directory without a .safetensors file or an index of one; give the directory of a saved model"


def lost_index(names: Sequence[str]) -> str:
    """Return a message if all files of a directory are shards whose index is missing; otherwise an empty string."""
    shards = [_SHARD.fullmatch(name) for name in names]
    parts = [shard for shard in shards if shard is not None and int(shard[2]) > 1]
    if not parts or len(parts) < len(names):
        return ""
    stem, count, suffix = parts[0].groups()
    return (
        f"holds {len(parts)} of {int(count)} shards, but not their index, {stem}{suffix}.index.json. Copy that too, "
        "or save the checkpoint again"
    )


def shard_set(name: str) -> tuple[str, str] | None:
    """Return the beginning and the number of shards that the name of a safetensors shard has; None for others.

    The parts of ranks, of which no name says how many there are, are one set.
    """
    if _PART.fullmatch(name):
        return "shard", ""
    shard = _SHARD.fullmatch(name)
    return (shard[1], shard[2]) if shard is not None and shard[3] == SUFFIX and int(shard[2]) > 1 else None


def shard_advice(where: str) -> str:
    """Return what to do about a file that is one shard of several; otherwise an empty string."""
    if _PART.search(where):
        return (
            "It is the part of one rank: give its folder. A watched directory takes weight files of one piece: pack "
            "the folder into it (weightswap pack)."
        )
    shard = _SHARD.search(where)
    if shard is None or int(shard[2]) < 2:
        return ""
    return (
        f"It is one of {int(shard[2])} shards: give their index, or their folder. A watched directory takes weight "
        "files of one piece: pack the checkpoint into it (weightswap pack)."
    )


def is_torch_name(name: str) -> bool:
    """Return True for the names of torch's checkpoints: pickled files and parts of distributed checkpoints."""
    return name.endswith(TORCH_SUFFIXES) or name == ".metadata"


def _open_shards(index: Location, check: Check | None, most: int) -> FileSet:
    # resolved once, as a link to the folder may be changed while the shards are opened
    folder = folder_behind(index.parent)
    weight_map = read_index(folder / index.name, SUFFIX, check, most)
    with ExitStack() as stack:
        files: dict[str, WeightFile] = {}
        for name in sorted(set(weight_map.values())):
            files[name] = _open_one(folder / name, len(files), check, most, stack)
            most = max(0, most - files[name].header.data_start)
        _check_in_place(files.values())
        if problems := list(_index_problems(weight_map, files)):
            raise WeightFileError(f"{index}: contradicts its shards: {listed(problems, between='; ')}. {_AGAIN}")
        stack.pop_all()  # the set closes them
    return FileSet(index, files.values())


def _open_one(path: Location, opened: int, check: Check | None, most: int, stack: ExitStack) -> WeightFile:
    """Open one of several files, after `opened` others, so that descriptors are left however many there are."""
    file = stack.enter_context(WeightFile(path, check, most))
    if opened >= _MOST_OPEN and isinstance(file.source, LocalFile):
        file.source.rest()
    return file


def _check_in_place(files: Iterable[WeightFile]) -> None:
    """Raise WeightFileError if a file was replaced while the others were opened: old and new ones are no set.

    An open file does not show it if its folder was renamed, or if it was replaced as soon as it was open.
    """
    for file in files:
        if isinstance(file.source, LocalFile):
            file.source.check_in_place()


def read_index(index: Location, suffix: str, check: Check | None = None, most: int = MAX_HEADER) -> dict[str, str]:
    """Read and check an index of shards with the given suffix, and return its map of tensors to shards.

    most: bytes of all headers; an index, which says less, has at most half as many.

    The shards' paths are relative to the index's folder. Raises WeightFileError.
    """
    raw = read_small(index, most // 2, check)
    if raw is None:
        raise WeightFileError(f"{index}: cannot be opened (no such file)")
    try:
        weight_map = from_json(raw, _Index).weight_map
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WeightFileError(f"{index}: not an index of {suffix[1:]} shards ({error}). {_AGAIN}") from error
    if not weight_map:
        raise WeightFileError(f"{index}: an index without tensors. {_AGAIN}")
    for name in sorted(set(weight_map.values())):
        _check_shard(index, name, suffix)
    return weight_map


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _check_shard(index: Location, name: str, suffix: str) -> None:
    shard = PurePosixPath(name)
    forbidden = "\\\0" if isinstance(index, Path) else "\\\0?#:"  # in URLs these begin a query or a version
    if shard.is_absolute() or ".." in shard.parts or set(name) & set(forbidden) or not name.endswith(suffix):
        raise WeightFileError(
            f"{index}: names the shard {name!r}; expected the name of a {suffix} file in the index's folder. "
            "Do not use this checkpoint unless you trust where it is from."
        )
    if isinstance(index, Path) and not is_file(index.parent / name):
        raise WeightFileError(f"{index}: names the shard {name:.200}, which is missing. {_AGAIN}")


def _index_problems(weight_map: Mapping[str, str], files: Mapping[str, WeightFile]) -> Iterator[str]:
    for key, name in weight_map.items():
        if key not in files[name].tensors:
            yield f"{key!r} is not in {name}"
    for name, file in files.items():
        for key, tensor in file.tensors.items():
            if weight_map.get(key) != name:
                other = f"the index says {weight_map[key]}" if key in weight_map else "the index does not list it"
                yield f"{name} has {key!r} ({describe(tensor)}), {other}"


# Parts of tensors, by rank.


class _Part(NamedTuple):
    file: WeightFile
    tensor: FileTensor
    offsets: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


class _Saved(msgspec.Struct):
    saved_offsets: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...]


def _open_parts(location: Location, names: Sequence[str], check: Check | None, most: int) -> FileSet:
    folder = folder_behind(location)
    if isinstance(location, Path) and not location.name:  # `.`, beside which nothing could be named after it
        location = folder
    with ExitStack() as stack:
        files = [_open_one(folder / name, count, check, most, stack) for count, name in enumerate(names)]
        _check_in_place(files)
        parts: dict[str, list[_Part]] = {}
        for file in files:
            offsets = _saved_offsets(file)
            for name, tensor in file.tensors.items():
                # what has no entry is whole
                part = _Part(file, tensor, offsets.get(name, (0,) * len(tensor.shape)))
                if len(part.offsets) != len(part.sizes):
                    raise _no_offsets(file, f"{name} has {len(part.offsets)} offsets and {len(part.sizes)} sizes")
                parts.setdefault(name, []).append(part)
        tensors = {name: _joined(str(location), name, found) for name, found in parts.items()}
        stack.pop_all()  # the set closes them
    weights = FileSet(location, files, tensors)
    weights.advice = _LOST_PART
    return weights


def _saved_offsets(file: WeightFile) -> dict[str, tuple[int, ...]]:
    text = file.header.metadata.get(_OFFSETS_KEY, "{}")
    try:
        saved = from_json(text, dict[str, _Saved])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _no_offsets(file, str(error)) from error
    return {name: entry.saved_offsets for name, entry in saved.items()}


def _no_offsets(file: WeightFile, problem: str) -> WeightFileError:
    return WeightFileError(
        f"{file.where}: its `{_OFFSETS_KEY}` does not say where its tensors belong ({problem}). {_AGAIN}"
    )


def _joined(where: str, name: str, parts: Sequence[_Part]) -> StoredTensor:
    """Return a tensor of all its parts. Raises WeightFileError if they are not exactly the parts of one tensor."""
    first = next((part for part in parts if part.tensor.nbytes), parts[0])  # ranks without a share have an empty part
    for part in parts:
        if (part.tensor.dtype, len(part.sizes)) != (first.tensor.dtype, len(first.sizes)):
            raise WeightFileError(
                f"{where}: {name} is {describe(first.tensor)} in {first.file.path.name} and {describe(part.tensor)} in "
                f"{part.file.path.name}. {_ALL_PARTS}"
            )
    full = [part for part in parts if part.tensor.nbytes] or [first]
    shape = tuple(map(max, zip(*(part.ends for part in full), strict=True)))
    _check_cover(where, name, shape, full)
    if len(full) == 1:
        return _stored(first.file, first.tensor)
    rectangles = [
        Rectangle(part.offsets, part.sizes, part.file.source, part.file.header.data_start + part.tensor.begin)
        for part in full
    ]
    source = Rectangles(where, shape, rectangles, DTYPES[first.tensor.dtype].bits // 8)
    return StoredTensor(first.tensor.dtype, shape, source, 0, source.size)


def _check_cover(where: str, name: str, shape: tuple[int, ...], parts: Sequence[_Part]) -> None:
    if len(parts) > 1 and DTYPES[parts[0].tensor.dtype].bits % 8:
        raise WeightFileError(
            f"{where}: {name} is {describe(parts[0].tensor)}, cut into {len(parts)} parts; expected whole bytes. Save "
            "it whole (enable_consolidation=True)."
        )
    if problem := grid_problem(shape, [(part.offsets, part.sizes) for part in parts]):
        text, place = problem
        holders = [part.file.path.name for part in parts if part.offsets == place]
        files = f" ({listed(holders)})" if holders else ""
        raise WeightFileError(f"{where}: {name}: {text}{files}. {_ALL_PARTS}")


def _stored(file: WeightFile, tensor: FileTensor) -> StoredTensor:
    return StoredTensor(tensor.dtype, tensor.shape, file.source, file.header.data_start + tensor.begin, tensor.nbytes)
