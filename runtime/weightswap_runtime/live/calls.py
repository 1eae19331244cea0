"""How methods are called: their arguments are checked and flattened, run on leased weights, and observed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from weightswap_runtime.engines.engine import Bound, Engine
from weightswap_runtime.errors import InputMismatch, UnknownName
from weightswap_runtime.format.manifest import STEPS, Manifest, TextGeneration
from weightswap_runtime.format.signature import CallCheck, Signature, Tensor, unflatten
from weightswap_runtime.jobs import Claim, Listeners

from .context import Context
from .ranks import Ranks
from .variants import Choice, VariantNames, Variants

T = TypeVar("T")
CallObserver = Callable[[str, float, BaseException | None], object]
_log = logging.getLogger("weightswap.calls")


class Caller:
    """An object with the artifact's methods: `x(...)` calls `forward` (or the only method), `x.encode(...)` another."""

    _serves = True  # whether observers are told of the calls

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, or the only method, with the arguments that it was exported with.

        `context=`: a Context, whose state the call reads and changes; without one, the call starts from the initial
        state and discards its changes. `variants=`: a dict from groups to names of resident variants; without one, or
        with None for a name, the base weights answer alone. Outputs share no memory with weights or state.

        Raises InputMismatch before anything runs; with a context StaleState and ContextError;
        with variants UnknownName and StaleState.
        """
        return self._call(self._methods.default, args, kwargs)

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """The inputs and outputs of each method."""
        return self._methods.signatures

    @property
    def default_method(self) -> str:
        """The method that a plain call runs."""
        return self._methods.default

    def method(self, name: str) -> Callable[..., Any]:
        """Return the method called `name`, also if an attribute of this class hides it. Raises UnknownName."""
        if name not in self._methods.inputs:
            known = list(self._methods.inputs)
            near = get_close_matches(name, [*known, *dir(type(self))], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UnknownName(
                f"{name!r} is neither an attribute nor a method of this artifact, which has: {', '.join(known)}{hint}"
            )
        return partial(self._call_named, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.method(name)

    def _call_named(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(name, args, kwargs)

    def call_flat(self, name: str, flat: list[Any], variants: VariantNames | Choice | None = None) -> list[Any]:
        """Call a method with flat inputs, which the caller has checked; return flat outputs. variants: as in calls."""
        if (ranks := self._methods.ranks) is not None:
            return self._observed(name, lambda: self._on_ranks(ranks, name, lambda: flat))
        choice = self._methods.variants.choose(variants) if self._methods.variants is not None else None
        return self._observed(name, lambda: self._run(name, flat, None, choice))

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._methods.observers.all:
            return self._observed(name, lambda: self._checked_call(name, args, kwargs))
        return self._checked_call(name, args, kwargs)

    def _checked_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._methods.ranks is not None:
            values = self._on_ranks(self._methods.ranks, name, lambda: self._methods.flatten(name, args, kwargs))
            return self._unflatten(name, values)
        if name not in self._methods.inputs:
            self.method(name)
        choice = None
        if self._methods.variants is not None and "variants" in kwargs:
            kwargs = kwargs.copy()
            choice = self._methods.variants.choose(kwargs.pop("variants"))
        context = kwargs.get("context")
        if isinstance(context, Context):  # otherwise the method has an input of that name
            values = self._run_in_context(context, name, args, kwargs, choice)
        else:
            values = self._run(name, self._methods.flatten(name, args, kwargs), None, choice)
        return self._unflatten(name, values)

    def _unflatten(self, name: str, values: list[Any]) -> Any:
        if name in self._methods.single:
            return values[0]
        return unflatten(self._methods.signatures[name].output, values)

    def _on_ranks(self, ranks: Ranks, name: str, check: Callable[[], list[Any]]) -> list[Any]:
        def checked() -> list[Any]:
            if name not in self._methods.inputs:
                self.method(name)
            return check()

        return ranks.call(name, checked, lambda: str(self._served_id()), lambda flat: self._run(name, flat, None, None))

    def _served_id(self) -> str | None:
        """Return the id of the weights with which a call would run now."""
        raise NotImplementedError

    def _observed(self, name: str, call: Callable[[], T]) -> T:
        if not (self._serves and self._methods.observers.all):
            return call()
        start = time.perf_counter()
        try:
            result = call()
        except BaseException as error:
            self._methods.observers.notify(name, time.perf_counter() - start, error)
            raise
        self._methods.observers.notify(name, time.perf_counter() - start, None)
        return result

    def _run_in_context(
        self, context: Context, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], choice: Choice | None
    ) -> list[Any]:
        context.check_engine(self._methods.engine)
        inputs = kwargs.copy()
        del inputs["context"]
        flat = self._methods.flatten(name, args, inputs)
        claim = Claim()
        try:
            context.use(claim)
            return self._run(name, flat, context, choice)
        finally:
            claim.end()

    def _run(self, name: str, flat: list[Any], context: Context | None, choice: Choice | None) -> list[Any]:
        raise NotImplementedError


class Methods:
    """The methods of an artifact, with their signatures, input checks, variants, ranks and observers."""

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        member: int,
        variants: Variants | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.variants = variants
        self.ranks = ranks
        self.member = member  # the id of the engine in every session
        self.engine = engine
        self.observers: Listeners[[str, float, BaseException | None]] = Listeners(_log)
        self.inputs = {
            name: CallCheck(name, method.signature, engine.tensor_type, engine.dtypes, engine.misplaced, engine.kind)
            for name, method in manifest.methods.items()
        }
        self.signatures: Mapping[str, Signature] = {name: method.signature for name, method in manifest.methods.items()}
        self.single = {name for name, signature in self.signatures.items() if isinstance(signature.output, Tensor)}
        self._generation = manifest.generation
        names = list(self.inputs)
        self.default = "forward" if "forward" in names or len(names) != 1 else names[0]

    def flatten(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Check the arguments of a call and return its flat inputs. Raises InputMismatch."""
        flat = self.inputs[name].flatten(args, kwargs)
        if self._generation is not None and name in STEPS:
            _check_position(name, flat, self._generation)
        return flat


def _check_position(method: str, flat: Sequence[Any], generation: TextGeneration) -> None:
    """Raise InputMismatch for a call of `prefill` or `decode` whose tokens would lie outside the cache.

    A position on a device is not checked, as reading it would make the call wait for the device.
    """
    ids, *_, position = flat
    if not getattr(position, "is_cpu", True):
        return
    first, tokens = int(position), ids.shape[1]
    if not 0 <= first <= generation.length - tokens:
        problem = f"{tokens} tokens at position {first} do not fit in a cache of {generation.length}"
        raise InputMismatch(method, [f"{problem}; start again in a new context, or export with a larger length"])


_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


def run_chosen(
    bound: Bound, weights_id: str, name: str, flat: list[Any], context: Context | None, choice: Choice | None
) -> list[Any]:
    """Call a method of the weights `weights_id`, with an optional context and choice. Raises StaleState."""
    if choice is not None:
        choice.check_base(weights_id)
    if context is not None:
        return context.run(bound, weights_id, name, flat, choice)
    return bound.run(name, flat, None, choice and choice.chosen)
