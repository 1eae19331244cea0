"""Artifacts that differ from their manifest are refused with a reason."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import damaged
from tests.support.forged import replace_file
from tests.support.handmade import Document, change
from tests.support.tiny import TinyArtifact
from weightswap_runtime import Artifact, ArtifactError, load
from weightswap_runtime.format.canonical import pack_ranges, render_header

BROKEN = {
    "no graph id": (change(("graph_id",), None), "missing required field `graph_id`"),
    "another graph id": (change(("graph_id",), "0" * 64), "its graph id is 000000000000, its contents give"),
    "a weight altered": (change(("weights", 0, "shape", 0), 4), "its contents give"),
    "an unknown field": (change(("surprise",), 1), "unknown field `surprise`"),
    "an unknown dtype": (change(("weights", 0, "dtype"), "F31"), "'weight' has the type F31[3, 5]"),
    "too many sizes": (change(("weights", 0, "shape"), [3] * 65), "has the type F32[65 dimensions]"),
    "a negative size": (change(("weights", 0, "shape"), [-1, 5]), "'weight' has the type"),
    "a wrong stride": (change(("weights", 0, "stride"), [1, 1]), "'weight' has the stride [1, 1]"),
    "two tensors of one name": (change(("weights", 1, "name"), "weight"), "'weight' names 2 tensors"),
    "a weight that is not listed": (
        change(("methods", "forward", "inputs", 0), ["weight", "w9"]),
        "takes the weight 'w9'",
    ),
    "an input too many": (change(("methods", "forward", "signature", "args"), []), "has 0 inputs in its signature"),
    "no methods": (change(("methods",), {}), "it has no methods"),
    "a size that is no expression": (
        change(("methods", "forward", "signature", "args", 0, 1, "shape", 0), "__import__('os')"),
        "is not a size expression",
    ),
    "a size of no dimension": (
        change(("methods", "forward", "signature", "args", 0, 1, "shape", 0), "3*other"),
        "names no dimension",
    ),
    "a leaf of no dtype": (
        change(("methods", "forward", "signature", "args", 0, 1, "dtype"), "EVIL"),
        "has the unknown dtype 'EVIL'",
    ),
    "a leaf of negative size": (
        change(("methods", "forward", "signature", "args", 0, 1, "shape", 1), -3),
        "'x' has the shape",
    ),
    "a leaf that is too large": (
        change(("methods", "forward", "signature", "output", "shape", 1), 10**30),
        "has the shape",
    ),
    "a literal that is no number": (
        change(("methods", "forward", "signature", "output"), {"type": "literal", "name": "y", "hex": "0x1p99999"}),
        "'y' is not a number",
    ),
    "a weight whose strides overflow": (
        change(("weights", 0, "shape"), [0, 2**62, 2**62]),
        "'weight' has the shape",
    ),
    "a path that leaves the folder": (change(("files", "../../etc/passwd"), "0" * 64), "would be outside the artifact"),
    "an absolute path": (change(("files", "/etc/passwd"), "0" * 64), "would be outside the artifact"),
    "a graph outside the folder": (
        change(("methods", "forward", "graph"), "../forward.pt2"),
        "'../forward.pt2' is not among its files",
    ),
    "a digest that is none": (change(("files", "graphs/forward.pt2"), "abc"), "has no BLAKE3 digest"),
    "a source missing": (change(("conversion", "sources", 0), None), "does not have one source for each weight"),
    "a key for two weights": (
        change(("conversion", "sources", 1, "keys"), ["w"]),
        "the checkpoint key 'w' would become 2",
    ),
}


@pytest.mark.parametrize(("alter", "says"), BROKEN.values(), ids=BROKEN)
def test_contradictory_manifests_are_refused(alter: Callable[[Document], None], says: str, tiny: TinyArtifact) -> None:
    document = tiny.document()
    alter(document)
    tiny.write_manifest(json.dumps(document).encode())
    with pytest.raises(ArtifactError) as refused:
        Artifact.open(tiny.path)
    assert says in str(refused.value)
    assert "manifest.json" in str(refused.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b'{"format_version": "1"}', b"[" * 5000])
def test_other_documents_are_refused(raw: bytes, tiny: TinyArtifact) -> None:
    tiny.write_manifest(raw)
    with pytest.raises(ArtifactError, match="not a weightswap manifest"):
        Artifact.open(tiny.path)


@pytest.mark.parametrize("version", [0, 4, 99])
def test_other_format_versions_are_refused_by_name(version: int, tiny: TinyArtifact) -> None:
    tiny.write_manifest(json.dumps({"format_version": version, "from": "the future"}).encode())
    with pytest.raises(ArtifactError, match=f"format version {version}; this runtime reads 1"):
        Artifact.open(tiny.path)


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ArtifactError, match="no artifact here"):
            load(path)


@pytest.mark.parametrize("name", ["graphs/forward.pt2", "constants.safetensors"])
def test_missing_and_altered_files_are_refused(name: str, tiny: TinyArtifact) -> None:
    path = damaged(tiny.path / name)
    with pytest.raises(ArtifactError, match=rf"{path.name}: altered since the export"):
        load(tiny.path)
    path.unlink()
    with pytest.raises(ArtifactError, match=rf"{path.name}: listed in the manifest but not readable"):
        load(tiny.path)


def test_a_file_that_memory_cannot_hold_is_named(tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_bytes(path: Path) -> bytes:
        raise MemoryError

    artifact = Artifact.open(tiny.path)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(ArtifactError, match=r"forward\.pt2: no memory to read its \d+ bytes into"):
        artifact.read("graphs/forward.pt2")


def test_a_link_out_of_the_folder_is_refused(tiny: TinyArtifact, tmp_path: Path) -> None:
    path = tiny.path / "constants.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="points outside the artifact"):
        load(tiny.path)


def test_links_that_lead_in_circles_are_refused(tiny: TinyArtifact) -> None:
    for name, says in (("constants.safetensors", "not readable"), ("manifest.json", "cannot be opened")):
        path = tiny.path / name
        path.unlink()
        path.symlink_to(path.name)
        with pytest.raises(ArtifactError, match=rf"{path.name}: .*{says}"):
            load(tiny.path)


def test_constants_of_another_type_are_refused(tiny: TinyArtifact) -> None:
    raw = render_header(pack_ranges([("shift", "F64", (1,))]), {}) + bytes(8)
    replace_file(tiny.path, "constants.safetensors", raw)
    with pytest.raises(ArtifactError, match=r"has no F32\[1\] for 'shift'"):
        load(tiny.path)


def test_a_graph_that_torch_cannot_open_is_named(tiny: TinyArtifact) -> None:
    replace_file(tiny.path, "graphs/forward.pt2", b"not a graph")
    with pytest.raises(ArtifactError, match=r"forward.pt2: not an archive written by torch.export"):
        load(tiny.path)


def rewritten(tiny: TinyArtifact, change: Callable[[str, bytes], bytes | None], more: dict[str, bytes]) -> bytes:
    """Return the graph's archive with members changed, dropped (None) and added."""
    written = io.BytesIO()
    with zipfile.ZipFile(tiny.path / "graphs/forward.pt2") as source, zipfile.ZipFile(written, "w") as target:
        root = source.namelist()[0].partition("/")[0]
        for name in source.namelist():
            content = change(name, source.read(name))
            if content is not None:
                target.writestr(name, content)
        for name, content in more.items():
            target.writestr(f"{root}/{name}", content)
    return written.getvalue()


