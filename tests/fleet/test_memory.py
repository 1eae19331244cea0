"""The memory of a node beside real processes: who has it is found, who has ended gives its slot back."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.tiny import TinyArtifact
from weightswap_fleet.node.memory import NodeMemory, Slots
from weightswap_runtime import Unsupported
from weightswap_runtime.shared.control import Control

Start = Callable[[NodeMemory], "subprocess.Popen[bytes]"]


@pytest.fixture
def holder() -> Iterator[Start]:
    """A function that starts a process with a node's memory open, as a replica."""
    started: list[subprocess.Popen[bytes]] = []

    def start(memory: NodeMemory) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], pass_fds=memory.descriptors))
        return started[-1]

    yield start
    for process in started:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"weightswap.test.{os.getpid()}.{request.node.name[:40]}"


def test_memory_is_found_in_whoever_has_it_and_is_the_same(tiny: TinyArtifact, holder: Start, name: str) -> None:
    weights = tiny.manifest.weights
    assert NodeMemory.adopt(name) is None
    memory = NodeMemory.create(weights, 2, name)
    assert NodeMemory.adopt(name) is None  # this process is no other
    memory.revision_page.set_revision(1, 7)
    process = holder(memory)
    assert NodeMemory.is_held_by(process.pid, name)
    assert not NodeMemory.is_held_by(process.pid, f"{name}.other")
    memory.close()
    again = NodeMemory.adopt(name)
    assert again is not None
    assert (again.revision_page.revision(1), again.revision_page.revision(0)) == (7, 0)
    Control(again.segment.control).commit(1)
    end(process)
    before = open_descriptors()
    with pytest.raises(OSError):
        NodeMemory.from_process(process.pid, again.descriptors)
    assert open_descriptors() == before
    again.close()
    assert NodeMemory.adopt(name) is None  # it goes with the last that has it


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_replicas_have_they_cannot_write(tiny: TinyArtifact, name: str) -> None:
    memory = NodeMemory.create(tiny.manifest.weights, 2, name)
    seen = NodeMemory.from_process("self", memory.descriptors, read_only=True)
    for arena in seen.segment.arenas:
        with pytest.raises(PermissionError):
            mmap.mmap(arena, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    seen.close()
    memory.close()


def test_who_was_killed_holds_nothing_and_has_no_seat(tiny: TinyArtifact, holder: Start, name: str) -> None:
    memory = NodeMemory.create(tiny.manifest.weights, 2, name)
    control = Control(memory.segment.control)
    taken = Slots(control, lambda pid: NodeMemory.is_held_by(pid, name))
    first, second = holder(memory), holder(memory)
    slots = [taken.assign(process.pid) for process in (first, second)]
    for slot, process in zip(slots, (first, second), strict=True):
        control.fill_slot(slot, process.pid)
        control.hold(slot, 1)
    with pytest.raises(Unsupported, match="2 replicas on one node"):
        taken.assign(os.getpid())
    assert taken.processes == (first.pid, second.pid)
    end(first)
    taken.sweep()
    assert (taken.processes, control.holders(1)) == ((second.pid,), [second.pid])
    third = holder(memory)
    assert taken.assign(third.pid) == slots[0]
    end(third)
    with pytest.raises(Unsupported, match="no process"):
        taken.assign(first.pid)
    taken.close()
    memory.close()


def test_the_next_agent_knows_who_sits_there(tiny: TinyArtifact, holder: Start, name: str) -> None:
    """It watches living replicas, and empties the slots of dead ones, even if their pid is in use again."""
    memory = NodeMemory.create(tiny.manifest.weights, 3, name)
    control = Control(memory.segment.control)
    living, dead = holder(memory), holder(memory)
    strange = subprocess.Popen(["sleep", "600"])
    for slot, process in enumerate((living, dead, strange)):
        control.fill_slot(slot, process.pid)
        control.hold(slot, 0)
    end(dead)
    taken = Slots(control, lambda pid: NodeMemory.is_held_by(pid, name))
    assert (taken.processes, control.holders(0)) == ((living.pid,), [living.pid])
    end(living)
    taken.sweep()
    assert control.holders(0) == []
    end(strange)
    taken.close()
    memory.close()
