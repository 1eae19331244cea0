"""Name matching: by FQN, by checkpoint key, with every problem at once and near misses as hints."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.tiny import TinyArtifact
from weightswap_runtime import WeightsMismatch
from weightswap_runtime.format.manifest import Conversion, Manifest, NamedTensor, WeightSource
from weightswap_runtime.format.names import KEYS_THEN_NAMES, NAMES, ignored_names, resolve
from weightswap_runtime.format.safetensors import FileTensor

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
    stored = {**tensors("tied", "again", "other"), "wieght": FileTensor("F32", (3, 5), 0, 0)}
    stored |= {"bias": FileTensor("F16", (5,), 0, 0), "steps": FileTensor("I64", (1,), 0, 0)}
    with pytest.raises(WeightsMismatch) as refused:
        resolve(stored, tiny.manifest, "file")
    assert set(refused.value.problems) == {
        "weight: missing, F32[3, 5] (did you mean wieght?)",
        "bias: expected F32[5], found F16[5]",
        "steps: expected I64[], found I64[1]",
        "wieght: unexpected (did you mean weight?)",
        "other: unexpected",
    }
    assert "file: refused, 5 problems" in str(refused.value)


def test_the_nearer_reading_is_reported(tiny: TinyArtifact) -> None:
    with pytest.raises(WeightsMismatch) as refused:
        resolve(tensors("w", "bias", "steps"), tiny.manifest, "file")
    assert refused.value.problems == ("tied or again: missing, F32[1]",)


def test_the_advice_fits_the_problem(tiny: TinyArtifact) -> None:
    halves = {name: FileTensor("F16", t.shape, 0, 0) for name, t in tensors("weight", "bias", "tied", "steps").items()}
    with pytest.raises(WeightsMismatch, match="Only the dtypes differ, but packing casts floating-point tensors alone"):
        resolve(halves, tiny.manifest, "file")  # the steps, too, which are integers
    with pytest.raises(WeightsMismatch, match=r"cast when packing \(weightswap pack --dtype float32, pack\(dtype="):
        resolve(halves | tensors("steps"), tiny.manifest, "file")
    with pytest.raises(WeightsMismatch, match="It is one of 3 shards: give their index, or their folder"):
        resolve(tensors("weight"), tiny.manifest, "folder/model-00002-of-00003.safetensors")
    with pytest.raises(WeightsMismatch, match="Give a checkpoint of the exported architecture"):
        resolve(halves | tensors("more"), tiny.manifest, "file")
    whole = tensors("weight", "bias", "tied", "steps")
    with pytest.raises(WeightsMismatch, match=r"It has every weight, and more. .* leave them out: ignore='x.inv_freq'"):
        resolve(whole | tensors("x.inv_freq"), tiny.manifest, "file")


def test_no_name_is_suggested_twice(tiny: TinyArtifact) -> None:
    fields = {name: getattr(tiny.manifest, name) for name in tiny.manifest.__struct_fields__}
    rows = tuple(
        type(tiny.manifest.weights[0])(name=f"norm.{name}", dtype="F32", shape=(5,)) for name in ("weight", "bias")
    )
    conversion = Conversion(sources=tuple(WeightSource(weight=row.name, keys=(row.name,)) for row in rows))
    manifest = Manifest(**{**fields, "weights": rows, "conversion": conversion})
    stored = {f"norm.{name}": FileTensor("F32", (5,), 0, 0) for name in ("weights", "gain")}
    with pytest.raises(WeightsMismatch) as refused:
        resolve(stored, manifest, "file")
    assert set(refused.value.problems) == {
        "norm.weight: missing, F32[5] (did you mean norm.weights?)",
        "norm.bias: missing, F32[5]",
        "norm.weights: unexpected (did you mean norm.weight?)",
        "norm.gain: unexpected",
    }


def crossed(manifest: Manifest) -> Manifest:
    """Return a conversion whose checkpoint keys are the FQNs of other weights."""
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    sources = [WeightSource(weight="bias", keys=("other",)), WeightSource(weight="other", keys=("bias",))]
    weights = [weight for weight in manifest.weights if weight.name == "bias"]
    twin = type(weights[0])(name="other", dtype="F32", shape=(5,))
    return Manifest(**{**fields, "weights": (weights[0], twin), "conversion": Conversion(sources=tuple(sources))})


def test_a_set_that_fits_both_ways_is_refused_unless_it_is_said_which(tiny: TinyArtifact) -> None:
    manifest = crossed(tiny.manifest)
    stored = {name: FileTensor("F32", (5,), 0, 0) for name in ("bias", "other")}
    with pytest.raises(WeightsMismatch, match="fit both as runtime names and as checkpoint keys"):
        resolve(stored, manifest, "file")
    assert resolve(stored, manifest, "file", readings=NAMES).found["bias"] == ("bias",)
    assert resolve(stored, manifest, "file", readings=KEYS_THEN_NAMES).found["bias"] == ("other",)


def test_a_weight_without_keys_says_what_to_do(tiny: TinyArtifact) -> None:
    manifest = crossed(tiny.manifest)
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    sources = (WeightSource(weight="bias", keys=()), WeightSource(weight="other", keys=("other",)))
    broken = Manifest(**{**fields, "conversion": Conversion(sources=sources)})
    with pytest.raises(WeightsMismatch, match="bias: the conversion has no checkpoint key for it"):
        resolve({"other": FileTensor("F32", (5,), 0, 0)}, broken, "file", readings=KEYS_THEN_NAMES)


PLAIN = ("w", "bias", "tied", "steps", "extra")
WRAPPED = {
    "DDP": [f"module.{name}" for name in PLAIN],
    "torch.compile": [f"_orig_mod.{name}" for name in PLAIN],
    "both": [f"module._orig_mod.{name}" for name in PLAIN],
    "a nesting level": [f"state_dict.{name}" for name in PLAIN],
    "nesting around a wrapper": [f"model.module.{name}" for name in PLAIN],
    "a wrapped part": ["_checkpoint_wrapped_module.w", "bias", "tied", "steps"],
    "FQNs": ["module.weight", "module.bias", "module.again", "module.steps"],
}


@pytest.mark.parametrize("names", WRAPPED.values(), ids=WRAPPED)
def test_prefixes_of_wrappers_are_stripped(names: list[str], tiny: TinyArtifact) -> None:
    types = tensors(*PLAIN, "weight", "again")
    match = resolve({name: types[name.split(".")[-1]] for name in names}, tiny.manifest, "file")
    assert {key for keys in match.found.values() for key in keys} == {n for n in names if not n.endswith("extra")}
    assert match.ignored == tuple(name for name in names if name.endswith("extra"))


NOT_WRAPPED = {
    "one key is left over": (["module.w", "module.bias", "module.tied", "module.steps", "module.more"], "module.more"),
    "one key is missing": (["module.w", "module.bias", "module.tied"], "module.bias: unexpected"),
    "one key is not wrapped": (["module.w", "bias", "tied", "steps", "module.bias"], "module.bias: unexpected"),
    "another prefix": ([f"net.{name}" for name in PLAIN], "net.bias: unexpected"),
}


@pytest.mark.parametrize(("names", "says"), NOT_WRAPPED.values(), ids=NOT_WRAPPED)
def test_nothing_is_stripped_unless_the_keys_then_are_the_model_s(
    names: list[str], says: str, tiny: TinyArtifact
) -> None:
    types = tensors(*PLAIN)
    stored = {name: types.get(name.split(".")[-1], types["bias"]) for name in names}
    with pytest.raises(WeightsMismatch, match=says):
        resolve(stored, tiny.manifest, "file")


def test_types_are_checked_under_the_stripped_names(tiny: TinyArtifact) -> None:
    stored = {f"module.{name}": typed for name, typed in tensors(*PLAIN).items()}
    stored["module.bias"] = FileTensor("F16", (5,), 0, 0)
    with pytest.raises(WeightsMismatch) as refused:
        resolve(stored, tiny.manifest, "file")
    assert refused.value.problems == ("bias: expected F32[5], found F16[5]",)


def test_a_model_whose_own_names_look_wrapped_is_read_as_it_is(tiny: TinyArtifact) -> None:
    manifest = crossed(tiny.manifest)
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    weight = type(manifest.weights[0])(name="module.bias", dtype="F32", shape=(5,))
    conversion = Conversion(sources=(WeightSource(weight="module.bias", keys=("module.bias",)),))
    named = Manifest(**{**fields, "weights": (weight,), "conversion": conversion})
    assert resolve({"module.bias": FileTensor("F32", (5,), 0, 0)}, named, "file").found == {
        "module.bias": ("module.bias",)
    }


def test_without_recorded_loading_code_only_weight_files_and_declared_fqns_are_accepted(tiny: TinyArtifact) -> None:
    fields = {name: getattr(tiny.manifest, name) for name in tiny.manifest.__struct_fields__}
    conversion = Conversion(
        sources=tiny.manifest.conversion.sources, untraceable="hook (model.py, line 3): wants values"
    )
    manifest = Manifest(**{**fields, "conversion": conversion})
    stored = tensors("weight", "bias", "tied", "steps")
    with pytest.raises(WeightsMismatch, match=r"could not be recorded at export: hook \(model.py, line 3\)"):
        resolve(stored, manifest, "file")
    assert resolve(stored, manifest, "file", readings=NAMES).found["weight"] == ("weight",)


def with_layers(manifest: Manifest, count: int) -> Manifest:
    rows = tuple(NamedTensor(name=f"layers.{i}.weight", dtype="F32", shape=(1,)) for i in range(count))
    conversion = Conversion(sources=tuple(WeightSource(weight=row.name, keys=(row.name,)) for row in rows))
    return msgspec.structs.replace(manifest, weights=rows, conversion=conversion)


def test_many_problems_show_both_missing_and_unexpected_names(tiny: TinyArtifact) -> None:
    stored = tensors(*(f"blocks.{i}.w" for i in range(90)))
    with pytest.raises(WeightsMismatch) as refused:
        resolve(stored, with_layers(tiny.manifest, 80), "file")
    message = str(refused.value)
    assert message.count(": missing, F32[1]") == message.count(": unexpected") == 25
    assert "and 120 more" in message
    assert len(refused.value.problems) == len(set(refused.value.problems)) == 170


PEFT = "base_model.model.layers.0.lora_A.default.weight"


def test_names_of_a_peft_adapter_are_reported_with_advice(tiny: TinyArtifact) -> None:
    stored = tensors(
        *(f"base_model.model.layers.{i}.{kind}.weight" for i in range(60) for kind in ("base_layer", "lora_A.default"))
    )
    with pytest.raises(WeightsMismatch) as refused:
        resolve(stored, with_layers(tiny.manifest, 60), "file")
    message = str(refused.value)
    assert "layers.0.weight: missing" in message
    assert "base_model.model.layers.0.base_layer.weight: unexpected" in message
    assert "merge the adapter into the model first (model.merge_and_unload())" in message


def test_adapters_that_the_export_has_recorded_are_not_to_be_merged(tiny: TinyArtifact) -> None:
    conversion = Conversion(sources=(WeightSource(weight="w", keys=(PEFT,)),))
    row = NamedTensor(name="w", dtype="F32", shape=(1,))
    manifest = msgspec.structs.replace(tiny.manifest, weights=(row,), conversion=conversion)
    with pytest.raises(WeightsMismatch, match="Give a checkpoint of the exported architecture"):
        resolve(tensors("base_model.model.other"), manifest, "file")


def test_no_pattern_hides_a_name_that_has_a_wrappers_name_in_it() -> None:
    names = ["model.encoder.module.weight", "model.encoder.module.bias"]
    assert ignored_names(names, ["*"], "file", kept=["encoder.module.weight"]) == ("model.encoder.module.bias",)
