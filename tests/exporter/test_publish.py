"""Publishing from a trainer: files have the model's values at the call, whole and in order, whatever happens then."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import warm
from tests.support.models import Everything, Renamed, fill
from weightswap_exporter import Publication, export, pack, packing, publish, publishing
from weightswap_exporter.checkpoints.reading import Checkpoint
from weightswap_exporter.packing import pack_checkpoint
from weightswap_runtime import (
    Artifact,
    ArtifactError,
    CheckpointError,
    WaitTimeout,
    WeightFile,
    WeightsMismatch,
    load,
)

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait until the event is set."""
    event = threading.Event()

    def wait_and_pack(*args: Any, **kwargs: Any) -> Any:
        assert event.wait(120)
        return pack_checkpoint(*args, **kwargs)

    monkeypatch.setattr(publishing, "pack_checkpoint", wait_and_pack)
    yield event
    event.set()


def test_training_goes_on_while_the_file_is_written(renamed: Artifact, tmp_path: Path, held: threading.Event) -> None:
    model = Renamed().eval()
    expected = pack(model, renamed, out=tmp_path / "e.safetensors", labels={"run": "a", "step": "1000"})
    handle = publish(model, tmp_path / "out", str(renamed.path), step=1000, labels={"run": "a"})
    assert not handle.done
    assert "step=1000, being written" in repr(handle)
    with pytest.raises(WaitTimeout, match=r"step 1000 is still being written after 0\.01 s"):
        handle.wait(0.01)
    fill(model, 7.0)
    held.set()
    packed = handle.wait(120)
    assert handle.done
    assert packed.path.name == f"step-000001000-{expected.weights_id[:12]}.safetensors"
    assert packed.path.read_bytes() == expected.path.read_bytes()
    assert list((tmp_path / "out").iterdir()) == [packed.path]


def test_ties_and_buffers_are_copied_and_cast(tmp_path: Path, held: threading.Event) -> None:
    model = Everything().eval()
    image = torch.zeros(2, 1, 5, 5)
    artifact = export(Everything().double().eval(), (image.double(),), out=tmp_path / "a.artifact")
    expected = pack(model, artifact, out=tmp_path / "e.safetensors", dtype="float64")
    handle = publish(model, tmp_path / "out", artifact, step=0, dtype="float64")
    fill(model, 7.0)
    model.offset.fill_(7.0)
    held.set()
    packed = handle.wait(120)
    assert (packed.weights_id, packed.cast) == (expected.weights_id, expected.cast)


def test_many_quick_publishes_from_several_threads_keep_their_order(renamed: Artifact, tmp_path: Path) -> None:
    model, lock = Renamed().eval(), threading.Lock()
    handles: list[Publication] = []

    def train() -> None:
        for _ in range(10):
            with lock:
                fill(model, float(len(handles)))
                handles.append(publish(model, tmp_path / "out", renamed, step=len(handles)))

    with ThreadPoolExecutor(4) as pool:
        for trained in [pool.submit(train) for _ in range(4)]:
            trained.result()
    paths = [handle.wait(120).path for handle in handles]
    assert paths == sorted((tmp_path / "out").iterdir())
    appeared = [path.stat().st_ctime_ns for path in paths]
    assert appeared == sorted(appeared)
    served = load(renamed, paths[0])
    for step, path in enumerate(paths):
        served.swap(path)
        fill(model, float(step))
        assert torch.equal(served(X), model(X))


def test_one_snapshot_at_a_time(renamed: Artifact, tmp_path: Path, held: threading.Event) -> None:
    first = publish(Renamed(), tmp_path / "out", renamed, step=1)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(publish, Renamed(), tmp_path / "out", renamed, step=2)
        time.sleep(0.1)
        assert not second.done()
        held.set()
        first.wait(120)
        assert second.result(120).wait(120).nbytes == 96


def test_errors_are_raised_by_wait(renamed: Artifact, tmp_path: Path) -> None:
    handle = publish(nn.Linear(3, 3), tmp_path / "out", renamed, step=1)
    for _ in range(2):
        with pytest.raises(WeightsMismatch):
            handle.wait(120)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        publish(Renamed(), tmp_path / "file", renamed, step=1).wait(120)
    with pytest.raises(CheckpointError, match="has no values"):
        publish(Renamed().to("meta"), tmp_path / "out", renamed, step=1).wait(120)
    assert publish(Renamed(), tmp_path / "out", renamed, step=2).wait(120).nbytes == 96


