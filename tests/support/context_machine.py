"""State machine of contexts over changing weights, compared with an eager model for each context."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn

from tests.support.refusals import because
from tests.support.remembering import POLICIES, Policy
from weightswap_runtime import Context, ContextError, NothingToRollBack, StaleState, WaitTimeout, load

MOST = 4  # contexts at a time
ANY = -1  # the variant of a context that was loaded for other weights
which = st.integers(0, 11)
State = dict[str, torch.Tensor]


@dataclass(eq=False)
class Held:
    """A context, the eager model's state, None before the first call, and what that was made with."""

    context: Context
    state: State | None
    base: int | None
    variant: int | None = None
    arena: int = 0  # of those with the policy "pin"

    @property
    def pins(self) -> bool:
        return self.context.on_swap == "pin"


class ContextMachine(RuleBasedStateMachine):
    """Machine of calls, saves, loads, swaps and rollbacks over several contexts.

    Whoever runs it gives an artifact, its sets of weights, a folder, an input, and `eager(base, variant)`, which
    returns a new eager model.
    """

    artifact: Path
    weights: list[Path]
    folder: Path
    x: torch.Tensor
    engine = "torch"

    @staticmethod
    def eager(base: int, variant: int | None) -> nn.Module:
        raise NotImplementedError

    @initialize(residency=st.sampled_from(["single", "double"]), first=which)
    def start(self, residency: Literal["single", "double"], first: int) -> None:
        self.base, self.previous = first % len(self.weights), -1
        options: Any = {"engine": self.engine, "residency": residency, "keep_previous": "host"}
        self.model = load(self.artifact, self.weights[self.base], **options)
        self.double, self.arena = residency == "double", 0
        self.contexts: list[Held] = []
        self.saved: Held | None = None

    def teardown(self) -> None:
        for held in getattr(self, "contexts", ()):
            held.context.close()

    @precondition(lambda self: len(self.contexts) < MOST)
    @rule(policy=st.sampled_from(POLICIES))
    def begin(self, policy: Policy) -> None:
        context = self.model.new_context(on_swap=policy)
        self.contexts.append(Held(context, None, self.base if policy == "pin" else None, arena=self.arena))

    @rule(which=which)
    def swap(self, which: int) -> None:
        base = which % len(self.weights)
        if any(held.pins and not (self.double and held.arena == self.arena) for held in self.contexts):
            with pytest.raises(WaitTimeout):
                self.model.swap(self.weights[base])
        else:
            self._committed(base, self.model.swap(self.weights[base]).contexts)

    @rule()
    def rollback(self) -> None:
        held = not self.double and any(held.pins for held in self.contexts)
        if self.previous == -1 or held:
            with pytest.raises(WaitTimeout if self.previous != -1 else NothingToRollBack):
                self.model.rollback()
        else:
            self._committed(self.previous, self.model.rollback().contexts)

    def _committed(self, base: int, contexts: dict[str, int]) -> None:
        becomes = {"invalidate": "invalidated", "reset": "reset", "keep": "kept", "pin": "pinned"}
        changed = [held.context.on_swap for held in self.contexts if held.base not in (None, base)]
        assert contexts == Counter(becomes[policy] for policy in changed)
        self.base, self.previous = base, self.base
        self.arena ^= self.double

    @rule(which=which, factor=st.integers(-2, 2))
    def call(self, which: int, factor: int) -> None:
        self._call(which, factor, None)

    def _call(self, which: int, factor: int, variant: int | None, **options: Any) -> None:
        """Call with a context, or without one if there is none."""
        x, given = self.x * factor, self.given(factor)
        if not self.contexts:
            assert self._same(self.model(given, **options), self.eager(self.base, variant), x)
            return
        held = self.contexts[which % len(self.contexts)]
        options["context"] = held.context
        state, base = held.state, held.base if held.pins and held.base is not None else self.base
        if state is not None and (held.base != base or held.variant not in (ANY, variant)):
            if held.context.on_swap in ("invalidate", "pin"):
                with pytest.raises(StaleState):
                    self.model(given, **options)
                return
            if held.context.on_swap == "reset":
                state = None
        eager = self.eager(base, variant)
        eager.load_state_dict(state or {}, strict=False)
        assert self._same(self.model(given, **options), eager, x)
        held.state, held.base, held.variant = dict(eager.named_buffers()), base, variant

    def given(self, factor: int) -> Any:
        x = self.x * factor
        return x.numpy() if self.engine == "onnx" else x

    @torch.no_grad()
    def _same(self, found: Any, eager: nn.Module, x: torch.Tensor) -> bool:
        expected = eager(x)
        if self.engine == "torch":
            return torch.equal(found, expected)
        return torch.allclose(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-4)

    @precondition(lambda self: self.contexts)
    @rule(which=which, what=st.sampled_from(["save", "reset", "close"]))
    def end(self, which: int, what: str) -> None:
        held = self.contexts[which % len(self.contexts)]
        if what == "save":
            held.context.save(self.folder / "saved.safetensors")
            self.saved = Held(held.context, deepcopy(held.state), held.base if held.state else None, held.variant)
        elif what == "reset":
            held.context.reset()
            held.state, held.base = None, held.base if held.pins else None
        else:
            held.context.close()
            self.contexts.remove(held)

    @precondition(lambda self: self.saved and len(self.contexts) < MOST)
    @rule(policy=st.sampled_from(["invalidate", "reset", "keep"]), other=st.booleans())
    def restore(self, policy: Policy, other: bool) -> None:
        assert self.saved
        base, variant, path = self.saved.base, self.saved.variant, self.folder / "saved.safetensors"
        if base not in (None, self.base) and not other:
            with pytest.raises(ContextError, check=because("mismatch")):
                self.model.load_context(path, on_swap=policy)
            other = True
        context = self.model.load_context(path, on_swap=policy, allow_other_weights=other)
        base = None if base is None else self.base
        self.contexts.append(Held(context, deepcopy(self.saved.state), base, ANY if other else variant))
