"""Threads that work on one batch, and the references that their errors keep."""

from __future__ import annotations

import subprocess
import threading
import weakref

import pytest

from tests.support import warm
from weightswap_runtime.threads import WorkerThreads, forget_frames


class Item:
    """An object that can be weakly referenced."""


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (3, 3), (4, 3), (16, 12), (96, 16)])
def test_a_quarter_of_the_processors_is_left_to_calls_where_there_are_a_few(
    processors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    assert WorkerThreads().threads == threads


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("in_the_pool", [True, False])
def test_an_error_of_any_thread_keeps_nothing_of_the_batch(in_the_pool: bool) -> None:
    workers, caller = WorkerThreads(2), threading.get_ident()
    items = [Item() for _ in range(100)]
    left = weakref.WeakSet(items)
    failed = threading.Event()

    def function(item: Item) -> None:
        if (threading.get_ident() != caller) == in_the_pool:
            failed.set()
            raise ValueError
        failed.wait(60)

    with pytest.raises(ValueError) as caught:
        workers.run_all(function, items)
    error = caught.value
    del items, caught
    forget_frames(error)  # as a caller that keeps an error does; frames of unfinished threads are left
    assert not left


def test_an_interrupt_while_a_thread_of_the_pool_starts_keeps_no_interpreter() -> None:
    script = (
        "import threading, time\nfrom weightswap_runtime.threads import WorkerThreads\n"
        "start = threading.Thread.start\n"
        "def start_and_interrupt(thread):\n"
        "    start(thread)\n"
        "    if threading.current_thread() is threading.main_thread():\n"
        "        raise KeyboardInterrupt\n"
        "threading.Thread.start = start_and_interrupt\n"
        "workers = WorkerThreads(2)\n"
        "try:\n    workers.run_all(lambda _: time.sleep(0.2), range(4))\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    done = subprocess.run([warm.python(), "-e", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
