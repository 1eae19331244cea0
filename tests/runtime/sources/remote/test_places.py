"""URLs: which are accepted, what they show, and what reading them needs."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.runtime.sources.remote.answers import (
    DATA_START,
    compressed,
    dropped,
    everything,
    other_range,
    status,
    too_much,
)
from tests.support import warm
from tests.support.servers import WebServer
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_exporter import pack
from weightswap_exporter.commands.build import pack_command
from weightswap_runtime import ArtifactError, Event, Model, Unsupported, WeightFileError, load, read_weights
from weightswap_runtime.sources.location import Url, as_location, printable, redact


def test_a_file_url_is_a_local_path(tiny: TinyArtifact, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "a b.safetensors", tiny.values(1))
    assert serves(load(tiny.path, f"file://{str(path).replace(' ', '%20')}"), 1)
    assert serves(load(tiny.path, f"file://localhost{path}"), 1)


UNSUPPORTED = {
    "file://elsewhere/v.safetensors": "expected file:/// and an absolute path",
    "simplecache::s3://a/b.safetensors": "chained URLs are not supported",
    "nothing://a/b.safetensors": "fsspec does not know nothing://. It knows .*s3",
    "abfs://a/b.safetensors": "needs another package .*adlfs",
    "models:/classifier/3": r"^models:/classifier/3: an MLflow URI, .* Download it \(mlflow",
    "runs:/0123/model": "an MLflow URI",
    "mlflow-artifacts:/0/a": "an MLflow URI",
    "mlflow-artifacts://host/a": "an MLflow URI",
}


@pytest.mark.parametrize(("url", "says"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_an_unsupported_url_is_refused(url: str, says: str, model: Model) -> None:
    for road in (model.swap, model.watch, load, read_weights):
        if road != model.watch or url.startswith(("nothing", "abfs", "models", "runs", "mlflow")):
            with pytest.raises(Unsupported, match=says):
                road(url)  # type: ignore[operator]


@pytest.mark.parametrize("url", ["nothing://a/b", "models:/classifier/3", "https://h/a.pt"])
def test_the_packed_source_is_named_too(url: str, tiny: TinyArtifact, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"copy it here|an MLflow URI"):
        pack(url, tiny.path, out=tmp_path / "v.safetensors")
    result = CliRunner().invoke(pack_command, [url, str(tiny.path), "-o", str(tmp_path / "v.safetensors")])
    assert (result.exit_code, url in result.stderr) == (2, True)


def test_a_url_as_a_path_is_named(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"^s3:\*\*\*: a URL as a Path, which drops a slash; give it as a string$"
    for road in (model.swap, model.watch):
        with pytest.raises(WeightFileError, match=says):
            road(Path("s3://bucket/v.safetensors"))
    with pytest.raises(ArtifactError, match=says):
        load(Path("s3://bucket/a.artifact"))
    monkeypatch.chdir(tmp_path)
    Path("s3:").mkdir()
    with pytest.raises(WeightFileError, match="No such file"):
        model.swap(Path("s3://bucket/v.safetensors"))


SECRETS = {
    "https://me:secret@host/a.safetensors": "https://***@host/a.safetensors",
    "https://secret@host:80/a": "https://***@host:80/a",
    "https://secret@host:80/a@b": "https://***@b",
    "http://me:sec/ret@host/a": "http://***@host/a",
    "http://me:1/secret@host/a": "http://***@host/a",
    "http://me:sec ret@host/a": "http://***@host/a",
    "http://me:sec@ret@host/a?sig=secret": "http://***@host/a?sig=***",
    "http://me:s@ec/ret@host/a": "http://***@host/a",
    "http://me:sec#ret@host/a": "http://***",
    "http://me:sec?ret=@host/a": "http://***",
    "https://sec/ret@host/a": "https://***@host/a",
    "https://host/a?email=me@secret": "https://***",
    "s3://key:sec/ret@bucket/a": "s3://***@bucket/a",
    "s3://bucket/a@b:c": "s3://bucket/a@b:c",
    "https://host/a?X-Amz-Signature=secret&versionId=7": "https://host/a?X-Amz-Signature=***&versionId=7",
    "https://host/a?secret": "https://host/a?***",
    "HTTPS://host/a#secret": "HTTPS://host/a",
    "s3://key:secret@bucket/a?versionId=7": "s3://***@bucket/a?versionId=7",
    "gs://bucket/a b#123": "gs://bucket/a b#123",
    "memory://a/b": "memory://a/b",
}


@pytest.mark.parametrize(("url", "shown"), SECRETS.items(), ids=SECRETS)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    assert str(Url(url)) == printable(url) == shown
    assert repr(Url(url)) == f"Url({shown!r})"
    if " " not in url:
        assert redact(f"before '{url}', after") == f"before '{shown}', after"


CARELESS = {
    "http://me:hunt/er2@localhost:1/v.safetensors": "http://***@localhost:1/v.safetensors",
    "http://me:hunt er2@localhost:1/v.safetensors": "http://***@localhost:1/v.safetensors",
    "http://me:hunt#er2@localhost:1/v.safetensors": "http://***",
    "http://me:hunt?er2=@localhost:1/v.safetensors": "http://***",
    "http://me:hunt\ner2@localhost:1/v.safetensors": "http://***@localhost:1/v.safetensors",
}


@pytest.mark.parametrize(("url", "shown"), CARELESS.items(), ids=CARELESS)
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(url: str, shown: str, model: Model) -> None:
    with pytest.raises(WeightFileError) as refused:
        model.swap(url)
    assert str(refused.value) == (
        f"{shown}: user and password cannot be separated from the rest; percent-encode them "
        "(urllib.parse.quote(password, safe=''))"
    )


@pytest.mark.parametrize("url", ["http:/me:secret@host/a", "HTTPS:me:secret@host/a"])
def test_a_url_without_its_slashes_is_refused_and_not_shown(url: str, model: Model) -> None:
    with pytest.raises(WeightFileError, match=r"^(http|HTTPS):\*\*\*: not a URL; expected (http|HTTPS):// and a host$"):
        model.swap(url)


ORDINARY = ["http://host/a@b", "http://host:80/a@b", "http://[fe80:1]:80/a@b", "http://me:a%2Fb@host/a", "s3://b:c/d@e"]


@pytest.mark.parametrize("url", ORDINARY)
def test_an_at_sign_elsewhere_is_taken(url: str) -> None:
    assert as_location(url) == Url(url)


def test_a_library_message_with_half_a_password_is_hidden() -> None:
    assert redact("Cannot connect to host me:12", "http://me:12/34@host/a") == "***"
    assert redact("Cannot connect to host host:12", "http://me:34@host:12/a") == "Cannot connect to host host:12"


def test_secrets_are_not_shown_where_a_file_system_has_taken_the_protocol_off() -> None:
    text = redact("FileNotFoundError: /me:secret@host/a?sig=secret", "memory://me:secret@host/a?sig=secret")
    assert text == "FileNotFoundError: /***@host/a?sig=***"


def test_no_secret_leaves_with_a_refusal_or_a_receipt(
    model: Model, weight_file: WriteWeights, server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="weightswap")
    events: list[Event] = []
    model.listen(events.append)
    server.put("v2.safetensors", weight_file(2).read_bytes())
    url = f"http://me:hunter2@{server.address}/v2.safetensors?X-Amz-Signature=hunter2"
    receipt = model.swap(url)
    errors = []
    for answer in (dropped, status(403), other_range, compressed, too_much, everything):
        server.fault = lambda handler, request, answer=answer: answer(handler, request) is None
        with pytest.raises((WeightFileError, Unsupported)) as refused:
            model.swap(url)
        errors.append("".join(traceback.format_exception(refused.value)))
    assert server.requests[0].headers["Authorization"] == "Basic bWU6aHVudGVyMg=="
    texts = [receipt, *events, *map(str, events), *errors, caplog.text]
    shown = re.sub(r"hunter2@\{server", "", "\n".join(map(str, texts)))
    assert f"http://***@{server.address}/v2.safetensors?X-Amz-Signature=***" in shown
    assert "hunter2" not in shown


JOINS = [
    ("s3://b/x/i.json", "s.safetensors", "s3://b/x/s.safetensors"),
    ("s3://b/i.json?versionId=7", "s", "s3://b/s"),
    ("gs://b/i.json#12", "s", "gs://b/s"),
    ("memory://i.json", "s", "memory://s"),
    ("memory:///i.json", "s", "memory:///s"),
    ("https://h/x/i.json?sig=a/b", "s t%2e.safetensors", "https://h/x/s%20t%252e.safetensors?sig=a/b"),
    ("https://h/i.json#part", "deep/s", "https://h/deep/s"),
]


@pytest.mark.parametrize(("url", "name", "joined"), JOINS, ids=[url for url, _, _ in JOINS])
def test_neighbours_are_named(url: str, name: str, joined: str) -> None:
    assert Url(url).name == "i.json"
    assert (Url(url).parent / name).raw == joined


EXTRA = {
    "huggingface_hub": "hf://o/r/v",
    "gcsfs": "gs://b/v",
    "s3fs": "s3://b/v",
    "aiohttp": "https://h/v",
    "fsspec": "memory://v",
}


def test_a_missing_extra_is_named() -> None:
    code = f"""
