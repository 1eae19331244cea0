"""The demo of row updates: a recommender learns from clicks, and a server takes the rows that change.

Three models of one artifact are in one server: one is never updated, one takes a full file each minute, one the row
deltas that the trainer publishes every two seconds. The same events, which the trainer does not see, go to all three.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
from events import Clicks, Events
from report import MODELS, Answer, Published, draw, summarise

EVENTS = 256  # of a request
RATE = 10.0  # requests to each model in a second
WARM_UP = 10.0  # seconds of training before the first file
_SERVE = "from weightswap_tools.program import main; main()"
_PATIENCE = 120.0  # seconds for the first words of a process, or for its end


class DemoError(Exception):
    """Error that ends the demo; the message says why."""


class Child:
    """A process, and the lines that it prints."""

    def __init__(self, name: str, command: list[str], folder: Path, stack: ExitStack) -> None:
        """The end of the stack stops it."""
        self._name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        stack.callback(self._process.wait)
        stack.callback(self._process.terminate)
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = Thread(target=self._listen, daemon=True)
        self._reader.start()

    def read(self) -> str:
        """Wait for a line. Raises DemoError if the process ends instead."""
        line = self._lines.get(timeout=_PATIENCE)
        if not line:
            self._process.wait(_PATIENCE)
            raise self._error()
        return line

    def check(self) -> None:
        """Raise DemoError if the process has failed."""
        if self._process.poll():
            raise self._error()

    def finish(self) -> list[str]:
        """Close its input, and wait until it has ended by itself; return all lines that were not read."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE)
        self.check()
        self._reader.join()
        return [line for _ in range(self._lines.qsize()) if (line := self._lines.get())]

    def _error(self) -> DemoError:
        return DemoError(f"the {self._name} has ended:\n{self._log.read_text(errors='replace')[-3000:]}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


class Client:
    """Asks the models of a server, with tensors as bytes."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=30)

    def is_ready(self) -> bool:
        self._connection.request("GET", "/v2/health/ready")
        with self._connection.getresponse() as answer:
            answer.read()
            return answer.status == 200

    def ask(self, model: str, events: Events, at: float) -> Answer:
        """Raises DemoError unless the status is 200."""
        inputs = [
            {
                "name": name,
                "datatype": datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": tensor.nbytes},
            }
            for name, datatype, tensor in (("numbers", "FP32", events.numbers), ("ids", "INT64", events.ids))
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = head + events.numbers.numpy().tobytes() + events.ids.numpy().tobytes()
        start = time.perf_counter()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        self._connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        with self._connection.getresponse() as answer:
            content = answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 200:
            raise DemoError(f"a request to {model} failed: {answer.status} {content[:500].decode(errors='replace')}")
        size = int(answer.headers["Inference-Header-Content-Length"])
        weights_id = json.loads(content[:size])["parameters"]["weights_id"]
        return Answer(at, model, weights_id, seconds, events.clicks.numpy(), np.frombuffer(content[size:], "<f4"))


def _started(folder: Path, zero: float, full_every: float, stack: ExitStack) -> tuple[Child, Published, Client]:
    """Start a trainer, which has published once, and a server, which serves that thrice."""
    times = {"zero": zero, "warm-up": WARM_UP, "rows-every": 2.0, "full-every": full_every}
    options = [f"--{name}={value}" for name, value in times.items()]
    trainer = Child("trainer", [str(Path(__file__).with_name("training.py")), str(folder), *options], folder, stack)
    first = Published(**json.loads(trainer.read()))
    options = [f"{model}={folder / 'ctr.artifact'}" for model in MODELS]
    options += [f"--weights={model}={first.file}" for model in MODELS]
    options += [f"--watch={model}={folder / model}" for model in MODELS if model != "never"]
    options += ["--port=0", "--interval=0.25", "--threads=1"]
    server = Child("server", ["-c", _SERVE, "serve", *options], folder, stack)
    client = Client(server.read().split()[0].removeprefix("http://"))
    while not client.is_ready():
        time.sleep(0.1)
    return trainer, first, client


def play(folder: Path, seconds: float, full_every: float) -> tuple[list[Published], list[Answer]]:
    """Return what was published, and all answers. Raises DemoError, and OSError for a server that is gone."""
    zero, clicks = time.time(), Clicks(seed=2)
    answers: list[Answer] = []
    for name in MODELS:
        (folder / name).mkdir()
    with ExitStack() as stack:
        trainer, first, client = _started(folder, zero, full_every, stack)
        print(f"the first file has {first.nbytes / 1e6:.1f} MB; {seconds:g} s of requests begin", flush=True)
        end, due, order = time.time() + seconds, time.time(), deque(MODELS)
        while (now := time.time()) < end:
            trainer.check()
            events = clicks.draw(EVENTS, now - zero)
            order.rotate()  # the first of them meets what was idle before
            answers += [client.ask(model, events, now) for model in order]
            due = max(due + 1 / RATE, now)
            time.sleep(max(0.0, due - time.time()))
        return [first, *(Published(**json.loads(line)) for line in trainer.finish())], answers


def main() -> int:
    """Run the demo. Exit status: 0 if every request was answered from weights that were published, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/demo_recsys", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-report/recsys.png"), help="the figure")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of requests (120)")
    parser.add_argument("--full-every", type=float, default=60.0, help="seconds between full files (60)")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not (options.seconds >= 2 and options.full_every > 0):
        parser.error("--seconds must be 2 or more, and --full-every greater than 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes end, too
    try:
        with tempfile.TemporaryDirectory(prefix="weightswap-clicks-") as folder:
            published, answers = play(Path(folder), options.seconds, options.full_every)
    except (DemoError, Empty, OSError, subprocess.TimeoutExpired, http.client.HTTPException) as error:
        print(f"the demo failed: {str(error) or repr(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    known = {each.weights_id for each in published}
    unknown = [answer for answer in answers if answer.weights_id not in known]
    for answer in unknown[:5]:
        print(f"{answer.model} answered from {answer.weights_id}, which was never published", file=sys.stderr)
    if unknown:
        return 1
    print(summarise(published, answers))
    draw(options.out, published, answers)
    print(f"{len(answers)} answers, each of weights that were published; the figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
