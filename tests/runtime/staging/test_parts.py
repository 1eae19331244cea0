"""Partial swaps, expected ids, and reads by tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests.support.tiny import TinyArtifact, WriteWeights, X, _filled, serves
from weightswap_runtime import (
    BaseMismatch,
    DigestMismatch,
    GraphMismatch,
    UnexpectedWeights,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
    read_weights,
)


def mixed(tiny: TinyArtifact, path: Path, **seeds: int) -> Path:
    """Write a weight file with each weight from the set of a seed."""
    return tiny.write(path, {name: tiny.values(seed)[name] for name, seed in seeds.items()})


@pytest.mark.parametrize(
    ("only", "from_new"),
    [
        ("bias", {"bias"}),
        (["bias", "steps"], {"bias", "steps"}),
        ("*s", {"bias", "steps"}),
        ("again", {"tied"}),
        ("tie[d]", {"tied"}),
        ("*", {"bias", "steps", "tied", "weight"}),
    ],
)
def test_the_named_weights_come_from_the_file(
    only: str | list[str],
    from_new: set[str],
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    residency: str,
    tmp_path: Path,
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency, keep_previous="host")
    receipt = model.swap(weight_file(1), only=only)
    seeds = {name: int(name in from_new) for name in tiny.values(0)}
    whole = mixed(tiny, tmp_path / "mixed.safetensors", **seeds)
    assert (receipt.kind, receipt.weights_id) == ("partial", load(tiny.path, whole).weights_id)
    expected = _filled({name: tiny.values(seed)[name] for name, seed in seeds.items()})
    with torch.no_grad():
        assert torch.equal(model(X), expected(X))
    model.rollback()
    assert serves(model, 0)
    model.rollback()
    assert model.weights_id == receipt.weights_id


def test_only_the_bytes_that_are_needed_are_read(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    receipt = model.swap(weight_file(1), only="bias")
    assert receipt.bytes_read == 20
    assert receipt.bytes_copied == (0 if residency == "double" else 20)


def test_a_file_may_hold_the_part_alone_or_more(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    model = load(tiny.path, weight_file(0))
    path = tmp_path / "part.safetensors"
    safetensors.torch.save_file({"bias": tiny.values(2)["bias"], "decoder.bias": torch.ones(3)}, path)
    model.swap(path, only="bias")
    with pytest.raises(WeightsMismatch):
        model.swap(path, only=["bias", "weight"])
    model.swap(weight_file(2), only=["weight", "steps", "tied"])
    assert serves(model, 2)


def test_checkpoint_keys_and_wrappers_are_understood(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(0))
    path = tmp_path / "keys.safetensors"
    values = tiny.values(1)
    safetensors.torch.save_file({"module.w": values["weight"], "module.bias": values["bias"]}, path)
    model.swap(path, only=["weight", "bias"])
    model.swap(weight_file(1), only=["steps", "tied"])
    assert serves(model, 1)


def test_patterns_that_match_nothing_are_refused(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with pytest.raises(Unsupported, match=r"'biass': matches no weight of the graph; did you mean 'bias'\?"):
        model.swap(weight_file(1), only=["bias", "biass"])
    for odd in ((), [3], 3):
        with pytest.raises(Unsupported, match="expected a pattern"):
            model.swap(weight_file(1), only=odd)  # type: ignore[arg-type]
    assert serves(model, 0)
    model.swap(weight_file(1))


REFUSED: dict[str, tuple[Callable[[TinyArtifact, Path], Path], str, type[Exception], str]] = {
    "damaged": (lambda t, path: damaged(t.write(path, t.values(1))), "*", DigestMismatch, "records the digest"),
    "another graph": (
        lambda t, path: t.write(path, t.values(1), graph_id="1" * 64),
        "bias",
        GraphMismatch,
        "packed for",
    ),
    "another shape": (
        lambda t, path: save(path, {"weight": np.ones((5, 3), np.float32)}),
        "weight",
        WeightsMismatch,
        r"expected F32\[3, 5\]",
    ),
    "torn ties": (
        lambda t, path: save(path, {"tied": np.ones(1, np.float32), "again": np.zeros(1, np.float32)}),
        "tied",
        WeightsMismatch,
        "tied and again are one tensor",
    ),
}


def damaged(path: Path) -> Path:
    raw = path.read_bytes()
    path.write_bytes(raw[:-61] + bytes([raw[-61] ^ 1]) + raw[-60:])
    return path


def save(path: Path, values: dict[str, np.ndarray]) -> Path:
    safetensors.numpy.save_file(values, path)
    return path


@pytest.mark.parametrize("what", REFUSED)
def test_refused_parts_leave_everything(
    what: str, tiny: TinyArtifact, weight_file: WriteWeights, residency: str, tmp_path: Path
) -> None:
    make, only, error, says = REFUSED[what]
    model = load(tiny.path, weight_file(0), residency=residency, keep_previous="host")
    model.swap(weight_file(1))
    with pytest.raises(error, match=says):
        model.swap(make(tiny, tmp_path / "odd.safetensors"), only=only)
    assert serves(model, 1)
    model.rollback()
    assert serves(model, 0)


def test_a_part_needs_weights_that_are_served(tiny: TinyArtifact, weight_file: WriteWeights, residency: str) -> None:
    model = load(tiny.path, residency=residency)
    with pytest.raises(BaseMismatch):
        model.swap(weight_file(0), only="bias")


def test_only_expected_weights_are_taken(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    first, second = (load(tiny.path, weight_file(seed)).weights_id for seed in (0, 1))
    model = load(tiny.path, weight_file(0), expect=first)
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_file(tiny.values(1), plain)
    for path in (weight_file(1), plain):
        with pytest.raises(UnexpectedWeights, match=f"gives the weights {second[:12]}, expected {first[:12]}"):
            model.swap(path, expect=first)
        assert serves(model, 0)
    for path in (weight_file(1), plain):
        assert model.swap(path, expect=second).weights_id == second
    part = model.swap(weight_file(0), only="bias").weights_id
    model.swap(weight_file(1))
    with pytest.raises(UnexpectedWeights):
        model.swap(weight_file(0), only="bias", expect=first)
    assert model.swap(weight_file(0), only="bias", expect=part).weights_id == part


def test_tools_read_what_they_name(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    values = tiny.values(3)
    arrays = read_weights(weight_file(3))
    assert arrays.keys() == values.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, values[name].numpy())
        assert array.flags.writeable
    assert read_weights(weight_file(3), "b*").keys() == {"bias"}
    tensors = read_weights(weight_file(3), ["bias", "steps"], framework="torch")
    assert torch.equal(tensors["bias"], values["bias"])
    assert tensors["steps"].shape == ()
    with pytest.raises(Unsupported):
        read_weights(weight_file(3), "w")
    with pytest.raises(Unsupported, match="framework='jax'"):
        read_weights(weight_file(3), framework="jax")  # type: ignore[arg-type]
    with pytest.raises(WeightFileError):
        read_weights(tmp_path / "none.safetensors")
    with pytest.raises(DigestMismatch):
        read_weights(damaged(weight_file(4)))


def test_tools_read_what_numpy_lacks_as_ml_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    safetensors.torch.save_file({"a": torch.arange(3).bfloat16(), "b": torch.ones(2), "none": torch.empty(0, 3)}, path)
    arrays = read_weights(path)
    assert (arrays["a"].dtype, arrays["a"].tolist()) == (ml_dtypes.bfloat16, [0, 1, 2])
    assert all(array.flags.writeable for array in arrays.values())
    assert read_weights(path, "b")["b"].tolist() == [1, 1]
    assert read_weights(path, "none")["none"].shape == (0, 3)
    assert read_weights(path, framework="torch")["a"].tolist() == [0, 1, 2]


def test_dtypes_that_no_array_holds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "quarter.safetensors"
    header = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}   '
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x12")
    for framework in ("numpy", "torch"):
        with pytest.raises(Unsupported, match="a is F4, which neither numpy nor torch has"):
            read_weights(path, framework=framework)  # type: ignore[arg-type]
