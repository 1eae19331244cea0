"""Contexts: each caller's own copy of the state, what a swap does to it, and what it is saved as."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn

from tests.support.forks import in_a_child
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import (
    Context,
    ContextBroken,
    ContextBusy,
    ContextClosed,
    ContextFileError,
    ContextMismatch,
    InputMismatch,
    LeaseTimeout,
    Model,
    ModelClosed,
    NoWeights,
    StaleContext,
    Unsupported,
    load,
)
from weightswap_runtime.engines.aten import state
from weightswap_runtime.engines.aten.graph_call import GraphCall
from weightswap_runtime.format.header import parse_file
from weightswap_runtime.live.context import OnSwap

Policy = Literal["invalidate", "reset", "keep", "pin"]
POLICIES: tuple[Policy, ...] = get_args(OnSwap)


class Remembering(nn.Module):
    """What it was given, taken through its weights, adds up; in place, and by assignment."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mix = nn.Linear(3, 3)
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("calls", torch.ones((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(self.mix(x).sum(0))
        self.calls = self.calls + 1
        return self.total / self.calls

    def peek(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The state itself, unchanged."""
        return self.total, self.calls

    def plain(self, context: torch.Tensor) -> torch.Tensor:
        """A method without state, whose input has the name of a call's argument."""
        return context * 2


X = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = [Remembering(seed).eval() for seed in range(3)]
        methods = {
            "forward": MethodSpec("forward", (X,)),
            "peek": MethodSpec("peek"),
            "plain": MethodSpec("plain", (X,)),
        }
        self.artifact = export(self.models[0], methods=methods, out=folder / "a.artifact", engines=("torch", "onnx"))
        self.weights = [
            pack(model, self.artifact, out=folder / f"v{seed}.safetensors").path
            for seed, model in enumerate(self.models)
        ]

    def eager(self, seed: int) -> Remembering:
        return deepcopy(self.models[seed])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("contexts"))


class Served:
    """A model on one engine, called with tensors whatever the engine takes."""

    def __init__(self, files: Files, engine: str = "torch", **options: Any) -> None:
        self.files = files
        self.model = load(files.artifact, files.weights[0], engine=engine, **options)  # type: ignore[arg-type]

    def __call__(self, x: torch.Tensor = X, context: Context | None = None, of: Any = None) -> torch.Tensor:
        given = x if self.model.engine == "torch" else x.numpy()
        return torch.as_tensor((of or self.model)(given, context=context) if context else (of or self.model)(given))

    def peek(self, context: Context) -> tuple[torch.Tensor, int]:
        total, calls = self.model.peek(context=context)
        return torch.as_tensor(total), int(calls)

    def equal(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        if self.model.engine == "torch":
            return torch.equal(found, expected)
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["torch", "onnx"])
def served(request: pytest.FixtureRequest, files: Files) -> Served:
    return Served(files, request.param)


@pytest.fixture
def model(files: Files) -> Model:
    return load(files.artifact, files.weights[0])


@torch.no_grad()
def test_a_stream_equals_the_eager_model_run_step_by_step(served: Served, files: Files) -> None:
    contexts = [served.model.new_context() for _ in range(2)]
    eager = [files.eager(0) for _ in range(2)]
    for step in range(6):
        which = step % 3 % 2
        assert served.equal(served(X * step, contexts[which]), eager[which](X * step))
    for context, each in zip(contexts, eager, strict=True):
        total, calls = served.peek(context)
        assert served.equal(total, each.total)
        assert calls == each.calls


@torch.no_grad()
def test_a_call_without_a_context_leaves_no_trace(served: Served, files: Files) -> None:
    context = served.model.new_context()
    first = served(X, context)
    assert [served.equal(served(), files.eager(0)(X)) for _ in range(3)] == [True] * 3
    assert served.equal(first, served())
    assert served.peek(context)[1] == 2


def test_outputs_are_no_windows_on_the_state(served: Served) -> None:
    context = served.model.new_context()
    served(X, context)
    total, _ = served.model.peek(context=context)
    before = served.peek(context)[0].clone()
    total += 7
    assert torch.equal(served.peek(context)[0], before)


@torch.no_grad()
def test_what_a_swap_does_is_the_contexts_policy(served: Served, files: Files) -> None:
    contexts = {policy: served.model.new_context(on_swap=policy) for policy in POLICIES}
    unused = served.model.new_context()
    eager = files.eager(0)
    eager(X)
    for context in contexts.values():
        served(X, context)
    old = served.model.weights_id
    receipt = served.model.swap(files.weights[1])
    assert receipt.contexts == {"invalidated": 1, "kept": 1, "pinned": 1, "reset": 1}
    with pytest.raises(StaleContext) as stale:
        served(X, contexts["invalidate"])
    assert (stale.value.made_with, stale.value.served) == (old, served.model.weights_id)
    assert served.equal(served(X, contexts["pin"]), eager(X))
    assert (contexts["pin"].weights_id, contexts["keep"].weights_id) == (old, old)
    assert served.equal(served(X, contexts["reset"]), files.eager(1)(X))
    assert served.equal(served(X, unused), files.eager(1)(X))
    kept = files.eager(1)
    kept.load_state_dict(files.models[1].state_dict())
    first = files.eager(0)
    first(X)
    kept.total, kept.calls = first.total, first.calls
    assert served.equal(served(X, contexts["keep"]), kept(X))
    assert contexts["keep"].weights_id == served.model.weights_id
    contexts["pin"].close()
    assert served.model.swap(files.weights[1]).contexts == {"invalidated": 1}


@torch.no_grad()
def test_a_context_lives_again_when_its_weights_come_back(model: Model, files: Files) -> None:
    context, eager = model.new_context(), files.eager(0)
    assert torch.equal(model(X, context=context), eager(X))
    model.swap(files.weights[1])
    with pytest.raises(StaleContext):
        model(X, context=context)
    model.rollback()
    assert torch.equal(model(X, context=context), eager(X))
    model.swap(files.weights[1])
    context.reset()
    assert torch.equal(model(X, context=context), files.eager(1)(X))


@pytest.mark.parametrize("residency", ["single", "double"])
def test_a_pinned_context_keeps_its_weights_until_it_is_closed(residency: str, files: Files) -> None:
    served = Served(files, residency=residency)
    model, context = served.model, served.model.new_context(on_swap="pin")
    if residency == "double":
        model.swap(files.weights[1])
    found: list[str] = []

    def swap() -> None:
        try:
            model.swap(files.weights[2], timeout=0.1)
        except LeaseTimeout as error:
            found.append(str(error))

    thread = threading.Thread(target=swap)
    thread.start()
    thread.join(30)
    assert "still held by 1 pinned context" in found[0]
    with pytest.raises(LeaseTimeout, match="close the context"):
        model.swap(files.weights[2])
    with torch.no_grad():
        assert torch.equal(model(X, context=context), files.eager(0)(X))
    context.close()
    model.swap(files.weights[2], timeout=0)


def test_a_pinned_context_that_is_forgotten_holds_nothing(files: Files) -> None:
    model = load(files.artifact, files.weights[0], residency="single")
    context = model.new_context(on_swap="pin")
    reference = weakref.ref(context)
    del context
    gc.collect()
    assert reference() is None
    assert model.swap(files.weights[1], timeout=0).contexts == {}


def test_pins_and_stagings_take_contexts_too(model: Model, files: Files) -> None:
    context, tried = model.new_context(), model.new_context()
    with model.pin() as pinned, model.stage(files.weights[1]) as staged, torch.no_grad():
        eager, other = files.eager(0), files.eager(1)
        assert torch.equal(pinned(X, context=context), eager(X))
        assert torch.equal(staged(X, context=tried), other(X))
        with pytest.raises(StaleContext):
            staged(X, context=context)
        staged.commit()
        assert torch.equal(model(X, context=tried), other(X))
        assert torch.equal(pinned(X, context=context), eager(X))


def test_a_pinned_context_is_answered_by_its_weights_alone(model: Model, files: Files) -> None:
    with model.new_context(on_swap="pin") as context, model.stage(files.weights[1]) as staged, torch.no_grad():
        with pytest.raises(StaleContext):
            staged(X, context=context)
        assert torch.equal(model(X, context=context), files.eager(0)(X))


def test_a_forked_child_keeps_to_its_parents_pins(files: Files) -> None:
    """Whichever thread of the child swaps; what another thread of the parent has pinned is not there."""
    for residency in ("single", "double"):
        model, contexts = load(files.artifact, files.weights[0], residency=residency), []  # type: ignore[arg-type]
        thread = threading.Thread(
            target=lambda model=model, contexts=contexts: contexts.append(model.new_context(on_swap="pin"))
        )  # type: ignore[misc]
        thread.start()
        thread.join(30)
        own = model.new_context(on_swap="pin")
        refused: list[object] = []

        def swap(model: Model = model, refused: list[object] = refused) -> None:
            try:
                for number in (1, 2):
                    model.swap(files.weights[number], timeout=0.1)
            except LeaseTimeout as error:
                refused.append(error)

        def child(
            model: Model = model,
            own: Context = own,
            contexts: list[Context] = contexts,
            refused: list[object] = refused,
        ) -> None:
            other = threading.Thread(target=swap)
            other.start()
            other.join(60)
            assert refused
            with torch.no_grad():
                assert torch.equal(model(X, context=own), files.eager(0)(X))
            with pytest.raises(ContextClosed, match="a fork has lost the thread"):
                model(X, context=contexts[0])

        in_a_child(child)


def test_two_calls_at_once_with_one_context_are_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    original = GraphCall.__call__

    def slow(self: GraphCall, *args: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return original(self, *args)

    monkeypatch.setattr(GraphCall, "__call__", slow)
    context, answers = model.new_context(), list[torch.Tensor]()
    thread = threading.Thread(target=lambda: answers.append(model(X, context=context)))
    thread.start()
    assert inside.wait(30)
    uses: list[Callable[[], Any]] = [
        lambda: model(X, context=context),
        context.reset,
        context.close,
        lambda: context.save("nowhere.safetensors"),
    ]
    for use in uses:
        with pytest.raises(ContextBusy):
            use()
    go_on.set()
    thread.join(30)
    assert len(answers) == 1
    model(X, context=context)


def test_a_call_that_broke_off_leaves_no_half_state_behind(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    context = model.new_context()
    model(X, context=context)
    with pytest.raises(InputMismatch):
        model(X[:, :2], context=context)
    model(X, context=context)

    def broken(self: GraphCall, *args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GraphCall, "__call__", broken)
        with pytest.raises(KeyboardInterrupt):
            model(X, context=context)
    for use in (lambda: model(X, context=context), lambda: context.save("nowhere.safetensors")):
        with pytest.raises(ContextBroken, match=r"reset\(\) it"):
            use()
    context.reset()
    assert torch.equal(model(X, context=context), model(X))


def test_a_reset_that_breaks_off_leaves_no_half_state(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    context = model.new_context()
    model(X, context=context)

    def broken(live: torch.Tensor, value: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state, "_put", broken)
        with pytest.raises(KeyboardInterrupt):
            context.reset()
    with pytest.raises(ContextBroken):
        model(X, context=context)
    context.reset()
    assert torch.equal(model(X, context=context), model(X))


def test_a_context_is_of_one_model_and_can_be_closed(model: Model, files: Files) -> None:
    with load(files.artifact, files.weights[0]) as other:
        context = other.new_context()
        with pytest.raises(ContextMismatch, match="of another model"):
            model(X, context=context)
        with context:
            other(X, context=context)
        context.close()
        assert context.closed
        for use in (lambda: other(X, context=context), context.reset, lambda: context.save("nowhere.safetensors")):
            with pytest.raises(ContextClosed):
                use()
        left = other.new_context()
    with pytest.raises(ModelClosed):
        other(X, context=left)
    with pytest.raises(ModelClosed):
        other.new_context()


def test_a_method_may_have_an_input_called_context(model: Model) -> None:
    assert torch.equal(model.plain(context=X), X * 2)
    with model.new_context() as context:
        assert torch.equal(model.plain(X, context=context), X * 2)
        assert context.weights_id is None  # no state was touched


def test_policies_and_models_that_cannot_be(model: Model, files: Files) -> None:
    with pytest.raises(Unsupported, match="on_swap='drop': expected 'invalidate', 'reset', 'keep', 'pin'"):
        model.new_context(on_swap="drop")  # type: ignore[arg-type]
    empty = load(files.artifact)
    context = empty.new_context()
    with pytest.raises(NoWeights):
        empty(X, context=context)
    with pytest.raises(NoWeights):
        empty.new_context(on_swap="pin")
    empty.swap(files.weights[0])
    assert torch.equal(empty(X, context=context), model(X))


# saved ones


@pytest.mark.parametrize("there", ["torch", "onnx"])
@torch.no_grad()
def test_a_saved_context_goes_on_where_it_was(served: Served, there: str, files: Files, tmp_path: Path) -> None:
    context, eager = served.model.new_context(), files.eager(0)
    for _ in range(2):
        served(X, context)
        eager(X)
    other = Served(files, there)
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    context.save(paths[0])
    other.model.load_context(paths[0]).save(paths[1])
    served.model.load_context(paths[1]).save(paths[2])
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()
    found = other.model.load_context(paths[2], on_swap="keep")
    assert found.weights_id == served.model.weights_id
    assert other.peek(found)[1] == 3
    assert torch.equal(other.peek(found)[0], served.peek(context)[0])
    assert torch.allclose(other(X, found), eager(X), atol=1e-5)
    assert set(safetensors.torch.load_file(paths[0])) == {"total", "calls"}  # and no weights


def test_a_context_of_other_weights_or_of_another_graph_is_refused_by_name(
    model: Model, files: Files, tmp_path: Path
) -> None:
    context = model.new_context()
    model(X, context=context)
    context.save(path := tmp_path / "c.safetensors")
    old = str(model.weights_id)
    model.swap(files.weights[1])
    with pytest.raises(ContextMismatch, match=f"{old[:12]}.*{str(model.weights_id)[:12]}.*allow_other_weights"):
        model.load_context(path)
    taken = model.load_context(path, allow_other_weights=True)
    assert int(model.peek(context=taken)[1]) == 2
    late = load(files.artifact)
    waiting = late.load_context(path)  # nothing is served yet
    late.swap(files.weights[1])
    with pytest.raises(StaleContext):
        late(X, context=waiting)
    other = export(files.models[0], (X[:1],), out=tmp_path / "other.artifact")
    foreign = load(other, pack(files.models[0], other, out=tmp_path / "o.safetensors").path)
    with pytest.raises(ContextMismatch, match=r"graph .*allow_other_graph"):
        foreign.load_context(path)
    found = foreign.load_context(path, allow_other_graph=True)
    with torch.no_grad():
        eager = files.eager(0)
        eager(X)
        assert torch.equal(foreign(X[:1], context=found), eager(X[:1]))


def test_a_damaged_file_is_refused_and_nothing_changes(model: Model, files: Files, tmp_path: Path) -> None:
    context = model.new_context()
    model(X, context=context)
    context.save(path := tmp_path / "c.safetensors")
    raw = path.read_bytes()
    tensors = safetensors.torch.load_file(path)
    renamed = {"totals": tensors["total"], "calls": tensors["calls"]}
    damages: dict[str, Callable[[], object]] = {
        "bytes are not those": lambda: path.write_bytes(raw[:-1] + b"\x7f"),
        "it is truncated": lambda: path.write_bytes(raw[:-1]),
        "is not a context": lambda: safetensors.torch.save_file(tensors, path),
        "safetensors": lambda: path.write_bytes(b"nonsense"),
        "not a context that": lambda: path.write_bytes(files.weights[0].read_bytes()),
        "lacks 'total'; it has 'totals'": lambda: path.write_bytes(
            safetensors.torch.save(renamed, parse_file(raw, "c")[1])
        ),
    }
    for text, damage in damages.items():
        damage()
        with pytest.raises(ContextFileError, match=text):
            model.load_context(path)
    with path.open("wb") as sparse:
        sparse.truncate(1 << 42)
    with pytest.raises(ContextFileError, match="more than the state of this model"):
        model.load_context(path)
    path.unlink()
    with pytest.raises(ContextFileError, match="No such file"):
        model.load_context(path)
    model(X, context=context)


def test_a_write_that_fails_leaves_what_was_there(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = model.new_context()
    model(X, context=context)
    context.save(path := tmp_path / "c.safetensors")
    before = path.read_bytes()
    model(X, context=context)

    def broken(self: Any, name: str) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(context._state), "content", broken)
    with pytest.raises(OSError, match="No space"):
        context.save(path)
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["c.safetensors"]


def test_thousands_of_contexts_cost_their_state_and_no_more(model: Model) -> None:
    contexts = [model.new_context() for _ in range(3000)]
    model(X, context=contexts[0])
    assert [int(model.peek(context=context)[1]) for context in contexts[:3]] == [2, 1, 1]
    reference = weakref.ref(contexts[1])
    contexts.clear()
    gc.collect()
    assert reference() is None


def test_a_forked_child_goes_on_with_its_own_copy(model: Model) -> None:
    context = model.new_context()
    model(X, context=context)

    def child() -> None:
        assert int(model.peek(context=context)[1]) == 2
        model(X, context=context)
        assert int(model.peek(context=context)[1]) == 3

    in_a_child(child)
    assert int(model.peek(context=context)[1]) == 2


# any order


class ContextMachine(RuleBasedStateMachine):
    """Calls, saves, loads, swaps and rollbacks over several contexts, against an eager model for each of them."""

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
        return any(context.on_swap == "pin" and made == seed for context, _, made in self.contexts)

    @rule(seed=st.integers(0, 2))
    def swap(self, seed: int) -> None:
        held = any(
            context.on_swap == "pin" and (not self.double or context._pinned.session is not self.live)  # type: ignore[union-attr]
            for context, _, _ in self.contexts
        )
        if held:
            with pytest.raises(LeaseTimeout):
                self.model.swap(self.files.weights[seed])
            return
        counts: dict[str, int] = {}
        becomes = {"invalidate": "invalidated", "reset": "reset", "keep": "kept", "pin": "pinned"}
        for context, _, made in self.contexts:
            if made not in (-1, seed):
                counts[becomes[context.on_swap]] = counts.get(becomes[context.on_swap], 0) + 1
        assert self.model.swap(self.files.weights[seed]).contexts == counts
        self.current = seed

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
        context, eager, made = self.contexts[index]
        weights = made if context.on_swap == "pin" else self.current
        if made not in (-1, weights):
            if context.on_swap == "invalidate":
                with pytest.raises(StaleContext):
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
        context, eager, made = self.contexts[index]
        if what == "save":
            context.save(path := self.files.folder / "saved.safetensors")
            self.saved = path, deepcopy(eager), made if eager is not None else -1
        elif what == "reset":
            context.reset()
            self.contexts[index] = context, None, made if context.on_swap == "pin" else -1
        else:
            context.close()
            del self.contexts[index]

    @precondition(lambda self: self.saved and len(self.contexts) < 4)
    @rule(policy=st.sampled_from(["invalidate", "reset", "keep"]))
    def restore(self, policy: Policy) -> None:
        assert self.saved
        path, eager, made = self.saved
        if made not in (-1, self.current):
            with pytest.raises(ContextMismatch):
                self.model.load_context(path, on_swap=policy)
            made = self.current
            context = self.model.load_context(path, on_swap=policy, allow_other_weights=True)
        else:
            context = self.model.load_context(path, on_swap=policy)
        self.contexts.append((context, deepcopy(eager), made))


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
    """Contexts of one policy, one after the other; each answer is compared with an eager model's."""

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
                except StaleContext:
                    assert self.policy == "invalidate"

    def stream(self, context: Context) -> None:
        eager: Remembering | None = None
        made = -1
        for step in range(8):
            answer, before = self.model(X * step, context=context), made
            made = self.ids.index(str(context.weights_id))
            following = self.files.eager(made)
            if eager is not None and (self.policy != "reset" or made == before):
                following.total, following.calls = eager.total, eager.calls
            if not torch.equal(answer, following(X * step)):
                self.wrong.append(f"step {step} of the weights {made}")
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
