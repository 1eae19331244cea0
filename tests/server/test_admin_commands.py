"""`weightswap push` and `weightswap status`, against `weightswap serve` as its own process would be."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.support.administered import TOKEN, administered
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import DesiredStore, Model, load, write_delta
from weightswap_runtime.transfer import admin_client
from weightswap_runtime.transfer.admin_client import AdminClient, AdminUnreachable
from weightswap_server import Server
from weightswap_tools.commands.operating import (
    commit_command,
    discard_command,
    hold_command,
    release_command,
    rollback_command,
)
from weightswap_tools.commands.push import _agreement, _print_processes, canary_command, push_command, status_command
from weightswap_tools.commands.serve import serve_command
from weightswap_tools.commands.weights import desired_command


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights) -> Model:
    return load(tiny.path, weight_file(1))


@pytest.fixture(params=["port", "socket"])
def server(
    request: pytest.FixtureRequest, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    (tmp_path / "uploads").mkdir()
    where = {"socket": str(tmp_path / "s")} if request.param == "socket" else {"port": 0}
    with administered({"tiny": model}, upload_dir=str(tmp_path / "uploads"), **where) as running:
        yield running


def url_of(server: Server) -> str:
    assert server.admin is not None
    return server.admin.where


def push(server: Server, *arguments: object) -> Result:
    return CliRunner().invoke(push_command, [url_of(server), *map(str, arguments)])


def test_weights_are_uploaded_and_swapped_in(
    server: Server, model: Model, weight_file: WriteWeights, tmp_path: Path
) -> None:
    done = push(server, weight_file(2), "--why", "better")
    assert done.exit_code == 0, done.stderr
    assert f"weights id  {model.weights_id}" in done.stdout
    assert re.search(r"generation  1: .*/uploads/.*\.safetensors\n", done.stdout)
    assert serves(model, 2)
    assert push(server, weight_file(1)).exit_code == 0
    assert push(server, weight_file(2)).exit_code == 0  # it is there already
    assert len(list((tmp_path / "uploads").iterdir())) == 2
    assert serves(model, 2)
    said = CliRunner().invoke(status_command, [url_of(server)])
    assert f"serves      {model.weights_id}" in said.stdout
    assert "generation 3" in said.stdout
    document = json.loads(CliRunner().invoke(status_command, [url_of(server), "--json"]).stdout)
    assert document["models"][0]["served"]["weights_id"] == model.weights_id


@pytest.mark.usefixtures("_places")
def test_a_delta_is_pushed(server: Server, model: Model, weight_file: WriteWeights, tmp_path: Path) -> None:
    delta = tmp_path / "d.safetensors"
    write_delta(weight_file(1), weight_file(2), delta)
    assert push(server, delta, "--model", "tiny").exit_code == 0
    assert (serves(model, 2), model.history[-1].kind) == (True, "delta")


def test_what_is_refused_is_said(server: Server, model: Model, weight_file: WriteWeights, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    content = bytearray(weight_file(2).read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    for arguments, status, says in (
        ([bad], 1, "DigestMismatch|digest"),
        ([tmp_path / "none.safetensors"], 2, "no such file"),
        ([tmp_path], 2, "only a weight file can be uploaded"),
        (["https://models/v2.safetensors"], 2, r"https://models/v2\.safetensors: only a weight file .* --point"),
        ([weight_file(2), "--point"], 1, "admin-allow"),
        ([weight_file(2), "--model", "other"], 1, "no model is named other"),
    ):
        refused = push(server, *arguments)
        assert refused.exit_code == status
        assert re.search(says, refused.stderr), refused.stderr
    assert serves(model, 1)


def test_a_file_of_another_graph_is_not_sent(
    server: Server, model: Model, tiny: TinyArtifact, tmp_path: Path, weight_file: WriteWeights
) -> None:
    other = tiny.write(tmp_path / "other.safetensors", tiny.values(2), graph_id="1" * 64)
    for command in (push_command, canary_command):
        refused = CliRunner().invoke(command, [url_of(server), str(other)])
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
        assert "packed for another graph, 111111111111; tiny has" in refused.stderr
    assert not list((tmp_path / "uploads").iterdir())
    assert push(server, other, "--allow-other-graph").exit_code == 0
    assert serves(model, 2)


def test_staged_and_left_to_others(server: Server, model: Model, weight_file: WriteWeights) -> None:
    assert push(server, weight_file(2), "--stage").stdout.startswith("staged      ")
    assert serves(model, 1)
    assert "staged      " in CliRunner().invoke(status_command, [url_of(server)]).stdout


def operate(command: typer.Typer, server: Server, *arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(command, [url_of(server), *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


def test_what_is_staged_is_committed_or_discarded(server: Server, model: Model, weight_file: WriteWeights) -> None:
    assert "nothing is staged" in operate(commit_command, server, status=1)
    push(server, weight_file(2), "--stage")
    assert "staged" not in operate(discard_command, server)
    push(server, weight_file(2), "--stage")
    assert "is staged now; look again" in operate(commit_command, server, "--expect", "1" * 64, status=1)
    assert "generation  1: " in operate(commit_command, server, "--why", "good")
    assert serves(model, 2)
    receipt = json.loads(operate(rollback_command, server, "--model", "tiny", "--json"))["receipt"]
    assert (receipt["kind"], serves(model, 1)) == ("rollback", True)
    assert "the model follows none" in operate(hold_command, server, status=1)


def test_a_followed_desired_store_is_rolled_back_held_and_released(
    server: Server, model: Model, weight_file: WriteWeights, tmp_path: Path
) -> None:
    (tmp_path / "service").mkdir()
    desired_store = DesiredStore(tmp_path / "service")
    first = desired_store.set(weight_file(1), revision=0).weights_id
    with model.follow(tmp_path / "service", 0.01) as follower:
        assert follower.wait(60)
        push(server, weight_file(2), "--revision", "latest")
        assert "generation  " in operate(rollback_command, server, str(first)[:8], "--no-hold", "--revision", 2)
        assert (desired_store.read().hold, serves(model, 1)) == (None, True)
        assert "this change is based on 1" in operate(hold_command, server, "--revision", 1, status=1)
        assert "on hold by token: friday" in operate(hold_command, server, "--why", "friday", "--revision", "latest")
        assert "on hold" not in operate(release_command, server)
        push(server, weight_file(2), "--stage")
        operate(hold_command, server)
        assert "is at revision 6" in operate(commit_command, server, status=1)  # it was 5 at the staging
        operate(commit_command, server, "--revision", "latest")
        assert serves(model, 2)
        assert "expected a number, or `latest`" in operate(release_command, server, "--revision", "last", status=2)
    assert desired_store.read().revision == 7


def test_who_serves_what_is_desired(
    server: Server, model: Model, weight_file: WriteWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "service").mkdir()

    def desired(*arguments: object, status: int = 0) -> Any:
        asked = ["--server", url_of(server), *map(str, arguments), "--json"]
        done = CliRunner().invoke(desired_command, [str(folder), *asked])
        assert done.exit_code == status, done.output
        return [(each["model"], each["agrees"], each["state"]) for each in json.loads(done.stdout)["servers"]]

    (tmp_path / "link").symlink_to(folder)
    ((name, agrees, why),) = desired("--wait", "--timeout", 0.1, status=1)
    assert (name, agrees) == ("", False)
    assert f"no model follows {folder}" in why
    with model.follow(folder, 0.01):
        assert desired(status=1) == [("tiny", False, "nothing is desired")]
        set_ = ("--set", weight_file(2), "--revision", "latest", "--wait")
        assert desired(*set_) == [("tiny", True, "serves")]
        assert serves(model, 2)
        for other_name in (tmp_path / "link", folder / ".." / "service"):
            done = CliRunner().invoke(desired_command, [str(other_name), "--server", url_of(server)])
            assert (done.exit_code, "serve it    1 of 1" in done.stdout) == (0, True)
        (tiny, other) = desired("--server", "http://127.0.0.1:1", "--wait", "--timeout", 0.1, status=1)
        assert (tiny[1], other[:2]) == (True, ("", False))
        assert "no server answers there" in other[2]
        bad = bytearray(weight_file(3).read_bytes())
        bad[-1] ^= 1
        (folder / "bad.safetensors").write_bytes(bad)
        DesiredStore(folder).set(folder / "bad.safetensors", revision=1)
        ((_, agrees, why),) = desired("--wait", "--timeout", 2, "--model", "tiny", status=1)
        assert (agrees, "the file records the digest" in why) == (False, True)
    assert desired("--model", "tiny", status=1) == [("tiny", False, "follows no desired store")]
    assert desired("--model", "other", status=1) == [("other", False, "has no such model")]
    done = CliRunner().invoke(desired_command, [str(folder), "--wait"])
    assert (done.exit_code, "--server" in done.output) == (2, True)


def test_a_desired_store_that_cannot_be_read_is_told(
    server: Server, model: Model, weight_file: WriteWeights, tmp_path: Path
) -> None:
    """Even if the desired weights that were read last are served."""
    (tmp_path / "service").mkdir()
    desired_store = DesiredStore(tmp_path / "service")
    desired_store.set(weight_file(1), revision=0, by="ana")
    with model.follow(desired_store.where, 0.02) as follower:
        assert follower.wait(20)
        assert "revision 1\n" in CliRunner().invoke(status_command, [url_of(server)]).stdout
        (tmp_path / "service" / "desired.json").write_text('{"revi')
        limit = time.monotonic() + 20
        while follower.status.reachable:
            assert time.monotonic() < limit
        said = CliRunner().invoke(status_command, [url_of(server)]).stdout
        assert re.search(r"revision 1, and CANNOT BE READ now: .*not a desired state", said)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"held_by": "", "held_why": ""}, ", on hold"),
        ({"held_by": "bo", "held_why": "a feast"}, ", on hold by bo: a feast"),
        ({"held_by": "", "held_why": "a feast", "agrees": False}, ", on hold: a feast, NOT served: 2 differ: a b"),
        (
            {"held_by": "bo", "held_why": "", "reachable": False},
            ", on hold by bo, and CANNOT BE READ now: 2 differ: a b",
        ),
    ],
)
def test_a_hold_and_a_refusal_on_one_line(more: dict[str, Any], says: str) -> None:
    assert (
        _agreement({"on_hold": True, "reachable": True, "agrees": True, "error": "2 differ:\n  a\n  b"} | more) == says
    )


def test_a_process_that_has_said_nothing_yet_begins(capsys: pytest.CaptureFixture[str]) -> None:
    process = {"name": "worker 0", "role": "worker", "pid": 7, "models": {}, "answered": 0, "ready": False}
    for heard, says in ((100.0, ", not ready"), (101.0, "SILENT for 9 s")):
        _print_processes({"time": 110.0, "processes": [process | {"since": 100.0, "heard": heard}]}, "tiny")
        assert capsys.readouterr().out.rstrip().endswith(says)


def test_a_server_that_reads_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives up while it connects or sends, but not while it waits for a response."""
    monkeypatch.setattr(admin_client, "_PATIENCE", 0.1)
    path = tmp_path / "large"
    path.write_bytes(bytes(1 << 25))
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        for where in (f"http://127.0.0.1:{tcp.getsockname()[1]}", f"unix://{tmp_path}/s"):
            with pytest.raises(AdminUnreachable, match="no answer in time"):
                AdminClient(where, TOKEN).upload(path, "large", "", lambda *_: None)
        tcp.accept()[0].close()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(AdminClient(f"http://127.0.0.1:{tcp.getsockname()[1]}", TOKEN).get, "/")
            connection, _ = tcp.accept()
            time.sleep(0.4)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            assert asked.result(20) == {}
            connection.close()


