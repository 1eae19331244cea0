"""Contexts over changing weights: no answer mixes generations, and no context sees another's state."""

from __future__ import annotations

import threading
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.refusals import because
from tests.support.remembering import POLICIES, Files, Policy, Remembering, X
from weightswap_runtime import Context, ContextError, Model, NothingToRollBack, StaleState, WaitTimeout, load


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("contexts"))


class ContextMachine(RuleBasedStateMachine):
    """Machine of calls, saves, loads, swaps and rollbacks over several contexts, with an eager model for each."""

    files: Files

    @initialize(residency=st.sampled_from(["single", "double"]), first=st.integers(0, 2))
    def start(self, residency: Literal["single", "double"], first: int) -> None:
        self.model = load(self.files.artifact, self.files.weights[first], residency=residency, keep_previous="host")
        self.current, self.previous = first, -1
        self.double = residency == "double"
        self.contexts: list[tuple[Context, Remembering | None, int]] = []  # the eager model, and whose weights it has
        self.saved: tuple[Path, Remembering | None, int] | None = None

    def teardown(self) -> None:
        for context, _, _ in getattr(self, "contexts", ()):
            context.close()

    @precondition(lambda self: len(self.contexts) < 4)
    @rule(policy=st.sampled_from(POLICIES))
    def begin(self, policy: Policy) -> None:
        self.contexts.append((self.model.new_context(on_swap=policy), None, self.current if policy == "pin" else -1))

    def pins(self, seed: int) -> bool:
        return any(context.on_swap == "pin" and made_with == seed for context, _, made_with in self.contexts)

    @rule(seed=st.integers(0, 2))
    def swap(self, seed: int) -> None:
        held = any(
            context.on_swap == "pin" and (not self.double or context._pinned.session is not self.live)  # type: ignore[union-attr]
            for context, _, _ in self.contexts
        )
        if held:
            with pytest.raises(WaitTimeout):
                self.model.swap(self.files.weights[seed])
            return
        assert self.model.swap(self.files.weights[seed]).contexts == self.outdated_by(seed)
        self.current, self.previous = seed, self.current

    @rule()
    def rollback(self) -> None:
        if self.previous == -1:
            with pytest.raises(NothingToRollBack):
                self.model.rollback()
        elif not self.double and any(context.on_swap == "pin" for context, _, _ in self.contexts):
            with pytest.raises(WaitTimeout):
                self.model.rollback()
        else:
            assert self.model.rollback().contexts == self.outdated_by(self.previous)
            self.current, self.previous = self.previous, self.current

    def outdated_by(self, seed: int) -> dict[str, int]:
        """Predict how many contexts a commit of these weights changes, by kind of change."""
        becomes = {"invalidate": "invalidated", "reset": "reset", "keep": "kept", "pin": "pinned"}
        return Counter(
            becomes[context.on_swap] for context, _, made_with in self.contexts if made_with not in (-1, seed)
        )

    @property
    def live(self) -> Any:
        version = self.model._gate.current
        assert version is not None
        return version.session

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), factor=st.integers(-2, 2))
    @torch.no_grad()
    def call(self, data: st.DataObject, factor: int) -> None:
        index = data.draw(st.integers(0, len(self.contexts) - 1))
        context, eager, made_with = self.contexts[index]
        weights = made_with if context.on_swap == "pin" else self.current
        if made_with not in (-1, weights):
            if context.on_swap == "invalidate":
                with pytest.raises(StaleState):
                    self.model(X * factor, context=context)
                return
            if context.on_swap == "reset":
                eager = None
        following = self.files.eager(weights)
        if eager is not None:
            following.total, following.calls = eager.total, eager.calls
        assert torch.equal(self.model(X * factor, context=context), following(X * factor))
        self.contexts[index] = context, following, weights

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), what=st.sampled_from(["save", "reset", "close"]))
    def end(self, data: st.DataObject, what: str) -> None:
        index = data.draw(st.integers(0, len(self.contexts) - 1))
        context, eager, made_with = self.contexts[index]
        if what == "save":
            context.save(path := self.files.folder / "saved.safetensors")
            self.saved = path, deepcopy(eager), made_with if eager is not None else -1
        elif what == "reset":
            context.reset()
            self.contexts[index] = context, None, made_with if context.on_swap == "pin" else -1
        else:
            context.close()
            del self.contexts[index]

    @precondition(lambda self: self.saved and len(self.contexts) < 4)
    @rule(policy=st.sampled_from(["invalidate", "reset", "keep"]))
    def restore(self, policy: Policy) -> None:
        assert self.saved
        path, eager, made_with = self.saved
        if made_with not in (-1, self.current):
            with pytest.raises(ContextError, check=because("mismatch")):
                self.model.load_context(path, on_swap=policy)
            made_with = self.current
            context = self.model.load_context(path, on_swap=policy, allow_other_weights=True)
        else:
            context = self.model.load_context(path, on_swap=policy)
        self.contexts.append((context, deepcopy(eager), made_with))


@pytest.mark.parametrize(
    ("examples", "steps"), [(20, 30), pytest.param(400, 60, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_any_order_of_steps(files: Files, examples: int, steps: int) -> None:
    machine = type("Machine", (ContextMachine,), {"files": files})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )


class Stream(threading.Thread):
    """Sequence of contexts of one policy, whose answers are compared with an eager model's."""

    def __init__(self, policy: Policy, model: Model, files: Files, ids: list[str], stop: threading.Event) -> None:
        super().__init__()
        self.policy, self.model, self.files, self.ids, self.stop = policy, model, files, ids, stop
        self.answers, self.wrong = 0, list[str]()

    @torch.no_grad()
    def run(self) -> None:
        while not self.stop.is_set():
            with self.model.new_context(on_swap=self.policy) as context:
                try:
                    self.stream(context)
                except StaleState:
                    assert self.policy == "invalidate"

    def stream(self, context: Context) -> None:
        eager: Remembering | None = None
        made_with = -1
        for step in range(8):
            answer, before = self.model(X * step, context=context), made_with
            made_with = self.ids.index(str(context.weights_id))
            following = self.files.eager(made_with)
            if eager is not None and (self.policy != "reset" or made_with == before):
                following.total, following.calls = eager.total, eager.calls
            if not torch.equal(answer, following(X * step)):
                self.wrong.append(f"step {step} of the weights {made_with}")
            eager = following
            self.answers += 1


def test_contexts_of_each_policy_in_a_storm(files: Files) -> None:
    """No answer mixes generations, and no context sees another's state."""
    model, stop = load(files.artifact, files.weights[0]), threading.Event()
    ids = [model.swap(path).weights_id for path in files.weights]
    streams = [Stream(policy, model, files, ids, stop) for policy in POLICIES for _ in range(2)]
    for stream in streams:
        stream.start()
    for number in range(60):
        model.swap(files.weights[number % 3])
    stop.set()
    for stream in streams:
        stream.join(60)
    assert [stream.wrong for stream in streams] == [[]] * len(streams)
    assert all(stream.answers > 8 for stream in streams)
