"""Child processes that report events, including their deaths; none outlives the demo."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from events import Event, parse

GRACE_SECONDS = 3.0


class DemoError(Exception):
    """Error that ends the demo; the message says why."""


class Children(AbstractContextManager["Children"]):
    """Child processes of one run, and the queue of their events. Leaving the block ends them all.

    `folder` is their working directory, where their standard error goes to `<name>.log`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._killed: list[subprocess.Popen[str]] = []

    def start(self, name: str, script: str, arguments: Sequence[str], ranks: int = 0) -> None:
        """Run a script of this folder with this process's interpreter; with `ranks`, as so many processes of torchrun.

        These have the same standard output, on which one of them reports.
        """
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *torchrun, str(Path(__file__).resolve().parent / script), *arguments],
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._running[name] = process
        Thread(target=self._listen, args=(name, process), daemon=True).start()

    def send(self, name: str, command: str) -> None:
        stdin = self._running[name].stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # the death of a child is reported by its own event
            print(command, file=stdin, flush=True)

    def kill(self, name: str) -> None:
        """End a child with SIGKILL; another may be started under its name."""
        process = self._running.pop(name)
        self._killed.append(process)
        process.kill()
        process.wait()

    def next_event(self, timeout: float) -> Event | None:
        """Return the next event, or None after `timeout` seconds. Raises DemoError if a child has died too early."""
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            return None
        if event.kind == "died":
            raise DemoError(self._obituary(event.source))
        return event

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        done = False
        for line in process.stdout:
            event = parse(name, line)
            done = done or event.kind == "done"
            self._events.put(event)
        if (process.wait() != 0 or not done) and process not in self._killed:
            self._events.put(Event(name, "died", time.monotonic(), {}))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _obituary(self, name: str) -> str:
        code = self._running[name].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended early with exit status {code}"
        last = self._log(name).read_text(errors="replace").strip().splitlines()[-15:]
        return "\n".join([f"the {name} process {how}", *last])
