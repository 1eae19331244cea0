"""A keeper's and a worker's process: `python -m weightswap_server.workers.child_main DESCRIPTOR`.

The descriptor is one end of a socket, the other is the manager's (`manager`). Over it come what to do, and answers;
when it closes, the manager has gone, and so does the child.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from weightswap_runtime.errors import WeightswapError
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.keeper import keep
from weightswap_runtime.shared.segment import Segment
from weightswap_runtime.shared.worker import join
from weightswap_server.admin.journal import JournalState
from weightswap_server.admin.operations import Taking
from weightswap_server.admin.plane import AdminPlane
from weightswap_server.admin.settings import AdminSettings
from weightswap_server.errors import log
from weightswap_server.service.processes import Process
from weightswap_server.service.service import Service
from weightswap_server.serving import ModelSource, Server
from weightswap_server.settings import Settings
from weightswap_server.signed_weights import requires

from .totals import Role
from .trials import KeeperTrials, WorkerTrials

TELLS = 1.0  # seconds between two times that a child tells its metrics
_WARM = 60.0  # seconds for which a worker that joins waits until it is warm


class ChildTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do. `segments` are those of `sources`, by the models' names, and `journals` what an earlier
    keeper's had when it ended."""

    role: Role
    name: str
    sources: Mapping[str, ModelSource]
    segments: Mapping[str, Segment]
    settings: Settings
    admin: AdminSettings | None = None
    require_signature: tuple[str, ...] = ()
    op_libraries: tuple[str, ...] = ()
    slot: int = 0
    listener: int = -1
    journals: Mapping[str, JournalState] = {}


class Word(msgspec.Struct, frozen=True):
    """What a child says to its manager, and, as "total" and "processes", asks. One that is not "alive" for long hangs.

    text: as "alive" a `Process`; "metrics" and "total" are as Prometheus reads them; "processes" are those of all;
    "tried" is a `Tried`, which the manager passes on to the keeper. "sources" and "journals" are the next keeper's.
    """

    kind: Literal["ready", "failed", "alive", "metrics", "total", "processes", "tried", "sources", "journals"]
    text: str = ""


class Line:
    """A child's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        with socket.socket(fileno=descriptor) as connection:
            self._stream = connection.makefile("rwb")  # keeps it open
        self.task = msgspec.json.decode(self._stream.readline(), type=ChildTask)
        self.closed = Event()
        self.on_tried: Callable[[str], object] = lambda _: None
        self._sending = Lock()
        self._asking = Lock()
        self._answers: SimpleQueue[str] = SimpleQueue()

    def listen(self) -> None:
        """Take what comes, in a thread; `closed` is set when nothing does any more."""
        Thread(target=self._listen, name="weightswap-line", daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, msgspec.DecodeError):
            while raw := self._stream.readline():
                word = msgspec.json.decode(raw, type=Word)
                (self.on_tried if word.kind == "tried" else self._answers.put)(word.text)
        self.closed.set()
        self._answers.put("")

    def say(self, word: Word) -> None:
        with self._sending, suppress(OSError):
            self._stream.write(msgspec.json.encode(word) + b"\n")
            self._stream.flush()

    def total(self, text: bytes) -> bytes:
        """The metrics of all processes, of which this one's are `text`."""
        return self._ask(Word("total", text.decode())).encode()

    def processes(self) -> list[Process]:
        """All processes, as the manager knows them; none where it has gone."""
        return msgspec.json.decode(self._ask(Word("processes")) or "[]", type=list[Process])

    def tell_source(self, name: str, taking: Taking) -> None:
        """What an operator has a model take: whoever replaces this process goes on with it."""
        source = msgspec.structs.replace(self.task.sources[name], **taking._asdict())
        self.say(Word("sources", msgspec.json.encode({name: source}).decode()))

    def tell_journal(self, name: str, journal: JournalState) -> None:
        """What the journal of a model has: it goes on in whoever replaces this process."""
        self.say(Word("journals", msgspec.json.encode({name: journal}).decode()))

    def _ask(self, word: Word) -> str:
        """What the manager answers; nothing where it has gone."""
        with self._asking:
            if self.closed.is_set():
                return ""
            self.say(word)
            return self._answers.get()


