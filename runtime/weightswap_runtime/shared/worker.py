"""The worker: a process with a model that answers from shared arenas, whose weights the owner changes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from weightswap_runtime.engines.choosing import open_engine
from weightswap_runtime.errors import ModelFailed, StageClosed, Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.jobs import POLL_SECONDS, Claim
from weightswap_runtime.live.calls import Caller, Methods, run_chosen
from weightswap_runtime.live.context import Context
from weightswap_runtime.live.gate import Gate, Version
from weightswap_runtime.live.receipt import Event, EventKind, SwapReceipt
from weightswap_runtime.live.session import Session
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.live.variants import Choice
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.memory.device_memory import HOST, HostMemory
from weightswap_runtime.model.served import ServedModel
from weightswap_runtime.threads import Background

from .control import Control, Summary, read_description, read_history, read_trial
from .owner import OPTIONS, Segment, check_graph, map_read_only

_OF_THE_OWNER = {"stage", "swap", "aswap", "astage", "rollback", "watch", "follow", "add_variant", "remove_variant"}
_RECEIPT_TIMEOUT = 1.0  # seconds to wait for a commit's receipt: an owner may be killed before it writes it


def join(artifact: str | os.PathLike[str] | Artifact, segment: Segment, slot: int) -> WorkerModel:
    """Return a model that serves what the owner of a segment commits: calls that begin after a commit use its weights.

    slot: the slot of this worker, different for each living one. The process that started the worker must empty the
    slot when the worker has died (`Control.empty_slot`), or a commit would wait for its calls for ever.

    Raises ArtifactError, also for another graph than the owner's, Unsupported and MissingExtra.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    control = Control(segment.control)
    check_graph(control, opened)
    control.fill_slot(slot, os.getpid())
    engine = open_engine("torch", opened, HOST, OPTIONS)
    gate = WorkerGate(control, slot)
    store = WeightStore(opened.manifest.weights, "double", None, MappedMemory(segment), gate)
    gate.attach(store._residency.sessions)
    store.history.extend(read_history(control))
    model = WorkerModel(opened, store, device=HOST, engine=engine)
    model.begin(gate, control)
    return model


class WorkerModel(ServedModel):
    """A model whose weights the owner changes."""

    def begin(self, gate: WorkerGate, control: Control) -> None:
        """Emit events of commits from now on, but not of those before."""
        self._shared_gate, self._control = gate, control
        self._commit_events = _CommitEvents(gate, control, self._store, self.graph_id)
        weakref.finalize(self, self._commit_events.end).atexit = False

    def find_trial(self, word: int) -> Trial | None:
        """Return the trial that has this word in the control page, or None if it is over."""
        summary = read_trial(self._control, word)
        return Trial(self._methods, self._shared_gate, word, summary) if summary is not None else None

    def close(self) -> None:
        self._commit_events.stop()
        super().close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _OF_THE_OWNER:
            raise Unsupported(
                f"{name}: this process is one of several that serve the same memory, which only their owner changes. "
                "Publish to the directory that it watches, or set the desired state at the desired store that it "
                "follows."
            )
        return super().__getattr__(name)


class Trial(Caller):
    """A staged set that a worker can call. Calls raise StageClosed once the trial is over."""

    _serves = False

    def __init__(self, methods: Methods, gate: WorkerGate, word: int, summary: Summary) -> None:
        super().__init__(methods)
        self._gate, self.word = gate, word
        self.weights_id = summary.weights_id
        self.terms = summary.terms  # the bytes that `begin_trial` was given

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        lease = Claim()
        session = self._gate.acquire_trial(self.word, lease)
        try:
            bound = session.bound[self._methods.member]
            return run_chosen(bound, self.weights_id, name, flat, context, choice)
        finally:
            self._gate.release(session, lease)


