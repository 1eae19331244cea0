"""Variants: sets of tensors, such as LoRA adapters, that calls choose by name over one set of weights."""

from __future__ import annotations

import time
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from threading import RLock
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from weightswap_runtime.engines.engine import Chosen, Engine
from weightswap_runtime.errors import (
    DigestMismatch,
    OutOfMemory,
    StagingBusy,
    StaleState,
    UnknownName,
    Unsupported,
    WeightsMismatch,
    listed,
)
from weightswap_runtime.format.identity import (
    Nonfinite,
    count_nonfinite,
    identify,
    newly_nonfinite,
    refuse_nonfinite,
)
from weightswap_runtime.format.manifest import Manifest, NamedTensor
from weightswap_runtime.format.peft import RowSource, match_peft, read_config, weights_in
from weightswap_runtime.format.safetensors import LEAST_HEADER
from weightswap_runtime.format.weight_set import PEFT_CONFIG_NAME, WeightSet, open_weights
from weightswap_runtime.jobs import Job, fork_safe
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena
from weightswap_runtime.memory.device_memory import Memory
from weightswap_runtime.sources.location import as_location, printable
from weightswap_runtime.staging.given import GivenWeights
from weightswap_runtime.staging.reading import Findings, lay, read_tensors
from weightswap_runtime.staging.request import DAMAGED, Admit, SwapRequest, check_expected, digest_problems
from weightswap_runtime.tensors import (
    TensorBytes,
    array_content,
    as_array,
    block_digests,
    describe,
    numpy_dtype,
    same_type,
)
from weightswap_runtime.threads import WorkerThreads

_FLOATS = ("F16", "BF16", "F32", "F64")
HISTORY = 100  # receipts that are kept
MOST = 16  # resident variants of a group, by default
VariantNames = Mapping[str, str | None]
Kind = Literal["added", "replaced", "removed", "evicted", "dropped"]


