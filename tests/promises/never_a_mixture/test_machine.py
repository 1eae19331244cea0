"""Property-based machine: stagings, commits, rollbacks and pins in any order, compared with a plain model of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.machines import run_in_any_order
from tests.support.sessions import addresses, live, live_bytes
from tests.support.varied import Origin, RichFiles, X, small_blocks
from weightswap_runtime import (
    BaseMismatch,
    DigestMismatch,
    ModelFailed,
    NothingToRollBack,
    NoWeights,
    Pinned,
    StageClosed,
    Staged,
    StagingBusy,
    SwapError,
    UnexpectedWeights,
    WaitTimeout,
    WeightFileError,
    load,
)
from weightswap_runtime.jobs import Claim

SETS = 3
seeds = st.integers(0, SETS - 1)
parts = st.sampled_from(["conv.*", "embed.*", "fused.*", "mix.bias", "head.weight", "*"])
kinds = st.sampled_from(["full", "checkpoint"])


class Way(NamedTuple):
    """Kind of file that weights come from: a weight file, a checkpoint, a part of either, or a delta from `base`."""

    kind: str
    seed: int
    base: int = 0
    only: str | None = None


ways = st.one_of(
    st.builds(Way, kinds, seeds, only=st.none()),
    st.builds(Way, kinds, seeds, only=parts),
    st.permutations(range(SETS)).map(lambda sets: Way("delta", sets[0], sets[1])),
)


class Files(RichFiles):
    """The files, intact and damaged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SETS)
        self.flipped = self._changed(self.full[1], slice(-1, None), bytes([self.full[1].read_bytes()[-1] ^ 1]))
        self.flipped_delta = self._changed(self.deltas[0, 1], slice(-1, None), b"\x77")
        self.truncated = self._changed(self.full[1], slice(-1, None), b"")

    def _changed(self, path: Path, where: slice, content: bytes) -> Path:
        raw = bytearray(path.read_bytes())
        raw[where] = content
        copy = self.folder / f"bad{len(list(self.folder.iterdir()))}.safetensors"
        copy.write_bytes(raw)
        return copy

    def path(self, way: Way) -> Path:
        if way.kind == "delta":
            return self.deltas[way.base, way.seed]
        return (self.full if way.kind == "full" else self.checkpoints)[way.seed]


class Pin(NamedTuple):
    pinned: Pinned
    origin: Origin
    generation: int
    place: int


