"""Service with a desired store of desired state, a folder of weight files, and processes that follow it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support import warm
from tests.support.tiny import TinyArtifact
from tests.support.watched import environment
from weightswap_runtime import DesiredState, DesiredStore, WeightFile
from weightswap_runtime.following.desired_state import DesiredWeights

FOLLOW = """
import sys
import time
from weightswap_runtime import load

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: threads say things at once
    sys.stdout.flush()

served = [None]

def report(event):
    if event.kind in ("committed", "rolled back"):
        say("serves", event.weights_id)
        served.append(event.weights_id)

model = load(sys.argv[1], on_event=report)
follower = model.follow(sys.argv[2], 0.01)
say("follows")
for line in sys.stdin:
    follower.wait(120, revision=int(line))
    while served[-1] != follower.status.served:  # a commit is told after it was made
        time.sleep(0.001)
    say("status", follower.status.served)
"""

NODE = """
import os
import sys
import time
from weightswap_fleet.documents import DeploymentSpec
from weightswap_fleet.node.agent import NodeAgent
from weightswap_runtime import Artifact

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

artifact = Artifact.open(sys.argv[1])
spec = DeploymentSpec("fleet", sys.argv[1], artifact.graph_id, sys.argv[2], "tiny", 0.0, interval=0.01)
owner = NodeAgent(spec, str(os.getpid()))
served = [owner.model.weights_id]
if served[0] is not None:
    say("serves", served[0])

def report(event):
    if event.kind in ("committed", "rolled back"):
        say("serves", event.weights_id)
        served.append(event.weights_id)

owner.model.listen(report)
owner.start()
say("follows")
for line in sys.stdin:
    while owner.status().revision < int(line) or served[-1] != owner.model.weights_id:
        time.sleep(0.001)  # a commit is told after it was made
    say("status", served[-1])
"""


def weights_id_of(path: Path) -> str:
    with WeightFile(path) as file:
        assert file.stamp is not None
        return file.stamp.weights_id


def wanted(state: DesiredState) -> DesiredWeights:
    """Return the weights of a state that has some."""
    assert state.weights is not None
    return state.weights


class Service:
    """Folder of weight files `v<seed>.safetensors` with a `desired.json`."""

    def __init__(self, tiny: TinyArtifact, folder: Path) -> None:
        self.tiny = tiny
        self.folder = folder
        folder.mkdir()
        self.desired_store = DesiredStore(folder)

    def write(self, seed: int) -> Path:
        return self.tiny.write(self.folder / f"v{seed}.safetensors", self.tiny.values(seed))

    def set(self, seed: int, by: str = "") -> str:
        """Make the weights of a seed desired, by hand, and return their id."""
        path = self.folder / f"v{seed}.safetensors"
        state = self.desired_store.set(path if path.exists() else self.write(seed), revision=self.revision, by=by)
        assert state.weights is not None
        return state.weights.weights_id

    def promote(self, seed: int) -> str:
        state = self.desired_store.promote(self.write(seed), by="trainer")
        assert state.weights is not None
        return state.weights.weights_id

    @property
    def revision(self) -> int:
        return self.desired_store.read().revision

    @property
    def desired(self) -> str | None:
        state = self.desired_store.read()
        return state.weights.weights_id if state.weights else None


class FollowingProcess:
    """Process that follows a desired store, and reports the weights that it has served, in order.

    code: the program; FOLLOW runs a model of the library, NODE a node of a fleet.
    """

    def __init__(self, artifact: Path, desired_store: Path | str, code: str = FOLLOW) -> None:
        command = [warm.python(), "-c", code, str(artifact), str(desired_store)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self.lines: list[list[str]] = []

    def _read_until(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.split())
            if self.lines[-1][0] == word:
                break
        return self.lines[-1]

    def ready(self) -> FollowingProcess:
        self._read_until("follows")
        return self

    def served(self, revision: int) -> str:
        """Return the weights id that is served once the process has reached a revision."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{revision}\n")
        self.process.stdin.flush()
        return self._read_until("status")[1]

    @property
    def commits(self) -> list[str]:
        return [line[1] for line in self.lines if line[0] == "serves"]

    def kill(self) -> None:
        """Kill the process, like the system when memory is short."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.read()  # ends with the program
        self.process.stdin.close()
        self.process.stdout.close()