def _keep(line: Line) -> None:
    """Stage and commit for all workers, until the manager says or is gone."""
    task, ended = line.task, line.closed
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    admit = requires(*task.require_signature) if task.require_signature else None
    models = {name: keep(source.artifact, task.segments[name], admit) for name, source in task.sources.items()}
    service = Service(models, task.settings)
    for served in service.served:
        served.switch = Control(task.segments[served.name].control)
    line.on_tried = KeeperTrials(service.served).heard
    service.all_metrics = lambda: line.total(service.metrics.text())
    service.load_metrics = lambda: text_string_to_metric_families(service.all_metrics().decode())
    service.processes = line.processes
    plane = AdminPlane(service, task.admin) if task.admin is not None else None
    for name, operations in plane.models.items() if plane is not None else ():
        operations.on_source = partial(line.tell_source, name)
        operations.journal.on_change = partial(line.tell_journal, name)
        operations.journal.inherit(task.journals.get(name, JournalState()))
    try:
        for name, source in task.sources.items():
            if source.weights is not None and models[name].weights_id is None:
                models[name].swap(source.weights)
            source.take(models[name])
        with plane.running() if plane is not None else nullcontext():
            line.say(Word("ready", plane.where if plane is not None else ""))
            _say_how(line, service)
            while not ended.wait(TELLS):
                _say_how(line, service)
    finally:
        service.close()


def _serve(line: Line) -> None:
    """Answer requests, until the manager says or is gone. It accepts them when it is warm."""
    task = line.task
    models = {name: join(source.artifact, task.segments[name], task.slot) for name, source in task.sources.items()}
    server = Server(models, task.settings, listener=socket.socket(fileno=task.listener))
    for served in server.service.served:
        served.switch = Control(task.segments[served.name].control)
    trials = WorkerTrials(server.service.served)
    own = server.service.metrics.text
    server.service.all_metrics = lambda: line.total(own())
    server.on_listening(partial(line.say, Word("ready")))
    _await_warm(server)
    gc.collect()
    gc.freeze()
    turned = Event()
    server.on_listening(lambda: _turn(asyncio.get_running_loop(), turned))
    Thread(target=_tell, args=(line, server, turned, trials), name="weightswap-telling", daemon=True).start()
    server.run()


def _turn(loop: asyncio.AbstractEventLoop, turned: Event) -> None:
    """Show that the loop goes round, from which no call in the model's thread keeps it."""
    turned.set()
    loop.call_later(TELLS / 2, _turn, loop, turned)


def _await_warm(server: Server) -> None:
    deadline = time.monotonic() + _WARM
    while not all(served.warm or served.model.weights_id is None for served in server.service.served):
        if time.monotonic() >= deadline:
            log.warning("a model is not warm after %g s, and is served all the same", _WARM)
            return
        time.sleep(0.01)


def _tell(line: Line, server: Server, turned: Event, trials: WorkerTrials) -> None:
    """In a thread, as the manager may let one wait."""
    while not line.closed.wait(TELLS):
        _say_how(line, server.service, turned.is_set())
        turned.clear()
        for text in trials.told():
            line.say(Word("tried", text))
    server.stop()


def _say_how(line: Line, service: Service, goes_round: bool = True) -> None:
    line.say(Word("metrics", service.metrics.text().decode()))
    if goes_round:
        process = service.process(line.task.role, line.task.name)
        line.say(Word("alive", msgspec.json.encode(process).decode()))


def main(descriptor: str) -> None:
    """Do what the manager says. What it cannot do is told, and ends it."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s [{os.getpid()}]: %(message)s")
    line = Line(int(descriptor))
    line.listen()
    try:
        if line.task.settings.traces:
            from weightswap_server.service.traces import export_spans

            export_spans()
        if line.task.op_libraries:
            from weightswap_runtime.engines.graphs.libraries import import_libraries  # needs torch

            import_libraries(line.task.op_libraries)
        (_keep if line.task.role == "keeper" else _serve)(line)
    except (WeightswapError, OSError) as error:
        line.say(Word("failed", str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
