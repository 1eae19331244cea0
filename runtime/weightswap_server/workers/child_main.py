"""The program of a child: as the owner it changes weights, as a worker it answers from them.

The manager sends one task, and then answers messages; both sides write a line of JSON for each. A child whose manager
has ended ends, too. The metrics of a child are part of the totals that any of them shows.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Literal

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import WeightswapError
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.owner import Segment, own
from weightswap_runtime.shared.worker import join
from weightswap_server.admin.access import ENVIRONMENT, AdminSettings
from weightswap_server.admin.journal import JournalState
from weightswap_server.admin.plane import AdminPlane
from weightswap_server.errors import log
from weightswap_server.http.handover import Handed
from weightswap_server.protocol import Process
from weightswap_server.service.service import Service
from weightswap_server.serving import ModelSource, Server
from weightswap_server.settings import Settings
from weightswap_server.signed_weights import requires

from .trials import OwnerTrials, WorkerTrials

Role = Literal["owner", "worker"]
_Key = tuple[str, str, tuple[tuple[str, str], ...]]  # of a sample: its family, its name, its labels
MOST_SAMPLES = 10_000  # of processes that have ended; the oldest are dropped
# metrics that count for workers; a worker's others are those of the weights, which its owner has, too
_BY_WORKERS = ("weightswap_server_", "weightswap_calls", "weightswap_call_seconds", "weightswap_leases")
_MOMENTARY = ("gauge", "unknown")  # kinds of which nothing is left when a process has ended
_REPORT_INTERVAL = 1.0  # seconds between two reports of a child
_WARM_UP = 60.0  # seconds for which a new worker waits until it is warm


def main(descriptor: str) -> None:
    """Receive the task, and run it. An error is sent to the manager, and ends the process with 1."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s [{os.getpid()}]: %(message)s")
    manager = ManagerConnection(int(descriptor))
    manager.listen()
    Thread(target=manager.report_start, name="weightswap-starting", daemon=True).start()
    try:
        if manager.task.settings.traces:
            from weightswap_server.service.traces import export_spans

            export_spans()
        if manager.task.op_libraries:
            from weightswap_runtime.engines.operators import import_libraries  # needs torch

            import_libraries(manager.task.op_libraries)
        (_own if manager.task.role == "owner" else _serve)(manager)
    except (WeightswapError, OSError) as error:
        manager.send(Message("failed", str(error)))
        sys.exit(1)


def _own(manager: ManagerConnection) -> None:
    """Stage and commit for all workers, until SIGTERM or the manager's end."""
    task, ended = manager.task, manager.closed
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    admit = requires(*task.require_signature) if task.require_signature else None
    models = {
        name: own(source.artifact, task.segments[name], admit, **source.options)
        for name, source in task.sources.items()
    }
    service = Service(models, task.settings)
    for served in service.served:
        served.switch = Control(task.segments[served.name].control)
    manager.on_tried = OwnerTrials(service.served).add
    service.all_metrics = lambda: manager.total(service.metrics.text())
    service.load_metrics = lambda: text_string_to_metric_families(service.all_metrics().decode())
    service.processes = manager.processes
    plane = AdminPlane(service, task.admin) if task.admin is not None else None
    os.environ.pop(ENVIRONMENT, None)  # no process that starts here needs it
    for name, operations in plane.models.items() if plane is not None else ():
        operations.on_source = partial(manager.send_source, name)
        operations.journal.on_change = partial(manager.send_journal, name)
        operations.journal.inherit(task.journals.get(name, JournalState()))
    try:
        for name, source in task.sources.items():
            if models[name].weights_id is None:
                source.begin(models[name])
            source.attach(models[name])
        with plane.running() if plane is not None else nullcontext():
            manager.send_ready(plane.where if plane is not None else "")
            _report(manager, service)
            while not ended.wait(_REPORT_INTERVAL):
                _report(manager, service)
    finally:
        service.close()


