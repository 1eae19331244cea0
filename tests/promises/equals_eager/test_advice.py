"""What errors advise: who follows it, or does what is nearest, gets eager's numbers or the next refusal by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear as apply
from torch.nn.functional import normalize

from tests.support.models import Does
from tests.support.refusals import because
from tests.support.setups import equal
from weightswap_exporter import export, pack, publish, skeleton
from weightswap_runtime import (
    Artifact,
    CaptureError,
    CheckpointError,
    Sender,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.errors import ContextError, GraphMismatch, StaleState
from weightswap_tools.diff.artifacts import compare_artifacts

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def exported(model: nn.Module, folder: Path, **options: Any) -> Artifact:
    """Export although loading code cannot be recorded, which is a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export(model.eval(), (X,), out=folder / "a.artifact", **options)


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().eval()


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Scaled(nn.Module):
    """Checkpoints have a scale that a hook sets, after a look at it, as a number, a tensor or a buffer."""

    def __init__(self, initial: Any, *, persistent: bool | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if persistent is None:
            self.scale = initial
        else:
            self.register_buffer("scale", initial, persistent=persistent)
        self.register_load_state_dict_pre_hook(self._set)

    @staticmethod
    def _set(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        value = state["scale"] if "scale" in dict(module.named_buffers()) else state.pop("scale")
        assert value.item() > 0
        if "scale" not in state:
            module.scale = value.item() if isinstance(module.scale, float) else value.clone()
        elif "scale" in module._non_persistent_buffers_set:
            module.scale.copy_(state.pop("scale"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


SCALED: dict[str, Callable[[], nn.Module]] = {
    "number": lambda: Scaled(1.0),
    "tensor": lambda: Scaled(torch.ones(())),
    "buffer": lambda: Scaled(torch.ones(()), persistent=False),
}


def checkpoint_of_scaled(scale: float) -> dict[str, torch.Tensor]:
    return {**seeded(7, lambda: Scaled(torch.ones(()), persistent=True)).state_dict(), "scale": torch.tensor(scale)}


@pytest.mark.parametrize("kind", SCALED)
def test_packing_with_the_model_refuses_what_the_graph_would_keep(kind: str, tmp_path: Path) -> None:
    artifact = exported(SCALED[kind](), tmp_path, checkpoint=checkpoint_of_scaled(1.0))
    model = SCALED[kind]()
    for _ in range(2):  # the second time the model has the new value before
        with pytest.raises(CheckpointError, match=r"changes scale, but the graph keeps.*persistent buffer, and export"):
            pack(checkpoint_of_scaled(3.0), artifact, out=tmp_path / "v.safetensors", model=model)
    assert not (tmp_path / "v.safetensors").exists()
    pack(checkpoint_of_scaled(1.0), artifact, out=tmp_path / "v.safetensors", model=SCALED[kind]())


@pytest.mark.parametrize("kind", ["tensor", "buffer"])
def test_a_module_with_other_constants_than_the_artifact_is_refused_wherever_it_is_given(
    kind: str, tmp_path: Path
) -> None:
    artifact = exported(SCALED[kind](), tmp_path, checkpoint=checkpoint_of_scaled(1.0))
    same, model = SCALED[kind]().eval(), SCALED[kind]().eval()
    model.load_state_dict(checkpoint_of_scaled(3.0))
    served, at = load(artifact, same), f"unix:{tmp_path / 'socket'}"
    with served.receive(at), Sender(at, artifact) as sender:
        builds: list[Callable[[], object]] = [
            lambda: pack(model, artifact, out=tmp_path / "v.safetensors"),
            lambda: publish(model, tmp_path / "published", artifact, step=1),
        ]
        serves: list[Callable[[], object]] = [
            lambda: load(artifact, model),
            lambda: served.swap(model),
            lambda: served.swap(model, rows={}),
            lambda: served.stage(model),
            lambda: sender.send(model),
        ]
        for error, gives in ((CheckpointError, builds), (WeightsMismatch, serves)):
            for give in gives:
                with pytest.raises(error, match=r"scale, which is a constant of the graph: expected 1\.0, found 3\.0"):
                    give()
    assert torch.equal(served(X), same(X))
    assert not (tmp_path / "published").exists()


def test_a_buffer_that_no_graph_reads_may_differ_in_a_module_that_is_given(tmp_path: Path) -> None:
    """As what a training records about itself."""
    models = [Does(lambda m, x: x * m.scale, scale=nn.Parameter(torch.rand(4))) for _ in range(2)]
    for number, model in enumerate(models):
        model.seen = nn.Buffer(torch.full((1,), float(number)), persistent=False)
    served = load(export(models[0], (X,), out=tmp_path / "a"), models[0])
    served.swap(models[1])
    assert torch.equal(served(X), models[1](X))


class Rotating(nn.Module):
    """Has weights of half precision, and frequencies that a conversion of the whole module rounds."""

    def __init__(self, frequency: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).to(torch.bfloat16)
        self.register_buffer("frequency", torch.full((4,), frequency), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * 1000 * self.frequency).cos()


@pytest.mark.parametrize("frequency", [1 / 3, 0.5])
def test_a_conversion_that_rounds_constants_alone_is_refused(frequency: float, tmp_path: Path) -> None:
    x = torch.rand(2, 4).to(torch.bfloat16)
    eager = seeded(1, lambda: Rotating(frequency))
    artifact = export(eager, (x,), out=tmp_path / "a")
    served, rounded = load(artifact, eager), seeded(2, lambda: Rotating(frequency)).to(torch.bfloat16)
    if frequency == 0.5:  # nothing is rounded
        served.swap(rounded)
        assert equal(served(x).bfloat16(), rounded(x))
        return
    says = r"frequency, which is a constant of the graph: expected F32\[4\], found other values in BF16"
    with pytest.raises(WeightsMismatch, match=says):
        served.swap(rounded)
    with pytest.raises(CheckpointError, match=says):
        pack(rounded, artifact, out=tmp_path / "v.safetensors")
    assert equal(served(x), eager(x))
    whole = export(rounded, (x,), out=tmp_path / "b")  # as advised
    assert equal(load(whole, rounded)(x), rounded(x))
    packed = pack(rounded.float(), whole, out=tmp_path / "v.safetensors", dtype="bfloat16")  # all of it is cast
    assert equal(load(whole, packed.path)(x), rounded.bfloat16()(x))
    with pytest.raises(WeightsMismatch, match=r"frequency.*expected BF16\[4\], found other values in F32"):
        load(whole, eager)


def test_code_that_gradients_forbid_is_decorated_as_advised(tmp_path: Path) -> None:
    def write(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([model.get_parameter("weight")] * 2)
        whole.chunk(2)[1].zero_()
        return x @ whole.T

    with pytest.raises(CaptureError, match=r"decorate the method with torch\.no_grad\(\)"):
        exported(Does(write, weight=nn.Parameter(torch.ones(4, 4))), tmp_path)
    eager = Does(torch.no_grad()(write), weight=nn.Parameter(torch.randn(4, 4))).eval()
    assert torch.equal(load(exported(eager, tmp_path), eager)(X), eager(X))


def test_a_persistent_buffer_as_advised_has_the_checkpoints_value(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Scaled(torch.ones(()), persistent=True)

    artifact = exported(make(), tmp_path)
    packed = pack(checkpoint_of_scaled(3.0), artifact, out=tmp_path / "v.safetensors", model=make())
    eager = make().eval()
    eager.load_state_dict(checkpoint_of_scaled(3.0))
    assert torch.equal(load(artifact, packed.path)(X), eager(X))


def add(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    with torch.no_grad():
        model.get_parameter("weight").add_(checkpoint["change"])


def test_a_model_to_which_loading_adds_takes_one_checkpoint(tmp_path: Path) -> None:
    changes = [{"change": torch.full((4, 4), float(number))} for number in (1, 2)]
    artifact = exported(seeded(1, linear), tmp_path, load=add, checkpoint=changes[0])
    model = seeded(1, linear)
    pack(changes[0], artifact, out=tmp_path / "v1.safetensors", model=model, load=add)
    with pytest.raises(CheckpointError, match=r"loaded before. Build the model anew for each checkpoint"):
        pack(changes[1], artifact, out=tmp_path / "v2.safetensors", model=model, load=add)
    packed = pack(changes[1], artifact, out=tmp_path / "v2.safetensors", model=seeded(1, linear), load=add)
    eager = seeded(1, linear)
    add(eager, changes[1])
    assert torch.equal(load(artifact, packed.path)(X), eager(X))


def test_a_model_that_takes_any_checkpoint_may_take_several(tmp_path: Path) -> None:
    artifact = exported(linear(), tmp_path)
    model = linear()
    for seed in (1, 2):
        checkpoint = seeded(seed, linear).state_dict()
        packed = pack(checkpoint, artifact, out=tmp_path / "v.safetensors", model=model)
        assert torch.equal(load(artifact, packed.path)(X), seeded(seed, linear)(X))


def test_a_damaged_file_is_not_packed_again(tmp_path: Path) -> None:
    artifact = exported(linear(), tmp_path)
    file = pack(linear(), artifact, out=tmp_path / "v1.safetensors").path
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x55
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"bias is damaged: its bytes do not match its digest. Copy the file again"
    ):
        pack(file, artifact, out=tmp_path / "v2.safetensors")
    with pytest.raises(CheckpointError):
        pack(file, artifact, out=tmp_path / "v2.safetensors", model=linear())


class Halved(nn.Module):
    """Loading halves the weight, which has the same name in a checkpoint and in the model."""

    def __init__(self, factor: float = 0.5, *, looks: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.factor, self.looks = factor, looks
        self.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _halve(module: Any, state: dict[str, Any], *_: Any) -> None:
        if module.looks:
            state["linear.weight"].sum().item()
        if module.factor != 1:
            state["linear.weight"] = state["linear.weight"] * module.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / self.factor


def test_the_digests_that_a_file_lacks_are_not_to_be_removed(tmp_path: Path) -> None:
    artifact = exported(Halved(), tmp_path)
    checkpoint = seeded(2, Halved).state_dict()
    packed = pack(checkpoint, artifact, out=tmp_path / "v1.safetensors")
    metadata = {"weightswap": f'{{"graph_id": "{artifact.graph_id}", "weights_id": "{"0" * 64}", "digests": {{}}}}'}
    save_file(load_file(packed.path), tmp_path / "odd.safetensors", metadata)
    for take in (load, lambda artifact, path: pack(path, artifact, out=tmp_path / "v2.safetensors")):
        with pytest.raises(WeightFileError, match="Copy the file again, or pack its checkpoint again") as refused:
            take(artifact, tmp_path / "odd.safetensors")
        assert "remove" not in str(refused.value)


def test_names_that_fit_twice_are_read_as_the_model_reads_them(tmp_path: Path) -> None:
    artifact = exported(Halved(), tmp_path)
    eager = seeded(2, Halved)
    save_file(eager.state_dict(), tmp_path / "c.safetensors")
    eager.load_state_dict(load_file(tmp_path / "c.safetensors"))
    with pytest.raises(WeightsMismatch, match=r'keys="checkpoint" loads it as the model loads its state dicts'):
        load(artifact, tmp_path / "c.safetensors")
    served = load(artifact)
    served.swap(tmp_path / "c.safetensors", keys="checkpoint")
    assert torch.equal(served(X), eager(X))


def test_a_checkpoint_whose_loading_is_unknown_is_only_to_be_packed(tmp_path: Path) -> None:
    artifact = exported(Halved(looks=True), tmp_path)
    eager = seeded(2, lambda: Halved(looks=True))
    save_file(eager.state_dict(), tmp_path / "c.safetensors")
    with pytest.raises(WeightsMismatch, match=r"Pack it on the build side, with the model") as refused:
        load(artifact, tmp_path / "c.safetensors")
    assert "fqn" not in str(refused.value)
    model = Halved(looks=True)
    packed = pack(tmp_path / "c.safetensors", artifact, out=tmp_path / "v.safetensors", model=model)
    eager.load_state_dict(load_file(tmp_path / "c.safetensors"))
    assert torch.equal(load(artifact, packed.path)(X), eager(X))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("wrapper", ["", "module.", "model."])
@pytest.mark.parametrize("name", "ab")
def test_ignoring_one_of_two_unlike_tied_values_chooses_none(name: str, wrapper: str, tmp_path: Path) -> None:
    artifact = exported(Tied(), tmp_path)
    unlike = {f"{wrapper}{key}.weight": torch.full((4, 4), float(ord(key))) for key in "ab"}
    save_file(unlike, tmp_path / "c.safetensors")
    for take in (load, lambda artifact, path, ignore: pack(path, artifact, out=tmp_path / "v", ignore=ignore)):
        with pytest.raises(WeightsMismatch, match=r"one tensor in the graph, but .*different values"):
            take(artifact, tmp_path / "c.safetensors", ignore=f"*{name}.weight")
    assert not (tmp_path / "v").exists()


def test_floats_of_8_bits_are_not_cast_without_their_scale(tmp_path: Path) -> None:
    artifact = exported(nn.Linear(4, 4, bias=False), tmp_path)
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    scaled = {"weight": weight, "weight_scale_inv": torch.tensor(0.1)}
    with pytest.raises(WeightsMismatch, match="Only the dtypes differ: cast when packing"):
        pack(scaled, artifact, out=tmp_path / "v.safetensors", ignore="*scale*")
    with pytest.raises(
        CheckpointError, match="weight: is F8_E4M3, and weight_scale_inv, which is left out, may be its"
    ):
        pack(scaled, artifact, out=tmp_path / "v.safetensors", ignore="*scale*", dtype="float32")
    packed = pack({"weight": weight}, artifact, out=tmp_path / "v.safetensors", dtype="float32")
    assert torch.equal(load(artifact, packed.path)(X), apply(X, weight.float()))


def test_state_beside_floats_of_8_bits_is_no_scale(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4).to(torch.float8_e4m3fn), requires_grad=False)
            self.register_buffer("total", torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x
            return self.weight.float() * self.total

    artifact, other = exported(Counting(), tmp_path), Counting()
    for given in (other, other.state_dict()):
        packed = pack(given, artifact, out=tmp_path / "v.safetensors")
        assert torch.equal(load(artifact, packed.path)(X), other.weight.float() * X)


def test_transformers_skips_no_scale_of_8_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=16)
    model = transformers.LlamaForCausalLM(config).eval()
    artifact = export(model, (torch.ones(1, 4, dtype=torch.long),), out=tmp_path / "a.artifact")
    checkpoint = dict(model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    checkpoint |= {name: checkpoint[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    with pytest.raises(WeightsMismatch, match=r"pack it with the model \(weightswap pack --recipe"):
        pack(checkpoint, artifact, out=tmp_path / "v.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}_scale_inv: may be the scale of the 8-bit floats"):
        pack(checkpoint, artifact, out=tmp_path / "v.safetensors", model=transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("flat", [True, False])
def test_of_several_fitting_places_none_is_advised_alone(flat: bool, tmp_path: Path) -> None:
    artifact = exported(linear(), tmp_path)
    places = {name: seeded(seed, linear).state_dict() for seed, name in enumerate(["student", "teacher"])}
    whole = {f"{name}.{key}": value for name, state in places.items() for key, value in state.items()}
    source = whole if flat else {"weights": {"unrelated": torch.zeros(2)}, "bias": torch.zeros(4), **places}
    said = "prefix='student.' or prefix='teacher.'" if flat else "level='student' or level='teacher'"
    with pytest.raises(WeightsMismatch, match=f"Say which is meant: {said}"):
        pack(source, artifact, out=tmp_path / "v.safetensors")
    chosen: dict[str, Any] = {"prefix": "teacher."} if flat else {"level": "teacher"}
    packed = pack(source, artifact, out=tmp_path / "v.safetensors", **chosen)
    assert torch.equal(load(artifact, packed.path)(X), seeded(1, linear)(X))


class Normalising(nn.Module):
    """Changes its weight in each call, in place or by another tensor; or computes it anew, as advised."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = normalize(self.weight)
        with torch.no_grad():
            if self.how == "in place":
                self.weight.copy_(weight)
            elif self.how == "data":
                self.weight.data = weight
        return x @ weight


@pytest.mark.parametrize(
    ("how", "advice"), [("in place", "compute a new tensor in each call"), ("data", "in the call")]
)
def test_a_weight_that_calls_change_is_not_made_state(how: str, advice: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=advice) as refused:
        exported(Normalising(how), tmp_path)
    assert "register" not in str(refused.value)
    artifact = exported(Normalising("anew"), tmp_path)
    eager = seeded(4, lambda: Normalising("anew"))
    assert torch.equal(load(artifact, pack(eager, artifact, out=tmp_path / "v.safetensors").path)(X), eager(X))


class Seeding(nn.Module):
    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if drawn:
            self.register_buffer("drawn", torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "drawn"):
            torch.manual_seed(0)
            return self.linear(x) @ torch.randn(4, 4)
        return self.linear(x) @ self.drawn


def test_random_numbers_that_are_kept_belong_to_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="keep them in a persistent buffer, so that checkpoints have them"):
        exported(Seeding(False), tmp_path)
    artifact = exported(Seeding(True), tmp_path)
    eager = seeded(5, lambda: Seeding(True))
    save_file(eager.state_dict(), tmp_path / "c.safetensors")
    assert torch.equal(load(artifact, tmp_path / "c.safetensors")(X), eager(X))


class Norm(nn.Module):
    """Reads a parameter's value in its constructor, or in each call, as advised."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.largest = self.linear.weight.abs().max().item() if early else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / (self.largest or self.linear.weight.abs().max())


def test_values_of_parameters_are_read_in_calls(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="compute in the call what calls need of a parameter's values"), skeleton():
        Norm(True)
    with skeleton():
        model = Norm(False)
    artifact, eager = exported(model, tmp_path), seeded(6, lambda: Norm(False))
    assert torch.equal(load(artifact, pack(eager, artifact, out=tmp_path / "v.safetensors").path)(X), eager(X))


def test_graphs_that_load_in_other_ways_are_said_not_to_share_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    one, other = exported(Halved(0.5), tmp_path), exported(Halved(1.0), tmp_path / "b")
    assert "pack each checkpoint for each graph" in compare_artifacts(one.path, other.path).verdict
    checkpoint = seeded(2, Halved).state_dict()
    file = pack(checkpoint, one, out=tmp_path / "v.safetensors").path
    with pytest.raises(GraphMismatch, match=r"Pack the checkpoint for this one. .* if both graphs compute them alike"):
        load(other, file)
    with pytest.raises(GraphMismatch, match=r"which may compute its weights in another way. Pack the checkpoint"):
        pack(file, other, out=tmp_path / "w.safetensors")
    eager = Halved(1.0).eval()
    eager.load_state_dict(checkpoint)
    assert torch.equal(load(other, pack(checkpoint, other, out=tmp_path / "v.safetensors").path)(X), eager(X))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("sum", torch.zeros(3, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum += self.linear(x)
        return self.sum.clone()


def test_a_state_of_other_weights_is_started_anew(tmp_path: Path) -> None:
    artifact = exported(Remembering(), tmp_path)
    files = [pack(seeded(seed, Remembering), artifact, out=tmp_path / f"v{seed}.safetensors").path for seed in range(2)]
    served = load(artifact, files[0])
    context = served.new_context()
    served(X, context=context)
    context.save(tmp_path / "c.safetensors")
    served.swap(files[1])
    with pytest.raises(StaleState, match=r'on_swap="reset" or "pin"') as stale:
        served(X, context=context)
    assert "keep" not in str(stale.value)
    with pytest.raises(ContextError, check=because("mismatch"), match=r"start a new context.*would mix both"):
        served.load_context(tmp_path / "c.safetensors")
    assert torch.equal(served(X, context=served.new_context(on_swap="reset")), seeded(1, Remembering)(X))


class Arguments:
    """What a trainer pickles beside the weights."""


def test_a_pickle_that_its_owner_trusts_is_given_whole(tmp_path: Path) -> None:
    artifact = exported(linear(), tmp_path)
    states = [seeded(seed, linear).state_dict() for seed in range(2)]
    torch.save({"state_dict": states[0], "model": states[1], "args": Arguments()}, tmp_path / "c.pt")
    advice = r"unpickle it yourself: pack\(torch\.load\(path, weights_only=False\), artifact"
    with pytest.raises(CheckpointError, match=advice):
        pack(tmp_path / "c.pt", artifact, out=tmp_path / "v.safetensors")
    whole = torch.load(tmp_path / "c.pt", weights_only=False)
    with pytest.raises(WeightsMismatch, match=r"both fit, with different values\nSay which: level="):
        pack(whole, artifact, out=tmp_path / "v.safetensors")
    packed = pack(whole, artifact, out=tmp_path / "v.safetensors", level="model")
    assert torch.equal(load(artifact, packed.path)(X), seeded(1, linear)(X))


class Decaying(nn.Module):
    """Multiplies by a smaller number in each call: a number of Python, or a buffer, as advised."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if as_buffer:
            self.register_buffer("scale", torch.ones(()), persistent=False)
        else:
            self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * 0.5
        return self.linear(x) * self.scale


def test_a_number_that_calls_change_begins_as_at_the_export(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="register it as a buffer: servers begin with its value at the export"):
        exported(Decaying(False), tmp_path)
    artifact = exported(Decaying(True), tmp_path)
    eager = seeded(8, lambda: Decaying(True))
    served = load(artifact, pack(eager, artifact, out=tmp_path / "v.safetensors").path)
    context = served.new_context()
    for _ in range(3):
        assert torch.equal(served(X, context=context), eager(X))