class VariantReceipt(Struct, frozen=True, kw_only=True):
    """The receipt of one change of a variant."""

    group: str
    name: str
    kind: Kind
    """"added", "replaced" (calls that chose the name before keep the old variant), "removed", "evicted" (as the least
    recently used one, for another), or "dropped" (weights other than its `base` were committed)."""
    weights_id: str  # the digest of its tensors as the graph takes them
    previous_weights_id: str | None  # of the variant that had the name before
    graph_id: str
    base: str | None  # the weights id that it belongs to; None: it works with any
    source: str  # the path, or the URL without credentials
    by: str  # the requester, as given
    labels: dict[str, str]
    nbytes: int  # in memory
    bytes_read: int
    seconds_staged: float
    committed_at: float  # seconds since the epoch
    nonfinite: dict[str, Nonfinite] = field(default_factory=dict)  # its tensors with NaN or infinities

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, tuples, texts and numbers alone."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class Variants:
    """The variants of one model, by group and name."""

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        memory: Memory,
        workers: WorkerThreads,
        most: int,
        emit: Callable[[VariantReceipt], object],
    ) -> None:
        """most: the maximum of resident variants per group. emit: called with each receipt. Raises Unsupported."""
        if type(most) is not int or most < 1:
            raise Unsupported(f"max_variants={most!r}: expected 1 or more")
        self._manifest = manifest
        self._engine = engine
        self._memory = memory
        self._workers = workers
        self._most = most
        self._emit = emit
        self._ticks = count(1)
        self._residents: dict[str, dict[str, _Resident]] = {group: {} for group in manifest.variants}
        self.history: deque[VariantReceipt] = deque(maxlen=HISTORY)
        self._lock = fork_safe(RLock())  # reentrant, for signal handlers

    def resident(self) -> dict[str, dict[str, VariantReceipt]]:
        """Return the receipts of each group by name, least recently used first."""
        with self._lock:
            return {
                group: {name: each.receipt for name, each in sorted(named.items(), key=lambda item: item[1].used)}
                for group, named in self._residents.items()
            }

    def choose(self, names: VariantNames | Choice | None) -> Choice | None:
        """Return the variants of these names; None for the base alone. Raises UnknownName."""
        if not names or isinstance(names, Choice):
            return names or None  # type: ignore[return-value]
        if type(names) is not dict and not isinstance(names, Mapping):
            raise UnknownName(f"variants={names!r}: expected a dict from groups to names")
        with self._lock:
            residents = [self._find(group, name) for group, name in names.items() if name is not None]
            if not residents:
                return None
            first, *others = residents
            chosen = self._engine.joined(each.chosen for each in residents) if others else first.chosen
            choice = Choice(residents, chosen)
            for resident in residents:
                resident.used = next(self._ticks)
                resident.users.add(weakref.ref(choice, resident.users.discard))
        return choice

    def _find(self, group: Any, name: Any) -> _Resident:
        try:
            return self._residents[group][name]
        except (KeyError, TypeError):
            self.check_group(group)
        known = listed(list(self._residents[group])) or "none"
        raise UnknownName(
            f"{group} has no {name!r} here (resident: {known}); whoever runs the model can add it (model.add_variant)"
        )

    def check_group(self, group: Any) -> None:
        """Raise UnknownName for a group that the artifact does not declare."""
        if not isinstance(group, str) or group not in self._residents:
            raise UnknownName(
                f"{group!r} is not a group of variants of this artifact, which has {listed(self._residents)}"
            )

    def add(
        self, group: str, name: str, request: SwapRequest, base: str | None, admit: Admit | None = None
    ) -> VariantReceipt:
        """Stage and verify a variant, then let calls choose it by its name, in one atomic step.

        Raises what the staging raises, UnknownName for an unknown group, and StagingBusy if none can be evicted.
        """
        self.check_group(group)
        if not isinstance(name, str) or not name:
            raise Unsupported(f"expected a non-empty string as a variant's name, got {name!r}")
        rows = self._manifest.variants[group]
        arena, staged = _stage(rows, self._memory, self._workers, request, admit, self._manifest.weights)
        chosen = self._engine.variant(rows, arena)
        receipt = VariantReceipt(
            **staged,
            group=group,
            name=name,
            kind="added",
            previous_weights_id=None,
            graph_id=self._manifest.graph_id,
            base=base,
            by=request.by,
            nbytes=arena.layout.nbytes,
            committed_at=time.time(),
        )
        with self._lock:
            residents = self._residents[group]
            old = residents.get(name)
            evicted = self._to_evict(group) if old is None and len(residents) >= self._most else None
            if old is not None:
                receipt = replace(receipt, kind="replaced", previous_weights_id=old.receipt.weights_id)
            resident = _Resident(chosen, receipt, next(self._ticks))
            kept = {key: each for key, each in residents.items() if each is not evicted}
            self._residents[group] = {**kept, name: resident}
        if evicted is not None:
            self._record_end(evicted.receipt, "evicted", request.by)
        return self._record(receipt)

    def _to_evict(self, group: str) -> _Resident:
        """Return the least recently used variant that no call uses. Raises StagingBusy if there is none."""
        free = [each for each in self._residents[group].values() if not each.users]
        if not free:
            raise StagingBusy(
                f"{group}: all {self._most} resident variants are in use; load with a larger max_variants, or try again"
            )
        return min(free, key=lambda each: each.used)

    def remove(self, group: str, name: str, by: str) -> VariantReceipt:
        """Remove a variant; calls that have chosen it go on. Raises UnknownName."""
        self.check_group(group)
        with self._lock:
            removed = self._find(group, name)
            self._residents[group] = {key: each for key, each in self._residents[group].items() if each is not removed}
        return self._record_end(removed.receipt, "removed", by)

    def keep_for(self, weights_id: str, by: str) -> dict[str, tuple[str, ...]]:
        """Drop the variants that belong to other weights than these. Return the names "kept" and "dropped"."""
        with self._lock:
            dropped, kept = [], []
            for group, named in self._residents.items():
                fitting = {key: each for key, each in named.items() if each.receipt.base in (None, weights_id)}
                dropped += [each.receipt for name, each in named.items() if name not in fitting]
                kept += [f"{group}/{name}" for name in fitting]
                self._residents[group] = fitting
        for receipt in dropped:
            self._record_end(receipt, "dropped", by)
        outcomes = {"kept": tuple(kept), "dropped": tuple(f"{each.group}/{each.name}" for each in dropped)}
        return {outcome: names for outcome, names in outcomes.items() if names}

    def clear(self) -> None:
        """Remove all variants; their memory is freed with the last calls that use them."""
        with self._lock:
            self._residents = {group: {} for group in self._residents}

    def _record_end(self, receipt: VariantReceipt, kind: Kind, by: str) -> VariantReceipt:
        return self._record(
            replace(receipt, kind=kind, previous_weights_id=receipt.weights_id, by=by, committed_at=time.time())
        )

    def _record(self, receipt: VariantReceipt) -> VariantReceipt:
        self.history.append(receipt)
        self._emit(receipt)
        return receipt