def _serve(manager: ManagerConnection) -> None:
    """Answer requests, once warm, until SIGTERM or the manager's end."""
    task = manager.task
    models = {name: join(source.artifact, task.segments[name], task.slot) for name, source in task.sources.items()}
    server = Server(models, task.settings, handed=Handed(*task.handover))
    for served in server.service.served:
        served.switch = Control(task.segments[served.name].control)
    trials = WorkerTrials(server.service.served)
    metrics = server.service.metrics.text
    server.service.all_metrics = lambda: manager.total(metrics())
    server.on_listening(manager.send_ready)
    _await_warm(server)
    gc.collect()
    gc.freeze()
    loop_alive = Event()
    server.on_listening(lambda: _signal_alive(asyncio.get_running_loop(), loop_alive))
    report = partial(_report_regularly, manager, server, loop_alive, trials)
    Thread(target=report, name="weightswap-reports", daemon=True).start()
    server.run()


def _signal_alive(loop: asyncio.AbstractEventLoop, loop_alive: Event) -> None:
    """Set the event regularly while the loop runs; a long call in the model's thread does not block it."""
    loop_alive.set()
    loop.call_later(_REPORT_INTERVAL / 2, _signal_alive, loop, loop_alive)


def _await_warm(server: Server) -> None:
    deadline = time.monotonic() + _WARM_UP
    while not all(served.warm or served.model.weights_id is None for served in server.service.served):
        if time.monotonic() >= deadline:
            log.warning("a model is not warm after %g s, and is served anyway", _WARM_UP)
            return
        time.sleep(0.01)


def _report_regularly(manager: ManagerConnection, server: Server, loop_alive: Event, trials: WorkerTrials) -> None:
    """Run in a thread of its own, as sending to the manager may block."""
    while not manager.closed.wait(_REPORT_INTERVAL):
        _report(manager, server.service, loop_alive.is_set())
        loop_alive.clear()
        for text in trials.drain():
            manager.send(Message("tried", text))
    server.stop()


def _report(manager: ManagerConnection, service: Service, alive: bool = True) -> None:
    manager.send(Message("metrics", service.metrics.text().decode()))
    if alive:
        process = service.process(manager.task.role, manager.task.name)
        manager.send(Message("alive", msgspec.json.encode(process).decode()))


class ChildTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a child."""

    role: Role
    name: str
    sources: Mapping[str, ModelSource]  # by model
    segments: Mapping[str, Segment]  # by model
    settings: Settings
    admin: AdminSettings | None = None  # of the owner's admin plane
    require_signature: tuple[str, ...] = ()  # public keys
    op_libraries: tuple[str, ...] = ()  # whose import registers operators
    slot: int = 0  # of a worker, in the segments
    handover: tuple[int, int] = (-1, -1)  # descriptors of a worker's connections
    journals: Mapping[str, JournalState] = {}  # by model, of an earlier owner when it ended


class Message(msgspec.Struct, frozen=True):
    """A message of a child to its manager, or the manager's answer to "total" and "processes".

    text: for "alive", a `Process`, sent regularly unless the child hangs; for "metrics" and "total", Prometheus' text
    format; for "processes", all of them; for "tried", `TrialMeasures` for the owner. "sources" and "journals" are
    kept for the next owner.
    """

    kind: Literal["ready", "failed", "alive", "metrics", "total", "processes", "tried", "sources", "journals"]
    text: str = ""


class ManagerConnection:
    """A child's connection to the manager."""

    def __init__(self, descriptor: int) -> None:
        with socket.socket(fileno=descriptor) as connection:
            self._stream = connection.makefile("rwb")  # keeps the socket open
        self.task = from_json(self._stream.readline(), ChildTask)
        self.closed = Event()
        self._is_ready = Event()
        self.on_tried: Callable[[str], object] = lambda _: None
        self._send_lock = Lock()
        self._request_lock = Lock()
        self._answers: SimpleQueue[str] = SimpleQueue()

    def listen(self) -> None:
        """Receive messages in a thread; `closed` is set when the manager has ended."""
        Thread(target=self._listen, name="weightswap-manager", daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, msgspec.DecodeError):
            while raw := self._stream.readline():
                message = from_json(raw, Message)
                (self.on_tried if message.kind == "tried" else self._answers.put)(message.text)
        self.closed.set()
        self._answers.put("")

    def send(self, message: Message) -> None:
        with self._send_lock, suppress(OSError):
            self._stream.write(msgspec.json.encode(message) + b"\n")
            self._stream.flush()

    def report_start(self) -> None:
        """Tell the manager regularly that this process lives, until it is ready."""
        while not (self._is_ready.wait(_REPORT_INTERVAL) or self.closed.is_set()):
            role, name, now = self.task.role, self.task.name, time.time()
            process = Process(role=role, name=name, pid=os.getpid(), since=now, heard=now, ready=False)
            self.send(Message("alive", msgspec.json.encode(process).decode()))

    def send_ready(self, text: str = "") -> None:
        """Tell the manager that this process serves. text: the address of the admin plane."""
        self._is_ready.set()
        self.send(Message("ready", text))

    def total(self, text: bytes) -> bytes:
        """Return the metrics of all processes. text: those of this one."""
        return self._request(Message("total", text.decode())).encode()

    def processes(self) -> list[Process]:
        """Return all processes; none if the manager has ended."""
        return from_json(self._request(Message("processes")) or "[]", list[Process])

    def send_source(
        self, name: str, watch: str | None = None, follow: str | None = None, interval: float = 5.0
    ) -> None:
        """Send a model's new source, for the process that replaces this one."""
        source = msgspec.structs.replace(self.task.sources[name], watch=watch, follow=follow, interval=interval)
        self.send(Message("sources", msgspec.json.encode({name: source}).decode()))

    def send_journal(self, name: str, journal: JournalState) -> None:
        """Send a model's journal, for the process that replaces this one."""
        self.send(Message("journals", msgspec.json.encode({name: journal}).decode()))

    def _request(self, message: Message) -> str:
        """Return the manager's answer, or "" if it has ended."""
        with self._request_lock:
            if self.closed.is_set():
                return ""
            self.send(message)
            return self._answers.get()


class Totals:
    """The latest metrics of each process, and their totals."""

    def __init__(self) -> None:
        self._living: dict[object, tuple[Role, str]] = {}  # parsed on request alone: reports come each second
        self._ended: dict[_Key, float] = {}
        self._families: dict[str, Metric] = {}  # without samples

    def update(self, process: object, role: Role, text: str) -> None:
        """Replace a process's metrics. text: Prometheus' text format."""
        self._living[process] = role, text

    def end(self, process: object) -> None:
        """Keep the counters of a process that has ended."""
        if process not in self._living:
            return
        for key, value in self._read(*self._living.pop(process)):
            if self._families[key[0]].type not in _MOMENTARY:
                self._ended[key] = self._ended.pop(key, 0.0) + value
        for key in list(self._ended)[: max(0, len(self._ended) - MOST_SAMPLES)]:
            del self._ended[key]

    def text(self) -> str:
        """Return the totals in Prometheus' text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        """Return the totals, as a registry's collector."""
        sums = dict(self._ended)
        for role, text in self._living.values():
            for key, value in self._read(role, text):
                sums[key] = sums.get(key, 0.0) + value
        totals = {name: Metric(name, known.documentation, known.type) for name, known in self._families.items()}
        for (family, name, labels), value in sums.items():
            totals[family].add_sample(name, dict(labels), value)
        return iter(totals.values())

    def _read(self, role: Role, text: str) -> Iterator[tuple[_Key, float]]:
        """Yield the samples that count for a process of this role, without creation times."""
        for family in text_string_to_metric_families(text):
            if family.name.startswith(_BY_WORKERS) == (role == "worker") and not family.name.endswith("_created"):
                self._families[family.name] = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    yield (family.name, sample.name, tuple(sample.labels.items())), sample.value


if __name__ == "__main__":
    main(*sys.argv[1:])
