"""`weightswap fleet deploy` and `remove` on a real cluster: what is refused, and what comes up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.damage import damaged
from tests.support.packages import needs
from tests.support.ray_turns import ray_turn
from weightswap_tools.commands import fleet
from weightswap_tools.commands.fleet import fleet_command

from .clusters import Files, cluster

pytestmark = [
    needs("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]


def run(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(fleet_command, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done.output


def test_the_life_of_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightswap_fleet.coordinator.actors import find_spec

    monkeypatch.setattr(fleet, "cluster", lambda address: nullcontext())
    files = Files(tmp_path, 2)
    (desired_store := tmp_path / "damaged").mkdir()
    damaged(files.weights[0], desired_store / "0.safetensors")
    with cluster(1, cpus=1):
        said = run("deploy", files.artifact, "--weights", desired_store / "0.safetensors", "--name", "never", status=1)
        assert "the file records the digest" in said
        assert "Traceback" not in said
        assert "\\n" not in said

        run("deploy", files.artifact, "--weights", files.weights[0], "--name", "numbered", "--no-relay")
        assert not find_spec("numbered").relay
        said = run("deploy", files.artifact, "--weights", files.weights[1], "--name", "numbered")
        assert "--weights are not served" in said
        assert find_spec("numbered").relay
        named = ("--name", "numbered")
        assert "serve it    1 of 1 replica\n" in run("status", *named)
        run("hold", *named, "--by", "ana", "--why", "it is friday")
        assert json.loads(run("release", *named, "--json"))["hold"] is None
        run("canary", files.weights[1], *named, "--share", "0.5", "--by", "ana")
        assert "aborted: by ana: not today" in run("abort", *named, "--by", "ana", "--why", "not today")
        assert "nothing is on trial" in run("abort", *named, status=1)
        run("remove", "--name", "numbered")
        assert "UnknownFleet" in run("remove", "--name", "numbered", status=1)


@contextmanager
def _head_with_token(home: Path) -> Iterator[str]:
    """A Ray cluster that requires the token in a home directory. Yields its address."""
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = (f"--port={port}", "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={home / 'ray'}")
    started = subprocess.Popen(
        [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--disable-usage-stats", *options],
        env=os.environ | {"HOME": str(home), "RAY_AUTH_MODE": "token"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        started.terminate()  # with all processes of the cluster
        started.wait()


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short path: those of Ray's sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_cluster_that_requires_a_token(home: Path) -> None:
    def said(mode: str, home: Path = home) -> str:
        environment = os.environ | {"HOME": str(home), "RAY_AUTH_MODE": mode}
        command = [Path(sys.executable).parent / "weightswap", "fleet", "status", "--address", address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.stderr

    with ray_turn(), _head_with_token(home) as address:
        limit = time.monotonic() + 120
        while "no fleet of that name" not in (answer := said("token")):
            assert time.monotonic() < limit, answer
        began = time.monotonic()
        assert "requires a token" in said("disabled")
        assert time.monotonic() - began < 15  # Ray alone takes 20 s
        assert "has no token" in said("token", home / "elsewhere")