@pytest.mark.parametrize("early", [False, True])
def test_an_error_that_nobody_asks_for_is_logged(
    early: bool, renamed: Artifact, tmp_path: Path, held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "weightswap"):
        handle = publish(nn.Linear(3, 3), tmp_path / "out", renamed, step=9)
        outcome = handle._outcome
        if early:
            del handle
        held.set()
        assert outcome.exception(120)
        if not early:
            del handle
        gc.collect()
        deadline = time.monotonic() + 120
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [message.splitlines()[0] for message in caplog.messages] == [
        "step 9 was not published: WeightsMismatch: Linear: refused, 6 problems"
    ]


def test_an_error_that_was_raised_is_not_logged(
    renamed: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = publish(nn.Linear(3, 3), tmp_path / "out", renamed, step=9)
    with pytest.raises(WeightsMismatch):
        handle.wait(120)
    del handle
    gc.collect()
    assert not [record for record in caplog.records if record.name == "weightswap"]


def test_a_failed_write_holds_no_snapshot(renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []

    def watch(checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> Any:
        copies.extend(weakref.ref(values.load()) for values in checkpoint.levels[0].tensors.values())
        return pack_checkpoint(checkpoint, *args, **kwargs)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(publishing, "pack_checkpoint", watch)
    monkeypatch.setattr(packing, "pieces", full)
    handle = publish(Renamed(), tmp_path / "out", renamed, step=1)
    with pytest.raises(CheckpointError):
        handle.wait(120)
    assert [copy() for copy in copies] == [None] * 4
    assert not list((tmp_path / "out").iterdir())


def test_a_label_may_repeat_the_step(renamed: Artifact, tmp_path: Path) -> None:
    labels: dict[str, Any] = {"step": 7}
    assert publish(Renamed(), tmp_path / "out", renamed, step=7, labels=labels).wait(120).labels == {"step": "7"}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a negative step": ({"step": -1}, CheckpointError, "expected a whole number from 0 to 999999999, got -1"),
    "a step too large": ({"step": 10**9}, CheckpointError, "got 1000000000"),
    "a step that is a text": ({"step": "7"}, CheckpointError, "got '7'"),
    "a state dict": ({"step": 1, "model": {}}, CheckpointError, "expected a module, got a dict"),
    "no dtype": ({"step": 1, "dtype": "int"}, CheckpointError, "tensors can be cast to"),
    "another step as a label": ({"step": 7, "labels": {"step": "8"}}, CheckpointError, "'8' contradicts step=7; leave"),
    "labels too long": ({"step": 7, "labels": {"config": "x" * 65536}}, CheckpointError, "labels: its labels have"),
    "a dtype that nothing has": ({"step": 1, "dtype": "float64"}, CheckpointError, "the graph expects none"),
    "no artifact": ({"step": 1, "artifact": "nowhere"}, ArtifactError, "nowhere"),
}


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_cannot_be_right_are_refused_at_once(
    changes: dict[str, Any], error: type[Exception], says: str, renamed: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        publish(**{"model": Renamed(), "directory": tmp_path / "out", "artifact": renamed} | changes)
    assert not (tmp_path / "out").exists()


TRAINER = """
import sys, time
from tests.support.models import Renamed
from weightswap_exporter import publish
from weightswap_exporter import packing

original = packing.pieces

def slowly(*args):
    for piece in original(*args):
        yield piece
        print("writing", flush=True)
        time.sleep(float(sys.argv[3]))

packing.pieces = slowly
handle = publish(Renamed(), sys.argv[2], sys.argv[1], step=int(sys.argv[4]))
if sys.argv[5] == "drop":
    del handle
"""


def trainer(artifact: Artifact, out: Path, seconds: float, step: int, last: str = "keep") -> subprocess.Popen[str]:
    """A process that publishes, with a pause after each tensor, and then ends."""
    command = [warm.python(), "-e", "-c", TRAINER, str(artifact.path), str(out), str(seconds), str(step), last]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


@pytest.mark.sampled(1)
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_the_end_of_the_interpreter_waits_for_the_write(last: str, renamed: Artifact, tmp_path: Path) -> None:
    process = trainer(renamed, tmp_path / "out", 0.1, 3, last)
    assert process.communicate(timeout=120) == ("writing\n" * 3, "")
    assert process.returncode == 0
    (path,) = (tmp_path / "out").iterdir()
    with WeightFile(path) as file:
        assert file.stamp is not None
        assert path.name == f"step-000000003-{file.stamp.weights_id[:12]}.safetensors"


@pytest.mark.slow
def test_a_killed_trainer_leaves_nothing_that_a_reader_takes(renamed: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed, alive = trainer(renamed, out, 60, 1), trainer(renamed, out, 60, 2)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=120)
        assert len(list(out.iterdir())) == 2
        assert not list(out.glob("*.safetensors"))
        published = publish(Renamed(), out, renamed, step=3).wait(120)
        left = sorted(path.name for path in out.iterdir())
        assert len(left) == 2
        assert left[0].startswith(".step-000000002.safetensors.tmp-")
        assert left[1] == published.path.name
    finally:
        alive.kill()
        alive.communicate(timeout=120)
    publish(Renamed(), out, renamed, step=4).wait(120)
    assert sorted(path.name[:15] for path in out.iterdir()) == ["step-000000003-", "step-000000004-"]


def test_a_forked_child_publishes_for_itself(renamed: Artifact, tmp_path: Path, held: threading.Event) -> None:
    parents = publish(Renamed(), tmp_path / "out", renamed, step=1)
    child = os.fork()
    if child == 0:
        held.set()
        os._exit(0 if publish(Renamed(), tmp_path / "out", renamed, step=2).wait(120).nbytes == 96 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.set()
    parents.wait(120)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


class Interrupted(threading.Condition):
    """A condition whose waiter is interrupted as soon as it holds."""

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        held = super().wait_for(predicate, timeout)
        if not signalled.is_set():
            signalled.set()
            signal.raise_signal(signal.SIGUSR1)
        return held


signalled = threading.Event()


def while_copying(patch: pytest.MonkeyPatch, interrupted: Callable[[nn.Module], Checkpoint]) -> None:
    patch.setattr(publishing, "from_module", interrupted)


def before_copying(patch: pytest.MonkeyPatch, _: object) -> None:
    signalled.clear()
    patch.setattr(publishing._writer, "_changed", Interrupted())


@pytest.mark.parametrize("place", ["noted", "its turn", "copying", "started"])
def test_an_interrupt_leaves_nothing_that_later_publications_wait_for(
    place: str, renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the thread has begun, it alone decides when the next one may."""
    owner, name = {
        "noted": (publishing._writer._threads, ""),
        "its turn": (threading.Condition, "wait_for"),
        "copying": (publishing, "from_module"),
        "started": (threading.Thread, "start"),
    }[place]

    def interrupted(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_interrupt(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.undo()
            call(*args, **kwargs)
            raise KeyboardInterrupt

        return call_and_interrupt

    if place == "noted":
        noted = type("Noted", (set,), {})
        monkeypatch.setattr(noted, "add", interrupted(set.add))
        publishing._writer._threads = noted()  # stays: what is added by the interrupted call, too
    else:
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))
    model, out = Renamed().eval(), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        publish(model, out, renamed, step=1)
    packed = publish(model, out, renamed, step=2).wait(120)
    steps = {int(path.name.split("-")[1]) for path in out.iterdir()}
    assert packed.path.exists()
    assert steps == ({1, 2} if place == "started" else {2})


@pytest.mark.parametrize(
    ("interrupt", "caught"), [(while_copying, True), (while_copying, False), (before_copying, True)]
)
def test_a_signal_handler_that_publishes_while_its_thread_copies_is_refused(
    interrupt: Callable[..., None], caught: bool, renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a preemption: the handler would wait for its own thread. An alarm ends such a deadlock."""
    model, out = Renamed().eval(), tmp_path / "out"
    original, refused = publishing.from_module, list[CheckpointError]()

    def interrupted(model: nn.Module) -> Checkpoint:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return original(model)

    def last(*_: object) -> None:
        try:
            publish(model, out, renamed, step=2)
        except CheckpointError as error:
            refused.append(error)
            if not caught:
                raise

    def stuck(*_: object) -> None:
        raise TimeoutError("it waits for itself")

    handlers = {signal.SIGUSR1: last, signal.SIGALRM: stuck}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    interrupt(monkeypatch, interrupted)
    signal.alarm(20)
    try:
        if caught:
            publish(model, out, renamed, step=1).wait(120)
        else:
            with pytest.raises(CheckpointError, match="already in publish"):
                publish(model, out, renamed, step=1)
        publish(model, out, renamed, step=3).wait(120)
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "this thread is already in publish()" in str(refused.pop())
    assert sorted(path.name[:14] for path in out.iterdir()) == ["step-000000001"] * caught + ["step-000000003"]


def test_a_relative_directory_is_that_of_the_call(
    renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def moved(*args: Any, **kwargs: Any) -> Any:
        os.chdir(tmp_path / "elsewhere")
        return pack_checkpoint(*args, **kwargs)

    monkeypatch.setattr(publishing, "pack_checkpoint", moved)
    packed = publish(Renamed(), "out", renamed, step=1).wait(120)
    assert packed.path.parent == Path("out")  # as it was given
    assert (tmp_path / packed.path).exists()
