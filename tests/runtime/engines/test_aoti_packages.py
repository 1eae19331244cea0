"""Packages of machine code: reading, checks and refusals."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch
from torch import nn

from tests.support.compiled import Mixtures, needs_compiler, sample
from weightswap_exporter import export
from weightswap_exporter.engines.compiling import with_files
from weightswap_runtime import Artifact, ArtifactError, Unsupported, load
from weightswap_runtime.engines import aoti as aoti_library
from weightswap_runtime.engines import aoti_package
from weightswap_runtime.engines.aoti_package import machine_targets, package_file
from weightswap_runtime.format.manifest import MANIFEST_NAME, encode_manifest

pytestmark = needs_compiler


def test_nothing_of_the_build_machine_is_inside(mixtures: Mixtures) -> None:
    content = b"".join(members(mixtures.artifact).values())
    for place in ("/tmp/", str(Path.home()), str(Path(torch.__file__).parent), sys.prefix, sys.base_prefix):
        assert place.encode() not in content


def package_path(artifact: Artifact) -> Path:
    return artifact.path / package_file(machine_targets()[0], "forward")


def members(artifact: Artifact) -> dict[str, bytes]:
    """The files in the package of `forward`."""
    with zipfile.ZipFile(package_path(artifact)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_torch_can_open_a_package_too(mixtures: Mixtures) -> None:
    found = torch._inductor.aoti_load_package(str(package_path(mixtures.artifact)))
    assert "body.3.weight" in found.get_constant_fqns()


def test_auto_says_that_it_takes_it(mixtures: Mixtures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(mixtures.artifact, engine="auto").engine == "aoti"
    assert load(relabelled(mixtures.artifact, tmp_path / "other.artifact"), engine="auto").engine == "torch"
    monkeypatch.setattr(aoti_package, "version", lambda _: "1.13.1")
    assert load(mixtures.artifact, engine="auto").engine == "torch"


def relabelled(artifact: Artifact, folder: Path, target: str = "cuda-sm90") -> Artifact:
    """Copy the artifact, with packages labelled for another machine."""
    shutil.copytree(artifact.path, folder)
    (folder / "engines/aoti" / machine_targets()[0]).rename(folder / "engines/aoti" / target)
    files = {
        name.replace(machine_targets()[0], target): (folder / name.replace(machine_targets()[0], target)).read_bytes()
        for name in artifact.manifest.files
    }
    manifest = with_files(msgspec.structs.replace(artifact.manifest, files={}), files)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return Artifact.open(folder)


def test_packages_for_another_machine_are_refused(mixtures: Mixtures, tmp_path: Path) -> None:
    other = relabelled(mixtures.artifact, tmp_path / "other.artifact")
    says = rf"compiled for cuda-sm90; this machine is {machine_targets()[0]}.*weightswap compile"
    with pytest.raises(Unsupported, match=says):
        load(other, engine="aoti")


def test_a_processor_that_lacks_something_is_refused(mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti_package, "machine_targets", lambda: ())
    with pytest.raises(Unsupported, match=rf"compiled for {machine_targets()[0]}; this machine"):
        load(mixtures.artifact, engine="aoti")


def test_another_torch_is_refused(mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti_package, "version", lambda _: "2.99.0")
    with pytest.raises(Unsupported, match=r"compiled with torch \d\.\d+, but this is torch 2\.99"):
        load(mixtures.artifact, engine="aoti")


def test_an_artifact_without_packages_is_refused(tmp_path: Path) -> None:
    plain = export(nn.Linear(2, 2), (torch.zeros(1, 2),), out=tmp_path / "plain.artifact")
    with pytest.raises(Unsupported, match=r"was not compiled for the engine 'aoti'.*--engine aoti"):
        load(plain, engine="aoti")
    assert load(plain, engine="auto").engine == "torch"


Edit = Callable[[dict[str, Any]], object]


def tensor(note: dict[str, Any], fqn: str = "body.3.weight") -> list[Any]:
    """One row of the table: fqn, kind, name, dtype, shape, stride."""
    found: list[Any] = next(row for row in note["tensors"] if row[0] == fqn)
    return found


TAMPERED: dict[str, tuple[Edit, str]] = {
    "graph": (lambda note: note.update(graph_id="0" * 64), "made from the graph 000000000000, expected"),
    "method": (lambda note: note.update(method="encode"), "claims to be 'encode'"),
    "target": (lambda note: note.update(target="cuda-sm90"), "'forward' for cuda-sm90"),
    "dtype": (lambda note: tensor(note).__setitem__(3, "F64"), r"'body.3.weight' as F64\[3, 16\]"),
    "shape": (lambda note: tensor(note).__setitem__(4, [16, 3]), r"'body.3.weight' as F32\[16, 3\]"),
    "stride": (lambda note: tensor(note).__setitem__(5, [1, 3]), r"in the strides \[1, 3\], expected"),
    "weight": (lambda note: tensor(note).__setitem__(2, "no.weight"), "the weight 'no.weight', which the method"),
    "kind": (lambda note: tensor(note).__setitem__(1, "state"), "the state 'body.3.weight', which the method"),
    "name": (lambda note: tensor(note).__setitem__(0, "other"), "it takes 'body.3.weight', which is not listed"),
    "less": (lambda note: note["tensors"].remove(tensor(note)), "it takes 'body.3.weight', which is not listed"),
    "twice": (lambda note: note["tensors"].append(tensor(note)), "it lists 'body.3.weight' twice"),
    "unknown": (lambda note: note.update(more=1), "is not a package"),
}


@pytest.mark.parametrize(("edit", "says"), TAMPERED.values(), ids=TAMPERED)
def test_a_package_that_is_not_the_manifests_is_refused(
    edit: Edit, says: str, mixtures: Mixtures, tmp_path: Path
) -> None:
    parts = members(mixtures.artifact)
    (name,) = (name for name in parts if name.endswith("weightswap.json"))
    note = msgspec.json.decode(parts[name])
    edit(note)
    parts[name] = msgspec.json.encode(note)
    with pytest.raises(ArtifactError, match=says):
        load(replaced(mixtures.artifact, tmp_path / "a.artifact", zipped(parts)), engine="aoti")


def zipped(parts: dict[str, bytes]) -> bytes:
    written = BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return written.getvalue()


def replaced(artifact: Artifact, folder: Path, package: bytes) -> Artifact:
    """Copy the artifact, with another package that its manifest lists."""
    shutil.copytree(artifact.path, folder)
    name = package_file(machine_targets()[0], "forward")
    (folder / name).write_bytes(package)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(with_files(artifact.manifest, {name: package})))
    return Artifact.open(folder)


@pytest.mark.parametrize(
    "raw", [b"", b"no zip", zipped({}), zipped({"m/extra/weightswap.json": b"{}", "m.wrapper.so": b""})]
)
def test_a_damaged_package_is_refused(raw: bytes, mixtures: Mixtures, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is not a package.*Compile it again"):
        load(replaced(mixtures.artifact, tmp_path / "a.artifact", raw), engine="aoti")


def test_damaged_machine_code_is_refused(mixtures: Mixtures, tmp_path: Path) -> None:
    parts = members(mixtures.artifact)
    (name,) = (name for name in parts if name.endswith(".so"))
    parts[name] = b"\x7fELF" + bytes(4096)
    damaged = replaced(mixtures.artifact, tmp_path / "a.artifact", zipped(parts))
    with pytest.raises(Unsupported, match=r"cannot be loaded by torch .* Compile it again"):
        load(damaged, engine="aoti")
    with pytest.warns(RuntimeWarning, match=r"engine=\"auto\": using the engine 'torch' instead: .* cannot be loaded"):
        assert load(damaged, engine="auto").engine == "torch"


def nowhere(*_: object, **__: object) -> NoReturn:
    raise FileNotFoundError("no usable temporary directory found")


def test_machine_code_is_loaded_where_nothing_can_be_written(
    mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aoti_library.tempfile, "TemporaryDirectory", nowhere)
    ids, seen, times = sample(2)
    for path, eager in zip(mixtures.files, mixtures.models, strict=True):
        found = load(mixtures.artifact, path, engine="aoti")(ids, seen.clone(), times)
        with torch.no_grad():
            torch.testing.assert_close(found["logits"], eager(ids, seen.clone(), times)["logits"])


def test_machine_code_is_loaded_where_memory_cannot_be_executed(
    mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", nowhere)
    assert load(mixtures.artifact, mixtures.files[0], engine="auto").engine == "aoti"
    monkeypatch.setattr(aoti_library.tempfile, "TemporaryDirectory", nowhere)
    with pytest.raises(Unsupported, match=r"no usable temporary directory.*memfd_create.*TMPDIR"):
        load(mixtures.artifact, engine="aoti")
    with pytest.warns(RuntimeWarning):
        assert load(mixtures.artifact, engine="auto").engine == "torch"
