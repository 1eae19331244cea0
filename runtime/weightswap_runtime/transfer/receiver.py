"""Receiving weights from a trainer's memory: a Unix socket on which senders pass packed weight files without names."""

from __future__ import annotations

import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

from weightswap_runtime.errors import TransferFailed, Unsupported, check_timeout, join_seconds
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.sources.byte_source import Check, LocalFile
from weightswap_runtime.staging.given import MEMORY, GivenWeights, as_file
from weightswap_runtime.threads import Background, UntilStopped

from .messages import VERSION, Channel, Offer, Outcome, Refusal, peer, socket_path

MOST_SENDERS = 32  # connected at once
_AT_ONCE = 1.0  # seconds to tell a sender that it is turned away
_log = logging.getLogger("weightswap.transfer")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


class Target(Protocol):
    """The model that takes the weights."""

    graph_id: str

    def swap(
        self, given: GivenWeights, weights_id: str, job: Job, agree: Callable[[], None] = lambda: None
    ) -> SwapReceipt:
        """Serve weights, which must have this id. Raises as `Model.swap`, and what `agree` raises.

        agree: is called once they are staged and verified, before they are served.
        """
        ...


class Receiver(UntilStopped):
    """A socket on which a model receives weights, until `stop()`, or until the model is dropped. Made by
    `Model.receive()`.

    Only processes of the same user may connect. Dropping this object does not stop it.
    """

    def __init__(self, at: str, target: Target, timeout: float | None, rate_limit: float | None = None) -> None:
        """Begin to listen. Raises Unsupported."""
        check_timeout(timeout)
        self.at = self._where = at
        self.last_error: BaseException | None = None  # None again once weights were taken
        self._path = str(Path(socket_path(at)).absolute())  # the working directory may change
        self._target, self._rate_limit = target, rate_limit
        self._timeout = math.inf if timeout is None else timeout
        self._listener = _listen(self._path, at)
        self._identity = _identity_of(self._path)
        self._is_stopping = False
        self._lock = threading.Lock()  # of what follows
        self._connections: dict[socket.socket, Job] = {}
        self._threads: list[Background] = []
        self._thread = Background(self._accept, "weightswap-receiver", self._end)
        self._thread.start()

    def interrupt(self) -> None:
        """Cancel what is being staged; its sender is told."""
        with self._lock:
            for job in self._connections.values():
                job.cancel()

    def stop(self, timeout: float | None = None) -> bool:
        """Stop listening, cancel what is being staged, and remove the socket.

        Wait for at most `timeout` seconds until all threads have ended, and return whether they have.
        """
        seconds = join_seconds(timeout)
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._end()
        for thread in (self._thread, *self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
        return not any(thread.is_alive() for thread in (self._thread, *self._threads))

    def _end(self) -> None:
        with self._lock:
            was_stopping, self._is_stopping = self._is_stopping, True
            connections = dict(self._connections)
        if was_stopping:
            return
        with suppress(OSError):
            if _identity_of(self._path) == self._identity:  # not another receiver's
                Path(self._path).unlink()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        for connection, job in connections.items():
            job.cancel()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # an outcome can still be sent

    def _accept(self) -> None:
        with self._listener:
            while not self._is_stopping:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._is_stopping:
                        _log.warning("%s: %s", self.at, error)
                        time.sleep(1.0)  # such as no descriptors
                    continue
                self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        """Serve a connection in a thread of its own."""
        if peer(connection) != os.getuid():
            self._turn_away(connection, f"{self.at}: takes weights from processes of its own user alone")
            return
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            is_full = self._is_stopping or len(self._threads) >= MOST_SENDERS
            if not is_full:
                self._connections[connection] = Job()
                thread = Background(lambda: self._converse(connection), "weightswap-receiving", self._end)
                self._threads.append(thread)
                thread.start()
        if is_full:
            self._turn_away(connection, f"{self.at}: {MOST_SENDERS} senders are connected; close one of them")

    def _turn_away(self, connection: socket.socket, why: str) -> None:
        refusal = TransferFailed(why)
        with closing(Channel(connection)) as channel, suppress(TransferFailed):
            channel.send(Outcome(refusal=Refusal.of(refusal)), time.monotonic() + _AT_ONCE)

    def _converse(self, connection: socket.socket) -> None:
        channel, until = Channel(connection), time.monotonic() + self._timeout
        try:
            while not self._is_stopping:
                offer = channel.receive(Offer, until, self._timeout)
                if offer is None:
                    return
                until = math.inf  # who sends takes as long as it likes until the next step
                channel.send(self._take(connection, channel, offer), time.monotonic() + self._timeout)
        except TransferFailed as error:  # the sender is gone
            _log.info("%s: %s", self.at, error)
        except BaseException:
            _log.exception("%s: a connection failed", self.at)
        finally:
            channel.close()
            with self._lock:
                self._connections.pop(connection, None)

    def _check(self, offer: Offer) -> None:
        """Raise TransferFailed for an offer that this receiver cannot take."""
        if offer.version != VERSION:
            raise TransferFailed(
                f"{self.at}: the sender speaks version {offer.version}, the receiver {VERSION}; install one release"
            )
        if offer.graph_id != self._target.graph_id:
            raise TransferFailed(
                f"{self.at}: the sender has the graph {offer.graph_id[:12]}, the receiver "
                f"{self._target.graph_id[:12]}; give the sender the artifact that is served"
            )

    def _take(self, connection: socket.socket, channel: Channel, offer: Offer) -> Outcome:
        """Serve what is offered, and return what became of it."""
        job = Job(self._rate_limit, yields=True)
        with self._lock:
            self._connections[connection] = job
        try:
            if self._is_stopping:
                job.cancel()
            self._check(offer)
            descriptor = channel.receive_descriptor()
            try:
                receipt = self._target.swap(self._given(descriptor), offer.weights_id, job)
            finally:
                os.close(descriptor)
        except Exception as error:
            channel.drop_descriptor()
            self.last_error = error.with_traceback(None)
            return Outcome(refusal=Refusal.of(error))
        self.last_error = None
        return Outcome(receipt.as_dict())

    def _given(self, descriptor: int) -> GivenWeights:
        where = f"{MEMORY}:{self.at}"

        def open_source(_: Check) -> LocalFile:
            source = LocalFile(Path(f"/proc/self/fd/{descriptor}"))
            source.where = where
            return source

        return as_file(where, open_source)


def _listen(path: str, at: str) -> socket.socket:
    """Return a listening socket that its user alone may connect to. Raises Unsupported."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path, at)
        listener.bind(path)
        Path(path).chmod(0o600)  # before anybody can connect
        listener.listen(MOST_SENDERS)
    except OSError as error:
        listener.close()
        raise Unsupported(f"{at}: cannot listen there ({error.strerror or error})") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _identity_of(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _remove_dead(path: str, at: str) -> None:
    """Remove a socket that a process has left behind. Raises Unsupported if one listens on it, or for another file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Unsupported(f"{at}: is there already, and no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise Unsupported(f"{at}: another process receives there")
