"""`pack()`: from a checkpoint to a weight file.

All that can be checked without values is checked before anything is written; then one weight at a time is read, or
computed by the conversion's graph, and written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from weightswap_exporter.capture.tracing import Load
from weightswap_exporter.checkpoints.loading import check_kinds, kind_mismatch, load_into, model_problems
from weightswap_exporter.checkpoints.nested_state_dicts import Choice, NestedStateDict
from weightswap_exporter.checkpoints.reading import Checkpoint, Source, choose_level, open_checkpoint, refuse
from weightswap_exporter.checkpoints.tensor import SCALED, cast, casting, casts, pieces, requested
from weightswap_exporter.modules.libraries import base_alone, peft_base
from weightswap_exporter.modules.tensors import ModelView, unwrapped
from weightswap_runtime import Artifact
from weightswap_runtime.errors import (
    CheckpointError,
    GraphMismatch,
    ParityError,
    WeightsMismatch,
    WeightswapError,
    listed,
)
from weightswap_runtime.format.canonical import StampedFile, canonical_order, new_weight_file
from weightswap_runtime.format.identity import Counts, Nonfinite, count_nonfinite, newly_nonfinite
from weightswap_runtime.format.manifest import MANIFEST_NAME, Manifest, NamedTensor
from weightswap_runtime.format.model_config import CONFIG_NAME, MOST_CONFIG, check_config
from weightswap_runtime.format.names import KEYS_THEN_NAMES, NAMES, Match, by_fqn, by_key, patterns, tied_names
from weightswap_runtime.format.safetensors import TensorRow, label_problem
from weightswap_runtime.format.weight_set import check_weights_name, goldens_path
from weightswap_runtime.sources.location import check_writable
from weightswap_runtime.sources.opening import read_small
from weightswap_runtime.sources.writing import companion, is_file
from weightswap_runtime.staging.given import OTHER_CONSTANTS, constant_problems
from weightswap_runtime.staging.transforms import Transforms
from weightswap_runtime.tensors import Tolerance, digest_of

from .goldens import Recording, Requested, record, wanted_goldens

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """A weight file that was written."""

    path: Path
    graph_id: str
    weights_id: str
    nbytes: int
    labels: dict[str, str]
    ignored: tuple[str, ...]
    """Keys at `level` that are no weights (state, extra state), that lack the prefix, or that `ignore=` matches."""
    level: str
    """Place of the weights in the checkpoint, such as `model`; empty for its top."""
    cast: dict[str, list[str]]
    """Weights that were cast, by their dtype in the checkpoint."""
    nonfinite: dict[str, Nonfinite] = field(default_factory=dict)
    """Weights with NaN, and those with infinities that require a gradient: a server may refuse them."""
    goldens: int = 0
    """Number of cases recorded in the file beside it."""
    promoted: int | None = None
    """Revision of the desired state that names this file; None without a promotion."""
    refusal: str = ""
    """Reason why `publish(promote=)` did not promote it; empty otherwise."""
    receipt: object = None
    """The fleet's receipt, if the file was promoted to a fleet."""
    base: str = ""
    """Weights id from which the file leads to its own, if it is a delta: `publish(rows=)`; empty otherwise."""


