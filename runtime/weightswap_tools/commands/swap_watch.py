"""What `weightswap swap --watch` and `--follow` print, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

import typer

from weightswap_runtime.live.events import Event
from weightswap_runtime.live.watching.loop import Watching
from weightswap_tools.terminal import encode_json, say

POLL_SECONDS = 0.2  # how soon it is noticed that the watching has ended by itself


class StartChoice(StrEnum):
    """Which of the files that are there already are taken."""

    NEWEST = "newest"
    ALL = "all"
    NEW = "new"


def print_event(event: Event) -> None:
    """An event as one line of text; what a terminal would obey, in the names of a file's tensors, is escaped."""
    say(" ".join(str(event).split()))


def print_event_as_json(event: Event) -> None:
    """An event as one line of JSON."""
    typer.echo(encode_json(event.as_dict()).decode())


def watch_until_interrupt(start: Callable[[], Watching]) -> None:
    """Start the watching, and return on Ctrl-C when it has ended. Events may be printed before it has been started."""
    watcher: Watching | None = None
    try:
        watcher = start()
        while watcher.alive:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        if watcher is not None:
            watcher.stop()