import os, sys
from weightswap_runtime import WeightFile, MissingExtra
for module, url in {EXTRA}.items():
    if not os.fork():
        sys.modules[module] = None
        try:
            WeightFile(url)
        except MissingExtra as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"reading {url.partition(':')[0]}:// needs the extra `remote`: pip install 'weightswap[remote]'"
        for url in EXTRA.values()
    ]


def test_a_forked_child_opens_again(weight_file: WriteWeights, server: WebServer) -> None:
    url = server.put("v1.safetensors", weight_file(1).read_bytes())
    code = f"""
import os
from weightswap_runtime import WeightFile, WeightFileError
parent = WeightFile({url!r})
pid = os.fork()
if not pid:
    try:
        parent.check_unchanged()
    except WeightFileError as error:
        print(error, flush=True)
    with WeightFile({url!r}) as child:
        print(child.stamp == parent.stamp, flush=True)
    child.check_unchanged()
    os._exit(0)
print(os.waitpid(pid, 0)[1])
parent.check_unchanged()
"""
    head = f"import weightswap_runtime.sources.web as web\nweb.HEAD_BYTES = {DATA_START}\n"
    done = subprocess.run([warm.python(), "-c", head + code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [
        f"{url}: was opened before this process was forked; open it again",
        "True",
        "0",
    ]
    assert done.stderr == ""
