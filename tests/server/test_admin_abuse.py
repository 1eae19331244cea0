"""Who has no token gets nothing, and whoever has one only what was allowed; weights stay, nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from blake3 import blake3

from tests.support.administered import BEARER, TOKEN, administered, call, change
from tests.support.described import MODES, try_operation
from tests.support.served import ask, rest_of
from tests.support.servers import Handler, Request, WebServer
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from tests.support.watched import eventually
from weightswap_runtime import Unsupported, WeightFileError, load
from weightswap_runtime.sources.location import fixed_text
from weightswap_server import AdminSettings, Server
from weightswap_server.admin import uploads
from weightswap_server.admin.access import AllowList, Tokens, read_tokens
from weightswap_server.admin.audit import AuditLog
from weightswap_server.errors import Forbidden, NotReady

PATHS = ("/admin/status", "/admin/models/tiny", "/openapi.json", "/metrics", "/nothing/here", "/v2/repository/index")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("operated")
    for name in ("allowed", "uploads", "outside"):
        (found / name).mkdir()
    tiny = TinyArtifact(found / "tiny.artifact")
    for where in ("allowed", "outside"):
        tiny.write(found / where / "v2.safetensors", tiny.values(2))
    (found / "allowed" / "link.safetensors").symlink_to(found / "outside" / "v2.safetensors")
    (found / "allowed" / "away").symlink_to(found / "outside")
    tiny.write(found / "allowed" / "w.safetensors", tiny.values(3))
    tiny.write(found / "v1.safetensors", tiny.values(1))
    (found / "allowed" / "w.goldens.safetensors").symlink_to(found / "outside" / "g")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """A server with the weights of seed 1, which no test changes."""
    model = load(folder / "tiny.artifact", folder / "v1.safetensors")
    with administered(
        {"tiny": model},
        allow=(str(folder / "allowed"), "https://models.example/prod/"),
        upload_dir=str(folder / "uploads"),
        max_uploads=100_000,
        upload_timeout=1.0,
        audit_log=str(folder / "audit.jsonl"),
    ) as running:
        yield running
        assert model.generation == 0
        assert serves(model, 1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN} {TOKEN}"},
        {"Authorization": "Bearer pässwörter-täuschen-sehr".encode("latin-1")},
        {"Authorization": "Bearer пароль-пароль-пароль".encode()},
        {"Authorization": b"Bearer \xff\xfe"},
        {"Authorization": f"Bearer {'x' * 10_000}"},
        {"X-Authorization": f"Bearer {TOKEN}"},
        {"Cookie": f"token={TOKEN}"},
    ],
    ids=str,
)
def test_nothing_is_told_without_the_token(server: Server, path: str, headers: Any) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        refused = call(server, path, headers=headers, method=method)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, 'Bearer realm="weightswap"')
        assert ("is not valid" if "Authorization" in headers else "is required") in refused.json["error"]
        assert sorted(refused.json) == ["error", "kind", "reason"]
        assert TOKEN not in refused.body.decode()


def connect(server: Server, timeout: float = 10) -> socket.socket:
    assert server.admin is not None
    return socket.create_connection(("127.0.0.1", server.admin.port), timeout)


def test_two_tokens_are_none(server: Server) -> None:
    with connect(server) as connection:
        lines = f"Authorization: Bearer {TOKEN}\r\n" * 2
        connection.sendall(f"GET /admin/status HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_the_public_port_has_no_admin(server: Server) -> None:
    assert ask(server, "/admin/status", headers=BEARER).status == 404
    assert ask(server, "/v2/repository/models/tiny/load", {}, BEARER).status == 404


@pytest.mark.parametrize(
    "source",
    [
        "/etc/passwd",
        "{folder}/outside/v2.safetensors",
        "{folder}/allowed/../outside/v2.safetensors",
        "{folder}/allowed/link.safetensors",
        "{folder}/allowed/away/v2.safetensors",
        "{folder}/allowed/w.safetensors",  # whose goldens are a link
        "{folder}/allowedx",
        "../../etc/passwd",
        "upload:../v1.safetensors",
        "upload:/etc/passwd",
        "upload:",
        "upload:..",
        "upload:.coming.safetensors.tmp-0a1b2c3d",
        "upload:a\0b",
        "upload:" + "a" * 300,
        "{folder}/allowed/a\0b",
        "file://{folder}/allowed/v2.safetensors",
        "FILE:///etc/passwd",
        "https://models.example/prod/../secret.safetensors",
        "https://models.example/prod/%2e%2e/secret.safetensors",
        "https://models.example/prod/a%2fb.safetensors",
        "https://models.example/prodx/v.safetensors",
        "https://models.example.evil/prod/v.safetensors",
        "https://models.example:8443/prod/v.safetensors",
        "http://models.example/prod/v.safetensors",
        "https://models.example@evil/prod/v.safetensors",
        "https://user:password@models.example/prod/v.safetensors",
        "https://models.example/prod/v.safetensors#x",
        "https://models.example/prod/v.safetensors?token=secret",
        "https://models.example/prod//v.safetensors",
        "https://models.example/prod\\..\\v.safetensors",
        "https://models.example/prod/v.safetensors ",
        "https://[models.example/prod/v",
        "simplecache::https://models.example/prod/v.safetensors",
        "http://169.254.169.254/latest/meta-data",
        "s3://bucket/v.safetensors",
        "memory://v",
    ],
)
def test_what_was_not_allowed_is_not_read(server: Server, folder: Path, source: str) -> None:
    named = source.format(folder=folder)
    for refused in (
        change(server, "swap", source=named),
        change(server, "stage", source=named),
        call(server, "/v2/repository/models/tiny/load", {"parameters": {"weights": named}}),
    ):
        assert refused.status == 403, refused.body
        assert refused.json["kind"] == "Forbidden"
        assert "secret" not in refused.json["error"].replace("secret.safetensors", "")
        assert "password" not in refused.json["error"].replace("user, password", "")
    if not named.endswith("/w.safetensors"):
        assert change(server, "watch", directory=named).status == 403
        assert change(server, "follow", desired_store=named).status == 403
    audit = (folder / "audit.jsonl").read_text()
    assert "token=secret" not in audit
    assert "user:password" not in audit


def test_what_was_allowed(folder: Path) -> None:
    allowed = AllowList([str(folder / "allowed"), "https://models.example/prod", "s3://bucket"], folder / "uploads")
    file = folder / "allowed" / "v2.safetensors"
    urls = ("https://models.example/prod/a/v.safetensors", "s3://bucket/v", "s3://bucket/v?versionId=a.b_c")
    for source, where in {str(file): str(file), os.path.relpath(file): str(file), **{url: url for url in urls}}.items():
        with allowed.weights(source) as location:
            assert fixed_text(location) == where
    with pytest.raises(Forbidden), AllowList([]).weights(str(file)):
        pass
    for wrong in ("nowhere", "https://u:p@host/", "https://host/?a=b", "file:///tmp", "https://host/../a"):
        with pytest.raises(Unsupported, match="admin-allow"):
            AllowList([wrong])


def replace_by_link(path: Path, target: Path) -> None:
    path.rename(path.with_name(f"{path.name}.was"))
    path.symlink_to(target)


@pytest.fixture
def shards(tiny: TinyArtifact, tmp_path: Path) -> Path:
    """Two sets of two shards with an index and goldens: in `allowed/set` and in `outside`."""
    for where in ("allowed/set", "outside"):
        folder = tmp_path / where
        folder.mkdir(parents=True)
        names = {}
        for number, (name, value) in enumerate(tiny.values(2).items()):
            file = folder / f"{number}.safetensors"
            safetensors.torch.save_file({name: value}, file)
            names[name] = file.name
        (folder / "m.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        (folder / "m.goldens.safetensors").write_bytes(b"goldens")
    return tmp_path


@pytest.mark.parametrize("changed", ["m.safetensors.index.json", "1.safetensors", "m.goldens.safetensors", "."])
def test_a_link_that_is_made_after_the_check_is_not_followed(
    tiny: TinyArtifact, weight_file: WriteWeights, shards: Path, changed: str
) -> None:
    source = shards / "allowed/set/m.safetensors.index.json"
    model = load(tiny.path, weight_file(1))
    location: Any
    with AllowList([str(shards / "allowed")]).weights(str(source)) as location:
        replace_by_link(shards / "allowed/set" / changed, shards / "outside" / changed)
        with pytest.raises(WeightFileError, match="a link leads to where nothing may be read"):
            model.swap(location)
    assert serves(model, 1)


def test_a_link_to_what_is_allowed_is_followed(tiny: TinyArtifact, weight_file: WriteWeights, shards: Path) -> None:
    folder = shards / "allowed/set"
    (folder / "m.goldens.safetensors").unlink()
    (folder / "1.safetensors").rename(shards / "allowed/blob")
    (folder / "1.safetensors").symlink_to("../blob")
    model = load(tiny.path, weight_file(1))
    location: Any
    with AllowList([str(shards / "allowed")]).weights(str(folder)) as location:
        model.swap(location)
    assert serves(model, 2)


def test_a_link_that_changes_during_the_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = AllowList([str(tmp_path)])

    def realpath(path: object) -> str:
        raise OSError(errno.EINVAL, "Invalid argument")  # what was a link a moment ago is a file

    monkeypatch.setattr(os.path, "realpath", realpath)
    path = str(tmp_path / "v.safetensors")
    with pytest.raises(Forbidden, match="Invalid argument"), allowed.weights(path):
        pass
    with pytest.raises(Forbidden, match="Invalid argument"):
        allowed.folder(path)


def test_redirects_lead_to_allowed_hosts_alone(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    with WebServer() as web, WebServer() as other:
        target = ""

        def redirected(handler: Handler, request: Request) -> bool:
            if request.path == "/latest.safetensors":
                handler.reply(302, headers={"Location": target})
            return request.path == "/latest.safetensors"

        web.fault = redirected
        for server in (web, other):
            server.put("v2.safetensors", weight_file(2).read_bytes())
        model = load(tiny.path, weight_file(1))
        location: Any
        with AllowList([f"{web.url}/latest.safetensors"]).weights(f"{web.url}/latest.safetensors") as location:
            target = f"{other.url}/v2.safetensors"
            with pytest.raises(WeightFileError, match=f"redirects to {target}"):
                model.swap(location)
            assert not other.requests
            target = "/v2.safetensors?signature=abc"
            model.swap(location)
        assert serves(model, 2)


def listed(server: Server) -> dict[str, int]:
    found: dict[str, int] = call(server, "/admin/uploads").json["files"]
    return found


def put(server: Server, name: str, body: bytes, **headers: str) -> Any:
    return call(server, f"/admin/uploads/{name}", body, {**BEARER, **headers}, "PUT")


def left_behind(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "uploads").iterdir())


def test_an_upload_comes_whole(server: Server, folder: Path) -> None:
    body = (folder / "allowed" / "v2.safetensors").read_bytes()
    digest = blake3(body).hexdigest()
    wrong = put(server, "v.safetensors", body, **{"X-Weightswap-Blake3": digest[::-1]})
    assert (wrong.status, wrong.json["kind"]) == (422, "UploadMismatch")
    assert put(server, "v.safetensors", body, **{"X-Weightswap-Blake3": "abc"}).status == 400
    assert put(server, "v.safetensors", body, **{"Content-Encoding": "gzip"}).status == 400
    assert left_behind(folder) == []
    done = put(server, "v.safetensors", body, **{"X-Weightswap-Blake3": digest})
    assert (done.status, done.json) == (201, {"source": "upload:v.safetensors", "size": len(body), "blake3": digest})
    assert put(server, "v.safetensors", body).status == 409
    assert listed(server) == {"v.safetensors": len(body)}
    assert change(server, "stage", source="upload:v.safetensors").json["status"]["staged"]["ready"]
    assert change(server, "discard").status == 200
    assert call(server, "/admin/uploads/v.safetensors", method="DELETE").status == 204
    assert call(server, "/admin/uploads/v.safetensors", method="DELETE").status == 404
    assert left_behind(folder) == []


@pytest.mark.parametrize(
    "name", ["v.bin", ".safetensors", "a%2f..%2fb.safetensors", "..%2fb.safetensors", "a%20b.safetensors", "x" * 300]
)
def test_names_that_no_upload_has(server: Server, folder: Path, name: str) -> None:
    assert put(server, name, b"x").status in (400, 404)
    assert call(server, f"/admin/uploads/{name}", method="DELETE").status in (400, 404)
    assert left_behind(folder) == []


def test_uploads_have_limits(server: Server, folder: Path) -> None:
    assert put(server, "large.safetensors", bytes(100_001)).status == 413
    assert put(server, "one.safetensors", bytes(60_000)).status == 201
    assert put(server, "two.safetensors", bytes(60_000)).status == 507
    assert left_behind(folder) == ["one.safetensors"]
    assert call(server, "/admin/uploads/one.safetensors", method="DELETE").status == 204


def raw_upload(server: Server, head: str) -> socket.socket:
    connection = connect(server, 20)
    lines = f"PUT /admin/uploads/raw.safetensors HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{head}\r\n\r\n"
    connection.sendall(lines.encode())
    return connection


@pytest.mark.parametrize("is_link", [False, True])
def test_an_upload_replaces_nothing_that_came_meanwhile(server: Server, folder: Path, is_link: bool) -> None:
    path, other = folder / "uploads" / "raw.safetensors", folder / "outside" / "other"
    other.write_text("other")
    with raw_upload(server, "Content-Length: 6") as connection:
        connection.sendall(b"abc")
        assert eventually(lambda: bool(left_behind(folder)))
        path.symlink_to(other) if is_link else other.rename(path)
        connection.sendall(b"def")
        assert connection.recv(100).startswith(b"HTTP/1.1 409")
    assert path.is_symlink() == is_link
    assert path.read_text() == "other"
    assert left_behind(folder) == [path.name]
    path.unlink()


def test_uploads_are_listed_while_one_is_removed(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert put(server, "gone.safetensors", b"x").status == put(server, "kept.safetensors", b"x").status == 201

    @contextmanager
    def scandir(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scan(path) as entries:
            found = list(entries)
        (folder / "uploads" / "gone.safetensors").unlink(missing_ok=True)
        yield found

    scan = os.scandir
    monkeypatch.setattr(uploads.os, "scandir", scandir)
    assert listed(server) == {"kept.safetensors": 1}
    monkeypatch.undo()
    assert call(server, "/admin/uploads/kept.safetensors", method="DELETE").status == 204


def test_uploads_that_break_off_stall_or_never_end(server: Server, folder: Path) -> None:
    with raw_upload(server, "Content-Length: 5000") as connection:
        connection.sendall(bytes(100))
        assert eventually(lambda: bool(left_behind(folder)))
    assert eventually(lambda: not left_behind(folder))
    with raw_upload(server, "Content-Length: 5000") as connection:  # stalls
        connection.sendall(bytes(100))
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    with raw_upload(server, "Transfer-Encoding: chunked") as connection:  # too large, and nobody had said so
        with suppress(OSError):
            for _ in range(200):
                connection.sendall(b"1000\r\n" + bytes(4096) + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    with raw_upload(server, "Transfer-Encoding: chunked") as connection:  # a drop at a time, for ever
        answer, began = b"", time.monotonic()
        connection.settimeout(0.05)
        while not answer and time.monotonic() < began + 20:
            connection.sendall(b"1\r\nx\r\n")
            with suppress(TimeoutError):
                answer = connection.recv(100)
        assert answer.startswith(b"HTTP/1.1 408")
    assert eventually(lambda: not left_behind(folder))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/admin/models/other/swap", {"source": "x"}, 404),
        ("/admin/models/tiny/swap", {}, 400),
        ("/admin/models/tiny/swap", {"source": ""}, 400),
        ("/admin/models/tiny/swap", {"source": "x", "sauce": 1}, 400),
        ("/admin/models/tiny/swap", {"source": 7}, 400),
        ("/admin/models/tiny/swap", b"{", 400),
        ("/admin/models/tiny/swap", b"[" * 100_000, 400),
        ("/admin/models/tiny/swap", b"\xff", 400),
        ("/admin/models/tiny/swap", bytes(2 << 20), 413),
        ("/admin/models/tiny/swap", {"source": "x", "expect": "abc"}, 400),
        ("/admin/models/tiny/rollback", {"to": "../.."}, 400),
        ("/admin/models/tiny/rollback", {"to": "ffff"}, 409),
        ("/admin/models/tiny/rollback", {}, 409),
        ("/admin/models/tiny/commit", {}, 409),
        ("/admin/models/tiny/unfollow", {}, 409),
        ("/admin/models/tiny/release", {}, 409),
        ("/admin/models/tiny/watch", {"directory": "x", "interval": 0}, 400),
        ("/admin/models/tiny/nothing", {}, 404),
        ("/v2/repository/models/tiny/load", {"parameters": {"config": "{"}}, 400),
        ("/v2/repository/index", {"ready": "yes"}, 400),
    ],
)
def test_calls_that_cannot_be_meant(server: Server, path: str, body: Any, status: int) -> None:
    refused = call(server, path, body)
    assert refused.status == status, refused.body
    assert refused.json["error"]


@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(1)
def test_whatever_its_description_allows_and_what_it_does_not(server: Server, mode: str, examples: int) -> None:
    import schemathesis

    assert server.admin is not None
    described = schemathesis.openapi.from_dict(call(server, "/openapi.json").json)
    described.config.update(base_url=f"http://127.0.0.1:{server.admin.port}")
    for operation in (found.ok() for found in described.get_all_operations()):
        if operation.path != "/admin/events":
            try_operation(operation, mode, examples, headers=BEARER)
    for name in listed(server):
        call(server, f"/admin/uploads/{name}", method="DELETE")


def test_denied_calls_are_in_the_audit_log(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes tokens, lines or codes of terminals into it, and nobody else reads it."""
    monkeypatch.setattr("weightswap_server.admin.audit._DENIAL_INTERVAL", 0.0)
    for _ in range(3):
        assert call(server, "/%0a%7b%22who%22:1%7d%1b[31m%C2%9b31m%E2%80%A8%C2%85%EF%BF%BE", headers={}).status == 401
    content = (folder / "audit.jsonl").read_bytes()
    line = content.splitlines()[-1].decode("ascii")
    said = json.loads(line)
    assert said["outcome"] == "denied"
    assert said["call"].startswith("GET /")
    assert said["call"].endswith("\x1b[31m\x9b31m\u2028\x85\ufffe")
    assert line.isprintable()
    assert TOKEN.encode() not in content
    assert (folder / "audit.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("restarted", [False, True])
def test_a_line_that_a_full_disk_cut_off_does_not_swallow_the_next(
    restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, line: write(fd, line[:20]))
        with pytest.raises(NotReady):
            audit.begin(call="lost")
    if restarted:
        audit = AuditLog(str(path))
    audit.begin(call="first")
    audit.begin(call="second")
    torn, *lines = path.read_text().splitlines()
    assert len(torn) == 20
    assert [json.loads(line)["call"] for line in lines] == ["first", "second"]


def test_what_cannot_be_audited_is_not_done(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "token").write_text(f"# who may\nana {TOKEN}\nbo {TOKEN[::-1]}\n")
    model = load(tiny.path, weight_file(1))
    options: Any = {"allow": (str(tmp_path),), "audit_log": str(tmp_path / "log/a"), "warm": False}
    with administered({"tiny": model}, token_file=str(tmp_path / "token"), **options) as server:
        bo = {"Authorization": f"Bearer {TOKEN[::-1]}"}
        swapped = call(server, "/admin/models/tiny/swap", {"source": str(weight_file(2))}, bo)
        assert swapped.json["receipt"]["by"] == "bo"
        (tmp_path / "log").rename(tmp_path / "moved")
        assert change(server, "swap", source=str(weight_file(3))).status == 503
        assert serves(model, 2)


@pytest.mark.parametrize("text", ["", "\n# none\n", "short", "a b c", "ana {0}\nana {0}", "{0}\n{0}", "ana\u00e9! {0}"])
def test_files_that_hold_no_tokens(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokens").write_text(text.format(TOKEN))
    with pytest.raises(Unsupported, match="token"):
        read_tokens(str(tmp_path / "tokens"))
    with pytest.raises(Unsupported, match="token"):
        read_tokens(str(tmp_path / "none"))
    monkeypatch.delenv("WEIGHTSWAP_ADMIN_TOKEN", raising=False)
    with pytest.raises(Unsupported, match="WEIGHTSWAP_ADMIN_TOKEN"):
        AdminSettings(port=0).check()


def test_tokens_of_other_letters() -> None:
    tokens = Tokens({"ana": "schlüssel-für-den-schrank", "bo": TOKEN})
    assert tokens.name_of("schlüssel-für-den-schrank".encode()) == "ana"
    assert tokens.name_of("schlüssel-für-den-schrank".encode("latin-1")) is None
    assert tokens.name_of(TOKEN.encode()) == "bo"
    assert tokens.name_of(b"") is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"port": 0, "socket": "x"},
        {"port": 0, "max_uploads": 0},
        {"port": 0, "upload_timeout": -1.0},
        {"port": 0, "upload_keep": 1},
        {"port": 0, "upload_keep": 0, "upload_dir": "uploads"},
    ],
)
def test_settings_that_cannot_be_meant(fields: Any) -> None:
    with pytest.raises(Unsupported):
        AdminSettings(**fields).check()


def test_the_body_of_a_request_is_never_another_request(server: Server) -> None:
    inner = f"GET /admin/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    head = (
        f"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nUpgrade: foo\r\n"
        f"Connection: Upgrade\r\nContent-Length: {len(inner)}\r\n\r\n"
    )
    last = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(server) as raw:
        for piece in (head, inner, last):
            raw.sendall(piece.encode())
        received = rest_of(raw)
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"400", b"401"]
