"""What is fuzzed: readers of files that others may have written. Each takes bytes and raises errors of the family."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.fuzzing import mutations
from tests.support.adapters import Adapters
from tests.support.checkpoints import saved, saved_before_zip, saved_distributed
from tests.support.rows import prefer_rows
from tests.support.tiny import TinyArtifact, serves
from weightswap_exporter import pack
from weightswap_runtime import ArtifactError, Model, Unsupported, load, merge_deltas, write_delta
from weightswap_runtime.engines import graph as graph_opening
from weightswap_runtime.engines.graph import compile_graph
from weightswap_runtime.engines.graph_archive import UnknownPart, read_program
from weightswap_runtime.engines.operators import ForeignFunction, MissingOperator
from weightswap_runtime.format.manifest import MANIFEST_NAME, decode_manifest
from weightswap_runtime.format.signature import CallCheck, Literal, leaves
from weightswap_runtime.memory.arena import ArenaLayout
from weightswap_runtime.sources import byte_source as local
from weightswap_tools.diff import compare_weights


class Subject(NamedTuple):
    """`read` takes one input; the first of `seeds` is a valid one; `edit` makes a change that knows the format."""

    name: str
    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    edit: Callable[[random.Random, bytes], bytes]

    def mutated(self, choose: random.Random, corpus: Sequence[bytes]) -> bytes:
        return mutations.mutated(choose, choose.choice(corpus), corpus, self.edit)


class Readers:
    """Two live models, and the ways by which bytes reach them."""

    def __init__(self, folder: Path) -> None:
        local.CLOCK_TICK_NS = 0  # nobody writes to these files while they are read
        self._folder = folder
        self._file = folder / "input.safetensors"
        self._index = folder / "sharded" / "input.safetensors.index.json"
        self._index.parent.mkdir()
        self._parts = folder / "parts"
        self._parts.mkdir()
        tiny = TinyArtifact(folder / "tiny.artifact")
        self.tiny = tiny
        files = [tiny.write(folder / f"v{seed}.safetensors", tiny.values(seed)) for seed in range(2)]
        delta = write_delta(*files, folder / "delta.safetensors").path.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            prefer_rows(patch)
            rows = write_delta(*files, folder / "rows.safetensors").path.read_bytes()
        deltas = [delta, rows, mutations.shrink_delta(delta)]
        plain = folder / "plain.safetensors"
        values = tiny.values(1)
        safetensors.torch.save_file({"w": values.pop("weight"), **values}, plain)
        self.models = [load(tiny.path, files[0], residency=residency) for residency in ("double", "single")]
        full = [files[1].read_bytes(), plain.read_bytes()]
        self.subjects = (
            Subject("weights", self._stage, full, mutations.edit_weights),
            Subject("part", self._stage_part, full, mutations.edit_weights),
            Subject("delta", self._stage, deltas, mutations.edit_weights),
            Subject("merge", self._merge, deltas, mutations.edit_weights),
            Subject("index", self._stage_index, [self._shards(tiny)], mutations.edit_document),
            Subject("offsets", self._stage_parts, [self._parts_of_ranks(tiny)], mutations.edit_document),
            Subject("manifest", _manifest, [(tiny.path / MANIFEST_NAME).read_bytes()], mutations.edit_manifest),
            Subject("graph", _graph, _documents(), mutations.edit_document),
            *Checkpoints(folder, tiny).subjects,
        )

    def _shards(self, tiny: TinyArtifact) -> bytes:
        names = sorted(values := tiny.values(1))
        shards = {f"part-{index}.safetensors": names[index::2] for index in range(2)}
        for shard, held in shards.items():
            safetensors.torch.save_file({name: values[name] for name in held}, self._index.parent / shard)
        weight_map = {name: shard for shard, held in shards.items() for name in held}
        return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()

    def _parts_of_ranks(self, tiny: TinyArtifact) -> bytes:
        """Return the offsets of the second rank, which has the lower rows of a weight, and all other weights."""
        self._second = tiny.values(1)
        rows = self._second["weight"]
        self._second["weight"] = rows[1:].clone()
        offsets = {name: {"saved_offsets": [0] * value.ndim} for name, value in self._second.items()}
        self._save_part(1, {"weight": rows[:1].clone()}, json.dumps({"weight": offsets["weight"]}))
        offsets["weight"] = {"saved_offsets": [1, 0]}
        return json.dumps(offsets).encode()

    def _save_part(self, rank: int, values: dict[str, torch.Tensor], offsets: str) -> None:
        path = self._parts / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file(values, path, {"DCP_SHARDING_INFO": offsets})

    def _stage_parts(self, raw: bytes) -> None:
        self._save_part(2, self._second, raw.decode(errors="replace"))
        self._model(raw).stage(self._parts).discard()

    def _stage(self, raw: bytes) -> None:
        self._file.write_bytes(raw)
        self._model(raw).stage(self._file).discard()

    def _merge(self, raw: bytes) -> None:
        self._file.write_bytes(raw)
        merge_deltas([self._file], self._folder / "merged.safetensors")

    def _stage_part(self, raw: bytes) -> None:
        self._file.write_bytes(raw)
        self._model(raw).stage(self._file, only=["weight", "t*"]).discard()

    def _stage_index(self, raw: bytes) -> None:
        self._index.write_bytes(raw)
        self._model(raw).stage(self._index).discard()

    def _model(self, raw: bytes) -> Model:
        return self.models[len(raw) % 2]

    def whole(self) -> bool:
        """Whether both models are as they were."""
        return all(serves(model, 0) and model.generation == 0 for model in self.models)


class Checkpoints:
    """Checkpoints in the forms of trainers, which are packed, and a PEFT directory, which is added to a model."""

    def __init__(self, folder: Path, tiny: TinyArtifact) -> None:
        self._out, self._artifact = folder / "out.safetensors", tiny.path
        values = tiny.values(1)
        state = {"w": values.pop("weight"), **values}
        pt, old = saved(folder / "c.pt", {"model": state, "epoch": 3}), saved_before_zip(folder / "c.pth", state)
        dcp = saved_distributed(folder / "dcp", dict(state))
        (chunk,) = dcp.glob("*.distcp")
        adapters = Adapters(folder / "peft", 1)
        self._adapted, self._adapter = load(adapters.artifact, adapters.weights[0]), adapters.paths[0]
        self.subjects = (
            self._packed("pt", pt, pt, mutations.edit_zip),
            self._packed("old pt", old, old, mutations.edit_pickle),
            self._packed("metadata", dcp, dcp / ".metadata", mutations.edit_pickle),
            self._chunk(dcp, chunk),
            self._added("peft config", "adapter_config.json", mutations.edit_document),
            self._added("peft", "adapter_model.safetensors", mutations.edit_weights),
        )

    def _packed(self, name: str, source: Path, part: Path, edit: Callable[[random.Random, bytes], bytes]) -> Subject:
        raw = part.read_bytes()

        def read(changed: bytes) -> None:
            part.write_bytes(changed)
            try:
                pack(source, self._artifact, out=self._out)
                compare_weights(source, source)
            finally:
                part.write_bytes(raw)

        return Subject(name, read, [raw], edit)

    def _chunk(self, folder: Path, file: Path) -> Subject:
        """The chunk of one tensor, behind the others; the metadata say where it is and how long."""
        metadata, others = folder / ".metadata", file.read_bytes()
        untouched, document = metadata.read_bytes(), pickle.loads(metadata.read_bytes())
        (info,) = (info for index, info in document.storage_data.items() if index.fqn == "w")
        raw = others[info.offset : info.offset + info.length]

        def read(changed: bytes) -> None:
            info.offset, info.length = len(others), len(changed)
            file.write_bytes(others + changed)
            metadata.write_bytes(pickle.dumps(document))
            try:
                pack(folder, self._artifact, out=self._out)
                compare_weights(folder, folder)
            finally:
                file.write_bytes(others)
                metadata.write_bytes(untouched)

        return Subject("chunk", read, [raw], mutations.edit_zip)

    def _added(self, name: str, part: str, edit: Callable[[random.Random, bytes], bytes]) -> Subject:
        raw = (self._adapter / part).read_bytes()

        def read(changed: bytes) -> None:
            (self._adapter / part).write_bytes(changed)
            try:
                self._adapted.add_variant("lora", "a", self._adapter)
            finally:
                (self._adapter / part).write_bytes(raw)

        return Subject(name, read, [raw], edit)


class Modelled(nn.Module):
    """Sizes, texts, infinities, lists of tensors, a branch."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = torch.cond(x.sum() > 1, lambda a: a.sin(), lambda a: a.cos(), (x,))
        first, second = z.split([1, z.shape[0] - 1])
        picked = y[torch.zeros(2, dtype=torch.int64)].masked_fill(y[:2] > 0, float("-inf"))
        return nn.functional.gelu(first, approximate="tanh"), [second.to(torch.float64), torch.cat([picked, x])]


def _documents() -> list[bytes]:
    inputs = (torch.ones(4, 3), torch.ones(5, 3))
    program = torch.export.export(Modelled(), inputs, dynamic_shapes=({0: torch.export.Dim("rows", min=3)}, None))
    saved = io.BytesIO()
    torch.export.save(program, saved)
    with zipfile.ZipFile(saved) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith("/models/model.json")]


def _graph(raw: bytes) -> None:
    """Make a function of a graph's document; what only torch might know is refused here."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("archive/models/model.json", raw)
    try:
        compile_graph(read_program(written.getvalue()).graph_module.graph, torch.device("cpu"))
    except graph_opening.DAMAGED as error:
        raise ArtifactError(str(error)) from error
    except (UnknownPart, MissingOperator, ForeignFunction) as error:
        raise Unsupported(str(error)) from error


def _manifest(raw: bytes) -> None:
    """Decode, and do what a server does with it before it opens a graph."""
    manifest = decode_manifest(raw, "manifest.json")
    ArenaLayout(manifest.weights)
    for name, method in manifest.methods.items():
        CallCheck(name, method.signature, object, {}, lambda value: None, type)
        for leaf in leaves(method.signature.output):
            assert not isinstance(leaf, Literal) or leaf.content is not leaf
