"""What every model can do, also one whose weights another process changes: calls, contexts, generation, history."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from functools import partial
from typing import Any, NoReturn

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.errors import CallError, ContextError, ModelClosed, UnknownName, Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.context_file import read_context
from weightswap_runtime.jobs import Claim, Progress, Stop
from weightswap_runtime.live.calls import Caller, CallObserver, Methods, run_chosen
from weightswap_runtime.live.context import Context, OnSwap, check_policy
from weightswap_runtime.live.gate import Gate, Pin, Version
from weightswap_runtime.live.ranks import Ranks
from weightswap_runtime.live.receipt import Listener, SwapReceipt
from weightswap_runtime.live.session import Session, memory_errors
from weightswap_runtime.live.store import WeightStore, open_variants
from weightswap_runtime.live.variants import MOST, Choice, VariantNames, VariantReceipt, Variants
from weightswap_runtime.sources.location import as_location
from weightswap_runtime.staging.request import (
    PathLike,
)
from weightswap_runtime.tensors import TensorBytes

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

_RECEIPT_TIMEOUT = 0.5  # seconds to wait for a commit's receipt, which a killed owner may never have written


class ServedModel(Caller, AbstractContextManager["ServedModel"]):
    """A graph with weights that are served. Every method may be called from any thread.

    Leaving its `with` block closes it.
    """

    def __init__(
        self, artifact: Artifact, store: WeightStore, *, device: str, engine: Engine, max_variants: int = MOST
    ) -> None:
        self.artifact = artifact
        self.device = device
        self.engine = engine.name
        self.engines = dict(engine.runs)  # by method
        self._store = store
        self._gate = store.gate
        self._member = store.join(artifact, engine)
        self._variants = open_variants(artifact.manifest, engine, store, max_variants)
        super().__init__(Methods(artifact.manifest, engine, self._member.id, self._variants, store.ranks))
        # pins and stagings refer to the methods, too, and may outlive the model
        weakref.finalize(self._methods, store.leave, self._member.id).atexit = False

    def close(self) -> None:
        """Refuse calls and pins from now on with ModelClosed.

        Calls and pins that have begun go on; the memory of the arenas is freed with the last of them, or with the last
        model that shares it. A second call does nothing.
        """
        if self._closed:
            return
        self._gate = Gate()
        self._gate.close()
        self._end_changes()
        if self._variants is not None:
            self._variants.clear()
        self._store.close(self._member)
        self._methods = copy(self._methods)  # pins keep the original, and its finalizer frees the graphs

    def _end_changes(self) -> None:
        """End what could still change the weights of a model that is being closed."""

    @property
    def _closed(self) -> bool:
        return self._gate is not self._store.gate

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed

    def _refuse_on_ranks(self, what: str) -> None:
        """Raise Unsupported for what one rank would do by itself, or what ranks cannot do."""
        if self._store.ranks is not None:
            raise Unsupported(
                f"{what}: not for a model on several ranks. They change their weights together, by swap(), "
                "stage(background=True) with commit(), and rollback(), which every rank calls at the same place "
                "between its calls"
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def graph_id(self) -> str:
        return self.artifact.graph_id

    @property
    def weights_id(self) -> str | None:
        """The id of the weights that new calls use; None before the first swap."""
        return self._gate.current.weights_id if self._gate.current else None

    def _served_id(self) -> str | None:
        return "that failed" if self.failed else self.weights_id  # which the call then says, on all ranks

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that have the model together; None if this process has the whole."""
        return self._store.ranks

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
    def variants(self) -> dict[str, dict[str, VariantReceipt]]:
        """The receipts of the resident variants by group and name, the least recently used first."""
        return self._variants.resident() if self._variants is not None else {}

    @property
    def variant_history(self) -> tuple[VariantReceipt, ...]:
        """The last 100 receipts of variants, oldest first."""
        return tuple(self._variants.history) if self._variants is not None else ()

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

    def pin(self) -> Pinned:
        """Pin one version for several calls, whatever is committed meanwhile: `with model.pin() as pinned:`.

        In single residency a commit waits until the block ends; in double residency the staging after a commit does.
        """
        self._check_open()
        return Pinned(self._methods, self._gate, self._store.ranks)

    def new_context(self, *, on_swap: OnSwap = "invalidate") -> Context:
        """Return a copy of the initial state, for calls with `context=`.

        on_swap: what happens to the state when other weights are served than those that it was made with.
          "invalidate": calls raise StaleState until the same weights are served again, or until `reset()`.
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

        Raises ContextError, also if the file cannot be read, and OutOfMemory; with on_swap="pin" also what a call
        raises.
        """
        stamp, state = read_context(path, self.artifact.manifest.state, None if allow_other_graph else self.graph_id)
        made_with, served = stamp.weights_id, self.weights_id
        if not allow_other_weights and made_with and served and made_with != served:
            raise ContextError(
                f"{as_location(path)}: was made with the weights {made_with[:12]}, but {served[:12]} are served. "
                "Swap the former in, or start a new context. allow_other_weights=True would mix both: what follows "
                "comes from neither",
                reason="mismatch",
            )
        chosen = None if allow_other_weights or made_with is None else stamp.variants or {}
        return self._new_context(state, on_swap, served if made_with and served else made_with, chosen)

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
          weights first read the prompt and all tokens so far again; with "invalidate" StaleState is raised.
        tokenizer: the path of a tokenizer.json; None: the one beside the weights, or in the artifact (extra `text`).
        stream: return a TokenStream, both an iterator and an asynchronous one, instead of waiting for the end.

        Raises Unsupported for an artifact that does not generate and for invalid numbers, InputMismatch for prompts
        that do not fit into the cache, MissingExtra, and what a call raises.
        """
        generation = self.artifact.manifest.generation
        if generation is None:
            raise Unsupported(f"{self.artifact.path}: does not generate; export it with export_decoder()")
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
        with ExitStack() as unless_begun:
            # first, as the tokenizer is that of the weights that it pins
            context = unless_begun.enter_context(self.new_context(on_swap=on_swap))
            prompts = Prompts(prompt, lambda: self._tokenizer(tokenizer, context))
            request = GenerationRequest(prompts.rows, sampling, max_new_tokens, prompts.stop_check(stop), seed)
            check(request, generation)
            choice = self._require_variants().choose(variants) if variants else None
            find = partial(self._method_with_variants, choice) if choice is not None else self.method
            steps = generate_steps(find, self._member.engine, context, request, generation)
            pieces = prompts.pieces(steps) if stream else None
            unless_begun.pop_all()
        return prompts.whole(steps) if pieces is None else TokenStream(steps, pieces, context)

    def _method_with_variants(self, choice: Choice, name: str) -> Callable[..., Any]:
        return partial(self.method(name), variants=choice)

    def _tokenizer(self, path: PathLike | None, context: Context) -> Tokenizer:
        if path is not None:
            return Tokenizer(path)
        current = self._gate.current
        served, generation = context.weights_id, context.generation
        if generation is None and current is not None:  # the context pins nothing
            served, generation = current.weights_id, current.generation
        receipts = self._history_with(generation or 0)
        files = [receipt.source for receipt in reversed(_line_of(served, receipts)) if receipt.reloadable]
        return find_tokenizer(files, self.artifact.path)

    def _history_with(self, generation: int) -> tuple[SwapReceipt, ...]:
        """Return the history with the receipt of a generation, which comes a moment after its commit."""
        deadline = time.monotonic() + _RECEIPT_TIMEOUT
        while (not self.history or self.history[-1].generation < generation) and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.history

    def _new_context(
        self,
        saved: Mapping[str, TensorBytes] | None,
        on_swap: OnSwap,
        made_with: str | None,
        variants: Mapping[str, str] | None = None,
    ) -> Context:
        self._check_open()
        self._refuse_on_ranks("contexts")
        check_policy(on_swap)
        engine = self._member.engine
        with memory_errors("no memory for a context's state"):
            state = engine.new_state(saved)
        return self._store.contexts.add(Context(self.artifact, engine, state, self._gate, on_swap, made_with, variants))

    def _require_variants(self) -> Variants:
        self._check_open()
        if self._variants is None:
            raise UnknownName(f"{self.artifact.path.name}: declares no variants; export with variants=...")
        return self._variants

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

    def _acquire(self, context: Context, lease: Claim) -> Version:
        self._check_open()
        return context.acquire(self._gate, lease)

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Raise TypeError: a model's memory, locks and threads belong to it alone."""
        raise TypeError(f"{self!r}: a model cannot be copied or pickled; load its artifact where another is needed")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.artifact.path)!r}, graph_id={self.graph_id[:12]!r}, "
            f"weights_id={self.weights_id and self.weights_id[:12]!r}, generation={self.generation}, "
            f"residency={self.residency!r})"
        )


