"""Sessions, and the calling surface that the model, a pinned session and a staged session share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from .arena import Arena
from .engines import Bound, Engine
from .errors import DeviceError, OutOfMemory, UnknownMethod, WeightsMismatch, lacks_memory
from .gate import ClaimReference
from .hooks import Hooks
from .inputs import Inputs
from .manifest import Manifest
from .signature import Signature, Tensor, unflatten

CallObserver = Callable[[str, float, BaseException | None], object]
_log = logging.getLogger("weightswap.calls")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging


class Session:
    """One arena and the engines that are bound to it, by place: one for each artifact that shares the weights.

    `leases` belongs to the gate.
    """

    def __init__(self, arena: Arena, engines: Mapping[int, Engine]) -> None:
        self.arena = arena
        self.bound: dict[int, Bound] = {place: bind(engine, arena) for place, engine in engines.items()}
        self.leases: dict[int, ClaimReference] = {}
        self._prepared: set[int] = set()

    @property
    def has_prologue(self) -> bool:
        """Whether anything is computed from weights before they serve."""
        return any(bound.has_prologue for bound in list(self.bound.values()))

    def add(self, place: int, bound: Bound, prepared: bool) -> None:
        """Take in an engine that was bound to the arena. `prepared`: whether it has computed what depends on it."""
        if prepared:
            self._prepared.add(place)
        self.bound[place] = bound

    def prepare(self, where: str) -> None:
        """Compute what depends on the weights alone. They came from `where`, and serve nobody yet.

        Raises WeightsMismatch where that cannot be computed, and OutOfMemory.
        """
        self._prepared.clear()
        self.prepare_added(where)

    def adopt(self, other: Session, where: str) -> None:
        """As `prepare`, where another session has the same weights, and has computed already."""
        self._prepared.clear()
        with self.arena.writing(join=True), self.arena.stream():
            for place, bound in list(self.bound.items()):
                theirs = other.bound.get(place)
                if theirs is not None and bound.adopt(theirs):
                    self._prepared.add(place)
        self.prepare_added(where)

    def prepare_added(self, where: str) -> None:
        """As `prepare`, where that was not done since the weights came."""
        if self.bound.keys() <= self._prepared:
            return  # a device is asked for nothing
        with self.arena.writing(join=True), self.arena.stream():
            for place, bound in list(self.bound.items()):
                if place not in self._prepared:
                    prepare(bound, where)
                    self._prepared.add(place)

    def keep_prologue(self) -> Callable[[], None]:
        """Copy what was computed from weights; the function that is returned puts it back, and needs no memory.

        Raises OutOfMemory.
        """
        try:
            with self.arena.writing(join=True), self.arena.stream():
                kept = [bound.keep() for bound in list(self.bound.values()) if bound.has_prologue]
        except Exception as error:
            if lacks_memory(error):
                raise OutOfMemory(f"no memory to keep what was computed from the weights ({error})") from error
            raise

        def put_back() -> None:
            with self.arena.writing(join=True), self.arena.stream():
                for put in kept:
                    put()
            self._prepared.update(self.bound)

        return put_back

    def settle(self, where: str) -> None:
        """Wait until what came from `where` is in the arena. Raises DeviceError."""
        try:
            self.arena.settle()
        except Exception as error:
            raise DeviceError(f"{where}: {type(error).__name__}: {error}") from error

    @property
    def has_state(self) -> bool:
        """Whether calls leave traces."""
        return any(bound.has_state for bound in list(self.bound.values()))

    def reset_state(self) -> None:
        """Put all state back to its initial values, in place."""
        if not self.has_state:
            return  # a device is asked for nothing
        with self.arena.stream():
            for bound in list(self.bound.values()):
                bound.reset_state()


def bind(engine: Engine, arena: Arena) -> Bound:
    """Bind an engine to an arena; calls wait for what that has asked a device for. Raises OutOfMemory."""
    try:
        with arena.writing(join=True), arena.stream():
            return engine.bind(arena)
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(f"no memory for an engine's state ({error})") from error
        raise


def prepare(bound: Bound, where: str) -> None:
    """Let an engine compute what depends on weights from `where`. Raises WeightsMismatch and OutOfMemory."""
    try:
        bound.prepare()
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(f"{where}: no memory for what is computed from weights alone ({error})") from error
        raise WeightsMismatch(
            where,
            [f"what the graphs compute from weights alone cannot be computed: {type(error).__name__}: {error}"],
            "Every call would raise this. Load with prologue=False to serve these weights all the same.",
        ) from error


class Methods:
    """The artifact's methods: checks and flattens what goes in, rebuilds what comes out."""

    def __init__(self, manifest: Manifest, engine: Engine, place: int) -> None:
        self.place = place  # of the engine in a session
        self.observers: Hooks[[str, float, BaseException | None]] = Hooks(_log)
        self.inputs = {
            name: Inputs(name, method.signature, engine.tensor_type, engine.dtypes, engine.misplaced, engine.kind)
            for name, method in manifest.methods.items()
        }
        self.signatures: Mapping[str, Signature] = {name: method.signature for name, method in manifest.methods.items()}
        self.single = {name for name, signature in self.signatures.items() if isinstance(signature.output, Tensor)}
        names = list(self.inputs)
        self.default = "forward" if "forward" in names or len(names) != 1 else names[0]


class Caller:
    """Something whose methods can be called: `x(...)` is `forward` (or the only method), `x.encode(...)` is another."""

    _serves = True  # whether calls are those that observers are told of

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, or the only method, with the arguments that it was exported with.

        Raises InputMismatch before anything runs. Outputs share no memory with weights or state.
        """
        return self._call(self._methods.default, args, kwargs)

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """What each method takes and returns."""
        return self._methods.signatures

    @property
    def default_method(self) -> str:
        """The method that a plain call runs."""
        return self._methods.default

    def method(self, name: str) -> Callable[..., Any]:
        """The method called `name`, also where an attribute of this class hides it. Raises UnknownMethod."""
        if name not in self._methods.inputs:
            known = list(self._methods.inputs)
            near = get_close_matches(name, [*known, *dir(type(self))], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UnknownMethod(
                f"{name!r} is neither an attribute nor a method of this artifact, which has: {', '.join(known)}{hint}"
            )
        return partial(self._call_named, name)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.method(name)

    def _call_named(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(name, args, kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], observe: bool = True) -> Any:
        if observe and self._methods.observers.hooks:
            return self._observed(name, args, kwargs)
        if name not in self._methods.inputs:
            self.method(name)
        flat = self._methods.inputs[name].flatten(args, kwargs)
        values = self._run(name, flat)
        if name in self._methods.single:
            return values[0]
        return unflatten(self._methods.signatures[name].output, values)

    def _observed(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._serves:
            return self._call(name, args, kwargs, observe=False)
        start = time.perf_counter()
        try:
            result = self._call(name, args, kwargs, observe=False)
        except BaseException as error:
            self._methods.observers.tell(name, time.perf_counter() - start, error)
            raise
        self._methods.observers.tell(name, time.perf_counter() - start, None)
        return result

    def _run(self, name: str, flat: list[Any]) -> list[Any]:
        raise NotImplementedError
