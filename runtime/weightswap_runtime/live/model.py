"""The server's side: call a model, and put new weights behind it."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from copy import copy
from functools import partial
from itertools import starmap
from typing import Any, TypeVar, Unpack

from weightswap_runtime.desired.place import DesiredPlace
from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import ModelClosed, StaleVariant, UnknownVariant, Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.context_file import read_context
from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.format.name_matching import Keys
from weightswap_runtime.format.name_patterns import patterns
from weightswap_runtime.format.nonfinite import as_allowed
from weightswap_runtime.live.generation.generating import GenerationRequest, check
from weightswap_runtime.live.generation.sampling import Sampling
from weightswap_runtime.live.generation.tokenizer import Tokenizer
from weightswap_runtime.live.variants.resident import MOST, Choice, VariantNames, VariantReceipt, Variants
from weightswap_runtime.options import check_timeout
from weightswap_runtime.sources.location import printable
from weightswap_runtime.staging.request import LEASE_TIMEOUT, BaseFile, Busy, SwapRequest, check_busy, patience
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.threads.awaiting import in_thread
from weightswap_runtime.threads.claims import Claim
from weightswap_runtime.threads.job import Job, Progress
from weightswap_runtime.threads.listeners import Stop

from .asynchronous import AsyncStaging, StageOptions
from .calling import Caller, CallObserver, Methods, run_chosen
from .context import Context, OnSwap, check_policy
from .events import Event, Listener
from .gate import Gate, Version
from .pinned import Pinned
from .receipt import SwapReceipt
from .session import Session, naming_lack_of_memory
from .staged import Staged
from .staging_task import StagingTask
from .store import Store, open_variants
from .token_stream import Prompts, StopAt, TokenStream, find_tokenizer, generated
from .watching.follower import Follower
from .watching.intake import Start
from .watching.loop import Subject, Watching
from .watching.promotion import Policy, Promotion, check_promotion_policy
from .watching.watcher import Watcher

W = TypeVar("W", bound=Watching)
PathLike = str | os.PathLike[str]


class Model(Caller, AbstractContextManager["Model"]):
    """A graph with replaceable weights. Every method may be called from any thread. Made by `load()`.

    Leaving its `with` block closes it.
    """

    takes_weights = True  # or another process changes them

    def __init__(
        self, artifact: Artifact, store: Store, *, device: str, engine: Engine, max_variants: int = MOST
    ) -> None:
        self.artifact = artifact
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
        # pins and stagings have the methods, too
        weakref.finalize(self._methods, store.leave, self._member.id).atexit = False

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
        if self._variants is not None:
            self._variants.clear()
        self._store.close(self._member)
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
    def previous_weights_id(self) -> str | None:
        """The id of the weights that `rollback()` would serve; None where there are none."""
        return self._store.previous_id

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

    @property
    def watching(self) -> tuple[Watching, ...]:
        """What `watch` and `follow` have begun, and has not ended."""
        return tuple(each for each in self._watchers if each.alive)

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
        """Read and verify weights beside those that serve. Nothing that serves is touched.

        path: a .safetensors file, a .safetensors.index.json with its shards, a Hugging Face directory, or a delta
          file, which needs the weights that it starts from to be served; a local path, or an fsspec URL of the same
          (s3://, gs://, https://, ...; extra `remote`). Names are runtime FQNs or the checkpoint's keys; weights that
          the adapter computes need torch.
        only: patterns of FQNs, such as "encoder.*" (`*` also matches dots): these weights are taken from the file,
          whatever else it holds, and the rest are those that are served.
        ignore: patterns of names in the file, such as "*.position_ids", for keys that an older model had: these tensors
          are as if they were not there, and `SwapReceipt.ignored` lists them. A weight that the graph wants is then
          missing. A pattern that matches nothing is a warning; a delta, which has no such names, asks for none.
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
        onto: for a delta, files that lead to the weights that it starts from, with their weights ids: a full set, and
          then deltas. They are read where those weights are not served.

        Raises WeightFileError, WeightsMismatch, GraphMismatch, DigestMismatch, BaseMismatch, UnexpectedWeights,
        NonFiniteWeights, GoldensError, GoldenMismatch, OutOfMemory, StagingBusy, LeaseTimeout, Unsupported, and
        ArtifactError or MissingExtra where the adapter's graph cannot be opened; with `background`, `Staged.wait()`
        and `Staged.commit()` raise what comes after the start.
        """
        request = SwapRequest(
            path,
            keys,
            only=patterns(only) if only is not None else (),
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
        request.check()
        task = StagingTask(self._store, self._member, request, Job(rate_limit))
        self._check_open()
        if busy == "refuse":
            task.claim_at_once()
        staged = Staged(self._methods, task)
        self._stagings.add(staged)
        if self._closed:  # meanwhile
            staged.cancel_soon()
        return staged.start() if background else staged.run()

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
        """Replace weights: stage, verify, commit; the arguments are those of `stage`. Several threads' swaps queue.

        Whatever is raised before the commit leaves weights, addresses and outputs as they were. State starts again
        from its initial values, as in a model loaded with these weights.

        Raises what `stage` raises, and ModelFailed if an in-place commit breaks off.
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
        """A block in which swaps of other threads, watchers and followers wait, before they stage anything.

        check: called while the swap of another is waited for; what it raises ends the wait.
        """
        return self._store.turns.wait_for_turn(check)

    async def aswap(self, path: PathLike, **options: Unpack[StageOptions]) -> SwapReceipt:
        """As `swap`, for asyncio: the loop goes on meanwhile.

        If the task is cancelled, the swap is given up, unless it commits just then; it has ended when the task has.
        """
        staging = AsyncStaging(self.stage, self._store.turns, path, options)
        return await in_thread(staging.swap, staging.cancel)

    @asynccontextmanager
    async def astage(self, path: PathLike, **options: Unpack[StageOptions]) -> AsyncIterator[Staged]:
        """`async with model.astage(path) as staged:` stages for asyncio; `await staged.acommit()` serves the weights.

        Arguments and errors are those of `stage`. The block begins when they are staged and verified; its end, and a
        task that is cancelled, gives up what was not committed.
        """
        staging = AsyncStaging(self.stage, self._store.turns, path, options)
        staged = await in_thread(staging.stage, staging.cancel)
        try:
            yield staged
        finally:
            await in_thread(staged.discard)

    def rollback(self, *, by: str = "", busy: Busy = "refuse", timeout: float | None = LEASE_TIMEOUT) -> SwapReceipt:
        """Serve the previous weights again; a second rollback undoes the first. It is a commit of its own.

        While a swap or a staging is under way it is refused, or with busy="wait" waits for at most `timeout` seconds:
        what is then previous is what that has left.

        Raises NothingToRollBack, StagingBusy, LeaseTimeout, OutOfMemory, ModelFailed, and ModelClosed, also where
        `close()` ends the waiting.
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
        """Swap in each new complete weight file of a directory, or of a URL's, in order, in a thread of its own.

        Weight files are those whose names end in .safetensors, but not in .goldens.safetensors, and do not begin with
        a dot. They are ordered by name, numbers in names by their value; of two files that `publish()` wrote for one
        step, the later one is later. A file that comes before one that was taken is passed over. A web server
        (http://, https://) lists no files, and cannot be watched.

        interval: seconds between two looks at the directory.
        start: "newest" begins with the last file that can be taken; "all" with the first; "new" takes only files that
          are not there yet. All files of a local directory that is made later are new ones.
        callback: told what the watching does, in its thread, as are all that `listen`: the events of each swap, and
          "skipped", "waiting" and "unreachable". What it raises is logged.
        only: as in `swap`; something must be served already.
        allow_nonfinite: True, or patterns of FQNs, for weights that may have NaN or infinities where those that are
          served have none. Other files with such weights are skipped.
        promote: a place (`follow`) that is to say so of each file, before it is served here; what the place says is
          served here, too, as by `follow`, and nothing that it has on hold or has withdrawn is taken. A watching that
          begins again goes on after the last file that the place knows.
        policy: when that is done: "newest", for whatever can be taken; "proven", for files whose recorded outputs were
          reproduced. Others are skipped (Unproven).
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
        request = SwapRequest(
            "",
            keys,
            only=patterns(only) if only is not None else (),
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
        return self._watching(Watcher(subject, directory, interval, start, callback, promotion))

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
        """Serve what a place says is desired, from now on, in a thread of its own; docs/desired.md.

        All processes that follow one place serve the same weights one look, and one staging, after it was written;
        what else was swapped in, or rolled back, by hand gives way at the next look. `wait()` of what is returned
        waits for the first weights, `status` says what is desired and what is served.

        place: a directory, or the URL of a folder, with a `desired.json` that `DesiredPlace`, `weightswap desired`,
          `watch(promote=...)` or `publish(promote=...)` writes. It may come later.
        by: for receipts, where the document does not say who has asked.
        The other arguments are those of `watch`.

        Weights that are refused change nothing: they are skipped until the place says something else, or the file
        changes, and tried again, as by `watch`, where that may help. A model that serves nothing yet takes the last of
        the history that it can. Where the place cannot be read ("unreachable"), damaged or older than what was read
        before, what is served stays.

        Raises Unsupported and MissingExtra; nothing afterwards.
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
        return self._watching(Follower(subject, opened, interval, callback))

    def _watching(self, watching: W) -> W:
        """Have `close` stop it."""
        with self._store.closing:
            self._watchers = [*(each for each in self._watchers if each.alive), watching]
        if self._closed:  # meanwhile
            watching.stop()
        return watching

    def pin(self) -> Pinned:
        """`with model.pin() as pinned:` makes several calls on one version, whatever is committed meanwhile.

        In single residency a commit waits until the block ends; in double residency the next staging does.
        """
        self._check_open()
        return Pinned(self._methods, self._gate)

    def new_context(self, *, on_swap: OnSwap = "invalidate") -> Context:
        """A copy of the state, with its initial values, for calls with `context=`.

        on_swap: what becomes of it when other weights are served than those that its state was made with.
          "invalidate": the next call raises StaleContext, until the same weights are served again, or `reset()`.
          "reset": it begins with the initial state. "keep": the state is used with the new weights. "pin": it stays on
          the weights that are served now until it is closed, for which stagings and commits wait as for `pin()`.

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
        """A context that was saved, by this model or by another of the same artifact, with any engine, on any device.

        path: a local path, or a URL as for weights. allow_other_weights: take one that was made with other weights than
        those that are served, as it is. allow_other_graph: take one of another graph, if its tensors are those.

        Raises ContextFileError, also where nothing can be read, ContextMismatch, OutOfMemory; with on_swap="pin" what a
        call raises.
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
        """The continuation of a prompt, or of several side by side, by an artifact that `export_decoder` wrote.

        prompt: tokens, as a list, an array or a tensor of integers, or several of them, of any lengths; or a text, or a
          list of texts. What is returned is alike: new tokens, or text.
        variants: those that answer, as in a call; chosen once, for all tokens.
        max_new_tokens: None: until the cache is full. A row also ends with a token that the artifact names as an end.
        temperature: 0 takes the most likely token. top_k, top_p, repetition_penalty: as in transformers.
        stop: tokens, sequences of tokens, or texts where the prompt is one, after which a row ends, too.
        seed: of the sampling; the same gives the same tokens again.
        on_swap: what a swap meanwhile does, as for `new_context`: with "pin" all tokens come from the weights with
          which it began; with "keep" the next token comes from the new ones over the old cache; with "reset" the new
          ones read the prompt and the tokens so far again; with "invalidate" StaleContext is raised.
        tokenizer: the path of a tokenizer.json; None: that beside the weights, or in the artifact (extra `text`).
        stream: return a TokenStream, an iterator and an asynchronous one, instead of waiting for the end.

        Raises Unsupported for an artifact that does not generate and for numbers that cannot be meant, InputMismatch
        for prompts that do not fit into the cache, MissingExtra, and what a call raises.
        """
        generation = self.artifact.manifest.generation
        if generation is None:
            raise Unsupported(f"{self.artifact.path}: does not generate; export it with export_decoder()")
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
        prompts = Prompts(prompt, lambda: self._tokenizer(tokenizer))
        wanted = GenerationRequest(prompts.rows, sampling, max_new_tokens, prompts.stopped(stop), seed)
        check(wanted, generation)
        choice = self._opened_variants().choose(variants) if variants else None
        context = self.new_context(on_swap=on_swap)
        find = partial(self._chosen_method, choice) if choice is not None else self.method
        steps = generated(find, self._member.engine, context, wanted, generation)
        return TokenStream(steps, prompts.pieces(steps), context) if stream else prompts.whole(steps)

    def _chosen_method(self, choice: Choice, name: str) -> Callable[..., Any]:
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

        Calls that have chosen the name before go on with what it was. Where `max_variants` of the group are resident,
        the least recently used one that no call uses goes. The weights are not touched, and calls do not wait.

        path: a directory of PEFT's with LoRA, of the graph's rank or a lower one, or a safetensors file with the FQNs
          of the group; a local path, or a URL as for weights.
        base: the weights id that it goes with, such as `model.weights_id`: a commit of other weights drops it. None: it
          goes with any.
        expect: the weights id of the variant; anything else is refused. allow_nonfinite: let NaN and infinities in.

        Raises UnknownVariant for a group that the artifact does not declare, StaleVariant where others than `base` are
        served, VariantsBusy, WeightFileError, WeightsMismatch, DigestMismatch, UnexpectedWeights, NonFiniteWeights,
        OutOfMemory, and Unsupported for what PEFT does and the graph does not.
        """
        variants = self._opened_variants()
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
        """Take a variant's name away; its memory goes with the last call that uses it. Raises UnknownVariant."""
        return self._opened_variants().remove(group, name, by)

    @property
    def variants(self) -> dict[str, dict[str, VariantReceipt]]:
        """The variants that are resident, by group and name, the least recently used first."""
        return self._variants.resident() if self._variants is not None else {}

    @property
    def variant_history(self) -> tuple[VariantReceipt, ...]:
        """What happened to variants, the last 100 receipts, oldest first."""
        return tuple(self._variants.history) if self._variants is not None else ()

    def _opened_variants(self) -> Variants:
        self._check_open()
        if self._variants is None:
            raise UnknownVariant(f"{self.artifact.path.name}: declares no variants; export(variants=...) does")
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
        with naming_lack_of_memory("no memory for a context's state"):
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


def choice_of(model: Model, wanted: VariantNames) -> Choice:
    """What calls with `variants=wanted` choose now, to be given instead: it says which weights it has, and keeps them.

    Raises UnknownVariant.
    """
    choice = model._opened_variants().choose(wanted)
    assert choice is not None, "something was wanted"
    return choice


def engine_of(model: Model) -> Engine:
    """What executes a model's graphs: for tools that turn tensors of files into its inputs, and its outputs back."""
    return model._member.engine
