"""A worker's side: a model that answers from shared arenas, and whose weights are the keeper's business."""

from __future__ import annotations

import os
import threading
import time
import weakref
from functools import partial, partialmethod
from typing import Any, NoReturn

from weightswap_runtime.engines.choosing import open_engine
from weightswap_runtime.errors import ModelFailed, StageClosed, Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.live.calling import Caller, Methods, run_chosen
from weightswap_runtime.live.context import Context
from weightswap_runtime.live.events import Event, EventKind
from weightswap_runtime.live.gate import Gate, Version
from weightswap_runtime.live.model import Model
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.session import Session
from weightswap_runtime.live.store import Store
from weightswap_runtime.live.variants.resident import Choice
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.memory.host import HostMemory
from weightswap_runtime.threads.claims import POLL_SECONDS, Claim
from weightswap_runtime.threads.ending import Background

from .control import Control
from .descriptions import Summary, read_description, read_history, read_trial
from .keeper import OPTIONS
from .segment import Segment, map_read_only

_RECEIPT = 1.0  # seconds for which a commit's receipt is waited for: a keeper may be killed before it writes it


def join(artifact: str | os.PathLike[str] | Artifact, segment: Segment, slot: int) -> WorkerModel:
    """A model that serves what the keeper of a segment commits: a call that begins after a commit gets its weights.

    slot: this worker's, one for each living worker. Whoever has started it empties the slot when it is dead
    (`Control.empty_slot`), or a commit would wait for its calls for ever.

    Raises ArtifactError, Unsupported and MissingExtra.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    control = Control(segment.control)
    control.take_slot(slot, os.getpid())
    engine = open_engine("torch", opened, HOST, OPTIONS)
    gate = WorkerGate(control, slot)
    store = Store(opened.manifest.weights, "double", None, MappedMemory(segment), gate)
    gate.attach(store._residency.sessions)
    store.history.extend(read_history(control))
    model = WorkerModel(opened, store, device=HOST, engine=engine)
    model.begin(gate, control)
    return model


class MappedMemory(HostMemory):
    """The arenas of a segment, in their order, to be read only."""

    def __init__(self, segment: Segment) -> None:
        self._left = list(segment.arenas)

    def arena(self, layout: ArenaLayout) -> HostArena:
        return HostArena(layout, map_read_only(self._left.pop(0)))


class WorkerGate(Gate[Session]):
    """A gate whose current version is what the control page says, and whose leases the keeper waits for."""

    def __init__(self, control: Control, slot: int) -> None:
        super().__init__()
        self._control, self._slot = control, slot
        self._sessions: tuple[Session, ...] = ()
        self._seen = -1

    def attach(self, sessions: tuple[Session, ...]) -> None:
        """Those of the arenas, in the order of their parity."""
        self._sessions = sessions

    @property
    def current(self) -> Version[Session] | None:
        if self._sessions and self._control.word != self._seen and not self._closed:
            with self._lock:
                self._let_go(self._enter())
        return self._current

    def acquire(self, lease: Claim) -> Version[Session]:
        with self._lock:
            parity = self._enter()
            try:
                return super().acquire(lease)
            finally:
                self._let_go(parity)  # unless it has a lease now

    def acquire_trial(self, trial: int, lease: Claim) -> Session:
        """Lease what the word of a trial has named. Raises StageClosed once that is over."""
        parity = trial % 2
        with self._lock:
            between()
            self._control.hold(self._slot, parity)
            try:
                if self._trial_over(trial):
                    raise StageClosed("what was on trial was committed or discarded; the served weights answer")
                self.acquire_session(self._sessions[parity], lease)
            finally:
                self._let_go(parity)  # unless it has a lease now
        return self._sessions[parity]

    def _trial_over(self, trial: int) -> bool:
        """As `_moved`, of the word of a trial."""
        return self._control.trial != trial

    def release(self, session: Session, lease: Claim) -> None:
        super().release(session, lease)
        with self._lock:
            self._let_go(self._sessions.index(session))

    def sweep(self) -> None:
        """Let go of what was left behind without a word."""
        with self._lock:
            for parity in range(len(self._sessions)):
                self._let_go(parity)

    def _let_go(self, parity: int) -> None:
        if not self.leases(self._sessions[parity]):
            self._control.let_go(self._slot, parity)

    def _enter(self) -> int:
        """Hold the arena that is served, and know what lies in it; its parity."""
        while True:
            word = self._control.word
            parity = (word - 1) % 2
            between()
            self._control.hold(self._slot, parity)
            if not self._moved(word):
                break
            self._let_go(parity)
        if word and word != self._seen and not self._closed:
            self._take(word - 1)
        return parity

    def _moved(self, word: int) -> bool:
        """Whether what was held may have been overwritten before anybody could know that it was held."""
        return self._control.word != word

    def _take(self, generation: int) -> None:
        found = read_description(self._control, generation, Summary)
        if found is None:
            raise ModelFailed(f"generation {generation} is served, and the keeper has not said which weights it is")
        self._current = Version(self._sessions[generation % 2], generation, found.identity)
        self._seen = generation + 1


def between() -> None:
    """Called between the reading of the word and the holding of its arena, which tests take apart."""


class Trial(Caller):
    """A staged set as a worker calls it. Raises StageClosed once the trial is over.

    terms: what the keeper was told to say of it.
    """

    _serves = False

    def __init__(self, methods: Methods, gate: WorkerGate, word: int, summary: Summary) -> None:
        super().__init__(methods)
        self._gate, self.word = gate, word
        self.weights_id, self.terms = summary.weights_id, summary.terms

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        lease = Claim()
        session = self._gate.acquire_trial(self.word, lease)
        try:
            bound = session.bound[self._methods.member]
            return run_chosen(bound, self.weights_id, name, flat, context, choice)
        finally:
            self._gate.release(session, lease)


class WorkerModel(Model):
    """A model whose weights others change. What would change them is Unsupported."""

    takes_weights = False

    def begin(self, gate: WorkerGate, control: Control) -> None:
        """Tell listeners of commits from now on. Those that it began with are not told."""
        self._shared_gate, self._control = gate, control
        self._noticing = Noticing(gate, control, self._store, self.graph_id)
        weakref.finalize(self, self._noticing.end).atexit = False

    def find_trial(self, word: int) -> Trial | None:
        """What is on trial where the control page has this word, or None."""
        found = read_trial(self._control, word)
        return Trial(self._methods, self._shared_gate, word, found) if found is not None else None

    def close(self) -> None:
        self._noticing.stop()
        super().close()

    def _refuse(self, what: str, *_: Any, **__: Any) -> NoReturn:
        raise Unsupported(
            f"{what}: this process is one of several that serve the same memory, which their keeper changes. Publish "
            "into the directory that it watches, or set what is desired at the place that it follows."
        )

    stage = partialmethod(_refuse, "stage")
    swap = partialmethod(_refuse, "swap")
    rollback = partialmethod(_refuse, "rollback")
    watch = partialmethod(_refuse, "watch")
    follow = partialmethod(_refuse, "follow")
    add_variant = partialmethod(_refuse, "add_variant")


class Noticing:
    """A thread that tells of commits, and lets go of leases that nobody has given back."""

    def __init__(self, gate: WorkerGate, control: Control, store: Store, graph_id: str) -> None:
        self._gate, self._control, self._store, self._graph_id = gate, control, store, graph_id
        self._told = gate.current.generation if gate.current else -1
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
            if current is not None and current.generation > self._told:
                self._tell(current)

    def _tell(self, version: Version[Session]) -> None:
        """Tell of a commit. Of several since the last look it is the last one."""
        receipt = self._receipt(version.generation)
        self._told = version.generation
        kind: EventKind = "rolled back" if receipt is not None and receipt.kind == "rollback" else "committed"
        source, by, operation = (receipt.source, receipt.by, receipt.kind) if receipt is not None else ("", "", None)
        tell = partial(Event, kind, source, by, self._graph_id, version.weights_id, receipt=receipt)
        self._store.events.emit(tell(operation=operation, labels=version.labels))

    def _receipt(self, generation: int) -> SwapReceipt | None:
        """Its receipt, and those before it are taken into the history."""
        deadline = time.monotonic() + _RECEIPT
        while not self._stopped.is_set():
            known = read_history(self._control)
            found = next((each for each in known if each.generation == generation), None)
            if found is not None or time.monotonic() >= deadline:
                self._store.history.clear()
                self._store.history.extend(known)
                return found
            time.sleep(POLL_SECONDS / 4)
        return None