class Choice:
    """The variants that a call has chosen. It keeps them when names are reused. `ids`: weights ids by group."""

    __slots__ = ("__weakref__", "_residents", "chosen", "ids")

    def __init__(self, residents: Sequence[_Resident], chosen: Chosen) -> None:
        self._residents = residents
        self.chosen = chosen
        first, *others = residents
        self.ids: Mapping[str, str] = first.ids if not others else dict(ChainMap(*(each.ids for each in residents)))

    def check_base(self, weights_id: str) -> None:
        """Raise StaleState if a variant belongs to other weights than those of the call."""
        for resident in self._residents:
            base = resident.receipt.base
            if base is not None and base != weights_id:
                raise StaleState(f"{resident.receipt.group}/{resident.receipt.name}", base, weights_id)


class _Resident:
    """One resident variant. `users`: the choices that hold it. `used`: the tick of its last use."""

    __slots__ = ("chosen", "ids", "receipt", "used", "users")

    def __init__(self, chosen: Chosen, receipt: VariantReceipt, used: int) -> None:
        self.chosen, self.receipt, self.used = chosen, receipt, used
        self.ids = {receipt.group: receipt.weights_id}
        self.users: set[weakref.ref[Choice]] = set()  # a WeakSet would take a third of the time of `choose`


def _stage(
    rows: Sequence[NamedTensor],
    memory: Memory,
    workers: WorkerThreads,
    request: SwapRequest,
    admit: Admit | None,
    base: Sequence[NamedTensor],
) -> tuple[Arena, dict[str, Any]]:
    """Read and verify a variant: a PEFT directory, or a safetensors file with the FQNs of `rows`.

    request: only its path, `expect`, `allow_nonfinite` and `rate_limit` are used. admit: called last, with the weights
    id of the variant that was read. base: the weights over which calls choose it. Returns its memory, and fields of its
    receipt.
    """
    start, job = time.perf_counter(), Job(request.rate_limit)
    path = request.source
    assert not isinstance(path, GivenWeights)
    folder, file = weights_in(as_location(path))
    config = read_config(folder)
    try:
        most = LEAST_HEADER + sum(1000 + 6 * len(row.name) for row in rows)
        with open_weights(path if config is None else file, most_header=most) as weights:
            if config is None:
                sources = _match_names(weights, rows)
            else:
                sources = match_peft(weights.tensors, rows, config, weights.where, [each.name for each in base])
            arena, findings = _read(weights, sources, memory, workers, job)
            labels = weights.stamp.labels if weights.stamp else {}
            location, where = weights.location, weights.where
            bytes_read = sum(tensor.nbytes for tensor in weights.tensors.values())
    except MemoryError as error:
        raise OutOfMemory(f"{printable(path)}: no memory for it ({error})") from error
    identity = identify(rows, findings.digests, labels, findings.nonfinite)
    check_expected(identity.weights_id, where, request)
    nonfinite = newly_nonfinite(rows, identity.nonfinite, {})
    refuse_nonfinite(nonfinite, request.allow_nonfinite, where)
    if admit is not None:
        admit(location, identity.weights_id)
    return arena, {
        "weights_id": identity.weights_id,
        "labels": dict(labels),
        "source": where,
        "bytes_read": bytes_read,
        "seconds_staged": time.perf_counter() - start,
        "nonfinite": nonfinite,
    }


