"""Threads that work on one batch, and the references that their errors keep."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

from tests.support import warm
from weightswap_runtime.threads import NICENESS, WorkerThreads, forget_frames


class Item:
    """An object that can be weakly referenced."""


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (3, 3), (4, 3), (16, 12), (96, 16)])
def test_a_quarter_of_the_processors_is_left_to_calls_where_there_are_a_few(
    processors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    assert WorkerThreads().threads == threads


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize(("in_the_pool", "yields"), [(True, False), (False, False), (True, True)])
def test_an_error_of_any_thread_keeps_nothing_of_the_batch(in_the_pool: bool, yields: bool) -> None:
    workers, caller = WorkerThreads(2, yields=yields), threading.get_ident()
    items = [Item() for _ in range(100)]
    left = weakref.WeakSet(items)
    failed = threading.Event()

    def function(item: Item) -> None:
        if (threading.get_ident() != caller) == in_the_pool:
            failed.set()
            raise ValueError
        failed.wait(120)

    with pytest.raises(ValueError) as caught:
        workers.run_all(function, items)
    error = caught.value
    del items, caught
    forget_frames(error)  # as a caller that keeps an error does; frames of unfinished threads are left
    assert not left


@pytest.mark.skipif(sys.platform != "linux", reason="a process has one priority")
@pytest.mark.parametrize("yields", [True, False])
def test_threads_that_yield_have_a_lower_priority_than_their_caller(yields: bool) -> None:
    seen = set[tuple[bool, int]]()
    caller, own = threading.get_ident(), os.getpriority(os.PRIO_PROCESS, 0)
    both = threading.Barrier(2)

    def work(_: object) -> None:
        both.wait(120)
        thread = threading.get_native_id()
        seen.add((threading.get_ident() == caller, os.getpriority(os.PRIO_PROCESS, thread)))

    WorkerThreads(2, yields=yields).run_all(work, range(4))
    assert seen == ({(False, min(19, own + NICENESS))} if yields else {(True, own), (False, own)})
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("yields", [True, False])
def test_an_interrupt_while_work_is_handed_out_ends_the_batch(yields: bool) -> None:
    done, workers = list[int](), WorkerThreads(2, yields=yields)
    submit = workers._pool.submit

    def submit_and_interrupt(function: Any) -> None:
        submit(function)
        raise KeyboardInterrupt

    def work(item: int) -> None:
        time.sleep(0.01)
        done.append(item)

    workers._pool.submit = submit_and_interrupt  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        workers.run_all(work, range(1000))
    ended = len(done)
    assert ended < 1000
    time.sleep(0.1)
    assert len(done) == ended  # no thread works on it any more


@pytest.mark.parametrize("yields", [True, False])
def test_a_caller_works_alone_where_no_thread_can_be_started(yields: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads = list[int]()
    WorkerThreads(3, yields=yields).run_all(lambda _: threads.append(threading.get_ident()), range(9))
    assert threads == [threading.get_ident()] * 9


@pytest.mark.parametrize("yields", [True, False])
def test_an_interrupt_while_a_thread_of_the_pool_starts_keeps_no_interpreter(yields: bool) -> None:
    script = (
        "import threading, time\nfrom weightswap_runtime.threads import WorkerThreads\n"
        "start = threading.Thread.start\n"
        "def start_and_interrupt(thread):\n"
        "    start(thread)\n"
        "    if threading.current_thread() is threading.main_thread():\n"
        "        raise KeyboardInterrupt\n"
        "threading.Thread.start = start_and_interrupt\n"
        f"workers = WorkerThreads(2, yields={yields})\n"
        "try:\n    workers.run_all(lambda _: time.sleep(0.2), range(4))\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    done = subprocess.run([warm.python(), "-e", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
