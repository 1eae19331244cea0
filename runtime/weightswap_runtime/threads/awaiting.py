"""Work in threads, awaited by asyncio tasks."""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from .ending import Background

T = TypeVar("T")


async def done_within(future: Future[Any], seconds: float) -> bool:
    """Await a future. Return whether it ended in time; if not, or if the task is cancelled, cancel it."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def on_end(_: object) -> None:
        if threading.get_ident() == thread:  # saves the system call that wakes the loop
            wake()
        elif not loop.is_closed():  # it is closed after a stop that did not wait for the future
            loop.call_soon_threadsafe(wake)

    timer = loop.call_later(seconds, wake)
    future.add_done_callback(on_end)
    try:
        await woken
    except asyncio.CancelledError:
        future.cancel()
        raise
    finally:
        timer.cancel()
    ended = future.done()
    if not ended:
        future.cancel()
    return ended


async def in_thread(function: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Run a function in a thread of its own and await its result.

    If the task is cancelled, call `stop`, which lets the function end soon, and wait for its end.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    def start() -> None:
        try:
            Background(run, "weightswap-async", stop).start()
        except BaseException as error:
            outcome.set_exception(error)

    result = asyncio.wrap_future(outcome)
    # not in the loop: Thread.start() waits until the thread runs, for milliseconds on a busy machine
    _thread.start_new_thread(start, ())
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        stop()
        with suppress(Exception):
            await asyncio.shield(result)
        raise