def _match_names(weights: WeightSet, rows: Sequence[NamedTensor]) -> list[RowSource]:
    """Match a file's tensors to the FQNs of the graph. Raises WeightsMismatch."""
    tensors, problems = weights.tensors, []
    for row in rows:
        stored = tensors.get(row.name)
        if stored is None:
            problems.append(f"{row.name}: missing, the graph expects {describe(row)}")
        elif stored.shape != row.shape or not _can_cast(stored.dtype, row.dtype):
            problems.append(f"{row.name}: the graph expects {describe(row)}, the file has {describe(stored)}")
    problems += [f"{name}: not in the graph" for name in sorted(tensors.keys() - {r.name for r in rows})]
    if problems:
        advice = f"A PEFT directory has {PEFT_CONFIG_NAME}; any other file uses the graph's names."
        raise WeightsMismatch(weights.where, problems, advice)
    return [RowSource(row, row.name) for row in rows]


def _can_cast(dtype: str, target: str) -> bool:
    return dtype == target or {dtype, target} <= set(_FLOATS)


def _read(
    weights: WeightSet, sources: Sequence[RowSource], memory: Memory, workers: WorkerThreads, job: Job
) -> tuple[Arena, Findings]:
    """Read the tensors into a new arena that holds the rows."""
    if wrong := [s.key for s in sources if s.key and not _can_cast(weights.tensors[s.key].dtype, s.row.dtype)]:
        raise WeightsMismatch(
            weights.where, [f"{key}: not a floating-point tensor" for key in wrong], "Train it again."
        )
    arena = memory.arena(ArenaLayout(each.row for each in sources))
    as_is = [each for each in sources if _is_as_stored(each, weights)]
    changed = [each for each in sources if each not in as_is]
    stored = {each.key: weights.tensors[each.key] for each in changed if each.key is not None}
    raw = HostArena(ArenaLayout(NamedTensor(name=key, dtype=t.dtype, shape=t.shape) for key, t in stored.items()))
    with arena.writing(join=True):
        read = read_tensors(weights, {each.row.name: (str(each.key),) for each in as_is}, arena, workers, job)
        findings = Findings(
            {each.row.name: read.digests[str(each.key)] for each in as_is},
            {each.row.name: read.nonfinite[str(each.key)] for each in as_is if each.key in read.nonfinite},
        )
        read.add(read_tensors(weights, {key: (key,) for key in stored}, raw, workers, job))
        for each in changed:
            rows = _row_bytes(each, weights, raw)
            counts = count_nonfinite(each.row.dtype, rows)
            findings.add(Findings({each.row.name: block_digests(rows)}, {each.row.name: counts} if counts else {}))
            lay(arena, each.row, rows, job)
    if corrupt := digest_problems(weights.stamp, read.digests):
        raise DigestMismatch(weights.where, corrupt, DAMAGED)
    arena.synchronize()
    return arena, findings


def _is_as_stored(source: RowSource, weights: WeightSet) -> bool:
    """Return whether the bytes of a row are those of the file."""
    return source.key is not None and source.factor == 1.0 and same_type(weights.tensors[source.key], source.row)


def _row_bytes(source: RowSource, weights: WeightSet, raw: HostArena) -> memoryview:
    """Return the row-major bytes of a row: the values that were read, multiplied, cast and padded with zeros."""
    row = source.row
    padded = np.zeros(row.shape, numpy_dtype(row.dtype))
    if source.key is not None:
        stored = weights.tensors[source.key]
        values = as_array(TensorBytes(stored.dtype, stored.shape, raw.view(source.key)))
        with np.errstate(over="ignore", invalid="ignore"):  # values that are then not finite are refused later
            if source.factor != 1.0:
                wide: NDArray[Any] = values.astype(np.float64 if stored.dtype == "F64" else np.float32)
                factor: NDArray[Any] = np.asarray(source.factor, wide.dtype)
                values = wide * factor
            padded[tuple(map(slice, stored.shape))] = values.astype(padded.dtype)
    return array_content(padded).data
