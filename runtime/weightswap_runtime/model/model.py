"""Models whose weights are replaced: by swaps, by rollbacks, and by what a directory or a desired store says."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import ModelClosed, StaleState, UnexpectedWeights, check_timeout
from weightswap_runtime.following.desired_store import DesiredStore
from weightswap_runtime.following.file_queue import Start
from weightswap_runtime.following.watching import (
    Follower,
    Policy,
    Promotion,
    Subject,
    Watcher,
    Watching,
    check_promotion_policy,
)
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.ranks import Ranks
from weightswap_runtime.live.receipt import Event, Listener, SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.live.variants import MOST, VariantReceipt
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import (
    LEASE_TIMEOUT,
    Busy,
    PathLike,
    Patterns,
    SwapOptions,
    SwapRequest,
    WatchOptions,
    check_busy,
    patience,
)
from weightswap_runtime.threads import in_thread
from weightswap_runtime.transfer.group import GroupReceiver
from weightswap_runtime.transfer.keeping import KeptFiles
from weightswap_runtime.transfer.receiver import Receiver

from .served import ServedModel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from weightswap_runtime.staging.given import Given, GivenWeights

S = TypeVar("S", Watcher, Follower, Receiver, GroupReceiver, KeptFiles)


class Model(ServedModel):
    """A graph with replaceable weights, made by `load()`. Every method may be called from any thread.

    Leaving its `with` block closes it.
    """

    def __init__(
        self, artifact: Artifact, store: WeightStore, *, device: str, engine: Engine, max_variants: int = MOST
    ) -> None:
        super().__init__(artifact, store, device=device, engine=engine, max_variants=max_variants)
        self._composed = tuple(artifact.kinds)  # now: swaps go on if the artifact is deleted
        self._stagings: weakref.WeakSet[Staged] = weakref.WeakSet()
        self._services: list[
            Watching | Receiver | GroupReceiver | KeptFiles
        ] = []  # with threads of their own, which `close` stops

    def close(self) -> None:
        """Stop watchers, cancel open stagings, and refuse calls, swaps and pins from now on with ModelClosed.

        Calls and pins that have begun go on; the memory of the arenas is freed with the last of them, or with the last
        model that shares it. A second call does nothing. In a callback of its own watcher, or a listener of its own
        staging, it does not wait for these to end.
        """
        super().close()

    def _end_changes(self) -> None:
        # what keeps files comes last: it writes what was committed last
        for service in sorted(self._services, key=lambda each: isinstance(each, KeptFiles)):
            service.stop()
        for staged in list(self._stagings):
            staged.cancel()

    @property
    def previous_weights_id(self) -> str | None:
        """The id of the weights that `rollback()` would serve; None if there are none."""
        return self._store.previous_id

    @property
    def watching(self) -> tuple[Watching, ...]:
        """The watchers and followers that are still running."""
        return tuple(each for each in self._services if isinstance(each, Watching) and each.alive)

    def stage(
        self,
        weights: Given,
        *,
        background: bool = False,
        onto: Sequence[tuple[PathLike, str]] = (),
        **options: Unpack[SwapOptions],
    ) -> Staged:
        """Read and verify weights beside the served ones, which are not touched.

        weights: a .safetensors file, a .safetensors.index.json with its shards, a Hugging Face directory, or a delta
          file, whose base weights must be served; a local path, or an fsspec URL of the same (s3://, gs://, https://,
          ...; extra `remote`). Names are runtime FQNs or the checkpoint's keys; weights that the conversion computes
          need torch. Or tensors of this process, of torch on any device or of numpy, which are copied (docs/memory.md):
          a mapping by such names; an `nn.Module`, of which parameters and persistent buffers are taken; or an iterator
          of names with tensors, each of which is copied before the next one is asked for. Nobody may write to them
          meanwhile, such as a step of their optimizer: torch's counters of writes show most of these, and with
          `background` all tensors are compared once more at the end, which shows all but a step that stands still.
        labels: short texts for receipts, such as the step, of weights from memory; a file has its own.
        only: patterns of FQNs, such as "encoder.*" (`*` also matches dots): the matching weights are read from the
          file, whatever else it holds, and all others stay as they are served.
        ignore: patterns of names in the file, such as "*.position_ids", for keys of an older model: these tensors are
          ignored, and `SwapReceipt.ignored` lists them. A weight that the graph needs is then missing. A pattern that
          matches nothing causes a warning; for a delta, which has no such names, it causes none.
        keys: "checkpoint" or "fqn" says how to read the names of a file that weightswap has not written, if they would
          fit both ways with different results.
        expect: the weights id of the result; any other is refused.
        allow_other_graph: accept a file that was packed for another graph, if its tensors fit.
        verify: "goldens": if outputs of the eager model were recorded for these weights (`pack(..., goldens=...)`),
          the staged weights must reproduce them; outputs on recorded inputs must be finite in any case. "finite": only
          the latter. "off": the weights are not tried.
        allow_nonfinite: False refuses weights that have NaN or infinities where the served ones have none (if nothing
          is served: NaN anywhere, infinities in weights that require a gradient); patterns of FQNs allow them in these
          weights only. None and True allow them all; `SwapReceipt.nonfinite` and `Staged.nonfinite` list them.
        by: who requests this, for receipts and events.
        background: return at once; see `Staged` for `progress`, `wait()` and `cancel()`.
        rate_limit: the maximum number of bytes to read and copy per second, so that calls are not starved.
        busy: if another staging of the model is open, "refuse", or "wait" for it.
        timeout: seconds to wait for that staging, and for calls and pins that still use memory that is needed: in
          double residency that of the previous weights.
        onto: for a delta, the files that lead to its base weights, each with its weights id: a full set, then deltas.
          They are read if the base weights are not served.
        rows: of a module or a mapping, what has changed in its tables since the weights that are served: ascending ids
          of rows by the tables' names in `weights`, or a `RowTracker`. Only these rows are read; a table without ids
          has none. All other tensors are compared with the served weights by their digests, and taken whole if they
          differ. The result has the id that `pack` gives to all of the tensors; rows that have changed and are not
          named are not seen. A tracker's rows are taken by the commit; if they do not start from the served weights, as
          at first, or after a rollback, everything is read, as without `rows`. Nobody may write from this call on.
        base: the weights id that ids by name start from; if others are served, they are a BaseMismatch.

        Raises WeightFileError, SourceChanged, WeightsMismatch, GraphMismatch, DigestMismatch, BaseMismatch,
        UnexpectedWeights, NonFiniteWeights, GoldenMismatch, OutOfMemory, StagingBusy, WaitTimeout, Unsupported, and
        ArtifactError or MissingExtra if the conversion's graph cannot be opened; with `background`, `Staged.wait()` and
        `Staged.commit()` raise the errors that occur after the start.
        """
        request = SwapRequest.of(weights, options, self.artifact.manifest, self._composed, onto)
        return self._stage(request.beside_owner() if background else request, background=background)

    def _stage(self, request: SwapRequest, *, background: bool = False, job: Job | None = None) -> Staged:
        self._check_open()
        job = job or Job(request.rate_limit, yields=background)
        staged = Staged(self._methods, self._store, self._member, request, job)
        self._stagings.add(staged)
        if self._closed:  # by another thread meanwhile
            staged.cancel_soon()
        return staged.start() if background else staged.run()

    def swap(self, weights: Given, **options: Unpack[SwapOptions]) -> SwapReceipt:
        """Replace weights: stage, verify, commit. The options are those of `stage`. Swaps of several threads queue.

        An error before the commit leaves weights, addresses and outputs as they were. State starts again from its
        initial values, as in a model loaded with these weights.

        On ranks all swap, or none: every rank calls this at the same place between its calls. It then raises
        RanksRefused for whatever refuses the weights on any rank, and RanksLost.

        Raises what `stage` raises, and ModelFailed if an in-place commit fails half-way.
        """
        if self._store.ranks is not None:
            return self._swap_on_ranks(self._store.ranks, weights, options)
        request = SwapRequest.of(weights, options, self.artifact.manifest, self._composed)
        with self._store.turns.queue(), self._stage(request) as staged:
            return staged.commit(timeout=request.timeout)

    def _swap_on_ranks(self, ranks: Ranks, weights: Given, options: SwapOptions) -> SwapReceipt:
        """Swap on all ranks, or on none. Each stages beside its votes, so that it can say that it is not ready."""
        with ranks.turn("swap"), ExitStack() as stack:
            begun: list[tuple[Staged, float | None]] = []

            def begin() -> dict[str, str]:
                request = SwapRequest.of(weights, options, self.artifact.manifest, self._composed)
                begun.append((stack.enter_context(self._stage(request, background=True)), request.timeout))
                return {}

            ranks.agree("swap", begin)
            staged, timeout = begun[0]
            return staged.commit(timeout=timeout)

    def turn(self, check: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context manager during which swaps of other threads, watchers and followers wait before staging.

        check: called while waiting for the swap of another thread; an exception that it raises ends the wait.
        """
        return self._store.turns.wait_for_turn(check)

    async def aswap(self, weights: Given, **options: Unpack[SwapOptions]) -> SwapReceipt:
        """Swap as `swap` does, without blocking the event loop.

        If the task is cancelled, the swap is abandoned, unless it commits just then; it ends before the task does.
        """
        self._refuse_on_ranks("aswap()")
        request = SwapRequest.of(weights, options, self.artifact.manifest, self._composed).beside_owner()
        job = Job(request.rate_limit, yields=True)

        def swap() -> SwapReceipt:
            with self._store.turns.wait_for_turn(job.check), self._stage(request, job=job) as staged:
                return staged.commit(timeout=request.timeout)

        return await in_thread(swap, job.cancel)

    @asynccontextmanager
    async def astage(
        self, weights: Given, *, onto: Sequence[tuple[PathLike, str]] = (), **options: Unpack[SwapOptions]
    ) -> AsyncIterator[Staged]:
        """Stage for asyncio: `async with model.astage(weights) as staged:`; `await staged.acommit()` serves them.

        Arguments and errors are those of `stage`, but for `background`. The block begins when the weights are staged
        and verified. Leaving it, or cancelling the task, discards weights that were not committed.
        """
        self._refuse_on_ranks("astage()")
        request = SwapRequest.of(weights, options, self.artifact.manifest, self._composed, onto)
        request, job = request.beside_owner(), Job(request.rate_limit, yields=True)
        staged = await in_thread(lambda: self._stage(request, job=job), job.cancel, Staged.discard)
        try:
            yield staged
        finally:
            await in_thread(staged.discard)

    def rollback(self, *, by: str = "", busy: Busy = "refuse", timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve the previous weights again; a second rollback undoes the first. A rollback is a commit of its own.

        While a swap or a staging is under way, it is refused; with busy="wait" it waits for at most `timeout` seconds,
        and then serves the weights that are the previous ones at that time.

        Raises NothingToRollBack, StagingBusy, WaitTimeout, OutOfMemory, ModelFailed, and ModelClosed, also if
        `close()` ends the wait.
        """
        self._check_open()
        check_busy(busy)
        check_timeout(timeout)
        return self._store.rollback(self._member, by, patience(busy, timeout), timeout)

    def watch(
        self,
        directory: PathLike,
        interval: float = 5.0,
        *,
        start: Start = "newest",
        callback: Listener | None = None,
        only: str | Sequence[str] | None = None,
        promote: PathLike | None = None,
        policy: Policy = "newest",
        **options: Unpack[WatchOptions],
    ) -> Watcher:
        """Swap in each new complete weight file of a directory, local or behind a URL, in order, in its own thread.

        Weight files are those whose names end in .safetensors, but not in .goldens.safetensors, and do not begin with
        a dot. They are ordered by name, with numbers in names ordered by value; of two files that `publish()` wrote
        for one step, the one modified later comes later. A file that comes before one that was taken is skipped. A web
        server (http://, https://) lists no files, and cannot be watched.

        interval: seconds between two polls of the directory.
        start: "newest" begins with the last file that can be taken; "all" with the first; "new" takes only files that
          do not exist yet. If a local directory is created later, all its files are new.
        callback: called in the watcher's thread with the events of the watcher, which all listeners (`listen`) receive,
          too: those of each swap, and "skipped", "waiting" and "unreachable". Errors of the callback are logged.
        only: as in `swap`; weights must be served already.
        allow_nonfinite: True, or patterns of FQNs, for weights that may have NaN or infinities where the served ones
          have none. Other files with such weights are skipped.
        promote: a desired store (see `follow`) in which each file is promoted before it is served here. Weights that
          the desired store says are desired are served here, too, as by `follow`. While it is on hold, no file is
          taken; weights that it has withdrawn never are. A restarted watcher goes on after the last file that the
          desired store knows.
        policy: the condition for a promotion: "newest" promotes every file that can be taken; "proven" only files
          whose recorded outputs were reproduced. Others are skipped (NotPromoted).
        options: those of `stage`, but for `expect` and `busy`: the watcher waits for another staging of the model.

        Files that are renamed into place are taken at the next poll. A file that is shorter than its header says is
        waited for until a minute after its last change; a file without digests is taken when it was the same at two
        polls. A delta is taken while its base weights are served, and waits for them until a later file is taken.

        Weights that are served already are not swapped in again. Weights that were rolled back since the watcher began
        are skipped, in whichever file they come, until they are swapped in by hand; 100 commits later that is
        forgotten. A file that disappears and returns unchanged is not taken again; 10,000 such files are remembered.

        A file that cannot be taken changes nothing. A file that is damaged or does not fit is skipped until it changes.
        If a file cannot be read, memory or a lease is missing, or a URL's directory cannot be listed, it is retried
        after `interval`, then after twice as long, up to five minutes; later files are taken meanwhile. A local
        directory is looked at every `interval`.

        Raises Unsupported and MissingExtra here; the thread raises nothing.
        """
        self._check_open()
        self._refuse_on_ranks("watch()")
        request = self._request_of_thread(options, {"by": "watch", "only": only})
        check_promotion_policy(policy)
        promotion = None if promote is None else Promotion(DesiredStore(promote), policy, request.by)
        subject = Subject(self, self._store, self._member, request)
        return self._register(Watcher(subject, directory, interval, start, callback, promotion))

    def follow(
        self,
        desired_store: PathLike | DesiredStore,
        interval: float = 5.0,
        *,
        callback: Listener | None = None,
        **options: Unpack[WatchOptions],
    ) -> Follower:
        """Serve the weights that a desired store says are desired, from now on, in a thread of its own;
        docs/desired.md.

        All processes that follow one desired store serve the same weights one poll and one staging after it was
        written. The next poll reverts swaps and rollbacks made by hand. `Follower.wait()` waits for the first weights,
        and `Follower.status` says which weights are desired and which are served.

        desired_store: a directory, or the URL of a folder, with a `desired.json` that `DesiredStore`, `weightswap
          desired`, `watch(promote=...)` or `publish(promote=...)` writes. The document may appear later.
        by: the requester for receipts, if the document does not name one.
        options: those of `watch`.

        Weights that are refused change nothing: they are skipped until the desired store or the file changes, and
        retried, as by `watch`, where that may help. A model that serves nothing yet takes the last entry of the history
        that it can. If the desired store cannot be read ("unreachable"), is damaged, or is older than at the last read,
        the served weights stay.

        Raises Unsupported and MissingExtra here; the thread raises nothing.
        """
        self._check_open()
        self._refuse_on_ranks("follow()")
        request = self._request_of_thread(options, {"by": "follow"})
        opened = desired_store if isinstance(desired_store, DesiredStore) else DesiredStore(desired_store)
        subject = Subject(self, self._store, self._member, request)
        return self._register(Follower(subject, opened, interval, callback))

    def receive(
        self,
        at: str | ProcessGroup,
        *,
        verify: Mode = "goldens",
        allow_nonfinite: bool | Patterns | None = False,
        by: str = "receive",
        rate_limit: float | None = None,
        timeout: float | None = 60.0,
    ) -> Receiver | GroupReceiver:
        """Serve what a `Sender` sends, from now on, in threads of its own; docs/memory.md.

        at: `unix:PATH`, a socket to be made there, to which processes of this machine's same user connect; or a process
        group whose rank 0 sends, and which nothing else uses: all other ranks verify the weights, and then serve them,
        or none does; but for one whose calls and pins outlast the timeout.
        verify, allow_nonfinite, by, rate_limit: as in `stage`. timeout: seconds to wait for another staging, for calls
        and pins, and for a sender that has stopped in the middle of a message.

        Weights that are refused change nothing; the sender gets the reason. While the model follows a desired store,
        all are refused: the desired store says what is served, and these weights are in no file that it could name.

        Raises Unsupported; the threads raise nothing.
        """
        self._check_open()
        self._refuse_on_ranks("receive()")
        options = {"verify": verify, "allow_nonfinite": allow_nonfinite, "rate_limit": rate_limit, "timeout": timeout}
        request = self._request_of_thread(options, {"by": by})
        target = _Receiving(self, request)
        if not isinstance(at, str):
            member = GroupReceiver(at, target, rate_limit)
            weakref.finalize(self, member._end).atexit = False
            return self._register(member)
        receiver = Receiver(at, target, timeout, rate_limit)
        weakref.finalize(self, receiver._end).atexit = False
        return self._register(receiver)

    def keep(self, directory: PathLike, *, last: int = 3) -> KeptFiles:
        """Keep what is served as packed files, from now on, in a thread of its own: the `last` sets; docs/memory.md.

        Weights from memory are in no file: these are for a process that starts again, and to go back further than
        `rollback` does. Each commit is copied to memory of its own, one set, and written from there.

        directory: is made if it is missing. Others may read in it, but nothing else should write there.

        Raises Unsupported, and WeightFileError if the directory cannot be made; the thread raises nothing.
        """
        self._check_open()
        self._refuse_on_ranks("keep()")
        kept = KeptFiles(self._store, self.graph_id, directory, last)
        weakref.finalize(self, kept._end).atexit = False
        return self._register(kept)

    @property
    def receivers(self) -> tuple[Receiver | GroupReceiver, ...]:
        """The receivers that are still listening."""
        return tuple(each for each in self._services if isinstance(each, Receiver | GroupReceiver) and each.alive)

    def _request_of_thread(self, options: Mapping[str, Any], own: dict[str, Any]) -> SwapRequest:
        """Return the request with which a watcher or a follower stages; the path is filled in for each file."""
        if unknown := options.keys() - WatchOptions.__annotations__:
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
        options = {"allow_nonfinite": False, **own, **options, "busy": "wait"}
        return SwapRequest.of("", options, self.artifact.manifest, self._composed)

    def _register(self, service: S) -> S:
        """Let `close` stop what has threads of its own."""
        with self._store.closing:
            self._services = [*(each for each in self._services if each.alive), service]
        if self._closed:  # by another thread meanwhile
            service.stop()
        return service

    def add_variant(
        self,
        group: str,
        name: str,
        path: PathLike,
        *,
        base: str | None = None,
        expect: str | None = None,
        allow_nonfinite: bool = False,
        by: str = "",
        rate_limit: float | None = None,
    ) -> VariantReceipt:
        """Stage, verify and name a variant, which calls then choose: `model(x, variants={group: name})`.

        Calls that chose the name before keep its earlier variant. If `max_variants` of the group are resident, the
        least recently used one that no call uses is evicted. The weights are not touched, and calls do not wait.

        path: a PEFT directory with LoRA, of the graph's rank or a lower one, or a safetensors file with the FQNs of
          the group; a local path, or a URL as for weights.
        base: the weights id that the variant belongs to, such as `model.weights_id`: a commit of other weights drops
          it. None: it works with any weights.
        expect: the weights id of the variant; any other is refused. allow_nonfinite: allow NaN and infinities.

        Raises UnknownName for a group that the artifact does not declare, StaleState if weights other than `base`
        are served, StagingBusy, WeightFileError, WeightsMismatch, DigestMismatch, UnexpectedWeights, NonFiniteWeights,
        OutOfMemory, and Unsupported for a PEFT feature that the graph does not have.
        """
        variants = self._require_variants()
        request = SwapRequest(path, expect=expect, allow_nonfinite=bool(allow_nonfinite), by=by, rate_limit=rate_limit)
        try:
            request.check()
            if base is not None and base != self.weights_id:
                raise StaleState(f"{group}/{name}", base, str(self.weights_id))
            return variants.add(group, name, request, base, self._store.admit)
        except Exception as error:
            event = Event("variant refused", printable(path), by, self.graph_id, error=error, variant=f"{group}/{name}")
            self._store.events.emit(event)
            raise

    def remove_variant(self, group: str, name: str, *, by: str = "") -> VariantReceipt:
        """Remove a variant; its memory is freed with the last call that uses it. Raises UnknownName."""
        return self._require_variants().remove(group, name, by)


class _Receiving:
    """A model for its receiver, which refers to it only during a swap, so that it can be dropped."""

    def __init__(self, model: Model, request: SwapRequest) -> None:
        self._model, self._request = weakref.ref(model), request
        self.graph_id = model.graph_id
        self._first_generation = model._store.first_generation

    def swap(
        self, given: GivenWeights, weights_id: str, job: Job, agree: Callable[[], None] = lambda: None
    ) -> SwapReceipt:
        model = self._model()
        if model is None:
            raise ModelClosed
        if desired_store := next(
            (watching.desired_store for watching in model.watching if watching.desired_store is not None), None
        ):
            raise UnexpectedWeights(
                f"{given}: this model follows {desired_store.where}, which says what is served; publish the weights "
                "there, or receive them in a model that follows nothing"
            )
        request = self._request._replace(source=given, expect=weights_id)
        with model.turn(job.check):
            model._store.check_not_rolled_back(weights_id, self._first_generation, str(given))
            with model._stage(request, job=job) as staged:
                agree()
                return staged.commit(timeout=request.timeout)
