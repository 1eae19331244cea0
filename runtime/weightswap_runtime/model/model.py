"""Models: graphs whose methods are called, and whose weights are replaced."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from copy import copy
from functools import partial
from itertools import starmap
from typing import Any, TypeVar, Unpack

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import ModelClosed, StaleVariant, UnknownVariant, Unsupported, check_timeout
from weightswap_runtime.following.controller import Policy, Promotion, Subject, Watching, check_promotion_policy
from weightswap_runtime.following.intake import Start
from weightswap_runtime.following.place import DesiredPlace
from weightswap_runtime.following.watching import Follower, Watcher
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.context_file import read_context
from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.format.identity import as_allowed
from weightswap_runtime.format.names import Keys, check_whole, patterns
from weightswap_runtime.jobs import Claim, Job, Progress, Stop
from weightswap_runtime.live.calls import Caller, CallObserver, Methods, run_chosen
from weightswap_runtime.live.context import Context, OnSwap, check_policy
from weightswap_runtime.live.gate import Gate, Version
from weightswap_runtime.live.receipt import Event, Listener, SwapReceipt
from weightswap_runtime.live.session import Session, memory_errors
from weightswap_runtime.live.staged import AsyncStaging, Staged, StageOptions, StagingTask
from weightswap_runtime.live.store import Store, open_variants
from weightswap_runtime.live.variants import MOST, Choice, VariantNames, VariantReceipt, Variants
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import LEASE_TIMEOUT, BaseFile, Busy, SwapRequest, check_busy, patience
from weightswap_runtime.tensors import TensorBytes
from weightswap_runtime.threads import in_thread

from .generation import (
    GenerationRequest,
    Prompts,
    Sampling,
    StopAt,
    Tokenizer,
    TokenStream,
    check,
    find_tokenizer,
    generate_steps,
)
from .served import Pinned

W = TypeVar("W", bound=Watching)
PathLike = str | os.PathLike[str]


class Model(Caller, AbstractContextManager["Model"]):
    """A graph with replaceable weights, made by `load()`. Every method may be called from any thread.

    Leaving its `with` block closes it.
    """

    takes_weights = True  # False where another process changes the weights

    def __init__(
        self, artifact: Artifact, store: Store, *, device: str, engine: Engine, max_variants: int = MOST
    ) -> None:
        self.artifact = artifact
        self._composed = tuple(artifact.kinds)  # now: swaps go on if the artifact is deleted
        self.device = device
        self.engine = engine.name
        self.engines = dict(engine.runs)  # by method
        self._store = store
        self._gate = store.gate
        self._member = store.join(artifact, engine)
        self._variants = open_variants(artifact.manifest, engine, store, max_variants)
        super().__init__(Methods(artifact.manifest, engine, self._member.id, self._variants))
        self._stagings: weakref.WeakSet[Staged] = weakref.WeakSet()
        self._watchers: list[Watching] = []
        # pins and stagings refer to the methods, too, and may outlive the model
        weakref.finalize(self._methods, store.leave, self._member.id).atexit = False

    def close(self) -> None:
        """Stop watchers, cancel open stagings, and refuse calls, swaps and pins from now on with ModelClosed.

        Calls and pins that have begun go on; the memory of the arenas is freed with the last of them, or with the last
        model that shares it. A second call does nothing. In a callback of its own watcher, or a listener of its own
        staging, it does not wait for these to end.
        """
        if self._closed:
            return
        self._gate = Gate()
        self._gate.close()
        for watcher in self._watchers:
            watcher.stop()
        for staged in list(self._stagings):
            staged.cancel()
        if self._variants is not None:
            self._variants.clear()
        self._store.close(self._member)
        self._methods = copy(self._methods)  # pins keep the original, and its finalizer frees the graphs

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
        """The id of the weights that new calls use; None before the first swap."""
        return self._gate.current.weights_id if self._gate.current else None

    @property
    def previous_weights_id(self) -> str | None:
        """The id of the weights that `rollback()` would serve; None if there are none."""
        return self._store.previous_id

    @property
    def generation(self) -> int | None:
        """The number of commits after the first: 0 for the first weights; None before the first swap."""
        return self._gate.current.generation if self._gate.current else None

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the weights that new calls use."""
        return self._gate.current.labels if self._gate.current else {}

    @property
    def residency(self) -> str:
        return self._store.residency

    @property
    def failed(self) -> bool:
        """True after an in-place commit failed: calls are refused until a swap or rollback succeeds."""
        return self._gate.failure is not None

    @property
    def history(self) -> tuple[SwapReceipt, ...]:
        """The receipts of the last 100 commits, oldest first, including those of models that share the weights."""
        return tuple(self._store.history)

    @property
    def progress(self) -> Progress | None:
        """The progress of the staging that is under way, whoever requested it; None if there is none."""
        job = self._store.job
        return job.progress if job is not None else None

    @property
    def watching(self) -> tuple[Watching, ...]:
        """The watchers and followers that are still running."""
        return tuple(watcher for watcher in self._watchers if watcher.alive)

    def listen(self, listener: Listener) -> Stop:
        """Call `listener(event)` for each event of the weights, in the thread that causes it; see `Event`.

        Errors of the listener are logged. It must not swap or roll back. Returns a function that removes it.
        """
        return self._store.events.listen(listener)

    def observe(self, observer: CallObserver) -> Stop:
        """Call `observer(method, seconds, error)` after each call of this model and of its pins, in the same thread.

        `error` is the exception that the call raised, or None. Trial calls of a staging are not reported. Errors of
        the observer are logged. Returns a function that removes it.
        """
        return self._methods.observers.add(observer)

    def stage(
        self,
        path: PathLike,
        *,
        only: str | Sequence[str] | None = None,
        ignore: str | Sequence[str] = (),
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
        onto: Sequence[tuple[PathLike, str]] = (),
    ) -> Staged:
        """Read and verify weights beside the served ones, which are not touched.

        path: a .safetensors file, a .safetensors.index.json with its shards, a Hugging Face directory, or a delta
          file, whose base weights must be served; a local path, or an fsspec URL of the same (s3://, gs://, https://,
          ...; extra `remote`). Names are runtime FQNs or the checkpoint's keys; weights that the adapter computes need
          torch.
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

        Raises WeightFileError, WeightsMismatch, GraphMismatch, DigestMismatch, BaseMismatch, UnexpectedWeights,
        NonFiniteWeights, GoldensError, GoldenMismatch, OutOfMemory, StagingBusy, LeaseTimeout, Unsupported, and
        ArtifactError or MissingExtra if the adapter's graph cannot be opened; with `background`, `Staged.wait()` and
        `Staged.commit()` raise the errors that occur after the start.
        """
        request = SwapRequest(
            path,
            keys,
            only=self._patterns(only),
            expect=expect,
            allow_other_graph=allow_other_graph,
            verify=verify,
            allow_nonfinite=as_allowed(allow_nonfinite, self.artifact.manifest),
            by=by,
            rate_limit=rate_limit,
            busy=busy,
            timeout=timeout,
            ignore=patterns(ignore, "ignore") if ignore else (),
            onto=tuple(starmap(BaseFile, onto)),
        )
        return self._stage(request, background=background)

    def _stage(self, request: SwapRequest, *, background: bool) -> Staged:
        request.check()
        task = StagingTask(self._store, self._member, request, Job(request.rate_limit))
        self._check_open()
        if request.busy == "refuse":
            task.claim_at_once()
        staged = Staged(self._methods, task)
        self._stagings.add(staged)
        if self._closed:  # by another thread meanwhile
            staged.cancel_soon()
        return staged.start() if background else staged.run()

    def _patterns(self, only: str | Sequence[str] | None) -> tuple[str, ...]:
        """Return the patterns of a part. Raises Unsupported, also if they take a part of a quantised tensor."""
        chosen = patterns(only) if only is not None else ()
        check_whole(self.artifact.manifest, chosen, self._composed)
        return chosen

    def swap(
        self,
        path: PathLike,
        *,
        only: str | Sequence[str] | None = None,
        ignore: str | Sequence[str] = (),
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
        """Replace weights: stage, verify, commit. The arguments are those of `stage`. Swaps of several threads queue.

        An error before the commit leaves weights, addresses and outputs as they were. State starts again from its
        initial values, as in a model loaded with these weights.

        Raises what `stage` raises, and ModelFailed if an in-place commit fails half-way.
        """
        with (
            self._store.turns.queue(),
            self.stage(
                path,
                only=only,
                ignore=ignore,
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

    def turn(self, check: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context manager during which swaps of other threads, watchers and followers wait before staging.

        check: called while waiting for the swap of another thread; an exception that it raises ends the wait.
        """
        return self._store.turns.wait_for_turn(check)

    async def aswap(self, path: PathLike, **options: Unpack[StageOptions]) -> SwapReceipt:
        """Swap as `swap` does, without blocking the event loop.

        If the task is cancelled, the swap is abandoned, unless it commits just then; it ends before the task does.
        """
        staging = AsyncStaging(self.stage, self._store.turns, path, options)
        return await in_thread(staging.swap, staging.cancel)

    @asynccontextmanager
    async def astage(self, path: PathLike, **options: Unpack[StageOptions]) -> AsyncIterator[Staged]:
        """Stage for asyncio: `async with model.astage(path) as staged:`; `await staged.acommit()` serves the weights.

        Arguments and errors are those of `stage`. The block begins when the weights are staged and verified. Leaving
        it, or cancelling the task, discards weights that were not committed.
        """
        staging = AsyncStaging(self.stage, self._store.turns, path, options)
        staged = await in_thread(staging.stage, staging.cancel)
        try:
            yield staged
        finally:
            await in_thread(staged.discard)

    def rollback(self, *, by: str = "", busy: Busy = "refuse", timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve the previous weights again; a second rollback undoes the first. A rollback is a commit of its own.

        While a swap or a staging is under way, it is refused; with busy="wait" it waits for at most `timeout` seconds,
        and then serves the weights that are the previous ones at that time.

        Raises NothingToRollBack, StagingBusy, LeaseTimeout, OutOfMemory, ModelFailed, and ModelClosed, also if
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
        ignore: str | Sequence[str] = (),
        keys: Keys | None = None,
        allow_other_graph: bool = False,
        verify: Mode = "goldens",
        allow_nonfinite: bool | str | Sequence[str] = False,
        by: str = "watch",
        rate_limit: float | None = None,
        timeout: float | None = LEASE_TIMEOUT,
        promote: PathLike | None = None,
        policy: Policy = "newest",
    ) -> Watcher:
        """Swap in each new complete weight file of a directory, local or behind a URL, in order, in its own thread.

        Weight files are those whose names end in .safetensors, but not in .goldens.safetensors, and do not begin with
        a dot. They are ordered by name, with numbers in names ordered by value; of two files that `publish()` wrote
        for one step, the one modified later comes later. A file that comes before one that was taken is skipped. A web
        server (http://, https://) lists no files, and cannot be watched.

        interval: seconds between two looks at the directory.
        start: "newest" begins with the last file that can be taken; "all" with the first; "new" takes only files that
          do not exist yet. If a local directory is created later, all its files are new.
        callback: called in the watcher's thread with the events of the watcher, which all listeners (`listen`) receive,
          too: those of each swap, and "skipped", "waiting" and "unreachable". Errors of the callback are logged.
        only: as in `swap`; weights must be served already.
        allow_nonfinite: True, or patterns of FQNs, for weights that may have NaN or infinities where the served ones
          have none. Other files with such weights are skipped.
        promote: a place (see `follow`) in which each file is promoted before it is served here. Weights that the place
          says are desired are served here, too, as by `follow`. While it is on hold, no file is taken; weights that it
          has withdrawn never are. A restarted watcher goes on after the last file that the place knows.
        policy: the condition for a promotion: "newest" promotes every file that can be taken; "proven" only files
          whose recorded outputs were reproduced. Others are skipped (Unproven).
        The other arguments are those of `swap`; the watcher waits for another staging of the model.

        Files that are renamed into place are taken at the next look. A file that is shorter than its header says is
        waited for until a minute after its last change; a file without digests is taken when it was the same at two
        looks. A delta is taken while its base weights are served, and waits for them until a later file is taken.

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
        request = SwapRequest(
            "",
            keys,
            only=self._patterns(only),
            allow_other_graph=allow_other_graph,
            verify=verify,
            allow_nonfinite=as_allowed(allow_nonfinite, self.artifact.manifest),
            by=by,
            rate_limit=rate_limit,
            busy="wait",
            timeout=timeout,
            ignore=patterns(ignore, "ignore") if ignore else (),
        )
        check_promotion_policy(policy)
        promotion = None if promote is None else Promotion(DesiredPlace(promote), policy, by)
        subject = Subject(self, self._store, self._member, request)
        return self._register(Watcher(subject, directory, interval, start, callback, promotion))

    def follow(
        self,
        place: PathLike | DesiredPlace,
        interval: float = 5.0,
        *,
        callback: Listener | None = None,
        ignore: str | Sequence[str] = (),
        keys: Keys | None = None,
        allow_other_graph: bool = False,
        verify: Mode = "goldens",
        allow_nonfinite: bool | str | Sequence[str] = False,
        by: str = "follow",
        rate_limit: float | None = None,
        timeout: float | None = LEASE_TIMEOUT,
    ) -> Follower:
        """Serve the weights that a place says are desired, from now on, in a thread of its own; docs/desired.md.

        All processes that follow one place serve the same weights one look and one staging after it was written. The
        next look reverts swaps and rollbacks made by hand. `Follower.wait()` waits for the first weights, and
        `Follower.status` says which weights are desired and which are served.

        place: a directory, or the URL of a folder, with a `desired.json` that `DesiredPlace`, `weightswap desired`,
          `watch(promote=...)` or `publish(promote=...)` writes. The document may appear later.
        by: the requester for receipts, if the document does not name one.
        The other arguments are those of `watch`.

        Weights that are refused change nothing: they are skipped until the place or the file changes, and retried, as
        by `watch`, where that may help. A model that serves nothing yet takes the last entry of the history that it
        can. If the place cannot be read ("unreachable"), is damaged, or is older than at the last read, the served
        weights stay.

        Raises Unsupported and MissingExtra here; the thread raises nothing.
        """
        self._check_open()
        request = SwapRequest(
            "",
            keys,
            allow_other_graph=allow_other_graph,
            verify=verify,
            allow_nonfinite=as_allowed(allow_nonfinite, self.artifact.manifest),
            by=by,
            rate_limit=rate_limit,
            busy="wait",
            timeout=timeout,
            ignore=patterns(ignore, "ignore") if ignore else (),
        )
        opened = place if isinstance(place, DesiredPlace) else DesiredPlace(place)
        subject = Subject(self, self._store, self._member, request)
        return self._register(Follower(subject, opened, interval, callback))

    def _register(self, watching: W) -> W:
        """Let `close` stop a watcher."""
        with self._store.closing:
            self._watchers = [*self.watching, watching]
        if self._closed:  # by another thread meanwhile
            watching.stop()
        return watching

    def pin(self) -> Pinned:
        """Pin one version for several calls, whatever is committed meanwhile: `with model.pin() as pinned:`.

        In single residency a commit waits until the block ends; in double residency the staging after a commit does.
        """
        self._check_open()
        return Pinned(self._methods, self._gate)

    def new_context(self, *, on_swap: OnSwap = "invalidate") -> Context:
        """Return a copy of the initial state, for calls with `context=`.

        on_swap: what happens to the state when other weights are served than those that it was made with.
          "invalidate": calls raise StaleContext until the same weights are served again, or until `reset()`.
          "reset": the state starts from its initial values again. "keep": the new weights use the state. "pin": the
          context stays on the weights served now until it is closed; stagings and commits wait as for `pin()`.

        Raises OutOfMemory, and with "pin" what a call raises.
        """
        return self._new_context(None, on_swap, None)

    def load_context(
        self,
        path: PathLike,
        *,
        on_swap: OnSwap = "invalidate",
        allow_other_weights: bool = False,
        allow_other_graph: bool = False,
    ) -> Context:
        """Load a context that was saved by this model or by another of the same artifact, on any engine and device.

        path: a local path, or a URL as for weights. allow_other_weights: accept a state that was made with weights
        other than the served ones, unchanged. allow_other_graph: accept one of another graph, if its tensors fit.

        Raises ContextFileError, also if the file cannot be read, ContextMismatch and OutOfMemory; with on_swap="pin"
        also what a call raises.
        """
        saved = read_context(path, self.artifact.manifest.state, None if allow_other_graph else self.graph_id)
        made_with, served = saved.stamp.weights_id, self.weights_id
        if not allow_other_weights:
            saved.check_weights(served)
        chosen = None if allow_other_weights or made_with is None else saved.stamp.variants or {}
        return self._new_context(saved.state, on_swap, served if made_with and served else made_with, chosen)

    def generate(
        self,
        prompt: Any,
        *,
        variants: VariantNames | Choice | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: StopAt | Sequence[StopAt] = (),
        seed: int | None = None,
        on_swap: OnSwap = "pin",
        tokenizer: PathLike | None = None,
        stream: bool = False,
    ) -> Any:
        """Continue a prompt, or several side by side, with an artifact that `export_decoder` wrote.

        prompt: tokens, as a list, an array or a tensor of integers; several of these, of any lengths; a text; or a
          list of texts. Returns the new tokens, or the new text, of each prompt in the same form.
        variants: the variants to use, as in a call; chosen once, for all tokens.
        max_new_tokens: None: until the cache is full. A row also ends at one of the artifact's end tokens.
        temperature: 0 takes the most likely token. top_k, top_p, repetition_penalty: as in transformers.
        stop: tokens, sequences of tokens, or (for text prompts) texts after which a row ends, too.
        seed: the seed of the sampling; the same seed gives the same tokens.
        on_swap: the effect of a swap meanwhile, as for `new_context`: with "pin" all tokens come from the weights of
          the beginning; with "keep" the next token comes from the new weights and the old cache; with "reset" the new
          weights first read the prompt and all tokens so far again; with "invalidate" StaleContext is raised.
        tokenizer: the path of a tokenizer.json; None: the one beside the weights, or in the artifact (extra `text`).
        stream: return a TokenStream, both an iterator and an asynchronous one, instead of waiting for the end.

        Raises Unsupported for an artifact that does not generate and for invalid numbers, InputMismatch for prompts
        that do not fit into the cache, MissingExtra, and what a call raises.
        """
        generation = self.artifact.manifest.generation
        if generation is None:
            raise Unsupported(f"{self.artifact.path}: does not generate; export it with export_decoder()")
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
        prompts = Prompts(prompt, lambda: self._tokenizer(tokenizer))
        request = GenerationRequest(prompts.rows, sampling, max_new_tokens, prompts.stop_check(stop), seed)
        check(request, generation)
        choice = self._require_variants().choose(variants) if variants else None
        context = self.new_context(on_swap=on_swap)
        find = partial(self._method_with_variants, choice) if choice is not None else self.method
        steps = generate_steps(find, self._member.engine, context, request, generation)
        return TokenStream(steps, prompts.pieces(steps), context) if stream else prompts.whole(steps)

    def _method_with_variants(self, choice: Choice, name: str) -> Callable[..., Any]:
        return partial(self.method(name), variants=choice)

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

        Raises UnknownVariant for a group that the artifact does not declare, StaleVariant if weights other than `base`
        are served, VariantsBusy, WeightFileError, WeightsMismatch, DigestMismatch, UnexpectedWeights, NonFiniteWeights,
        OutOfMemory, and Unsupported for a PEFT feature that the graph does not have.
        """
        variants = self._require_variants()
        request = SwapRequest(path, expect=expect, allow_nonfinite=bool(allow_nonfinite), by=by, rate_limit=rate_limit)
        try:
            request.check()
            if base is not None and base != self.weights_id:
                raise StaleVariant(f"{group}/{name}", base, str(self.weights_id))
            return variants.add(group, name, request, base, self._store.admit)
        except Exception as error:
            event = Event("variant refused", printable(path), by, self.graph_id, error=error, variant=f"{group}/{name}")
            self._store.events.emit(event)
            raise

    def remove_variant(self, group: str, name: str, *, by: str = "") -> VariantReceipt:
        """Remove a variant; its memory is freed with the last call that uses it. Raises UnknownVariant."""
        return self._require_variants().remove(group, name, by)

    @property
    def variants(self) -> dict[str, dict[str, VariantReceipt]]:
        """The receipts of the resident variants by group and name, the least recently used first."""
        return self._variants.resident() if self._variants is not None else {}

    @property
    def variant_history(self) -> tuple[VariantReceipt, ...]:
        """The last 100 receipts of variants, oldest first."""
        return tuple(self._variants.history) if self._variants is not None else ()

    def _require_variants(self) -> Variants:
        self._check_open()
        if self._variants is None:
            raise UnknownVariant(f"{self.artifact.path.name}: declares no variants; export with variants=...")
        return self._variants

    def _tokenizer(self, path: PathLike | None) -> Tokenizer:
        if path is not None:
            return Tokenizer(path)
        return find_tokenizer((receipt.source for receipt in reversed(self.history)), self.artifact.path)

    def _new_context(
        self,
        saved: Mapping[str, TensorBytes] | None,
        on_swap: OnSwap,
        made_with: str | None,
        variants: Mapping[str, str] | None = None,
    ) -> Context:
        self._check_open()
        check_policy(on_swap)
        engine = self._member.engine
        with memory_errors("no memory for a context's state"):
            state = engine.new_state(saved)
        return self._store.contexts.add(Context(self.artifact, engine, state, self._gate, on_swap, made_with, variants))

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        lease, gate = Claim(), self._gate
        version = None
        try:
            version = gate.acquire(lease) if context is None else self._acquire(context, lease)
            try:
                bound = version.session.bound[self._methods.member]
            except KeyError:
                raise ModelClosed from None
            return run_chosen(bound, version.weights_id, name, flat, context, choice)
        finally:
            lease.end()
            if version is not None:
                gate.release(version.session, lease)

    def _acquire(self, context: Context, lease: Claim) -> Version[Session]:
        self._check_open()
        return context.acquire(self._gate, lease)

    def __repr__(self) -> str:
        return (
            f"Model({str(self.artifact.path)!r}, graph_id={self.graph_id[:12]!r}, "
            f"weights_id={self.weights_id and self.weights_id[:12]!r}, generation={self.generation}, "
            f"residency={self.residency!r})"
        )


def choice_of(model: Model, names: VariantNames) -> Choice:
    """Return what calls with `variants=names` choose now, to pass instead of the names: it keeps these very variants.

    Raises UnknownVariant.
    """
    choice = model._require_variants().choose(names)
    assert choice is not None, "names must not be empty"
    return choice


def engine_of(model: Model) -> Engine:
    """Return a model's engine, for tools that convert tensors of files to its inputs, and its outputs back."""
    return model._member.engine
