"""What docs/deployment.md gives: the manifests, run as they say, and the models behind servers of others."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.support.apart import python_with
from tests.support.pages import blocks, page, python
from tests.support.servers import S3Server
from tests.support.watched import eventually
from weightswap_runtime import DesiredStore

DEPLOYMENT = ROOT / "docs" / "deployment"
NOBODY = 65532
X = [[1.0, 2.0, 3.0, 4.0]]
PAGE = page("deployment")


def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOYMENT / "kubernetes.yaml").read_text())}


def pod() -> Any:
    return documents()["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact and the two weight files of the page on serving."""
    found = tmp_path_factory.mktemp("deployment")
    python(found, blocks(page("serving"), "python")[0])
    return found


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked(url: str, document: object = None) -> tuple[int, Any]:
    """The status and the document of an answer; 0, if nobody answers."""
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, None


def output(folder: Path, weights: str) -> Any:
    """What these weights answer to X[0], within a last bit or so."""
    call = f"load('tagger.artifact', {weights!r})(torch.tensor({X})).tolist()"
    found = json.loads(python(folder, f"import torch; from weightswap_runtime import load; print({call})"))
    return pytest.approx(found[0])


def test_the_manifests_are_valid() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents().values():
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_every_part_finds_its_ports() -> None:
    (container,) = pod()["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {f"--port={ports['http']}", f"--grpc-port={ports['grpc']}"} <= set(container["args"])
    service = {port["targetPort"] for port in documents()["Service"]["spec"]["ports"]}
    policy = {port["port"] for port in documents()["NetworkPolicy"]["spec"]["ingress"][0]["ports"]}
    assert service == policy == ports.keys()
    grace = int(re.findall(r"--grace=(\d+)", " ".join(container["args"]))[0])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > grace + pause


def test_the_image_installs_what_there_is() -> None:
    text = (DEPLOYMENT / "Dockerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert all((ROOT / name).exists() for name in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"'\.\[(.*)\]'", text)[0].split(",")) <= project["optional-dependencies"].keys()
    assert project["readme"] in sources
    assert f"USER {NOBODY}:{NOBODY}" in text
    assert pod()["securityContext"]["runAsUser"] == NOBODY


def confined(command: str) -> list[str]:
    """The command as the manifest lets it run: nobody, without capabilities, over a root that is read-only."""
    mounts = "mount -t tmpfs tmpfs /tmp && mount -o remount,bind,ro / && cd /"
    nobody = f"unshare -U --map-user={NOBODY} --map-group={NOBODY}"
    without = "setpriv --no-new-privs --inh-caps=-all --ambient-caps=-all"
    return ["unshare", "-Urm", "--propagation", "private", "sh", "-c", f"{mounts} && exec {nobody} {without} {command}"]


def can_be_confined() -> bool:
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    look = confined(f"sh -c '! touch {Path.home()}/x && test $(id -u) = {NOBODY}'")
    return subprocess.run(look, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_container_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, unused_port: int) -> None:
    if not can_be_confined():
        pytest.skip("namespaces of users and mounts cannot be had")
    with S3Server() as s3:
        bucket = s3.new_bucket()
        for path in folder.rglob("*"):
            if path.is_file():
                bucket.put(str(path.relative_to(folder)), path.read_bytes())
        for name, value in (
            ("AWS_ENDPOINT_URL", s3.options["endpoint_url"]),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("HOME", "/tmp"),
        ):
            monkeypatch.setenv(name, str(value))
        desired_store = DesiredStore("s3://weights/tagger")
        state = desired_store.set("s3://weights/v1.safetensors", revision=0)
        (container,) = pod()["containers"]
        arguments = " ".join(container["args"])
        for theirs, ours in (
            ("s3://models", "s3://weights"),
            ("0.0.0.0", "127.0.0.1"),
            ("--port=8000", f"--port={unused_port}"),  # others serve at this very port
            ("--grpc-port=8001", "--grpc-port=0"),
        ):
            assert theirs in arguments
            arguments = arguments.replace(theirs, ours)
        program = f"{sys.executable} -c 'from weightswap_tools.commands.serve import serve_command; serve_command()'"
        with running(confined(f"{program} {arguments} --interval=0.2"), folder) as process:
            url = f"http://127.0.0.1:{unused_port}"
            ready = url + container["readinessProbe"]["httpGet"]["path"]
            assert eventually(lambda: asked(ready)[0] == 200), (folder / "log").read_text()
            assert asked(url + container["livenessProbe"]["httpGet"]["path"])[0] == 200
            request = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 4], "data": X[0]}]}
            infer = f"{url}/v2/models/tagger/infer"
            assert asked(infer, request)[1]["outputs"][0]["data"] == output(folder, "v1.safetensors")
            desired_store.set("s3://weights/v2.safetensors", revision=state.revision)
            assert eventually(lambda: asked(infer, request)[1]["model_version"] == "1")
            process.terminate()
            assert process.wait(120) == 0


