"""The server's side: call a model, and put new weights behind it."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any, Literal

from .adapter import Keys
from .artifact import Artifact
from .candidates import Candidate
from .engines import Engine
from .errors import ModelClosed, StageCancelled, StagingBusy, Unsupported
from .events import Event, EventKind, Listener
from .following import Start
from .gate import Claim, Gate
from .goldens import Mode
from .hooks import Stop
from .job import Job, Progress
from .nonfinite import as_allowed
from .pinned import Pinned
from .places import printable
from .receipts import SwapReceipt
from .selection import patterns
from .session import Caller, CallObserver, Methods
from .staged import LEASE_TIMEOUT, Staged, Staging
from .staging import Contents, Kind, Request
from .store import Store
from .watching import Options, Watcher

Path = str | os.PathLike[str]
Busy = Literal["refuse", "wait"]


def _check_busy(busy: str) -> None:
    if busy not in ("refuse", "wait"):
        raise Unsupported(f'busy={busy!r}: expected "refuse" or "wait"')


def _seconds(timeout: float | None) -> float:
    return math.inf if timeout is None else timeout


def _described(contents: Contents) -> dict[str, Any]:
    """What an event says of weights that are staged."""
    return {
        "weights_id": contents.identity.weights_id,
        "labels": dict(contents.identity.labels),
        "operation": contents.kind,
        "seconds_staged": contents.seconds_staged,
        "seconds_verified": contents.seconds_verified,
        "nonfinite": dict(contents.nonfinite),
    }


class Model(Caller, AbstractContextManager["Model"]):
    """A graph with replaceable weights. Every method may be called from any thread. Made by `load()`.

    Leaving its `with` block closes it.
    """

    def __init__(self, artifact: Artifact, store: Store, *, device: str, engine: Engine) -> None:
        self.artifact = artifact
        self.device = device
        self.engine = engine.name
        self._store = store
        self._gate = store.gate
        self._member = store.join(artifact, engine)
        super().__init__(Methods(artifact.manifest, engine, self._member.place))
        self._place = self._member.place
        self._stagings: weakref.WeakSet[Staged] = weakref.WeakSet()
        self._watchers: list[Watcher] = []
        # pins and stagings have the methods, too
        weakref.finalize(self._methods, store.leave, self._place).atexit = False

    def close(self) -> None:
        """End watching, cancel stagings that are open, and refuse calls, swaps and pins from now on: ModelClosed.

        Calls and pins that have begun go on; the memory of both arenas is let go with the last of them, or with the
        last model that shares it. A second time it does nothing. From a callback of its own watcher, or a listener of
        its own staging, it does not wait for them to end.
        """
        if self._closed:
            return
        self._gate = Gate()
        self._gate.close()
        for watcher in self._watchers:
            watcher.stop()
        for staged in list(self._stagings):
            staged.cancel()
        self._store.close(self._place)
        self._methods = copy(self._methods)  # pins have the original, with which the graphs go

    @property
    def _closed(self) -> bool:
        return self._gate is not self._store.gate

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def graph_id(self) -> str:
        return self.artifact.graph_id

    @property
    def weights_id(self) -> str | None:
        """The id of the weights that new calls get; None before the first swap."""
        return self._gate.current.weights_id if self._gate.current else None

    @property
    def generation(self) -> int | None:
        """0 for the first weights, one more for each commit; None before the first swap."""
        return self._gate.current.generation if self._gate.current else None

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the weights that new calls get."""
        return self._gate.current.labels if self._gate.current else {}

    @property
    def residency(self) -> str:
        return self._store.residency

    @property
    def failed(self) -> bool:
        """Whether an in-place commit broke off, so that calls are refused until a swap or rollback succeeds."""
        return self._gate.failure is not None

    @property
    def history(self) -> tuple[SwapReceipt, ...]:
        """The receipts of the last 100 commits, oldest first; also those through models that share the weights."""
        return tuple(self._store.history)

    @property
    def progress(self) -> Progress | None:
        """How far the staging is that is under way, whoever asked for it; None where none is."""
        job = self._store.job
        return job.progress if job is not None else None

    def listen(self, listener: Listener) -> Stop:
        """Call `listener(event)` for everything that happens to the weights, in the thread that does it; see `Event`.

        What it raises is logged. It must not swap or roll back itself. Returns a function that ends it.
        """
        return self._store.events.listen(listener)

    def observe(self, observer: CallObserver) -> Stop:
        """Call `observer(method, seconds, error)` after each call of this model and of its pins, in the same thread.

        `error` is what the call raised, or None. Trial calls of a staging are not told. What the observer raises is
        logged. Returns a function that ends it.
        """
        return self._methods.observers.add(observer)

    def stage(
        self,
        path: Path,
        *,
        only: str | Sequence[str] | None = None,
        keys: Keys | None = None,
        expect: str | None = None,
        allow_other_graph: bool = False,
        verify: Mode = "goldens",
        allow_nonfinite: bool | str | Sequence[str] | None = None,
        by: str = "",
        background: bool = False,
        rate_limit: float | None = None,
        busy: Busy = "refuse",
        timeout: float | None = LEASE_TIMEOUT,
    ) -> Staged:
        """Read and verify weights beside those that serve. Nothing that serves is touched.

        path: a .safetensors file, a .safetensors.index.json with its shards, a Hugging Face directory, or a delta
          file, which needs the weights that it starts from to be served; a local path, or an fsspec URL of the same
          (s3://, gs://, https://, ...; extra `remote`). Names are runtime FQNs or the checkpoint's keys; weights that
          the adapter computes need torch.
        only: patterns of FQNs, such as "encoder.*" (`*` also matches dots): these weights are taken from the file,
          whatever else it holds, and the rest are those that are served.
        keys: "checkpoint" or "fqn" says what the names are where a file that weightswap has not written would fit both
          ways, with different results.
        expect: the weights id of the result; anything else is refused.
        allow_other_graph: take a file that was packed for another graph, if its tensors fit.
        verify: "goldens": where outputs of the eager model were recorded for these weights (`pack(..., goldens=...)`),
          the staged weights must reproduce them; outputs on recorded inputs must be finite. "finite": the latter
          alone. "off": nothing is tried.
        allow_nonfinite: False refuses weights that have NaN or infinities where those that are served have none (where
          nothing is served: NaN anywhere, infinities in weights that require a gradient); patterns of FQNs refuse them
          but in these weights. None and True let them in; `SwapReceipt.nonfinite` and `Staged.nonfinite` say which.
        by: who asks, for receipts and events.
        background: return at once; see `Staged` for `progress`, `wait()` and `cancel()`.
        rate_limit: read and copy at most so many bytes per second, so that calls are not starved.
        busy: where another staging of the model is open, "refuse", or "wait" for it.
        timeout: seconds to wait for that, and for calls and pins that still use memory that is needed: in double
          residency the previous weights give way.

        Raises WeightFileError, WeightsMismatch, GraphMismatch, DigestMismatch, BaseMismatch, UnexpectedWeights,
        NonFiniteWeights, GoldensError, GoldenMismatch, OutOfMemory, StagingBusy, LeaseTimeout, Unsupported, and
        ArtifactError or MissingExtra where the adapter's graph cannot be opened; with `background`, `Staged.wait()`
        and `Staged.commit()` raise what comes after the start.
        """
        chosen = patterns(only) if only is not None else ()
        allowed = as_allowed(allow_nonfinite, self.artifact.manifest)
        request = Request(path, keys, chosen, expect, allow_other_graph, verify, allowed)
        request.check()
        _check_busy(busy)
        staged = self._prepare(request, Job(rate_limit), by, busy, timeout)
        return staged.start() if background else staged.run()

    def _prepare(self, request: Request, job: Job, by: str, busy: Busy, timeout: float | None) -> Staged:
        """A staging that has not begun. Raises StagingBusy if it is not to wait for another."""
        self._check_open()
        ticket = Claim()
        claim = partial(self._store.claim, ticket, _seconds(timeout) if busy == "wait" else None)
        if busy == "refuse":
            try:
                claim(job)
            except StagingBusy as error:
                self._tell("refused", request, by, error=error, phase=job.progress.phase)
                raise
        staging = Staging(partial(self._work, request, by, timeout, claim), job, ticket)
        staged = Staged(self._methods, self._gate, staging, partial(self._commit, by), partial(self._discarded, by))
        self._stagings.add(staged)
        if self._closed:  # meanwhile
            staged.cancel_soon()
        return staged

    def _tell(self, kind: EventKind, request: Request, by: str, **more: Any) -> None:
        operation: Kind | None = "partial" if request.only else None
        self._store.events.emit(
            Event(kind, printable(request.path), by, self.graph_id, **({"operation": operation} | more))
        )

    def swap(
        self,
        path: Path,
        *,
        only: str | Sequence[str] | None = None,
        keys: Keys | None = None,
        expect: str | None = None,
        allow_other_graph: bool = False,
        verify: Mode = "goldens",
        allow_nonfinite: bool | str | Sequence[str] | None = None,
        by: str = "",
        rate_limit: float | None = None,
        busy: Busy = "refuse",
        timeout: float | None = LEASE_TIMEOUT,
    ) -> SwapReceipt:
        """Replace weights: stage, verify, commit; the arguments are those of `stage`. Several threads' swaps queue.

        Whatever is raised before the commit leaves weights, addresses and outputs as they were. State starts again
        from its initial values, as in a model loaded with these weights.

        Raises what `stage` raises, and ModelFailed if an in-place commit breaks off.
        """
        with (
            self._store.queue(),
            self.stage(
                path,
                only=only,
                keys=keys,
                expect=expect,
                allow_other_graph=allow_other_graph,
                verify=verify,
                allow_nonfinite=allow_nonfinite,
                by=by,
                rate_limit=rate_limit,
                busy=busy,
                timeout=timeout,
            ) as staged,
        ):
            return staged.commit(timeout=timeout)

    def rollback(self, *, by: str = "", busy: Busy = "refuse", timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve the previous weights again; a second rollback undoes the first. It is a commit of its own.

        While a swap or a staging is under way it is refused, or with busy="wait" waits for at most `timeout` seconds:
        what is then previous is what that has left.

        Raises NothingToRollBack, StagingBusy, LeaseTimeout, ModelFailed.
        """
        self._check_open()
        _check_busy(busy)
        wait = _seconds(timeout) if busy == "wait" else None
        return self._store.rollback(self._member, by, wait, timeout)

    def watch(
        self,
        directory: Path,
        interval: float = 5.0,
        *,
        start: Start = "newest",
        callback: Listener | None = None,
        only: str | Sequence[str] | None = None,
        keys: Keys | None = None,
        allow_other_graph: bool = False,
        verify: Mode = "goldens",
        allow_nonfinite: bool | str | Sequence[str] = False,
        by: str = "watch",
        rate_limit: float | None = None,
        timeout: float | None = LEASE_TIMEOUT,
    ) -> Watcher:
        """Swap in each new complete weight file of a directory, or of a URL's, in order, in a thread of its own.

        Weight files are those whose names end in .safetensors, but not in .goldens.safetensors, and do not begin with
        a dot. They are ordered by name, numbers in names by their value; of two files that `publish()` wrote for one
        step, the later one is later. A file that comes before one that was taken is passed over. Behind http:// and
        https:// they are the links of a page; each look asks for the headers of each.

        interval: seconds between two looks at the directory.
        start: "newest" begins with the last file that can be taken; "all" with the first; "new" takes only files that
          are not there yet. All files of a local directory that is made later are new ones.
        callback: told what the watching does, in its thread, as are all that `listen`: the events of each swap, and
          "skipped", "waiting" and "unreachable". What it raises is logged.
        only: as in `swap`; something must be served already.
        allow_nonfinite: True, or patterns of FQNs, for weights that may have NaN or infinities where those that are
          served have none. Other files with such weights are skipped.
        The other arguments are those of `swap`; another staging of the model is waited for.

        Files that are renamed into place are taken at the next look. One that is shorter than its header says is waited
        for, for a minute after its last change; one without digests is taken when two looks found it the same. A
        delta is taken while the weights that it starts from are served, and waits for them until a later file is taken.

        Weights that are served already are not put in again. Those that a rollback took away since the watching began
        are skipped, in whichever file they come, until they were swapped in by hand; 100 commits later that is
        forgotten. A file that has gone and comes back as it was is not taken again; 10,000 of them are remembered.

        What cannot be taken changes nothing: a file that is damaged or does not fit is skipped until it changes. Where
        it cannot be read, memory or a lease is missing, or a URL's directory cannot be listed, another try is made
        after `interval`, then after twice as long, up to five minutes; later files are taken meanwhile. A local
        directory is looked at every `interval`.

        Raises Unsupported and MissingExtra; nothing afterwards.
        """
        self._check_open()
        allowed = as_allowed(allow_nonfinite, self.artifact.manifest)
        chosen = patterns(only) if only is not None else ()
        request = Request("", keys, chosen, None, allow_other_graph, verify, allowed)
        watcher = Watcher(self, directory, interval, start, callback, Options(request, by, rate_limit, timeout))
        self._watchers = [*(each for each in self._watchers if each.alive), watcher]
        return watcher

    def pin(self) -> Pinned:
        """`with model.pin() as session:` makes several calls on one version, whatever is committed meanwhile.

        In single residency a commit waits until the block ends; in double residency the next staging does.
        """
        self._check_open()
        return Pinned(self._methods, self._gate)

    def _work(
        self, request: Request, by: str, timeout: float | None, claim: Callable[[Job], None], job: Job
    ) -> Candidate:
        """What a staging does, in whichever thread."""
        start = time.perf_counter()
        tell = partial(self._tell, request=request, by=by)
        try:
            claim(job)
            tell("staging")
            job.begin("opening")
            candidate = self._store.stage(self._member, request, timeout, job)
        except BaseException as error:
            refused = isinstance(error, Exception) and not isinstance(error, StageCancelled)
            phase, nbytes, _ = job.progress
            seconds = time.perf_counter() - start
            tell("refused" if refused else "cancelled", error=error, phase=phase, nbytes=nbytes, seconds=seconds)
            raise
        contents = candidate.contents
        tell("staged", **_described(contents), nbytes=contents.bytes_read, seconds=time.perf_counter() - start)
        if job.abandoned:
            self._discarded(by, contents)
            job.check()
        return candidate

    def _commit(self, by: str, candidate: Candidate, timeout: float | None) -> SwapReceipt:
        return self._store.commit(self._member, candidate, by, timeout)

    def _discarded(self, by: str, contents: Contents) -> None:
        self._store.events.emit(Event("discarded", contents.source, by, self.graph_id, **_described(contents)))

    def _run(self, name: str, flat: list[Any]) -> list[Any]:
        lease, gate = Claim(), self._gate
        session = None
        try:
            session = gate.acquire(lease).session
            try:
                bound = session.bound[self._place]
            except KeyError:
                raise ModelClosed from None
            return bound.run(name, flat)
        finally:
            lease.end()
            if session is not None:
                gate.release(session, lease)

    def __repr__(self) -> str:
        return (
            f"Model({str(self.artifact.path)!r}, graph_id={self.graph_id[:12]!r}, "
            f"weights_id={self.weights_id and self.weights_id[:12]!r}, generation={self.generation}, "
            f"residency={self.residency!r})"
        )


def engine_of(model: Model) -> Engine:
    """What executes a model's graphs: for tools that turn tensors of files into its inputs, and its outputs back."""
    return model._member.engine
