"""A model through its public API, over a hand-made artifact, in both residencies."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from blake3 import blake3

from tests.runtime.test_header import BROKEN
from tests.tiny import TinyArtifact
from weightswap_runtime import (
    DigestMismatch,
    GraphMismatch,
    InputMismatch,
    LeaseTimeout,
    Model,
    ModelFailed,
    NothingToRollBack,
    NoWeights,
    OutOfMemory,
    PinReleased,
    StageClosed,
    StagingBusy,
    SwapError,
    UnknownMethod,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.arena import HostArena

WriteWeights = Callable[[int], Path]
X = torch.arange(6.0).reshape(2, 3)


def serves(model: Model, seed: int) -> bool:
    return torch.equal(model(X), TinyArtifact.eager(seed, X))


def test_swap_replaces_every_weight(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    assert (model.generation, model.graph_id) == (0, tiny.manifest.graph_id)
    assert serves(model, 0)
    receipt = model.swap(weight_file(1))
    assert serves(model, 1)
    assert (receipt.generation, receipt.weights_id) == (1, model.weights_id)
    assert receipt.previous_weights_id != receipt.weights_id
    assert receipt.source.endswith("v1.safetensors")
    assert receipt.bytes_read == 92
    assert (receipt.bytes_copied == 0) == (residency == "double")
    assert min(receipt.seconds_staged, receipt.seconds_verified, receipt.seconds_paused) >= 0


def test_without_weights_calls_are_refused_until_the_first_swap(
    tiny: TinyArtifact, weight_file: WriteWeights, residency: str
) -> None:
    model = load(tiny.path, residency=residency)
    assert (model.generation, model.weights_id) == (None, None)
    with pytest.raises(NoWeights, match=r"call model.swap\(path\) first"):
        model(X)
    with pytest.raises(NoWeights), model.pin():
        pass
    with pytest.raises(NothingToRollBack):
        model.rollback()
    with pytest.raises(WeightFileError):
        model.swap("nowhere.safetensors")
    assert model.swap(weight_file(3)).generation == 0
    assert serves(model, 3)


def test_stage_commit_discard(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    staged = model.stage(weight_file(1))
    assert torch.equal(staged(X), TinyArtifact.eager(1, X))
    assert serves(model, 0)
    with pytest.raises(StagingBusy):
        model.stage(weight_file(2))
    with pytest.raises(StagingBusy):
        model.swap(weight_file(2))
    with pytest.raises(StagingBusy):
        model.rollback()
    staged.discard()
    staged.discard()
    for use in (lambda: staged(X), staged.commit):
        with pytest.raises(StageClosed):
            use()
    assert serves(model, 0)
    with model.stage(weight_file(2)) as second:
        assert second.commit().weights_id == second.weights_id
        with pytest.raises(StageClosed):
            second.commit()
    assert serves(model, 2)


def test_a_staging_that_is_dropped_is_discarded(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    staged = model.stage(weight_file(1))
    del staged
    gc.collect()
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_rollback_goes_back_and_forth(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    model = load(tiny.path, weight_file(0), residency=residency, keep_previous="host")
    first = model.weights_id
    model.swap(weight_file(1))
    receipt = model.rollback()
    assert serves(model, 0)
    assert (receipt.generation, receipt.weights_id, receipt.source) == (2, first, "rollback")
    model.rollback()
    assert serves(model, 1)
    model.swap(weight_file(2))
    model.rollback()
    assert serves(model, 1)
    assert model.generation == 5


def test_single_residency_keeps_nothing_unless_asked(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    model.swap(weight_file(1))
    with pytest.raises(NothingToRollBack, match='keep_previous="host"'):
        model.rollback()
    assert serves(model, 1)


def test_a_staging_takes_the_place_of_the_previous_weights(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    model.swap(weight_file(1))
    with pytest.raises(WeightFileError):
        model.swap("nowhere.safetensors")  # refused before a byte is written: the rollback is still there
    model.rollback()
    model.stage(weight_file(2)).discard()
    with pytest.raises(NothingToRollBack, match="a staging has overwritten them"):
        model.rollback()
    assert serves(model, 0)


def test_previous_weights_that_are_kept_survive_a_refused_staging(
    tiny: TinyArtifact, weight_file: WriteWeights, residency: str
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency, keep_previous="host")
    model.swap(weight_file(1))
    with pytest.raises(DigestMismatch):
        model.swap(copy_of(weight_file(2), lambda raw: raw.__setitem__(-1, raw[-1] ^ 1)))
    model.stage(weight_file(3)).discard()
    assert serves(model, 1)
    model.rollback()
    assert serves(model, 0)
    model.rollback()
    assert serves(model, 1)


def copy_of(path: Path, change: Callable[[bytearray], None]) -> Path:
    raw = bytearray(path.read_bytes())
    change(raw)
    copy = path.with_name("changed.safetensors")
    copy.write_bytes(raw)
    return copy


def plain(tiny: TinyArtifact, path: Path, **changes: torch.Tensor | None) -> Path:
    """A safetensors file of another tool, without a stamp."""
    values = {**tiny.values(7), **changes}
    safetensors.torch.save_file({name: value for name, value in values.items() if value is not None}, path)
    return path


REFUSED: dict[str, tuple[Callable[[TinyArtifact, WriteWeights, Path], Path], type[SwapError], str]] = {
    "empty": (lambda t, w, p: copy_of(w(1), bytearray.clear), WeightFileError, "too few"),
    "truncated": (
        lambda t, w, p: copy_of(w(1), lambda raw: raw.__delitem__(slice(-1, None))),
        WeightFileError,
        "truncated",
    ),
    "too long": (lambda t, w, p: copy_of(w(1), lambda raw: raw.append(0)), WeightFileError, "1 bytes follow"),
    "a flipped bit": (
        lambda t, w, p: copy_of(w(1), lambda raw: raw.__setitem__(-1, raw[-1] ^ 1)),
        DigestMismatch,
        "the file records the digest",
    ),
    "another graph": (
        lambda t, w, p: t.write(p, t.values(1), graph_id="1" * 64),
        GraphMismatch,
        "allow_other_graph=True",
    ),
    "a wrong weights id": (
        lambda t, w, p: copy_of(w(1), forge_weights_id),
        DigestMismatch,
        "records the weights id",
    ),
    "missing": (lambda t, w, p: plain(t, p, bias=None), WeightsMismatch, "bias: missing"),
    "unexpected": (lambda t, w, p: plain(t, p, biass=torch.ones(5)), WeightsMismatch, "biass: unexpected"),
    "another shape": (
        lambda t, w, p: plain(t, p, weight=torch.ones(5, 3)),
        WeightsMismatch,
        "expected F32[3, 5], found F32[5, 3]",
    ),
    "another dtype": (
        lambda t, w, p: plain(t, p, weight=torch.ones(3, 5).half()),
        WeightsMismatch,
        "Only the dtypes differ",
    ),
    "ties that differ": (
        lambda t, w, p: plain(t, p, again=torch.tensor([9.0])),
        WeightsMismatch,
        "tied and again are one",
    ),
    "a folder": (lambda t, w, p: p.parent, WeightFileError, "cannot be read"),
}


def test_a_named_pipe_is_refused_at_once(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    model = load(tiny.path, weight_file(0))
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(WeightFileError, match="not a regular file"):
        model.swap(tmp_path / "pipe.safetensors")
    for odd in ("a\0b", "\ud800", "x" * 5000):
        with pytest.raises(WeightFileError, match="cannot be opened"):
            model.swap(odd)
    model.swap(weight_file(1))


def test_inputs_must_lie_where_the_graph_runs(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    for odd, says in ((X.to("meta"), "one on meta"), (X.to_sparse(), "expected a dense tensor")):
        with pytest.raises(InputMismatch, match=says):
            model(odd)


def call_pinned(model: Model) -> None:
    with model.pin() as session:
        session(X)


# an interrupt may also hit a callback of somebody else, who cannot raise it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_an_interrupt_leaves_behind_ends_by_itself(
    tiny: TinyArtifact, weight_file: WriteWeights, residency: str
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    deadline, seed = time.monotonic() + 1.5, 0
    interrupts = 0

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while time.monotonic() < deadline:
            seed += 1
            path = weight_file(seed % 3)
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + (seed % 17) * 0.00005)
            try:
                model.swap(path)
                call_pinned(model)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 10
    assert torch.is_grad_enabled()
    gc.collect()
    model.swap(weight_file(5), timeout=5)
    assert serves(model, 5)


@pytest.mark.parametrize("raw", [raw for raw, _ in BROKEN.values()], ids=BROKEN)
def test_no_broken_file_touches_a_live_model(
    raw: bytes, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(raw)
    for residency in ("double", "single"):
        model = load(tiny.path, weight_file(0), residency=residency)
        with pytest.raises(WeightFileError):
            model.swap(path)
        assert (model.generation, serves(model, 0)) == (0, True)


def test_a_live_model_needs_its_artifact_no_more(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    shutil.rmtree(tiny.path)
    assert serves(model, 0)
    model.swap(weight_file(1))
    assert serves(model, 1)


def forge_weights_id(raw: bytearray) -> None:
    start = raw.index(b"weights_id") + len(rb"weights_id\":\"")
    raw[start : start + 64] = b"0" * 64


@pytest.mark.parametrize(("make", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_a_refused_swap_changes_nothing(
    make: Callable[[TinyArtifact, WriteWeights, Path], Path],
    error: type[SwapError],
    says: str,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    residency: str,
    tmp_path: Path,
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    identity = (model.weights_id, model.generation)
    bad = make(tiny, weight_file, tmp_path / "other.safetensors")
    for attempt in (model.swap, model.stage):
        with pytest.raises(error) as refused:
            attempt(bad)
        assert says in str(refused.value)
        assert (model.weights_id, model.generation) == identity
        assert serves(model, 0)
    model.swap(weight_file(1))
    assert serves(model, 1)


def test_a_file_for_another_graph_is_taken_when_its_tensors_fit_and_the_caller_says_so(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(0))
    other = tiny.write(tmp_path / "other.safetensors", tiny.values(1), graph_id="1" * 64)
    model.swap(other, allow_other_graph=True)
    assert serves(model, 1)


@pytest.mark.parametrize("rename", [{}, {"weight": "w"}, {"tied": "again"}])
def test_files_of_other_tools_are_taken(rename: dict[str, str], tiny: TinyArtifact, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({rename.get(name, name): value for name, value in tiny.values(5).items()}, path)
    model = load(tiny.path, path)
    assert serves(model, 5)
    assert model.weights_id == load(tiny.path, tiny.write(tmp_path / "ours.safetensors", tiny.values(5))).weights_id


def test_a_live_model_never_reads_its_file(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    path = weight_file(0)
    model = load(tiny.path, path, residency=residency)
    path.write_bytes(b"")
    assert serves(model, 0)


def test_a_file_rewritten_while_it_is_read_is_refused(
    tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_file: WriteWeights
) -> None:
    model = load(tiny.path, weight_file(0))
    victim = plain(tiny, tmp_path / "victim.safetensors")
    original = os.preadv

    def rewriting(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = original(fd, buffers, offset)
        os.utime(victim, ns=(1, 1))
        return got

    monkeypatch.setattr(os, "preadv", rewriting)
    with pytest.raises(WeightFileError, match="written to while it was read"):
        model.swap(victim)
    monkeypatch.undo()
    assert serves(model, 0)


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError(), KeyboardInterrupt(), 0])
def test_any_failure_of_a_read_leaves_the_model_as_it_was(
    failure: BaseException | int,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    residency: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        for buffer in buffers:
            buffer[:] = b"\xff" * len(buffer)
        if isinstance(failure, int):
            return failure
        raise failure

    monkeypatch.setattr(os, "preadv", failing)
    expected = {int: WeightFileError, OSError: WeightFileError, MemoryError: OutOfMemory}
    with pytest.raises(expected.get(type(failure), type(failure))):
        model.swap(weight_file(1))
    monkeypatch.undo()
    assert serves(model, 0)
    model.swap(weight_file(1))
    assert serves(model, 1)


def test_short_reads_are_continued(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: original(fd, [buffers[0][:3]], offset))
    assert serves(load(tiny.path, weight_file(4)), 4)


def test_a_broken_in_place_commit_fails_the_model_until_a_swap_succeeds(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single", keep_previous="host")

    def breaking(arena: HostArena, other: HostArena, workers: object) -> None:
        arena.view("weight")[:] = bytes(60)
        raise RuntimeError("the device is gone")

    with model.stage(weight_file(1)) as staged:
        with monkeypatch.context() as patch:
            copies = iter([HostArena.copy_from, breaking])  # the first one keeps the previous weights
            patch.setattr(HostArena, "copy_from", lambda *args: next(copies)(*args))  # noqa: PLW0108
            with pytest.raises(ModelFailed, match="the device is gone"):
                staged.commit()
        assert model.failed
        for use in (partial(model, X), model.pin().__enter__):
            with pytest.raises(ModelFailed, match="swap or roll back"):
                use()
    model.rollback()
    assert not model.failed
    assert serves(model, 0)
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_a_pin_sees_one_version(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with model.pin() as session:
        pinned = session.weights_id
        model.swap(weight_file(1))
        assert serves(model, 1)
        assert torch.equal(session(X), TinyArtifact.eager(0, X))
        assert (session.weights_id, session.generation) == (pinned, 0)
        with pytest.raises(LeaseTimeout, match="this thread itself has pinned"):
            model.swap(weight_file(2))
        assert torch.equal(session(X), TinyArtifact.eager(0, X))
    for use in (lambda: session(X), session.__enter__):
        with pytest.raises(PinReleased):
            use()
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_in_single_residency_a_commit_waits_for_pins_and_then_says_so(
    tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    pinned, done = threading.Event(), threading.Event()

    def hold() -> None:
        with model.pin() as session:
            pinned.set()
            done.wait(10)
            assert torch.equal(session(X), TinyArtifact.eager(0, X))
            assert serves(model, 0)  # a plain call within a pin is let through, or the two would wait for each other

    holder = threading.Thread(target=hold)
    holder.start()
    pinned.wait(10)
    with pytest.raises(LeaseTimeout, match=r"1 call\(s\) or pin\(s\) still hold"):
        model.swap(weight_file(1), timeout=0.05)
    assert serves(model, 0)
    threading.Timer(0.05, done.set).start()
    model.swap(weight_file(1))
    holder.join()
    assert serves(model, 1)


def test_inputs_are_checked_before_anything_runs(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with pytest.raises(TypeError, match=r"x: dimension 0 expected batch with batch in 0\.\.8, got 9"):
        model(torch.zeros(9, 3))
    assert torch.equal(model(x=X), model(X))


def test_methods_are_attributes(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    assert torch.equal(model.forward(X), model(X))
    assert torch.equal(model.method("forward")(X), model(X))
    with pytest.raises(UnknownMethod, match="nor a method of this artifact, which has: forward"):
        model.encode(X)
    assert not hasattr(model, "encode")
    with pytest.raises(UnknownMethod, match=r"did you mean swap\?"):
        model.swapp("v1.safetensors")
    with pytest.raises(WeightFileError, match=r"got a dict; write one with weightswap_exporter.pack\(\)"):
        model.swap(tiny.values(0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"device": "cuda"}, Unsupported),
        ({"engine": "onnx"}, Unsupported),
        ({"residency": "triple"}, Unsupported),
        ({"keep_previous": "disk"}, Unsupported),
    ],
)
def test_what_this_version_cannot_do_is_said(
    options: dict[str, str], error: type[Exception], tiny: TinyArtifact
) -> None:
    with pytest.raises(error, match=next(iter(options.values()))):
        load(tiny.path, **options)  # type: ignore[arg-type]


def test_addresses_stay(tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[HostArena] = []
    original = HostArena.__init__

    def recording(arena: HostArena, layout: object) -> None:
        original(arena, layout)  # type: ignore[arg-type]
        arenas.append(arena)

    monkeypatch.setattr(HostArena, "__init__", recording)
    model = load(tiny.path, weight_file(0))
    for seed in range(1, 6):
        model.swap(weight_file(seed))
    assert len(arenas) == 2
    assert {blake3(arena.view("weight")).hexdigest() for arena in arenas} == {
        blake3(tiny.values(seed)["weight"].numpy().tobytes()).hexdigest() for seed in (4, 5)
    }


def test_a_forked_child_has_weights_of_its_own(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    model.swap(weight_file(1))
    other = weight_file(2)
    child = os.fork()
    if not child:  # only swap and leave: torch's own threads do not survive a fork
        try:
            model.swap(other)
            model.swap(other)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert serves(model, 1)
    model.rollback()
    assert serves(model, 0)