@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        ("http://127.0.0.1:9", 1, "no server answers"),
        ("unix:///nowhere/s", 1, "no server answers"),
        ("ftp://x", 2, "expected http"),
        ("http://user:secret@x", 2, "expected http"),
        ("http://[", 2, "not a URL"),
    ],
)
def test_urls_that_lead_nowhere(url: str, status: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    refused = CliRunner().invoke(status_command, [url])
    assert (refused.exit_code, says in refused.stderr, "secret" in refused.stderr) == (status, True, False)


def test_the_port_of_everybody(server: Server) -> None:
    refused = CliRunner().invoke(status_command, [f"http://127.0.0.1:{server.http_port}"])
    assert (refused.exit_code, "the port for operators?" in refused.stderr) == (1, True)


def test_tokens_that_are_wrong(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("another-token-altogether\n")
    refused = CliRunner().invoke(status_command, [url_of(server), "--token-file", str(tmp_path / "token")])
    assert (refused.exit_code, "the bearer token is not valid" in refused.stderr) == (1, True)
    (tmp_path / "token").write_text("")
    assert CliRunner().invoke(status_command, [url_of(server), "--token-file", str(tmp_path / "token")]).exit_code == 2
    monkeypatch.delenv("WEIGHTSWAP_ADMIN_TOKEN")
    assert CliRunner().invoke(status_command, [url_of(server)]).exit_code == 2


def test_sockets(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are for their owner alone. A stale one is replaced, one in use is not."""
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    path = tmp_path / "s"
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with administered({"tiny": model}, socket=str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(Exception, match="another process"), administered({}, socket=str(path)):
            pass
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(Exception, match="not a socket"), administered({}, socket=str(path)):
        pass


@pytest.mark.slow
def test_as_a_process(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    """A server that follows a desired store: pushed weights become desired, and are served after a restart, too."""
    (tmp_path / "service").mkdir()
    (tmp_path / "uploads").mkdir()
    (tmp_path / "token").write_text(f"ana {TOKEN}\n")
    DesiredStore(tmp_path / "service").set(weight_file(1), revision=0)
    token = ["--token-file", str(tmp_path / "token")]
    for revision in (1, 2):
        with served(
            *(str(tiny.path), "--follow", str(tmp_path / "service"), "--interval", "0.1"),
            *("--admin-port", "0", "--admin-token-file", str(tmp_path / "token")),
            *("--upload-dir", str(tmp_path / "uploads"), "--audit-log", str(tmp_path / "audit")),
        ) as url:
            document = json.loads(CliRunner().invoke(status_command, [url, *token, "--json"]).stdout)
            assert document["models"][0]["following"]["revision"] in (None, revision)
            if revision == 1:
                done = CliRunner().invoke(push_command, [url, str(weight_file(2)), *token])
                assert done.exit_code == 0, done.stderr
    state = DesiredStore(tmp_path / "service").read()
    assert state.weights is not None
    assert (state.revision, state.weights.by) == (2, "ana")


class served:  # noqa: N801 - a block
    """Run the command while the block runs, and check that it exits with 0. Yields the admin URL."""

    def __init__(self, *arguments: str) -> None:
        program = "from weightswap_tools.commands.serve import serve_command; serve_command()"
        self.command = [sys.executable, "-c", program, *arguments, "--port", "0"]

    def __enter__(self) -> str:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.fullmatch(r"(\S+) is for operators\n", line):
                return found[1]
        raise AssertionError("the server has ended")

    def __exit__(self, *_: object) -> None:
        assert self.process.stdout is not None
        self.process.terminate()
        self.process.stdout.close()
        assert self.process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--admin-token-file", "x"], 2, "operators"),
        (["--admin-port", "0"], 2, "WEIGHTSWAP_ADMIN_TOKEN"),
        (["--admin-port", "0", "--admin-socket", "s", "--admin-token-file", "{token}"], 2, "give exactly one of them"),
        (["--admin-port", "0", "--admin-token-file", "{token}", "--admin-allow", "nowhere"], 2, "no such directory"),
        (["--admin-port", "0", "--admin-token-file", "{token}", "--upload-dir", "nowhere"], 2, "upload-dir"),
        (["--admin-port", "0", "--admin-token-file", "{token}", "--audit-log", "no/where"], 2, "audit-log"),
    ],
)
def test_options_that_cannot_be_meant(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    given = [each.format(token=tmp_path / "token") for each in arguments]
    refused = CliRunner().invoke(serve_command, [str(tiny.path), "-w", str(weight_file(1)), "--port", "0", *given])
    assert (refused.exit_code, says in refused.stderr) == (status, True), refused.stderr
