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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.support.administered import TOKEN, Operator, administered, operated
from tests.support.commands import run
from tests.support.damage import damaged
from tests.support.handmade import goldens_beside
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights
from tests.support.watched import eventually
from weightswap_runtime import DesiredStore, Model
from weightswap_runtime.transfer import admin_client
from weightswap_runtime.transfer.admin_client import AdminClient, AdminUnreachable
from weightswap_tools.commands.push import _agreement, _print_processes


@pytest.fixture(params=["socket"])
def operator(request: pytest.FixtureRequest, model: Model, tiny: TinyArtifact, tmp_path: Path) -> Iterator[Operator]:
    """An operator of a server that takes uploads, and allows no file to be named."""
    (tmp_path / "uploads").mkdir()
    where: dict[str, Any] = {"socket": str(tmp_path / "s")} if request.param == "socket" else {"port": 0}
    with operated(model, tiny, tmp_path, allow=(), upload_dir=str(tmp_path / "uploads"), **where) as found:
        yield found


def push(operator: Operator, *arguments: object, status: int = 0) -> Result:
    return run("push", operator.where, *arguments, status=status)


@pytest.mark.parametrize("operator", ["port", "socket"], indirect=True)
def test_weights_are_uploaded_and_swapped_in(operator: Operator) -> None:
    done = push(operator, operator.file(2), "--why", "better")
    assert f"weights id  {operator.model.weights_id}" in done.stdout
    assert re.search(r"generation  1: .*/uploads/.*\.safetensors\n", done.stdout)
    assert operator.serves(2)
    push(operator, operator.file(1))
    push(operator, operator.file(2))  # it is there already
    assert len(list((operator.folder / "uploads").iterdir())) == 2
    assert operator.serves(2)
    said = run("status", operator.where).stdout
    assert f"serves      {operator.model.weights_id}" in said
    assert "generation 3" in said
    document = json.loads(run("status", operator.where, "--json").stdout)
    assert document["models"][0]["served"]["weights_id"] == operator.model.weights_id


def test_other_goldens_of_the_same_weights_replace_none(operator: Operator) -> None:
    """Another operator may be pushing, or a model staging, the upload that they would be taken from."""
    file, calls = operator.file(2), []
    for _ in range(2):
        push(operator, file)
        calls.append(operator.model.history[-1].verified)
        goldens_beside(operator.tiny, file, 2)
    assert calls == ["none", "goldens"]
    names = sorted(path.name for path in (operator.folder / "uploads").iterdir())
    assert [name.removesuffix(".goldens.safetensors") == name for name in names].count(False) == 1
    assert len(names) == 3


@pytest.mark.usefixtures("_places")
def test_a_delta_is_pushed(operator: Operator, delta: WriteDelta) -> None:
    push(operator, delta(1, 2), "--model", "tiny")
    assert (operator.serves(2), operator.model.history[-1].kind) == (True, "delta")


def test_what_is_refused_is_said(operator: Operator) -> None:
    bad = damaged(operator.file(2), operator.folder / "bad.safetensors")
    for arguments, status, says in (
        ([bad], 1, "DigestMismatch|digest"),
        ([operator.folder / "none.safetensors"], 2, "no such file"),
        ([operator.folder], 2, "only a weight file can be uploaded"),
        (["https://models/v2.safetensors"], 2, r"https://models/v2\.safetensors: only a weight file .* --point"),
        ([operator.file(2), "--point"], 1, "admin-allow"),
        ([operator.file(2), "--model", "other"], 1, "no model is named other"),
    ):
        refused = push(operator, *arguments, status=status)
        assert re.search(says, refused.stderr), refused.stderr
    assert operator.serves(1)