class Pinned(Caller, AbstractContextManager["Pinned"]):
    """One version of the model for the length of a `with` block; threads may share it."""

    def __init__(self, methods: Methods, gate: Gate, ranks: Ranks | None) -> None:
        super().__init__(methods)
        self._gate = gate
        self._ranks = ranks  # which may have to keep changes out
        self._version: Version | None = None
        self._lease: Pin

    def __enter__(self) -> Pinned:
        if self._version is not None:
            raise CallError("this pin was already entered; call model.pin() for each block")
        with ExitStack() as entered:
            if self._ranks is not None:
                entered.enter_context(self._ranks.without_changes())
            self._lease = Pin()  # of the thread that enters
            self._version = self._gate.acquire(self._lease)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lease.end()  # first: an interrupt may come at any time
        with self._entered:
            version = self._pinned()
            # without the session, which this drops
            self._version = Version(None, version.generation, version.identity)  # type: ignore[arg-type]
            if version.session is not None:
                self._gate.release(version.session, self._lease)

    @property
    def weights_id(self) -> str:
        return self._pinned().weights_id

    @property
    def generation(self) -> int:
        return self._pinned().generation

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._pinned().labels)

    def _served_id(self) -> str | None:
        return self.weights_id

    def _pinned(self) -> Version:
        if self._version is None:
            raise CallError("enter the pin first: with model.pin() as pinned: ...")
        return self._version

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        version = self._pinned()
        session: Session | None = version.session
        lease = Claim()
        try:
            if session is None or not self._gate.acquire_within(self._lease, session, lease):
                raise CallError("the `with model.pin()` block has ended; pin again")
            bound = session.bound[self._methods.member]
            return run_chosen(bound, version.weights_id, name, flat, context, choice)
        finally:
            if session is not None:
                self._gate.release(session, lease)