class SwapMachine(RuleBasedStateMachine):
    """Machine that predicts the served weights, the rollback's target and the holders before each step."""

    files: Files

    @initialize(
        residency=st.sampled_from(["single", "double"]),
        keep=st.booleans(),
        first=st.sampled_from([0, 1, 2, 0, 1, None]),
    )
    def start(self, residency: str, keep: bool, first: int | None) -> None:
        self.double, self.keep = residency == "double", keep
        self.model = load(self.files.artifact, residency=residency, keep_previous="host" if keep else None)
        self.current: Origin | None = None
        self.previous: Origin | None = None
        self.failed = False
        self.commits = self.place = self.counted = 0
        self.staged: tuple[Staged, Origin] | None = None
        self.pins: list[Pin] = []
        self.counted_with: Origin | None = None
        self.counter = self.model.new_context(on_swap="reset")
        self.addresses = addresses(self.model)
        if first is not None:
            self.swap(Way("full", first))

    # expectations

    def goal(self, way: Way) -> Origin:
        """Return the set that a staging leads to."""
        if way.only is None:
            return self.files.whole(way.seed)
        assert self.current is not None
        return self.files.mixed(self.current, way.only, way.seed)

    def refusal(self, way: Way) -> type[SwapError] | None:
        """Return the error that refuses a staging before anything is written."""
        builds_on_live = way.kind == "delta" or way.only is not None
        if builds_on_live and (self.current is None or self.failed):
            return BaseMismatch
        if way.kind == "delta" and self.current != self.files.whole(way.base):
            return BaseMismatch
        return WaitTimeout if self.idle_is_pinned else None

    @property
    def idle_is_pinned(self) -> bool:
        return self.double and any(pin.place != self.place for pin in self.pins)

    def overwritten(self) -> None:
        """Note that a staging has written to the idle arena."""
        if self.double and not self.keep:
            self.previous = None

    def committed(self, origin: Origin) -> None:
        if not self.failed:
            self.previous = self.current if self.double or self.keep else None
        if self.double and self.current is not None:
            self.place ^= 1
        self.current, self.failed = origin, False
        self.commits += 1

    # staging

    @rule(way=ways)
    def stage(self, way: Way) -> None:
        expected = StagingBusy if self.staged else self.refusal(way)
        if expected:
            with pytest.raises(expected):
                self.model.stage(self.files.path(way), only=way.only)
            return
        self.staged = self.model.stage(self.files.path(way), only=way.only), self.goal(way)
        self.overwritten()

    @precondition(lambda self: not self.staged)
    @rule(way=ways)
    def swap(self, way: Way) -> None:
        expected = self.refusal(way) or self.held()
        if expected is None:
            goal = self.goal(way)
            self.model.swap(self.files.path(way), only=way.only)
            self.overwritten()
            self.committed(goal)
            return
        with pytest.raises(expected):
            self.model.swap(self.files.path(way), only=way.only)
        if self.refusal(way) is None:
            self.overwritten()

    def held(self) -> type[SwapError] | None:
        """Return the error of a commit in place that would wait for a pin of this thread."""
        return WaitTimeout if self.pins and not self.double else None

    @precondition(lambda self: not self.staged)
    @rule(way=ways, stop=st.sampled_from(["no", "at once", "in the end", "dropped"]))
    def stage_in_the_background(self, way: Way, stop: str) -> None:
        refusal = self.refusal(way)
        goal = self.goal(way) if refusal is None else None
        staged = self.model.stage(self.files.path(way), only=way.only, background=True, timeout=0)
        if stop in ("at once", "dropped"):
            if stop == "at once":
                staged.cancel()
            del staged
            self.model._store.turns.claim(ticket := Claim(), 10, None)  # the thread has ended
            ticket.end()
            if refusal is None:
                self.settle()
            return
        if refusal is not None:
            with pytest.raises(refusal):
                staged.wait(120)
            return
        assert staged.wait(120).weights_id == self.files.weights_id(goal)
        self.overwritten()
        if stop == "in the end":
            staged.cancel()
        else:
            self.staged = staged, goal

    def settle(self) -> None:
        """Resolve whether a stopped staging had overwritten the previous weights, which is a matter of chance."""
        if not (self.double and not self.keep and self.previous):
            return
        if not self.pins:
            with suppress(NothingToRollBack):
                for _ in "there", "back":
                    self.model.rollback()
                    self.committed(self.previous)
                    self.the_promises_hold()
        self.model.stage(self.files.full[0]).discard()
        self.overwritten()

    @precondition(lambda self: not self.staged)
    @rule(
        kind=st.sampled_from(
            ["late", "flipped", "part flipped", "delta flipped", "late", "truncated", "nowhere", "expect"]
        )
    )
    def refuse(self, kind: str) -> None:
        files, whole = self.files, self.files.whole(0)
        path, error, writes, options = {
            "flipped": (files.flipped, DigestMismatch, True, {}),
            "part flipped": (files.flipped, DigestMismatch, False, {"only": "*"}),
            "delta flipped": (files.flipped_delta, DigestMismatch, False, {}),
            "truncated": (files.truncated, WeightFileError, False, {}),
            "nowhere": (files.folder / "nowhere", WeightFileError, False, {}),
            "expect": (files.full[1], UnexpectedWeights, False, {"expect": files.weights_id(whole)}),
            "late": (files.checkpoints[1], UnexpectedWeights, True, {"expect": files.weights_id(whole)}),
        }[kind]
        if kind == "part flipped" and (self.current is None or self.failed):
            error = BaseMismatch
        if kind == "delta flipped" and (self.current != whole or self.failed):
            error = BaseMismatch
        if writes and self.idle_is_pinned:
            error, writes = WaitTimeout, False
        with pytest.raises(error):
            self.model.swap(path, **options)
        if writes:
            self.overwritten()

    # ends of a staging

    @precondition(lambda self: self.staged)
    @rule()
    def commit(self) -> None:
        assert self.staged
        staged, origin = self.staged
        if expected := self.held():
            with pytest.raises(expected):
                staged.commit()
            return
        staged.commit()
        self.committed(origin)
        self.staged, self.closed = None, staged  # the staged weights hold nothing any more
        with pytest.raises(StageClosed):
            staged.commit()

    @precondition(lambda self: self.staged)
    @rule(how=st.sampled_from(["discard", "cancel", "drop", "leave"]))
    def give_up(self, how: str) -> None:
        assert self.staged
        (staged, _), self.staged = self.staged, None
        if how == "leave":
            with staged:
                pass
        elif how != "drop":
            getattr(staged, how)()

    @precondition(lambda self: self.staged)
    @rule()
    def try_it(self) -> None:
        assert self.staged
        staged, origin = self.staged
        assert torch.equal(staged(X), self.files.eager(origin))
        staged.count(X)

    # failures in the middle of a commit in place

    @contextmanager
    def breaking(self, after: int) -> Iterator[list[int]]:
        """Let writes to the served arena's memory fail after some pieces."""
        arena, broken, written = live(self.model).session.arena, [], []

        def failing(name: str) -> Any:
            original = getattr(arena, name)

            def write(*args: Any) -> None:
                written.append(1)
                original(*args)
                if len(written) > after:
                    broken.append(1)
                    raise OSError("the memory is gone")

            return write

        with pytest.MonkeyPatch.context() as patch:
            for name in ("write", "copy_part"):
                patch.setattr(arena, name, failing(name), raising=True)
            yield broken

    def broke(self) -> None:
        if not self.failed:
            self.previous = self.current if self.keep else None
        self.failed = True

    @precondition(lambda self: not self.double and self.current and not self.pins)
    @rule(way=ways, after=st.integers(0, 3))
    def break_a_commit(self, way: Way, after: int) -> None:
        """Break a commit of the staged set, or else of `way`, or of a full set if that is refused."""
        if self.staged is None:
            self.stage(way if self.refusal(way) is None else Way("full", way.seed))
        assert self.staged
        staged, origin = self.staged
        with self.breaking(after) as broken:
            try:
                staged.commit()
            except ModelFailed:
                assert broken
                self.broke()
                return
        assert not broken
        self.committed(origin)
        self.staged = None

    @precondition(lambda self: not self.staged and not self.double and self.previous and not self.pins)
    @rule(after=st.integers(0, 3))
    def break_a_rollback(self, after: int) -> None:
        with self.breaking(after) as broken:
            try:
                self.model.rollback()
            except ModelFailed:
                assert broken
                self.broke()
                return
        assert not broken
        assert self.previous
        self.committed(self.previous)

    # rollbacks, pins and calls

    @rule()
    def rollback(self) -> None:
        expected: type[SwapError] | None = None
        if self.staged:
            expected = StagingBusy
        elif self.previous is None or self.current is None:
            expected = NothingToRollBack
        elif self.pins and not self.double:
            expected = WaitTimeout
        if expected:
            with pytest.raises(expected):
                self.model.rollback()
            return
        self.model.rollback()
        assert self.previous
        self.committed(self.previous)

    @precondition(lambda self: len(self.pins) < 2)
    @rule()
    def pin(self) -> None:
        pinned = self.model.pin()
        if expected := self.refused_call():
            with pytest.raises(expected):
                pinned.__enter__()
            return
        assert self.current is not None
        self.pins.append(Pin(pinned.__enter__(), self.current, self.commits - 1, self.place))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))).pinned.__exit__()

    def refused_call(self) -> type[Exception] | None:
        return ModelFailed if self.failed else NoWeights if self.current is None else None

    @rule()
    def count(self) -> None:
        """Check a context's state: it lasts until other weights answer; without a context each call starts anew."""
        if self.refused_call() or self.current is None:
            return
        bias = self.files.tensors(self.current[self.files.names.index("mix.bias")])["mix.bias"].detach()
        self.counted = self.counted + 1 if self.counted_with == self.current else 1
        self.counted_with = self.current
        assert torch.equal(self.model.count(X, context=self.counter), bias + self.counted)
        assert torch.equal(self.model.count(X), bias + 1)

    @invariant()
    def the_promises_hold(self) -> None:
        model = self.model
        assert addresses(model) == self.addresses
        assert model.failed == self.failed
        assert model.generation == (self.commits - 1 if self.commits else None)
        assert model.weights_id == (None if self.current is None else self.files.weights_id(self.current))
        assert [receipt.generation for receipt in model.history] == list(range(self.commits))[-100:]
        if expected := self.refused_call():
            with pytest.raises(expected):
                model(X)
        else:
            assert self.current is not None
            assert torch.equal(model(X), self.files.eager(self.current))
            assert live_bytes(model) == self.files.arena_bytes(self.current)
        for pin in self.pins:
            assert (pin.pinned.generation, pin.pinned.weights_id) == (
                pin.generation,
                self.files.weights_id(pin.origin),
            )
            assert torch.equal(pin.pinned(X), self.files.eager(pin.origin))

    def teardown(self) -> None:
        for pin in getattr(self, "pins", ()):
            pin.pinned.__exit__()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with small_blocks():
        yield Files(tmp_path_factory.mktemp("machine"))


@pytest.mark.parametrize(
    ("examples", "steps"), [(14, 40), pytest.param(200, 80, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_any_order_of_steps(files: Files, examples: int, steps: int) -> None:
    run_in_any_order(SwapMachine, examples, steps, files=files)