def test_a_file_of_another_graph_is_not_sent(operator: Operator, tiny: TinyArtifact, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other.safetensors", tiny.values(2), graph_id="1" * 64)
    for command in ("push", "canary"):
        refused = run(command, operator.where, other, status=1).stderr
        assert refused.count("\n") == 1
        assert "packed for another graph, 111111111111; tiny has" in refused
    assert not list((tmp_path / "uploads").iterdir())
    push(operator, other, "--allow-other-graph")
    assert operator.serves(2)


def operate(command: str, operator: Operator, *arguments: object, status: int = 0) -> str:
    return run(command, operator.where, *arguments, status=status).output


def test_what_is_staged_is_committed_or_discarded(operator: Operator) -> None:
    assert "nothing is staged" in operate("commit", operator, status=1)
    assert push(operator, operator.file(2), "--stage").stdout.startswith("staged      ")
    assert operator.serves(1)
    assert "staged      " in operate("status", operator)
    assert "staged" not in operate("discard", operator)
    push(operator, operator.file(2), "--stage")
    assert "is staged now; look again" in operate("commit", operator, "--expect", "1" * 64, status=1)
    assert "generation  1: " in operate("commit", operator, "--why", "good")
    assert operator.serves(2)
    receipt = json.loads(operate("rollback", operator, "--model", "tiny", "--json"))["receipt"]
    assert (receipt["kind"], operator.serves(1)) == ("rollback", True)
    assert "the model follows none" in operate("hold", operator, status=1)


def test_a_followed_desired_store_is_rolled_back_held_and_released(
    operator: Operator, desired_store: DesiredStore
) -> None:
    first = desired_store.read().weights_id
    with operator.model.follow(desired_store, 0.01) as follower:
        assert follower.wait(120)
        push(operator, operator.file(2), "--revision", "latest")
        assert "generation  " in operate("rollback", operator, str(first)[:8], "--no-hold", "--revision", 2)
        assert (desired_store.read().hold, operator.serves(1)) == (None, True)
        assert "this change is based on 1" in operate("hold", operator, "--revision", 1, status=1)
        assert "on hold by token: friday" in operate("hold", operator, "--why", "friday", "--revision", "latest")
        assert "on hold" not in operate("release", operator)
        push(operator, operator.file(2), "--stage")
        operate("hold", operator)
        assert "is at revision 6" in operate("commit", operator, status=1)  # it was 5 at the staging
        operate("commit", operator, "--revision", "latest")
        assert operator.serves(2)
        assert "expected a number, or `latest`" in operate("release", operator, "--revision", "last", status=2)
    assert desired_store.read().revision == 7


def test_who_serves_what_is_desired(operator: Operator, tmp_path: Path) -> None:
    (folder := tmp_path / "service").mkdir()

    def desired(*arguments: object, status: int = 0) -> Any:
        asked = ["--server", operator.where, *map(str, arguments), "--json"]
        told = json.loads(run("desired", folder, *asked, status=status).stdout)
        return [(each["model"], each["agrees"], each["state"]) for each in told["servers"]]

    (tmp_path / "link").symlink_to(folder)
    ((name, agrees, why),) = desired("--wait", "--timeout", 0.1, status=1)
    assert (name, agrees) == ("", False)
    assert f"no model follows {folder}" in why
    with operator.model.follow(folder, 0.01):
        assert desired(status=1) == [("tiny", False, "nothing is desired")]
        set_ = ("--set", operator.file(2), "--revision", "latest", "--wait")
        assert desired(*set_) == [("tiny", True, "serves")]
        assert operator.serves(2)
        for other_name in (tmp_path / "link", folder / ".." / "service"):
            assert "serve it    1 of 1" in run("desired", other_name, "--server", operator.where).stdout
        (tiny, other) = desired("--server", "http://127.0.0.1:1", "--wait", "--timeout", 0.1, status=1)
        assert (tiny[1], other[:2]) == (True, ("", False))
        assert "no server answers there" in other[2]
        DesiredStore(folder).set(damaged(operator.file(3), folder / "bad.safetensors"), revision=1)
        ((_, agrees, why),) = desired("--wait", "--timeout", 0.5, "--model", "tiny", status=1)
        assert (agrees, "the file records the digest" in why) == (False, True)
    assert desired("--model", "tiny", status=1) == [("tiny", False, "follows no desired store")]
    assert desired("--model", "other", status=1) == [("other", False, "has no such model")]
    assert "--server" in run("desired", folder, "--wait", status=2).output


def test_a_desired_store_that_cannot_be_read_is_told(operator: Operator, desired_store: DesiredStore) -> None:
    """Even if the desired weights that were read last are served."""
    with operator.model.follow(desired_store.where, 0.02) as follower:
        assert follower.wait(120)
        assert "revision 1\n" in operate("status", operator)
        Path(desired_store.where, "desired.json").write_text('{"revi')
        assert eventually(lambda: not follower.status.reachable)
        said = operate("status", operator)
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
            with pytest.raises(AdminUnreachable):
                AdminClient(where, TOKEN).upload(path, "large", "", lambda *_: None)
        tcp.accept()[0].close()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(AdminClient(f"http://127.0.0.1:{tcp.getsockname()[1]}", TOKEN).get, "/")
            connection, _ = tcp.accept()
            time.sleep(0.4)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            assert asked.result(120) == {}
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
def test_urls_that_lead_nowhere(url: str, status: int, says: str) -> None:
    refused = run("status", url, status=status)
    assert (says in refused.stderr, "secret" in refused.stderr) == (True, False)


def test_the_port_of_everybody(operator: Operator) -> None:
    refused = run("status", f"http://127.0.0.1:{operator.server.http_port}", status=1)
    assert "the port for operators?" in refused.stderr


def test_tokens_that_are_wrong(operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = (operator.where, "--token-file", tmp_path / "token")
    (tmp_path / "token").write_text("another-token-altogether\n")
    assert "the bearer token is not valid" in run("status", *by_file, status=1).stderr
    (tmp_path / "token").write_text("")
    run("status", *by_file, status=2)
    monkeypatch.delenv("WEIGHTSWAP_ADMIN_TOKEN")
    run("status", operator.where, status=2)


def test_sockets(model: Model, tmp_path: Path) -> None:
    """They are for their owner alone. A stale one is replaced, one in use is not."""
    path = tmp_path / "s"
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
def test_as_a_process(
    tiny: TinyArtifact, weight_file: WriteWeights, desired_store: DesiredStore, tmp_path: Path
) -> None:
    """A server that follows a desired store: pushed weights become desired, and are served after a restart, too."""
    (tmp_path / "uploads").mkdir()
    (tmp_path / "token").write_text(f"ana {TOKEN}\n")
    token = ["--token-file", str(tmp_path / "token")]
    for revision in (1, 2):
        with served(
            *(str(tiny.path), "--follow", desired_store.where, "--interval", "0.1"),
            *("--admin-port", "0", "--admin-token-file", str(tmp_path / "token")),
            *("--upload-dir", str(tmp_path / "uploads"), "--audit-log", str(tmp_path / "audit")),
        ) as url:
            document = json.loads(run("status", url, *token, "--json").stdout)
            assert document["models"][0]["following"]["revision"] in (None, revision)
            if revision == 1:
                run("push", url, weight_file(2), *token)
    state = desired_store.read()
    assert state.weights is not None
    assert (state.revision, state.weights.by) == (2, "ana")


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run the command while the block runs, and check that it exits with 0. Yields the admin URL."""
    program = "from weightswap_tools.program import main; main()"
    command = [sys.executable, "-c", program, "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        found = (re.fullmatch(r"(\S+) is for operators\n", line) for line in process.stdout)
        yield next(match[1] for match in found if match)
        process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--admin-token-file", "x"], "operators"),
        (["--admin-port", "0"], "WEIGHTSWAP_ADMIN_TOKEN"),
        (["--admin-port", "0", "--admin-socket", "s", "--admin-token-file", "{token}"], "give exactly one of them"),
        (["--admin-port", "0", "--admin-token-file", "{token}", "--admin-allow", "nowhere"], "no such directory"),
        (["--admin-port", "0", "--admin-token-file", "{token}", "--upload-dir", "nowhere"], "upload-dir"),
        (["--admin-port", "0", "--admin-token-file", "{token}", "--audit-log", "no/where"], "audit-log"),
    ],
)
def test_options_that_cannot_be_meant(
    tiny: TinyArtifact, tmp_path: Path, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTSWAP_ADMIN_TOKEN")
    (tmp_path / "token").write_text(TOKEN)
    given = [each.format(token=tmp_path / "token") for each in arguments]
    weights = tiny.write(tmp_path / "v1.safetensors", tiny.values(1))
    assert says in run("serve", tiny.path, "-w", weights, "--port", "0", *given, status=2).stderr