class WorkerGate(Gate):
    """A gate whose current version is that of the control page, and whose leases the owner waits for."""

    def __init__(self, control: Control, slot: int) -> None:
        super().__init__()
        self._control, self._slot = control, slot
        self._sessions: tuple[Session, ...] = ()
        self._word = -1  # of the current version

    def attach(self, sessions: tuple[Session, ...]) -> None:
        """Set the sessions of the arenas, in the order of their parity."""
        self._sessions = sessions

    @property
    def current(self) -> Version | None:
        if self._sessions and self._control.word != self._word and not self._closed:
            with self._lock:
                self._unhold_if_idle(self._enter())
        return self._current

    def acquire(self, lease: Claim) -> Version:
        with self._lock:
            parity = self._enter()
            try:
                return super().acquire(lease)
            finally:
                self._unhold_if_idle(parity)

    def acquire_trial(self, trial: int, lease: Claim) -> Session:
        """Lease the staged set that the word of a trial names. Raises StageClosed once the trial is over."""
        parity = trial % 2
        with self._lock:
            between()
            self._control.hold(self._slot, parity)
            try:
                if self._trial_over(trial):
                    raise StageClosed("the weights on trial were committed or discarded; call the served weights")
                self.acquire_session(self._sessions[parity], lease)
            finally:
                self._unhold_if_idle(parity)
        return self._sessions[parity]

    def _trial_over(self, trial: int) -> bool:
        return self._control.trial != trial

    def release(self, session: Session, lease: Claim) -> None:
        super().release(session, lease)
        with self._lock:
            self._unhold_if_idle(self._sessions.index(session))

    def sweep(self) -> None:
        """Release the arenas whose leases were dropped without a release."""
        with self._lock:
            for parity in range(len(self._sessions)):
                self._unhold_if_idle(parity)

    def _unhold_if_idle(self, parity: int) -> None:
        if not self.leases(self._sessions[parity]):
            self._control.let_go(self._slot, parity)

    def _enter(self) -> int:
        """Hold the served arena, update the current version, and return the arena's parity.

        Between the read of the word and the mark, the owner may have seen no mark and begun to overwrite the arena. It
        writes the word before it looks at marks, so a word that is still the same after the mark says that it has not.
        """
        while True:
            word = self._control.word
            parity = (word - 1) % 2
            between()
            self._control.hold(self._slot, parity)
            if not self._moved(word):
                break
            self._unhold_if_idle(parity)
        if word and word != self._word and not self._closed:
            self._set_current(word - 1)
        return parity

    def _moved(self, word: int) -> bool:
        """Return whether the word has changed, so that the arena may have been overwritten before it was held."""
        return self._control.word != word

    def _set_current(self, generation: int) -> None:
        summary = read_description(self._control, generation, Summary)
        if summary is None:
            raise ModelFailed(f"generation {generation} is served, but the owner has not said which weights that is")
        self._current = Version(self._sessions[generation % 2], generation, summary.identity)
        self._word = generation + 1


def between() -> None:
    """Do nothing: a hook for tests, between reading the word and holding its arena."""


class MappedMemory(HostMemory):
    """The arenas of a segment, in their order, mapped read-only."""

    def __init__(self, segment: Segment) -> None:
        self._descriptors = iter(segment.arenas)

    def arena(self, layout: ArenaLayout) -> HostArena:
        return HostArena(layout, map_read_only(next(self._descriptors)))


class _CommitEvents:
    """A thread that emits events of the owner's commits, and releases arenas whose leases were dropped."""

    def __init__(self, gate: WorkerGate, control: Control, store: WeightStore, graph_id: str) -> None:
        self._gate, self._control, self._store, self._graph_id = gate, control, store, graph_id
        self._last_generation = gate.current.generation if gate.current else -1
        self._stopped = threading.Event()
        self._thread = Background(self._run, "weightswap-noticing", self.end)
        self._thread.start()

    def end(self) -> None:
        self._stopped.set()

    def stop(self) -> None:
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            self._gate.sweep()
            current = self._gate.current
            if current is not None and current.generation > self._last_generation:
                self._emit(current)

    def _emit(self, version: Version) -> None:
        """Emit the event of a commit; of several since the last look, only that of the last one."""
        receipt = self._receipt(version.generation)
        self._last_generation = version.generation
        kind: EventKind = "rolled back" if receipt is not None and receipt.kind == "rollback" else "committed"
        source, by, operation = (receipt.source, receipt.by, receipt.kind) if receipt is not None else ("", "", None)
        event = partial(Event, kind, source, by, self._graph_id, version.weights_id, receipt=receipt)
        self._store.events.emit(event(operation=operation, labels=version.labels))

    def _receipt(self, generation: int) -> SwapReceipt | None:
        """Return the receipt of a generation, if the owner writes it in time, and update the history."""
        deadline = time.monotonic() + _RECEIPT_TIMEOUT
        while not self._stopped.is_set():
            receipts = read_history(self._control)
            receipt = next((each for each in receipts if each.generation == generation), None)
            if receipt is not None or time.monotonic() >= deadline:
                self._store.history.clear()
                self._store.history.extend(receipts)
                return receipt
            time.sleep(POLL_SECONDS / 4)
        return None
