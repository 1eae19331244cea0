"""The variants that are resident, and what a call chooses among them."""

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
    """What happened to one variant. Sizes in bytes, times in seconds.

    kind: "added", "replaced" (calls that had chosen the name before go on with the old one), "removed", "evicted" (the
    least recently used one made room), or "dropped" (other weights than its `base` were committed). weights_id: the
    digest of its tensors as the graph takes them; previous_weights_id: of what had the name before. base: the weights
    that it goes with; None: any. source, by, labels, nonfinite: as in `SwapReceipt`.
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
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class _Resident:
    """One variant. `users` are the choices that hold it, `used` orders them by time."""

    __slots__ = ("chosen", "ids", "receipt", "used", "users")

    def __init__(self, chosen: Chosen, receipt: VariantReceipt, used: int) -> None:
        self.chosen, self.receipt, self.used = chosen, receipt, used
        self.ids = {receipt.group: receipt.weights_id}
        self.users: set[weakref.ref[Choice]] = set()  # a WeakSet would take a third of a choice's time


class Choice:
    """What a call has chosen; it keeps that, whatever becomes of the names. `ids`: weights ids by group."""

    __slots__ = ("__weakref__", "_residents", "chosen", "ids")

    def __init__(self, residents: Sequence[_Resident], chosen: Chosen) -> None:
        self._residents = residents
        self.chosen = chosen
        first, *others = residents
        self.ids: Mapping[str, str] = first.ids if not others else dict(ChainMap(*(each.ids for each in residents)))

    def check_base(self, weights_id: str) -> None:
        """Raise StaleVariant for one that goes with other weights than those that answer."""
        for each in self._residents:
            base = each.receipt.base
            if base is not None and base != weights_id:
                raise StaleVariant(f"{each.receipt.group}/{each.receipt.name}", base, weights_id)


class Variants:
    """The variants of one model, by group and name."""

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        memory: Memory,
        workers: WorkerThreads,
        most: int,
        tell: Callable[[VariantReceipt], object],
    ) -> None:
        """most: of one group at a time. tell: called with what happened. Raises Unsupported."""
        if type(most) is not int or most < 1:
            raise Unsupported(f"max_variants={most!r}: expected a number from 1")
        self._manifest = manifest
        self._engine = engine
        self._memory = memory
        self._workers = workers
        self._most = most
        self._tell = tell
        self._ticks = count(1)
        self._residents: dict[str, dict[str, _Resident]] = {group: {} for group in manifest.variants}
        self.history: deque[VariantReceipt] = deque(maxlen=HISTORY)
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        self._lock = RLock()  # for signal handlers

    def resident(self) -> dict[str, dict[str, VariantReceipt]]:
        """What each group has, least recently used first."""
        with self._lock:
            return {
                group: {name: each.receipt for name, each in sorted(found.items(), key=lambda item: item[1].used)}
                for group, found in self._residents.items()
            }

    def choose(self, wanted: VariantNames | Choice | None) -> Choice | None:
        """What a call asks for; None for the base alone. Raises UnknownVariant."""
        if not wanted or isinstance(wanted, Choice):
            return wanted or None  # type: ignore[return-value]
        if type(wanted) is not dict and not isinstance(wanted, Mapping):
            raise UnknownVariant(f"variants={wanted!r}: expected a dict from groups to names")
        with self._lock:
            picked = [self._find(group, name) for group, name in wanted.items() if name is not None]
            if not picked:
                return None
            chosen = picked[0].chosen if len(picked) == 1 else self._engine.joined(each.chosen for each in picked)
            choice = Choice(picked, chosen)
            for each in picked:
                each.used = next(self._ticks)
                each.users.add(weakref.ref(choice, each.users.discard))
        return choice

    def _find(self, group: Any, name: Any) -> _Resident:
        try:
            return self._residents[group][name]
        except (KeyError, TypeError):
            self.check_group(group)
        found = listed(list(self._residents[group])) or "none"
        raise UnknownVariant(
            f"{group} has no {name!r} here, but {found}; whoever runs the model adds some (model.add_variant)"
        )

    def check_group(self, group: Any) -> None:
        """Raise UnknownVariant for a group that the artifact does not declare."""
        if not isinstance(group, str) or group not in self._residents:
            raise UnknownVariant(
                f"{group!r} is no group of variants of this artifact, which has {listed(self._residents)}"
            )

    def add(
        self, group: str, name: str, request: SwapRequest, base: str | None, admit: Admit | None = None
    ) -> VariantReceipt:
        """Stage, verify, and give it the name, in one step for those who choose. Raises what staging raises,
        UnknownVariant for a group that there is not, and VariantsBusy where calls use all that would have to go.
        """
        self.check_group(group)
        if not isinstance(name, str) or not name:
            raise Unsupported(f"a variant's name is a text, got {name!r}")
        rows = self._manifest.variants[group]
        staged = stage_variant(rows, self._memory, self._workers, request, admit)
        chosen = self._engine.variant(rows, staged.arena)
        receipt = self._receipt(group, name, staged, base, request.by)
        with self._lock:
            residents = self._residents[group]
            old = residents.get(name)
            gone = self._least_used(group) if old is None and len(residents) >= self._most else None
            if old is not None:
                receipt = replace(receipt, kind="replaced", previous_weights_id=old.receipt.weights_id)
            resident = _Resident(chosen, receipt, next(self._ticks))
            self._residents[group] = {
                **{key: each for key, each in residents.items() if each is not gone},
                name: resident,
            }
        if gone is not None:
            self._end(gone.receipt, "evicted", request.by)
        return self._happened(receipt)

    def _least_used(self, group: str) -> _Resident:
        """The one to go for another. Raises VariantsBusy."""
        free = [each for each in self._residents[group].values() if not each.users]
        if not free:
            raise VariantsBusy(
                f"{group}: calls use all {self._most} variants that may be resident; load with a larger max_variants, "
                "or try again"
            )
        return min(free, key=lambda each: each.used)

    def remove(self, group: str, name: str, by: str) -> VariantReceipt:
        """Take the name away; calls that have chosen it go on. Raises UnknownVariant."""
        self.check_group(group)
        with self._lock:
            gone = self._find(group, name)
            self._residents[group] = {key: each for key, each in self._residents[group].items() if each is not gone}
        return self._end(gone.receipt, "removed", by)

    def keep_for(self, weights_id: str, by: str) -> dict[str, tuple[str, ...]]:
        """After a commit of these weights: drop what goes with others. What was kept, and what dropped."""
        with self._lock:
            gone, kept = [], []
            for group, found in self._residents.items():
                stay = {key: each for key, each in found.items() if each.receipt.base in (None, weights_id)}
                gone += [each.receipt for each in found.values() if each.receipt.name not in stay]
                kept += [f"{group}/{name}" for name in stay]
                self._residents[group] = stay
        for receipt in gone:
            self._end(receipt, "dropped", by)
        dropped = tuple(f"{receipt.group}/{receipt.name}" for receipt in gone)
        return {what: names for what, names in (("kept", tuple(kept)), ("dropped", dropped)) if names}

    def clear(self) -> None:
        """Let all go, as soon as no call uses them."""
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

    def _end(self, receipt: VariantReceipt, kind: Kind, by: str) -> VariantReceipt:
        return self._happened(
            replace(receipt, kind=kind, previous_weights_id=receipt.weights_id, by=by, committed_at=time.time())
        )

    def _happened(self, receipt: VariantReceipt) -> VariantReceipt:
        self.history.append(receipt)
        self._tell(receipt)
        return receipt
