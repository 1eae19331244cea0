"""Contexts: callers' own copies of the state that a model keeps from call to call."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any, Literal

from weightswap_runtime.engines.engine import Bound, Engine, State
from weightswap_runtime.errors import (
    ContextError,
    InputMismatch,
    StaleState,
    Unsupported,
)
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.context_file import write_context
from weightswap_runtime.jobs import Claim, ClaimReference, fork_safe

from .gate import Gate, Pin, Version
from .variants import Choice

OnSwap = Literal["invalidate", "reset", "keep", "pin"]
_OUTCOMES = {"invalidate": "invalidated", "reset": "reset", "keep": "kept", "pin": "pinned"}


def check_policy(on_swap: str) -> None:
    """Raise Unsupported for an unknown policy."""
    if not isinstance(on_swap, str) or on_swap not in _OUTCOMES:
        raise Unsupported(f"on_swap={on_swap!r}: expected {', '.join(map(repr, _OUTCOMES))}")


class ContextPin(Pin):
    """The lease of a context that stays on its weights until it is closed."""

    __slots__ = ()
    what = "pinned context"


class Context(AbstractContextManager["Context"]):
    """One caller's copy of a model's state: `model(x, context=context)` reads and changes it.

    Made by `model.new_context()` and `model.load_context()`. Calls with different contexts run in parallel; of two
    concurrent calls with the same context, the second is refused. Leaving its `with` block closes it.
    """

    def __init__(
        self,
        artifact: Artifact,
        engine: Engine,
        state: State,
        gate: Gate,
        on_swap: OnSwap,
        weights_id: str | None = None,
        variants: Mapping[str, str] | None = None,
    ) -> None:
        """engine: the engine of the state. weights_id: the weights that the state was made with, if any. variants: the
        ids of the variants that it was made with, by group; None if any will do.
        """
        self.on_swap: OnSwap = on_swap
        self._artifact = artifact
        self._methods = artifact.methods_with_state
        self._engine = engine
        self._state: State | None = state
        self._made_with = weights_id
        self._variants = variants
        self._consistent = True  # False during a call, and after one that was interrupted
        self._user: ClaimReference | None = None
        self._gate = gate
        self._pin = ContextPin()
        self._lock = fork_safe(RLock())  # reentrant, for signal handlers
        self._pinned = gate.acquire(self._pin) if on_swap == "pin" else None

    @property
    def weights_id(self) -> str | None:
        """The id of the weights that the state was made with, or is pinned to; None if it fits any weights."""
        pinned = self._pinned
        return pinned.weights_id if pinned is not None else self._made_with

    @property
    def generation(self) -> int | None:
        """The generation of the weights that the context is pinned to; None if it is not pinned."""
        pinned = self._pinned
        return pinned.generation if pinned is not None else None

    @property
    def closed(self) -> bool:
        return self._state is None

    def reset(self) -> None:
        """Restore the initial state. Raises ContextError."""
        with self.used():
            self._reset()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, without weights, to a safetensors file, which appears complete or not at all.

        `model.load_context()` reads it, on any engine and device. Raises ContextError, and Unsupported
        for a URL and for a state that a call has resized.
        """
        with self.used() as state:
            self._check_consistent()
            manifest = self._artifact.manifest
            variants = self._variants or {}
            write_context(path, manifest.state, state.content, manifest.graph_id, self._made_with, variants)

    def close(self) -> None:
        """Free the state, and unpin the weights. A second call does nothing. Raises ContextError."""
        if self._state is not None:
            with self.used():
                self._state = None
        self._pin.end()
        if (pinned := self._pinned) is not None:
            self._gate.release(pinned.session, self._pin)
            self._pinned = None

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def used(self) -> Iterator[State]:
        """Use the context exclusively within the block. Raises ContextError."""
        claim = Claim()
        try:
            yield self.use(claim)
        finally:
            claim.end()

    def use(self, claim: Claim) -> State:
        """Use the context exclusively until the claim ends. Raises ContextError."""
        with self._lock:
            other = self._user() if self._user is not None else None
            if other is not None and other.holds:
                raise ContextError("another call is using this context; give each caller one of its own", reason="busy")
            self._user = weakref.ref(claim)
        if self._state is None:
            raise ContextError("the context was closed; make another with model.new_context()", reason="closed")
        return self._state

    def acquire(self, gate: Gate, lease: Claim) -> Version:
        """Lease the weights for a call: the served ones, or those that the context is pinned to."""
        if self._pinned is None:
            return gate.acquire(lease)
        if not self._pin.holds:
            raise ContextError(
                "the thread that pinned this context was lost in a fork; make another in this process", reason="closed"
            )
        self._gate.acquire_session(self._pinned.session, lease)
        return self._pinned

    def run(
        self, bound: Bound, weights_id: str, method: str, inputs: list[Any], choice: Choice | None = None
    ) -> list[Any]:
        """Call a method of the weights `weights_id` with this state, which the caller has claimed by `use`."""
        chosen, ids = (choice.chosen, choice.ids) if choice is not None else (None, {})
        if method not in self._methods:
            return bound.run(method, inputs, None, chosen)
        self._check_consistent()
        if self._pinned is not None and self._pinned.weights_id != weights_id:
            raise _stale(self._pinned.weights_id, weights_id)
        if self._made_with is not None and (self._made_with != weights_id or self._variants not in (None, ids)):
            self._apply_policy(weights_id, ids)
        self._consistent = False
        try:
            outputs = bound.run(method, inputs, self._state, chosen)
        except (InputMismatch, Unsupported):
            self._consistent = True  # nothing ran; any other CallError is that of a signal handler's own call
            raise
        self._made_with, self._variants, self._consistent = weights_id, ids, True
        return outputs

    def check_engine(self, engine: Engine) -> None:
        """Raise ContextError unless the context belongs to the model that has this engine."""
        if engine is not self._engine:
            raise ContextError(
                "the context belongs to another model; make one with this model's new_context()", reason="mismatch"
            )

    def _check_consistent(self) -> None:
        if not self._consistent:
            raise ContextError(
                "a call on this context failed midway, so its state may be a mixture; reset() it", reason="interrupted"
            )

    def _apply_policy(self, weights_id: str, variants: Mapping[str, str]) -> None:
        """Reset, keep or refuse a state that was made with other weights or variants than those of this call."""
        if self.on_swap == "reset":
            self._reset()
        elif self.on_swap != "keep":
            raise _stale(_described(self._made_with, self._variants or {}), _described(weights_id, variants))

    def _reset(self) -> None:
        assert self._state is not None
        self._consistent = False
        self._state.reset()
        self._made_with, self._variants, self._consistent = None, None, True


class Contexts:
    """The contexts of all models that share weights, by weak references."""

    def __init__(self) -> None:
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._lock = fork_safe(RLock())

    def add(self, context: Context) -> Context:
        with self._lock:
            self._contexts.add(context)
        return context

    def outdated_by(self, weights_id: str) -> dict[str, int]:
        """Count the contexts of other weights than these, by the outcome of their policy."""
        if not self._contexts:
            return {}
        with self._lock:
            live = [context for context in self._contexts if not context.closed]
        outcomes = Counter(_OUTCOMES[each.on_swap] for each in live if each.weights_id not in (None, weights_id))
        return dict(sorted(outcomes.items()))


def _described(weights_id: str | None, variants: Mapping[str, str]) -> str:
    """Return a text of the weights, and the variants by group, that compute a state."""
    chosen = ", ".join(f"{group} {variant}" for group, variant in sorted(variants.items()))
    return f"{weights_id} with {chosen}" if chosen else str(weights_id)


def _stale(made_with: str, served: str) -> StaleState:
    advice = '. Start a new one, reset() it, or make contexts with on_swap="reset" or "pin"'
    return StaleState("the context's state", made_with, served, "was made with", advice)