def choice_of(model: ServedModel, names: VariantNames) -> Choice:
    """Return what calls with `variants=names` choose now, to pass instead of the names: it keeps these very variants.

    Raises UnknownName.
    """
    choice = model._require_variants().choose(names)
    assert choice is not None, "names must not be empty"
    return choice


def holds_calls(model: ServedModel) -> bool:
    """Return whether a commit holds new calls now, for those who would call from a thread that has a pin."""
    return model._gate.is_held


def engine_of(model: ServedModel) -> Engine:
    """Return a model's engine, for tools that convert tensors of files to its inputs, and its outputs back."""
    return model._member.engine


def _line_of(weights_id: str | None, receipts: Iterable[SwapReceipt]) -> Sequence[SwapReceipt]:
    """Return the receipts of some weights and of those before them, oldest first, without those that were withdrawn.

    Weights whose file is swapped in again, as to go back to them, follow those that they followed before.
    """
    line: Sequence[SwapReceipt] = ()
    of_weights: dict[str, Sequence[SwapReceipt]] = {}
    of_files: dict[tuple[str, str], Sequence[SwapReceipt]] = {}
    for receipt in receipts:
        if receipt.kind == "rollback":  # it names no file
            line = of_weights.get(receipt.weights_id, line)
        else:
            line = of_files.setdefault((receipt.weights_id, receipt.source), (*line, receipt))
        of_weights[receipt.weights_id] = line
    return of_weights.get(weights_id or "", line)