def pack(
    source: Source,
    artifact: Artifact | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    labels: Mapping[str, str] | None = None,
    dtype: torch.dtype | str | None = None,
    model: nn.Module | None = None,
    load: Load | None = None,
    level: str | None = None,
    prefix: str = "",
    ignore: str | Sequence[str] = (),
    progress: Progress | None = None,
    goldens: Requested | None = None,
    tolerance: Tolerance | None = None,
) -> Packed:
    """Write the weights of a checkpoint as a weight file for an artifact.

    source: a module, a state dict, or a path to one of:
      - .safetensors; .safetensors.index.json with its shards; a folder that holds either
      - .pt, .pth, .bin, .ckpt; .bin.index.json with its shards; a folder that holds pytorch_model.bin or its index.
        They are opened with `weights_only=True`: nothing in them runs
      - a folder that `torch.distributed.checkpoint.save` wrote, with any number of ranks
    Keys may be those of `model.state_dict()` or runtime FQNs, also with what wrappers add to them (`module.`,
    `_orig_mod.`, `_checkpoint_wrapped_module.`, `_fsdp_wrapped_module.`). A state dict below `state_dict`, `model`,
    `model_state_dict` or `module` (two levels at most) is taken if it alone has what the artifact wants.

    labels: short texts to store in the file; 64 KiB at most, names and texts together, as JSON.
    dtype: a floating dtype, such as `torch.bfloat16` or "bfloat16". Floating tensors of the checkpoint are cast to it
      where the graph has exactly this dtype, and the file records which. Every other mismatch stays an error, and so
      does a dtype that no weight of the graph has.
    model: for checkpoints whose loading computes something that the conversion has not recorded: the checkpoint is
      loaded into this module by `load(model, checkpoint)`, by default `model.load_state_dict(checkpoint)`, and the
      module's parameters and buffers are packed. The module keeps these values. Build it outside skeleton().
    load: gets the whole checkpoint as it was saved; then, if it raises or leaves the module as it was, the state dicts
      in it, until it has loaded one.
    level: place of the weights in the checkpoint, as keys joined with dots, such as "state_dict_ema" or "app.model";
      empty for its top. No other place is looked at, even if others fit, too.
    prefix: only tensors whose names begin with it, such as "net.", are taken, and it is removed from their names.
    ignore: patterns of names, such as "*.position_ids" (`*` also matches dots), for keys that an older model had: these
      tensors are treated as absent. A pattern that matches nothing causes a warning.
    progress: callback that gets the bytes done and the bytes in all.
    goldens, tolerance: as in `export()`, recorded with `model`, or else with the module given as `source`, into
      `NAME.goldens.safetensors` beside `NAME.safetensors`. Each method is called as the model's attribute of that name.
      The goldens are in place before the weight file is; without `goldens`, those of a replaced file are removed.

    Memory: one tensor of the checkpoint at a time, and the inputs of a weight that is computed; with `model`, the whole
    module and the whole checkpoint. A file in the format before torch 1.6 is read whole.

    The file appears whole or not at all, and old goldens stay with an old file. Raises CheckpointError, Unsupported for
    a name of goldens, WeightFileError, ParityError for goldens that cannot be recorded, and WeightsMismatch with every
    problem found.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    if load is not None and model is None:
        raise CheckpointError("`load` says how to load a checkpoint into `model`; give `model` too")
    if opened.manifest.variants:  # its weights have the names of the model that PEFT wraps
        source = peft_base(source) if isinstance(source, nn.Module) else source
        model = peft_base(model) if model is not None else None
    check_writable(out)
    texts = checked_labels(labels)
    path = Path(out)
    check_weights_name(path)
    eager = model if model is not None else source
    record_from = recorder(eager, opened, goldens, tolerance)
    if isinstance(source, str | os.PathLike):
        _check_other(path, [Path(source)])
    choice = Choice(level, prefix, patterns(ignore, "ignore") if ignore else (), tied_names(opened.manifest))
    opening = open_checkpoint(source, choice) if model is None else load_into(model, source, load, choice)
    with opening as checkpoint:
        _check_graph(checkpoint, opened)
        if isinstance(source, str | os.PathLike) and not checkpoint.graph_id and Path(source).is_dir():
            raw = read_small(Path(source) / CONFIG_NAME, MOST_CONFIG)
            check_config(raw, opened.manifest.config, str(source))
        recording = record_from()
        if isinstance(eager, nn.Module):
            check_constants(unwrapped(eager), opened)
        packing = pack_checkpoint(checkpoint, opened, path, labels=texts, dtype=dtype, progress=progress)
        with packing as (file, packed):
            goldens = recording.encode(packed.weights_id) if recording else None
            with companion(goldens_path(path), goldens):
                file.rename(path)
    return replace(packed, goldens=len(recording.cases) if recording else 0)


def pack_to_compare(source: Source, artifact: Artifact, out: Path) -> Path:
    """Pack weights with which a server may compute something else: a comparison shows what."""
    if isinstance(source, nn.Module) and artifact.manifest.variants:
        source = peft_base(source)
    with open_checkpoint(source) as checkpoint, pack_checkpoint(checkpoint, artifact, out, labels={}) as (file, _):
        file.rename(out)
    return out


@contextmanager
def pack_checkpoint(
    checkpoint: Checkpoint,
    artifact: Artifact,
    out: Path,
    *,
    labels: Mapping[str, str],
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[StampedFile, Packed]]:
    """Pack an open checkpoint into a temporary file, which the block has only to rename."""
    manifest = artifact.manifest
    weights = MatchedWeights.find(checkpoint, artifact, dtype)
    _check_other(out, {values.file for values in weights.level.tensors.values()})
    if isinstance(artifact.path, Path):
        _check_other(out, (artifact.path / name for name in (MANIFEST_NAME, *manifest.files)), "a file of the artifact")
    weights.check()
    counts: dict[str, Counts] = {}
    writing = new_weight_file(
        out,
        [weight.row for weight in manifest.weights],
        _with_progress(_counted(weights.data(), manifest, counts), manifest.total_bytes, progress),
        graph_id=manifest.packed_for,
        labels=labels,
        cast=weights.cast,
        with_blocks=manifest.ranks is not None,
    )
    try:
        with writing as (file, stamp):
            packed = Packed(
                path=out,
                graph_id=manifest.packed_for,
                weights_id=stamp.weights_id,
                nbytes=manifest.total_bytes,
                labels=stamp.labels,
                ignored=weights.left_out,
                level=weights.level.path,
                cast=weights.cast,
                nonfinite=newly_nonfinite(manifest.weights, counts, served=None),
            )
            yield file, packed
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{out}: cannot be written ({error})") from error


def recorder(
    model: object, artifact: Artifact, goldens: Requested | None, tolerance: Tolerance | None
) -> Callable[[], Recording | None]:
    """Return what records the goldens once the model has its weights. Raises CheckpointError and ParityError."""
    if (wanted := wanted_goldens(goldens, tolerance, artifact.methods)) is None:
        return lambda: None
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            "goldens are recorded with the eager model, and a checkpoint is not one: also give the module that was "
            "exported, as `model` or as the source"
        )
    eager = unwrapped(peft_base(model) if artifact.manifest.variants else model)
    if problems := model_problems(ModelView(eager), artifact):
        raise ParityError(problems, "Record with the model that was exported.", where="goldens")
    constants = artifact.constants()
    groups = {group: [row.name for row in rows] for group, rows in artifact.manifest.variants.items()}

    def record_base() -> Recording:
        view = ModelView(eager)  # after the loading, which may have replaced parameters
        with base_alone(view, groups):
            return record(view, wanted, artifact.manifest, constants, {})

    return record_base


def checked_labels(labels: Mapping[str, object] | None) -> dict[str, str]:
    """Return labels as texts. Raises CheckpointError for what no weight file may have."""
    texts = {str(name): str(text) for name, text in (labels or {}).items()}
    if problem := label_problem(texts):
        raise CheckpointError(f"labels: {problem}")
    return texts


def _check_other(out: Path, files: Iterable[Path | None], what: str = "the checkpoint") -> None:
    """Raise CheckpointError if the weight file would replace one of these files."""
    if is_file(out) and any(file is not None and is_file(file) and out.samefile(file) for file in files):
        raise CheckpointError(f"{out}: the weight file would replace {what}; give another name")


def _check_graph(checkpoint: Checkpoint, artifact: Artifact) -> None:
    """Raise GraphMismatch for a file that was packed for another graph, as a swap does."""
    expected = artifact.manifest.packed_for
    if checkpoint.graph_id not in ("", expected):
        raise GraphMismatch(
            f"{checkpoint.where}: packed for another graph, {checkpoint.graph_id[:12]}; the artifact has "
            f"{expected[:12]}, which may compute its weights in another way. Pack the checkpoint that it was made of, "
            "or the model"
        )


def check_constants(model: nn.Module, artifact: Artifact) -> None:
    """Raise CheckpointError if a module's constants are not the artifact's, with which a server computes."""
    if problems := constant_problems(model, artifact):
        raise CheckpointError(f"{type(model).__qualname__}: {listed(problems, between='; ')}. {OTHER_CONSTANTS}")


def _unscaled(match: Match, level: NestedStateDict, left_out: Sequence[str]) -> Iterator[str]:
    """Yield texts about floats of 8 bits or fewer beside which something is left out: it may be their scale."""
    names = {name for names in match.found.values() for name in names[:1]}
    names |= {name for keys in match.computed.values() for name in keys.values()}
    for name in sorted(name for name in names if level.tensors[name].dtype.startswith(SCALED)):
        full = f"{level.prefix}{name}"
        if beside := [other for other in left_out if other.rpartition(".")[0] in (full, full.rpartition(".")[0])]:
            yield (
                f"{full}: is {level.tensors[name].dtype}, and {listed(beside)}, which is left out, may be its scale. "
                "Load the checkpoint with the code that applies it, and pack what that gives"
            )


class MatchedWeights(NamedTuple):
    """The weights of an artifact, as a checkpoint has them; they are read one at a time."""

    artifact: Artifact
    checkpoint: Checkpoint
    level: NestedStateDict
    match: Match
    cast: dict[str, list[str]]  # as in `Packed`
    left_out: tuple[str, ...]

    @classmethod
    def find(cls, checkpoint: Checkpoint, artifact: Artifact, dtype: torch.dtype | str | None) -> MatchedWeights:
        """Match a checkpoint with the artifact. Raises CheckpointError and WeightsMismatch with every problem."""
        manifest = artifact.manifest
        wanted = requested(dtype, manifest)
        # a module may be the base model, without PEFT's layers
        names = (by_fqn, by_key) if manifest.variants else NAMES
        readings = casting(names if checkpoint.names else KEYS_THEN_NAMES, wanted, manifest)
        try:
            level, match = choose_level(checkpoint, manifest, readings)
        except WeightsMismatch as error:
            if mismatch := kind_mismatch(checkpoint, artifact):
                raise mismatch from error
            raise
        check_kinds(level, match, artifact, checkpoint.where)
        unread = (*match.ignored, *(level.extra if checkpoint.names else ()))
        left_out = (*(f"{level.prefix}{name}" for name in unread), *level.left_out)
        state = {f"{level.prefix}{tensor.name}" for tensor in manifest.state}  # whose values are the export's
        refuse(_unscaled(match, level, [name for name in left_out if name not in state]))
        return cls(artifact, checkpoint, level, match, casts(match, manifest, level.tensors), left_out)

    def check(self) -> None:
        """Check all that is known before writing. Raises CheckpointError, and WeightsMismatch for broken ties."""
        names = {name for names in self.match.found.values() for name in names}
        names |= {name for keys in self.match.computed.values() for name in keys.values()}
        refuse(text for name in sorted(names) for text in self.level.tensors[name].problems())
        ties = [
            f"{' and '.join(self.match.found[row.name])} are one tensor in the graph, but the checkpoint has "
            "different values for them"
            for row in self.artifact.manifest.weights
            if self._is_broken_tie(row)
        ]
        if ties:
            raise WeightsMismatch(
                self.checkpoint.where, ties, "Save the checkpoint from a model whose tied tensors are tied."
            )

    def _is_broken_tie(self, row: NamedTensor) -> bool:
        distinct = {self.level.tensors[name].tie_key: name for name in self.match.found.get(row.name, ())}
        return len(distinct) > 1 and len({digest_of(self._stored(name, row.dtype)) for name in distinct.values()}) > 1

    def data(self) -> Iterator[tuple[str, Iterator[memoryview]]]:
        """Yield the name and bytes of each weight, in the file's order. Raises the errors of reading and computing."""
        transforms = self.transforms()
        for row in canonical_order(weight.row for weight in self.artifact.manifest.weights):
            yield row.name, self.content(row, transforms)
        self.checkpoint.check_unchanged()

    def transforms(self) -> Transforms | None:
        """Return what computes weights; None if all are the checkpoint's own."""
        return Transforms(self.artifact) if self.match.computed else None

    def content(self, row: TensorRow, transforms: Transforms | None) -> Iterator[memoryview]:
        """Yield the bytes of a weight."""
        if transforms is not None and row.name in self.match.computed:
            return pieces(self._compute(row.name, transforms))
        return self._stored(self.match.found[row.name][0], row.dtype)

    def _stored(self, name: str, dtype: str) -> Iterator[memoryview]:
        return pieces(
            self.level.tensors[name].load(), partial(cast, dtype=dtype, where=f"{self.checkpoint.where}: {name}")
        )

    def _compute(self, weight: str, transforms: Transforms) -> torch.Tensor:
        names = self.match.computed[weight]
        inputs = {item.name: item.dtype for item in self.artifact.manifest.conversion.inputs}

        def read(key: str) -> torch.Tensor:
            return cast(self.level.tensors[names[key]].load(), inputs[key], f"{self.checkpoint.where}: {names[key]}")

        try:
            return dict(transforms.compute([weight], read))[weight]
        except (WeightswapError, MemoryError):
            raise
        except Exception as error:
            raise WeightsMismatch(
                self.checkpoint.where,
                [f"the conversion cannot compute {weight}: {type(error).__name__}: {error}"],
                "Load the checkpoint into the model and pack the model: pack(checkpoint, artifact, model=...).",
            ) from error


def _counted(
    data: Iterator[tuple[str, Iterator[memoryview]]], manifest: Manifest, counts: dict[str, Counts]
) -> Iterator[tuple[str, Iterator[memoryview]]]:
    """Count the values of the weights that are not finite, in `counts`, as they pass by."""
    dtypes = {weight.name: weight.dtype for weight in manifest.weights}

    def count(name: str, parts: Iterator[memoryview]) -> Iterator[memoryview]:
        for part in parts:
            if found := count_nonfinite(dtypes[name], part):
                counts[name] = found.plus(counts.get(name))
            yield part

    return ((name, count(name, parts)) for name, parts in data)


def _with_progress(
    data: Iterator[tuple[str, Iterator[memoryview]]], total: int, progress: Progress | None
) -> Iterator[tuple[str, Iterator[memoryview]]]:
    done = 0

    def count(parts: Iterator[memoryview]) -> Iterator[memoryview]:
        nonlocal done
        for part in parts:
            yield part
            done += len(part)
            if progress:
                progress(done, total)

    for name, parts in data:
        yield name, count(parts)
