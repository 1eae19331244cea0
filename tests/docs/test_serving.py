"""The code and the commands of docs/serving.md run as they stand, but for the ports."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import warm
from tests.support.pages import blocks, page, python, served
from weightswap_runtime import DesiredStore, load
from weightswap_server import Settings
from weightswap_server.signed_weights import SignatureRefused, requires

BLOCKS = {kind: blocks(page("serving"), kind) for kind in ("python", "sh")}


@pytest.fixture(scope="module")
def ports() -> dict[str, str]:
    """Free ones, for those of the page."""
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        return {f"800{number}": str(listener.getsockname()[1]) for number, listener in enumerate(free)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("serving")
    python(found, BLOCKS["python"][0])
    return found


def elsewhere(text: str, ports: dict[str, str]) -> str:
    return re.sub(r"\b800[0-3]\b", lambda found: ports[found[0]], text).replace("localhost", "127.0.0.1")


def shell(folder: Path, commands: str) -> str:
    done = subprocess.run(["sh", "-ec", commands], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_nothing_to_an_answer(folder: Path, ports: dict[str, str]) -> None:
    serve, ask, move = (elsewhere(block, ports) for block in BLOCKS["sh"][:3])
    with served(folder, serve):
        answer = json.loads(shell(folder, ask).partition("}{")[2].join(("{", "")))
        assert (answer["model_version"], answer["outputs"][0]["shape"]) == ("0", [1, 2])
        assert python(folder, elsewhere(BLOCKS["python"][1], ports)) == "(3, 2)\n(3, 2)\n"
        shell(folder, move)
        again, until = "\n".join(ask.splitlines()[-2:]), time.monotonic() + 120
        while (later := json.loads(shell(folder, again)))["model_version"] != "1" and time.monotonic() < until:
            time.sleep(0.1)
        gained = [b - a for a, b in zip(answer["outputs"][0]["data"], later["outputs"][0]["data"], strict=True)]
        assert gained == pytest.approx([1, 1], abs=1e-5)


@pytest.mark.slow
def test_workers(folder: Path, ports: dict[str, str]) -> None:
    serve, ask = elsewhere(BLOCKS["sh"][4], ports), elsewhere(BLOCKS["sh"][1], ports)
    with served(folder, serve):
        answer = json.loads(shell(folder, ask).partition("}{")[2].join(("{", "")))
        assert answer["outputs"][0]["shape"] == [1, 2]


@pytest.mark.slow
def test_generation(tmp_path: Path, ports: dict[str, str]) -> None:
    (build,) = re.findall(r"```python\n(from transformers.*?)```", page("state"), re.DOTALL)
    python(tmp_path, "from weightswap_exporter import pack", build)
    serve, ask = (elsewhere(block, ports) for block in BLOCKS["sh"][5:7])
    with served(tmp_path, serve):
        events = shell(tmp_path, ask).strip().split("\n\n")
        assert len(events) == 4
        assert all(len(json.loads(event.removeprefix("data: "))["output_ids"]) == 1 for event in events)


@pytest.mark.slow
def test_variants(tmp_path: Path, ports: dict[str, str]) -> None:
    (build,) = blocks(page("variants"), "python")
    python(tmp_path, "import warnings; warnings.simplefilter('ignore')", build)
    serve, ask = (elsewhere(block, ports) for block in BLOCKS["sh"][7:9])
    with served(tmp_path, serve):
        assert json.loads(shell(tmp_path, ask))["parameters"]["variant"].startswith("lora=")


@pytest.mark.slow
def test_an_operator_pushes_weights_and_takes_them_back(folder: Path, ports: dict[str, str]) -> None:
    """And then lets them answer some requests first."""
    prepare, serve, push, canary = (elsewhere(block, ports) for block in BLOCKS["sh"][9:13])
    python(folder, BLOCKS["python"][0])
    commands(folder, prepare)
    desired_store = DesiredStore(folder / "service")
    with served(folder, serve):
        followed = f"weightswap status http://127.0.0.1:{ports['8003']} --token-file token | grep -q 'revision 1$'"
        commands(folder, f"until {followed}; do sleep 0.1; done")
        said = commands(folder, push)
        assert "generation  1: " in said
        assert "generation  2: rollback\n" in said
        assert "serve it    1 of 1\n" in said
        state = desired_store.read()
        assert state.hold is not None
        assert state.hold.why == "tags are slow"
        said = commands(folder, canary)
        assert re.search(r"requests +│ 2 +│ 8 ", said), said
        assert json.loads(said[said.rindex("\n{\n") :])["receipt"]["kind"] == "rollback"
    assert desired_store.read().revision == state.revision + 2
    calls = [json.loads(line)["call"] for line in (folder / "audit.jsonl").read_text().splitlines()]
    assert calls[-6:] == ["canary", "canary", "commit", "commit", "rollback", "rollback"]


@pytest.mark.slow
def test_weights_are_signed(folder: Path) -> None:
    pytest.importorskip("model_signing")
    python(folder, BLOCKS["python"][0])  # v2.safetensors has been moved away
    commands(folder, BLOCKS["sh"][13])
    model = load(folder / "tagger.artifact", folder / "v2.safetensors", admit=requires(str(folder / "public.pem")))
    with pytest.raises(SignatureRefused):
        model.swap(folder / "v1.safetensors")


def commands(folder: Path, text: str) -> str:
    """Commands of the page; the programs among them are those of this checkout."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["weightswap.commands"]

    def program(found: re.Match[str]) -> str:
        module, function = points[found[1]].split(":")
        return f"{warm.python()} -c 'from {module} import {function}; {function}()'"

    return shell(folder, re.sub(r"weightswap ([a-z]+)", program, text))


def test_in_a_program(folder: Path) -> None:
    assert "name='input', datatype='FP32', shape=[-1, 4]" in python(folder, BLOCKS["python"][2])


def test_the_defaults_are_those_of_the_page() -> None:
    limits = Settings()
    rows = dict(re.findall(r"^\| `(--[a-z-]+)`.*?\| (\d+)", page("serving"), re.MULTILINE))
    assert rows == {
        "--max-queue": str(limits.max_queue),
        "--max-body-mb": str(limits.max_body >> 20),
        "--max-bodies-mb": str(limits.max_bodies >> 20),
        "--body-timeout": f"{limits.body_timeout:g}",
        "--timeout": f"{limits.timeout:g}",
        "--max-connections": str(limits.max_connections),
        "--max-streams": str(limits.max_streams),
        "--stream-timeout": f"{limits.stream_timeout:g}",
        "--grace": f"{limits.grace:g}",
    }
