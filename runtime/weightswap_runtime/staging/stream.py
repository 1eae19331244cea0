"""Staging of tensors that come in an order that is not ours, and only once: one by one, or as a file.

Of those that come one by one, each is copied and hashed before the next one is asked for. A tensor goes to its place at
once if every way to read its name means the same weight. What may mean several, what weights are computed from, and
what the arena keeps in another order is kept beside it until all have come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

import numpy as np

from weightswap_runtime.errors import WeightsMismatch
from weightswap_runtime.format.manifest import Manifest, NamedTensor
from weightswap_runtime.format.names import Match, extra_state_of, known_as, tied_names
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import Arena, Scratch
from weightswap_runtime.sources.memory import MemorySource
from weightswap_runtime.tensors import BLOCK, TensorType, describe, same_type
from weightswap_runtime.threads import WorkerThreads

from .given import Stream, stored
from .reading import Findings, confirm, lay, new_piece, read_pieces, read_scratch
from .request import READINGS, Staging
from .shares import read_shares

_ADVICE = "Give the tensors of the exported model, each once."


class Arrivals:
    """The tensors of a stream: where each is, and what was found in it, by its name."""

    def __init__(self, stream: Stream, arena: Arena, part: Manifest, staging: Staging) -> None:
        """part: what is requested of the manifest."""
        self._stream, self._arena, self._staging = stream, arena, staging
        self._meanings = _meanings(part, staging)
        self._tied = tied_names(staging.manifest)
        self._placed: dict[str, str] = {}  # weight -> name of the tensor in its place
        self._kept: dict[str, Scratch] = {}
        self.findings = Findings({}, {})

    def read_all(self) -> None:
        """Take what comes.

        Raises WeightsMismatch at the first tensor that cannot be of these weights, SourceChanged for one that was
        written to while it was copied, StageCancelled, MemoryError, and what the iterator raises.
        """
        for name, source in self._stream:
            self._staging.job.check()
            bare = known_as(name, self._meanings)
            if problem := self._problem(name, bare, source):
                raise WeightsMismatch(self._stream.where, [problem], _ADVICE)
            self._stream.tensors[name] = stored(source)
            if bare is not None and self._meanings[bare] and not self._is_ignored(name):
                self._take(name, source, self._place(bare, source))
            source.close()  # nothing keeps what was given

    def _is_ignored(self, name: str) -> bool:
        matches = any(fnmatchcase(name, pattern) for pattern in self._staging.request.ignore)
        return matches and known_as(name, self._tied) is None

    def _problem(self, name: str, bare: str | None, source: MemorySource) -> str:
        """Return what is wrong with a tensor whatever else will come; otherwise an empty text."""
        if name in self._stream.tensors:
            return f"{name}: came twice"
        if self._is_ignored(name) or extra_state_of(name):
            return ""
        if bare is None:
            return "" if self._staging.request.only else f"{name}: unexpected"
        types = [typed for _, typed in self._meanings[bare]]
        if types and not any(same_type(source.type, typed) for typed in types):
            return f"{name}: expected {describe(types[0])}, found {describe(source.type)}"
        return ""

    def _place(self, bare: str, source: MemorySource) -> NamedTensor | None:
        """Return the weight into whose place a tensor goes; None if it has to be kept beside."""
        weights = {weight.name: weight for weight, _ in self._meanings[bare] if weight is not None}
        certain = len(weights) == 1 and all(weight is not None for weight, _ in self._meanings[bare])
        weight = next(iter(weights.values())) if certain else None
        fits = weight is not None and weight.stride is None and same_type(weight, source.type)
        return weight if fits else None

    def _take(self, name: str, source: MemorySource, weight: NamedTensor | None) -> None:
        """Copy a tensor. weight: whose place it goes to; if another one is there, they must have the same bytes."""
        staging, placed = self._staging, weight is not None and weight.name not in self._placed
        if weight is not None and placed:
            self._placed[weight.name] = name
            found = self._take_into_place(name, weight)
        else:
            scratch, found = read_scratch(self._stream, [name], staging.workers, staging.job, most=BLOCK)
        source.check_unchanged()
        if staging.request.confirm:
            names = {weight.name: (name,)} if weight is not None and placed else {}
            confirm(self._stream, found.digests, names, self._arena, staging.workers, staging.job)
        self.findings.add(found)
        if weight is None:
            self._kept[name] = scratch
            copy = MemorySource(name, np.asarray(scratch.memory))
            self._stream.tensors[name] = self._stream.tensors[name]._replace(source=copy)

    def _take_into_place(self, name: str, weight: NamedTensor) -> Findings:
        arena, workers, job = self._arena, self._staging.workers, self._staging.job
        if weight.name in arena.layout.shares:
            return read_shares(self._stream, {weight.name: name}, arena, workers, job)
        piece = new_piece(self._stream, name, arena, arena.layout.slots[weight.name])
        read_pieces([piece], workers, job, most=BLOCK)
        return Findings.of([piece])

    def settle(self, found: Mapping[str, Collection[str]]) -> Findings:
        """Put the weights in their places that are not there yet; return what was found in all tensors, by name.

        found: weight -> names that hold it. Raises WeightsMismatch for a tensor that is in the place of another weight.
        """
        for weight, names in found.items():
            if self._placed.get(weight) in names:
                continue
            kept = next((name for name in names if name in self._kept), None)
            if kept is None:
                text = f"{weight}: its tensor came under a name that fits more than one weight"
                raise WeightsMismatch(self._stream.where, [text], "Give all tensors at once, as a mapping.")
            row = self._arena.layout.weights[weight]
            lay(self._arena, row, self._kept[kept].part(0), self._staging.job)
        return self.findings


def _meanings(part: Manifest, staging: Staging) -> dict[str, list[tuple[NamedTensor | None, TensorType]]]:
    """Return what each name may mean: a weight, or None for a weight that is computed from it, with its type.

    A name that no weight needs, as that of state, has no meaning, but is known.
    """
    meanings: dict[str, list[tuple[NamedTensor | None, TensorType]]] = defaultdict(list)
    for reading in (each(part) for each in READINGS[staging.request.keys]):
        for demand in reading.demands:
            for key, typed in demand.keys.items():
                meanings[key].append((None if demand.all else demand.weight, TensorType.of(typed)))
        for name in (*reading.ignored, *reading.needed):
            meanings.setdefault(name, [])
    return dict(meanings)


def read_in_order(weights: WeightSet, match: Match, arena: Arena, workers: WorkerThreads, job: Job) -> Findings:
    """Read what is used of a file that comes once, and return what was found in it, by name.

    What belongs into the arena as it is goes there. Kept beside it, and read from there, are further names of tied
    weights, what weights are computed from, and what the arena has in another order. Raises what `read_tensors` raises,
    and what ends the transfer.
    """
    rows, slots = arena.layout.weights, arena.layout.slots
    uses = Counter(key for keys in match.found.values() for key in keys)
    uses.update(key for inputs in match.computed.values() for key in inputs.values())
    placed = {keys[0]: name for name, keys in match.found.items() if rows[name].stride is None and uses[keys[0]] == 1}
    kept = {key: Scratch([weights.tensors[key].nbytes]) for key in uses if key not in placed}
    pieces = [new_piece(weights, key, arena, slots[name]) for key, name in placed.items()]
    pieces += [new_piece(weights, key, scratch, scratch.slots[0]) for key, scratch in kept.items()]
    read_pieces(pieces, workers, job)
    weights.check_unchanged(proven=weights.stamp is not None)
    for name, keys in match.found.items():
        if keys[0] in kept:
            lay(arena, rows[name], kept[keys[0]].part(0), job)
    tensors = dict(weights.tensors)
    for key, scratch in kept.items():
        source = MemorySource(key, np.asarray(scratch.memory))
        tensors[key] = tensors[key]._replace(source=source, offset=0)
    weights.tensors = tensors
    return Findings.of(pieces)
