"""Broken goldens documents, from a table and at random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.handmade import Document, Stage, change, written
from tests.support.tiny import X
from weightswap_runtime import WeightFileError, WeightswapError
from weightswap_runtime.format.goldens import goldens_beside, open_goldens

BROKEN = {
    "another format": (change(("format_version",), 2), "goldens of format version 2; this runtime reads 1"),
    "no format": (change(("format_version",), "1"), "metadata is invalid (Expected `int`"),
    "an unknown field": (change(("more",), 1), "unknown field `more`"),
    "another graph": (change(("graph_id",), "0" * 64), "recorded for the graph 000000000000, but this model has"),
    "another method": (change(("cases", 0, "method"), "encode"), "the method 'encode' is not among those"),
    "no cases": (change(("cases",), []), "it has no cases"),
    "an input too many": (
        change(("cases", 0, "inputs"), ["0.input.0", 3]),
        "case 0, forward: expected 1 inputs, found 2",
    ),
    "an output missing": (change(("cases", 0, "outputs"), []), "expected 1 outputs, found 0"),
    "an integer for a tensor": (change(("cases", 0, "inputs"), [3]), "x: expected the name of a tensor in the file"),
    "a literal for a tensor": (change(("cases", 0, "inputs"), [None]), "x: expected the name of a tensor in the file"),
    "a name of nothing": (change(("cases", 0, "inputs"), ["x"]), "x: expected the name of a tensor in the file"),
    "an input of another type": (
        change(("cases", 0, "inputs"), ["0.output.0"]),
        "x: dimension 1 expected 3, got 5",
    ),
    "an output of another type": (
        change(("cases", 0, "outputs"), ["0.input.0"]),
        "output: expected F32[batch, 5], found F32[2, 3]",
    ),
    "a list for a name": (change(("cases", 0, "inputs"), [["x"]]), "metadata is invalid"),
    "a wrong digest": (change(("digests", "0.input.0"), "0" * 64), "the file records '000000000000', its bytes have"),
    "no digest": (change(("digests", "0.input.0"), "x"), "'0.input.0': the file records no BLAKE3 digest"),
    "a digest of nothing": (change(("digests", "more"), "0" * 64), "'more' lacks a tensor or a digest"),
    "a negative tolerance": (change(("tolerance",), [-1, 0]), "is not two finite numbers"),
    "an infinite tolerance": (change(("tolerance",), [1e999, 0]), "metadata is invalid (JSON is malformed"),
    "three tolerances": (change(("tolerance",), [1, 1, 1]), "metadata is invalid"),
}


@pytest.mark.parametrize(("alter", "says"), BROKEN.values(), ids=BROKEN)
def test_broken_documents_are_refused_with_a_reason(alter: Callable[[Document], None], says: str, stage: Stage) -> None:
    alter(stage.document)
    written(stage.path, stage.tensors, stage.document)
    with pytest.raises(WeightFileError) as refused:
        goldens_beside(stage.folder / "v1.safetensors", stage.tiny.manifest)
    assert says in str(refused.value)
    assert str(refused.value).startswith(str(stage.path))


def test_files_that_hold_no_goldens_are_refused_with_a_reason(stage: Stage, tmp_path: Path) -> None:
    manifest = stage.tiny.manifest
    written(stage.path, stage.tensors | {"0.more": X + 1}, stage.document)
    with pytest.raises(WeightFileError, match=r"'0.more' lacks a tensor or a digest.*'0.more' belongs to no case"):
        open_goldens(stage.path, manifest)
    with pytest.raises(WeightFileError, match="metadata is invalid"):
        open_goldens(stage.folder / "v1.safetensors", manifest)
    for text in ("[]", "{", "null", "", '"' * 9, "[" * 5000):
        with pytest.raises(WeightFileError, match="metadata is invalid"):
            open_goldens(written(stage.path, stage.tensors, text), manifest)
    safetensors.torch.save_file(stage.tensors, stage.path)
    with pytest.raises(WeightFileError, match="has no `weightswap` metadata"):
        open_goldens(stage.path, manifest)
    stage.path.write_bytes(stage.path.read_bytes()[:-1])
    with pytest.raises(WeightFileError, match="it is truncated"):
        open_goldens(stage.path, manifest)
    for path in (tmp_path / "nowhere", tmp_path, Path("x\0")):
        with pytest.raises(WeightFileError, match="cannot be opened"):
            open_goldens(path, manifest)
    (tmp_path / "w.goldens.safetensors").symlink_to("nowhere")
    with pytest.raises(WeightFileError, match="cannot be opened"):
        goldens_beside(tmp_path / "w.safetensors", manifest)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["0.input.0", "forward"])


JSON = st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


PLACES = st.sampled_from(
    [
        *[
            (name,)
            for name in ("format_version", "graph_id", "weights_id", "environment", "tolerance", "cases", "digests")
        ],
        ("cases", 0),
        ("cases", 0, "inputs"),
        ("cases", 0, "inputs", 0),
        ("cases", 0, "outputs"),
        ("environment", "threads"),
        ("digests", "0.input.0"),
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=PLACES, value=JSON)
@pytest.mark.slow
def test_no_document_raises_anything_but_errors_of_ours(
    place: tuple[str | int, ...], value: object, stage: Stage
) -> None:
    document = json.loads(json.dumps(stage.document))
    change(place, value)(document)
    written(stage.path, stage.tensors, document)
    try:
        goldens = open_goldens(stage.path, stage.tiny.manifest)
        stage.verify(goldens)
    except WeightswapError:
        pass
    else:  # environment and tolerance may be anything
        assert goldens.cases[0].inputs == ("0.input.0",)