def compressed(raw: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return written.getvalue()


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tiny: TinyArtifact) -> None:
    replace_file(tiny.path, "graphs/forward.pt2", compressed((tiny.path / "graphs/forward.pt2").read_bytes()))
    with pytest.raises(ArtifactError, match="its records are compressed"):
        load(tiny.path)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_two_records_of_one_name_are_refused(tiny: TinyArtifact) -> None:
    replace_file(tiny.path, "graphs/forward.pt2", rewritten(tiny, keep, {"models/model.json": b"{}"}))
    with pytest.raises(ArtifactError, match="two records have the same name"):
        load(tiny.path)


def keep(name: str, content: bytes) -> bytes:
    return content


class Planted:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


PLANTED = pickle.dumps(Planted())
HOSTILE: dict[str, tuple[Callable[[str, bytes], bytes | None], dict[str, bytes], str]] = {
    "pickled sample inputs": (
        lambda name, content: PLANTED if name.endswith("sample_inputs/model.pt") else content,
        {},
        "must be empty",
    ),
    "a pickled weight": (
        lambda name, content: content.replace(b'"use_pickle": false', b'"use_pickle": true'),
        {},
        "would be unpickled",
    ),
    "a pickled object": (
        lambda name, content: content.replace(b'"path_name": "tensor_', b'"path_name": "opaque_obj_'),
        {"data/constants/opaque_obj_0": PLANTED},
        "would be unpickled",
    ),
    "a legacy record": (keep, {"data/weights/model.pt": PLANTED}, "does not belong in an artifact"),
    "a second program": (keep, {"models/other.json": b"{}"}, "does not belong in an artifact"),
}


@pytest.mark.parametrize(("alter", "more", "says"), HOSTILE.values(), ids=HOSTILE)
def test_an_artifact_made_by_somebody_hostile_runs_nothing(
    alter: Callable[[str, bytes], bytes | None],
    more: dict[str, bytes],
    says: str,
    tiny: TinyArtifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    replace_file(tiny.path, "graphs/forward.pt2", rewritten(tiny, alter, more))
    with pytest.raises(ArtifactError, match=says):
        load(tiny.path)
    assert not (tmp_path / "executed").exists()


def test_the_same_rewriting_without_malice_loads(tiny: TinyArtifact) -> None:
    replace_file(tiny.path, "graphs/forward.pt2", rewritten(tiny, keep, {}))
    load(tiny.path)


def test_what_is_no_path_is_refused(tiny: TinyArtifact) -> None:
    for odd in (None, 3, b"x", "x" * 5000, "a\0b"):
        with pytest.raises(ArtifactError):
            load(odd)  # type: ignore[arg-type]