@pytest.fixture
def desired(folder: Path) -> DesiredStore:
    shutil.rmtree(folder / "service", ignore_errors=True)
    (folder / "service").mkdir()
    desired_store = DesiredStore(folder / "service")
    desired_store.set(folder / "v1.safetensors", revision=0)
    return desired_store


def requests() -> list[tuple[str, Any]]:
    """The paths and bodies of the page's requests to other servers: KServe's, and LitServe's."""
    return [
        (path, json.loads(body))
        for path, body in re.findall(r"curl -s localhost:8000(\S+) -H 'Content-Type.*?-d '(.*?)'", PAGE, re.DOTALL)
    ]


@pytest.mark.slow
def test_litserve(folder: Path, desired: DesiredStore, unused_port: int) -> None:
    pytest.importorskip("litserve")
    command = [sys.executable, str(DEPLOYMENT / "litserve_model.py"), "tagger.artifact", "service"]
    with running([*command, "--port", str(unused_port), "--workers", "2"], folder):
        (_, protocols), (path, document) = requests()
        url = f"http://127.0.0.1:{unused_port}{path}"
        assert eventually(lambda: asked(url, {"input": X})[0] == 200), (folder / "log").read_text()
        answer = asked(url, document)[1]
        assert answer["outputs"]["output"] == [output(folder, "v1.safetensors")]
        status, wrong = asked(url, {"input": [[1, 2, 3]]})
        assert (status, wrong["detail"]) == (400, "forward: input: dimension 1 expected 4, got 3")
        status, wrong = asked(url, protocols)
        assert (status, wrong["detail"]) == (400, "inputs: no such input; expected nested lists by name: input")
        desired.set(folder / "v2.safetensors", revision=1)
        newer = [output(folder, "v2.safetensors")]  # not a generation: a worker that starts late has v2 as its first
        assert eventually(lambda: all(asked(url, {"input": X})[1]["outputs"]["output"] == newer for _ in range(10)))


@pytest.fixture(scope="module")
def with_kserve(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with KServe, which wants older packages than others do, above all that is installed here."""
    return python_with(tmp_path_factory.mktemp("kserve") / "venv", "kserve")


@pytest.mark.slow
def test_kserve(folder: Path, desired: DesiredStore, with_kserve: str, unused_port: int) -> None:
    command = [with_kserve, str(DEPLOYMENT / "kserve_model.py"), "--artifact", "tagger.artifact", "--follow", "service"]
    options = ["--model_name", "tagger", "--http_port", str(unused_port), "--enable_grpc", "false"]
    with running([*command, *options], folder):
        url = f"http://127.0.0.1:{unused_port}/v2"
        assert eventually(lambda: asked(f"{url}/models/tagger/ready")[0] == 200), (folder / "log").read_text()
        ((path, document), _) = requests()
        (tensor,), infer = document["inputs"], f"http://127.0.0.1:{unused_port}{path}"
        answer = asked(infer, {"inputs": [tensor]})[1]
        assert answer["outputs"][0]["data"] == output(folder, "v1.safetensors")
        status, wrong = asked(infer, {"inputs": [tensor | {"shape": [1, 3], "data": [1, 2, 3]}]})
        assert (status, wrong["error"]) == (400, "forward: input: dimension 1 expected 4, got 3")
        assert asked(infer, {"inputs": [tensor | {"datatype": "BYTES", "data": ["a", "b", "c", "d"]}]})[0] == 400
        desired.set(folder / "v2.safetensors", revision=1)
        assert eventually(lambda: asked(infer, {"inputs": [tensor]})[1]["parameters"]["generation"] == "1")
        assert asked(infer, {"inputs": [tensor]})[1]["outputs"][0]["data"] == output(folder, "v2.safetensors")
        triton_over_http(f"127.0.0.1:{unused_port}", folder)


def triton_over_http(address: str, folder: Path) -> None:
    import numpy as np
    import tritonclient.http as triton

    with triton.InferenceServerClient(address) as client:
        tensor = triton.InferInput("input", [1, 4], "FP32").set_data_from_numpy(np.array(X, np.float32))
        found = client.infer("tagger", [tensor]).as_numpy("output")
        assert found[0].tolist() == output(folder, "v2.safetensors")


@pytest.mark.slow
def test_a_method_with_arrays(folder: Path) -> None:
    (code,) = blocks(PAGE, "python")
    assert python(folder, code) == "(1, 2) 0\n"
