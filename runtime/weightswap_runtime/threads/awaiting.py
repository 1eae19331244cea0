"""Work in threads that a task of asyncio awaits."""

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
    """Await the end of a future; whether it came in time. It is cancelled where it did not, or where the task is."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    either = loop.create_future()

    def wake() -> None:
        if not either.done():
            either.set_result(None)

    def on_end(_: object) -> None:
        if threading.get_ident() == thread:  # where waking the loop would be a call of the system
            wake()
        elif not loop.is_closed():  # as after a stop that has not waited for it
            loop.call_soon_threadsafe(wake)

    timer = loop.call_later(seconds, wake)
    future.add_done_callback(on_end)
    try:
        await either
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
    """Await a function that runs in a thread of its own.

    If the task is cancelled, `stop` is called, which lets the function end soon, and its end is waited for.
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

    awaited = asyncio.wrap_future(outcome)
    # not in the loop: Thread.start() waits until the thread runs, for milliseconds on a busy machine
    _thread.start_new_thread(start, ())
    try:
        return await asyncio.shield(awaited)
    except asyncio.CancelledError:
        stop()
        with suppress(Exception):
            await asyncio.shield(awaited)
        raise
