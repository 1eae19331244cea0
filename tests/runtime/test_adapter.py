"""Matching names: by FQN, by checkpoint key, everything wrong at once, near misses suggested."""

from __future__ import annotations

import pytest

from tests.tiny import TinyArtifact
from weightswap_runtime import WeightsMismatch
from weightswap_runtime.adapter import KEYS_THEN_NAMES, NAMES, resolve
from weightswap_runtime.header import FileTensor
from weightswap_runtime.manifest import Adapter, Manifest, Source

Found = dict[str, FileTensor]


def tensors(*names: str) -> Found:
    shapes = {"weight": ("F32", (3, 5)), "w": ("F32", (3, 5)), "bias": ("F32", (5,)), "steps": ("I64", ())}
    return {name: FileTensor(*shapes.get(name, ("F32", (1,))), 0, 0) for name in names}


@pytest.mark.parametrize(
    ("names", "weight", "tied"),
    [
        (("weight", "bias", "tied", "steps"), "weight", ("tied",)),
        (("weight", "bias", "again", "steps"), "weight", ("again",)),
        (("w", "bias", "tied", "again", "steps"), "w", ("tied", "again")),
        (("w", "bias", "tied", "steps", "extra"), "w", ("tied",)),
    ],
)
def test_names_and_keys_are_found(
    names: tuple[str, ...], weight: str, tied: tuple[str, ...], tiny: TinyArtifact
) -> None:
    match = resolve(tensors(*names), tiny.manifest, "file")
    assert match.found["weight"] == (weight,)
    assert match.found["tied"] == tied
    assert match.ignored == tuple(name for name in names if name == "extra")


def test_every_problem_is_reported_with_near_misses(tiny: TinyArtifact) -> None:
    found = {**tensors("tied", "again", "other"), "wieght": FileTensor("F32", (3, 5), 0, 0)}
    found |= {"bias": FileTensor("F16", (5,), 0, 0), "steps": FileTensor("I64", (1,), 0, 0)}
    with pytest.raises(WeightsMismatch) as refused:
        resolve(found, tiny.manifest, "file")
    assert set(refused.value.problems) == {
        "weight: missing, F32[3, 5] (did you mean wieght?)",
        "bias: expected F32[5], found F16[5]",
        "steps: expected I64[], found I64[1]",
        "wieght: unexpected (did you mean weight?)",
        "other: unexpected",
    }
    assert "file: refused, 5 problem(s)" in str(refused.value)


def test_the_nearer_reading_is_reported(tiny: TinyArtifact) -> None:
    with pytest.raises(WeightsMismatch) as refused:
        resolve(tensors("w", "bias", "steps"), tiny.manifest, "file")
    assert refused.value.problems == ("tied or again: missing, F32[1]",)


def test_the_advice_fits_the_problem(tiny: TinyArtifact) -> None:
    halves = {name: FileTensor("F16", t.shape, 0, 0) for name, t in tensors("weight", "bias", "tied", "steps").items()}
    with pytest.raises(WeightsMismatch, match="Only the dtypes differ: cast when packing"):
        resolve(halves, tiny.manifest, "file")
    with pytest.raises(WeightsMismatch, match="export the architecture of this one"):
        resolve(halves | tensors("more"), tiny.manifest, "file")


def test_long_lists_are_cut_in_the_text_alone(tiny: TinyArtifact) -> None:
    with pytest.raises(WeightsMismatch) as refused:
        resolve(tensors("weight", "bias", "tied", "steps", *map(str, range(99))), tiny.manifest, "file")
    assert len(refused.value.problems) == 99
    assert "and 49 more" in str(refused.value)


def crossed(manifest: Manifest) -> Manifest:
    """An adapter whose checkpoint keys are the FQNs of other weights."""
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    sources = [Source(weight="bias", keys=("other",)), Source(weight="other", keys=("bias",))]
    weights = [weight for weight in manifest.weights if weight.name == "bias"]
    twin = type(weights[0])(name="other", dtype="F32", shape=(5,))
    return Manifest(**{**fields, "weights": (weights[0], twin), "adapter": Adapter(sources=tuple(sources))})


def test_a_set_that_fits_both_ways_is_refused_unless_it_is_said_which(tiny: TinyArtifact) -> None:
    manifest = crossed(tiny.manifest)
    found = {name: FileTensor("F32", (5,), 0, 0) for name in ("bias", "other")}
    with pytest.raises(WeightsMismatch, match="fit both as runtime names and as checkpoint keys"):
        resolve(found, manifest, "file")
    assert resolve(found, manifest, "file", readings=NAMES).found["bias"] == ("bias",)
    assert resolve(found, manifest, "file", readings=KEYS_THEN_NAMES).found["bias"] == ("other",)


def test_a_weight_without_keys_says_what_to_do(tiny: TinyArtifact) -> None:
    manifest = crossed(tiny.manifest)
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    sources = (Source(weight="bias", keys=()), Source(weight="other", keys=("other",)))
    broken = Manifest(**{**fields, "adapter": Adapter(sources=sources)})
    with pytest.raises(WeightsMismatch, match="bias: the adapter knows no checkpoint key that gives it"):
        resolve({"other": FileTensor("F32", (5,), 0, 0)}, broken, "file", readings=KEYS_THEN_NAMES)
