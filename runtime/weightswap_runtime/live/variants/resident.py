"""Resident variants, and the choices of calls among them."""

from __future__ import annotations

import time
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from threading import RLock
from typing import Any, Literal

import msgspec

from weightswap_runtime.engines.engine import Chosen, Engine
from weightswap_runtime.errors import StaleVariant, UnknownVariant, Unsupported, VariantsBusy
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.nonfinite import Nonfinite
from weightswap_runtime.memory.host import Memory
from weightswap_runtime.messages import listed
from weightswap_runtime.staging.request import Admit, SwapRequest
from weightswap_runtime.threads.forks import renew_in_children
from weightswap_runtime.threads.worker_threads import WorkerThreads

from .staging import StagedVariant, stage_variant

HISTORY = 100
MOST = 16
VariantNames = Mapping[str, str | None]
Kind = Literal["added", "replaced", "removed", "evicted", "dropped"]


@dataclass(frozen=True)
class VariantReceipt:
    """The receipt of one change of a variant. Sizes in bytes, times in seconds.

    kind: "added", "replaced" (calls that chose the name before keep the old variant), "removed", "evicted" (as the
    least recently used one, for another), or "dropped" (weights other than its `base` were committed). weights_id: the
    digest of its tensors as the graph takes them; previous_weights_id: that of the variant that had the name before.
    base: the weights id that it belongs to; None: it works with any. source, by, labels, nonfinite: see `SwapReceipt`.
    """

    group: str
    name: str
    kind: Kind
    weights_id: str
    previous_weights_id: str | None
    graph_id: str
    base: str | None
    source: str
    by: str
    labels: dict[str, str]
    nbytes: int
    bytes_read: int
    seconds_staged: float
    committed_at: float
    nonfinite: dict[str, Nonfinite] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, tuples, texts and numbers alone."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class _Resident:
    """One resident variant. `users`: the choices that hold it. `used`: the tick of its last use."""

    __slots__ = ("chosen", "ids", "receipt", "used", "users")

    def __init__(self, chosen: Chosen, receipt: VariantReceipt, used: int) -> None:
        self.chosen, self.receipt, self.used = chosen, receipt, used
        self.ids = {receipt.group: receipt.weights_id}
        self.users: set[weakref.ref[Choice]] = set()  # a WeakSet would take a third of the time of `choose`


class Choice:
    """The variants that a call has chosen. It keeps them when names are reused. `ids`: weights ids by group."""

    __slots__ = ("__weakref__", "_residents", "chosen", "ids")

    def __init__(self, residents: Sequence[_Resident], chosen: Chosen) -> None:
        self._residents = residents
        self.chosen = chosen
        first, *others = residents
        self.ids: Mapping[str, str] = first.ids if not others else dict(ChainMap(*(each.ids for each in residents)))

    def check_base(self, weights_id: str) -> None:
        """Raise StaleVariant if a variant belongs to other weights than those of the call."""
        for resident in self._residents:
            base = resident.receipt.base
            if base is not None and base != weights_id:
                raise StaleVariant(f"{resident.receipt.group}/{resident.receipt.name}", base, weights_id)


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
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        self._lock = RLock()  # reentrant, for signal handlers

    def resident(self) -> dict[str, dict[str, VariantReceipt]]:
        """Return the receipts of each group by name, least recently used first."""
        with self._lock:
            return {
                group: {name: each.receipt for name, each in sorted(named.items(), key=lambda item: item[1].used)}
                for group, named in self._residents.items()
            }

    def choose(self, names: VariantNames | Choice | None) -> Choice | None:
        """Return the variants of these names; None for the base alone. Raises UnknownVariant."""
        if not names or isinstance(names, Choice):
            return names or None  # type: ignore[return-value]
        if type(names) is not dict and not isinstance(names, Mapping):
            raise UnknownVariant(f"variants={names!r}: expected a dict from groups to names")
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
        raise UnknownVariant(
            f"{group} has no {name!r} here (resident: {known}); whoever runs the model can add it (model.add_variant)"
        )

    def check_group(self, group: Any) -> None:
        """Raise UnknownVariant for a group that the artifact does not declare."""
        if not isinstance(group, str) or group not in self._residents:
            raise UnknownVariant(
                f"{group!r} is not a group of variants of this artifact, which has {listed(self._residents)}"
            )

    def add(
        self, group: str, name: str, request: SwapRequest, base: str | None, admit: Admit | None = None
    ) -> VariantReceipt:
        """Stage and verify a variant, then let calls choose it by its name, in one atomic step.

        Raises what the staging raises, UnknownVariant for an unknown group, and VariantsBusy if none can be evicted.
        """
        self.check_group(group)
        if not isinstance(name, str) or not name:
            raise Unsupported(f"expected a non-empty string as a variant's name, got {name!r}")
        rows = self._manifest.variants[group]
        staged = stage_variant(rows, self._memory, self._workers, request, admit, self._manifest.weights)
        chosen = self._engine.variant(rows, staged.arena)
        receipt = self._receipt(group, name, staged, base, request.by)
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
        """Return the least recently used variant that no call uses. Raises VariantsBusy if there is none."""
        free = [each for each in self._residents[group].values() if not each.users]
        if not free:
            raise VariantsBusy(
                f"{group}: all {self._most} resident variants are in use; load with a larger max_variants, or try again"
            )
        return min(free, key=lambda each: each.used)

    def remove(self, group: str, name: str, by: str) -> VariantReceipt:
        """Remove a variant; calls that have chosen it go on. Raises UnknownVariant."""
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

    def _receipt(self, group: str, name: str, staged: StagedVariant, base: str | None, by: str) -> VariantReceipt:
        return VariantReceipt(
            group=group,
            name=name,
            kind="added",
            weights_id=staged.identity.weights_id,
            previous_weights_id=None,
            graph_id=self._manifest.graph_id,
            base=base,
            source=staged.source,
            by=by,
            labels=dict(staged.identity.labels),
            nbytes=staged.arena.layout.nbytes,
            bytes_read=staged.bytes_read,
            seconds_staged=staged.seconds,
            committed_at=time.time(),
            nonfinite=dict(staged.nonfinite),
        )

    def _record_end(self, receipt: VariantReceipt, kind: Kind, by: str) -> VariantReceipt:
        return self._record(
            replace(receipt, kind=kind, previous_weights_id=receipt.weights_id, by=by, committed_at=time.time())
        )

    def _record(self, receipt: VariantReceipt) -> VariantReceipt:
        self.history.append(receipt)
        self._emit(receipt)
        return receipt
