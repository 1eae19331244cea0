"""Models of torchrec, with jagged tensors as their inputs: exported as they are, and bitwise as eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim, ShapesCollection

from tests.support.compiled import needs_compiler
from tests.support.served import ask, serving
from tests.support.setups import different, equal, loaded, served
from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import CaptureError, InputMismatch, Model, load, write_delta
from weightswap_runtime.format.signature import Dict, Items, Node, Tensor
from weightswap_tools.terminal import node_text, node_words

with warnings.catch_warnings():  # those of its own and of fbgemm's deprecated modules
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )
    from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantisedBags
    from torchrec.quant.embedding_modules import EmbeddingCollection as QuantisedCollection
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

FEATURES = ["f0", "f1", "f2"]
ROWS = 100
KJT = "torchrec.sparse.jagged_tensor.KeyedJaggedTensor"
DENSE: dict[str, Any] = {
    "dense_in_features": 8,
    "dense_arch_layer_sizes": [32, 16],
    "over_arch_layer_sizes": [16, 1],
}


def bags(features: list[str] = FEATURES, **options: Any) -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=f"t{index}", embedding_dim=16, num_embeddings=ROWS, feature_names=[feature], **options)
        for index, feature in enumerate(features)
    ]
    return EmbeddingBagCollection(tables=tables)


def weighted_bags() -> nn.Module:
    tables = [EmbeddingBagConfig(name=f, embedding_dim=16, num_embeddings=ROWS, feature_names=[f]) for f in FEATURES]
    return EmbeddingBagCollection(tables=tables, is_weighted=True)


def sequences() -> nn.Module:
    tables = [EmbeddingConfig(name=f, embedding_dim=16, num_embeddings=ROWS, feature_names=[f]) for f in FEATURES]
    return EmbeddingCollection(tables=tables)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(["q", "c"])
        self.q, self.c = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, kjts: list[Any]) -> torch.Tensor:
        pooled = self.bags(kjts[0])
        return (self.q(pooled["q"]) * self.c(pooled["c"])).sum(1).sigmoid()


class Scoring(nn.Module):
    """Takes what the pooling of another model gives, and one feature's ids."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ids = nn.Linear(32, 1), nn.EmbeddingBag(ROWS, 4, mode="sum")

    def forward(self, features: Mapping[str, Any]) -> torch.Tensor:
        pooled, ids = features["pooled"], features["ids"]
        known = self.ids(ids.values(), ids.offsets()[:-1])
        return self.linear(torch.cat([pooled["f0"], pooled["f1"]], 1)) + known.sum(1, keepdim=True)


def kjt(
    batch: int = 4,
    features: list[str] = FEATURES,
    *,
    most: int = 5,
    weighted: bool = False,
    offsets: bool = False,
    dtype: torch.dtype = torch.int64,
) -> Any:
    lengths = torch.randint(most, (len(features) * batch,), dtype=dtype)
    count = int(lengths.sum())
    ids = torch.randint(ROWS, (count,), dtype=dtype)
    weights = torch.rand(count) if weighted else None
    if offsets:
        begins = torch.cat([torch.zeros(1, dtype=dtype), lengths.cumsum(0).to(dtype)])
        return KeyedJaggedTensor(keys=features, values=ids, weights=weights, offsets=begins)
    return KeyedJaggedTensor(keys=features, values=ids, weights=weights, lengths=lengths)


def strided(batch: int = 4, *, most: int = 5) -> Any:
    """A KJT that has another number of rows for each feature."""
    strides = [[batch], [max(1, batch // 2)], [max(1, batch - 1)]]
    lengths = torch.randint(most, (sum(rows for (rows,) in strides),))
    inverse = torch.stack([torch.arange(batch) % rows for (rows,) in strides])
    return KeyedJaggedTensor(
        keys=FEATURES,
        values=torch.randint(ROWS, (int(lengths.sum()),)),
        lengths=lengths,
        stride_per_key_per_rank=strides,
        inverse_indices=(FEATURES, inverse),
    )


def dense(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 8)


def pooled_and_ids(batch: int = 4, *, most: int = 5) -> Any:
    table = KeyedTensor(keys=["f0", "f1"], length_per_key=[16, 16], values=torch.randn(batch, 32))
    lengths = torch.randint(most, (batch,))
    return {"pooled": table, "ids": JaggedTensor(torch.randint(ROWS, (int(lengths.sum()),)), lengths=lengths)}


batch, count = Dim("batch", max=999), Dim("ids", min=0, max=9999)


def fields(features: int = 3, *, weighted: bool = False, offsets: bool = False) -> list[Any]:
    """`dynamic_shapes` of a KJT."""
    rows = [None, None] if offsets else [{0: features * batch}, None]  # torch fixes the number of offsets
    return [{0: count}, {0: count} if weighted else None, *rows, None, None]


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    make: Callable[..., tuple[Any, ...]]  # arguments of a batch, with fewer than `most` ids in a row
    shapes: Any


def with_kjt(build: Callable[[], nn.Module], features: list[str] = FEATURES) -> Case:
    return Case(build, lambda b=4, most=5: (dense(b), kjt(b, features, most=most)), ({0: batch}, fields(len(features))))


def alone(build: Callable[[], nn.Module], features: int = 3, **options: Any) -> Case:
    names = [f"f{index}" for index in range(features)]
    given = {key: value for key, value in options.items() if key != "dtype"}
    return Case(build, lambda b=4, most=5: (kjt(b, names, most=most, **options),), (fields(features, **given),))


def of(features: int) -> list[str]:
    return [f"f{index}" for index in range(features)]


CASES = {
    "DLRM": with_kjt(lambda: DLRM(bags(), **DENSE)),
    "DLRM_DCN": with_kjt(lambda: DLRM_DCN(bags(), dcn_num_layers=2, dcn_low_rank_dim=4, **DENSE)),
    "DLRM_Projection": with_kjt(
        lambda: DLRM_Projection(
            bags(), interaction_branch1_layer_sizes=[32, 32], interaction_branch2_layer_sizes=[32, 32], **DENSE
        )
    ),
    "DeepFM": with_kjt(
        lambda: SimpleDeepFMNN(
            num_dense_features=8, embedding_bag_collection=bags(), hidden_layer_size=20, deep_fm_dimension=5
        )
    ),
    "5 features": alone(lambda: bags(of(5)), 5),
    "6 features": alone(lambda: bags(of(6)), 6),
    "7 features": alone(lambda: bags(of(7)), 7),
    "mean": alone(lambda: bags(pooling=PoolingType.MEAN)),
    "weighted": alone(weighted_bags, weighted=True),
    "offsets": alone(bags, offsets=True),
    "int32": alone(bags, dtype=torch.int32),
    "sequences": alone(sequences),
    "strides": Case(
        bags,
        lambda b=4, most=5: (strided(b, most=most),),
        ([{0: count}, None, {0: Dim("lengths", max=999)}, None, None, {1: batch}],),
    ),
    "list": Case(Towers, lambda b=4, most=5: ([kjt(b, ["q", "c"], most=most)],), ([fields(2)],)),
    "dict": Case(
        Scoring,
        lambda b=4, most=5: (pooled_and_ids(b, most=most),),
        {"features": {"pooled": [{0: batch}], "ids": [{0: count}, None, {0: batch}, None]}},
    ),
}


def plain(value: Any) -> Any:
    """What a server gives in place of a value: fields by name."""
    if isinstance(value, KeyedTensor):
        return {"_values": value.values()}
    if isinstance(value, JaggedTensor):
        return {"_values": value.values(), "_weights": None, "_lengths": value._lengths, "_offsets": value._offsets}
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def eagerly(model: nn.Module, args: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return plain(model(*args))


def as_fields(value: Any, node: Node) -> Any:
    """An argument with dicts of fields in place of objects."""
    if isinstance(node, Dict) and node.kind:
        given = {str(key): getattr(value, str(key)) for key, _ in node.items if hasattr(value, str(key))}
        if "_inverse_indices" in given and given["_inverse_indices"] is not None:
            given["_inverse_indices"] = given["_inverse_indices"][1]
        return {str(key): given[str(key)] for key, item in node.items if isinstance(item, Tensor)}
    if isinstance(node, Dict):
        return {key: as_fields(value[key], item) for key, item in node.items}
    if isinstance(node, Items):
        return [as_fields(item, part) for item, part in zip(value, node.items, strict=True)]
    return value


HEAVY = ("DLRM_DCN", "DLRM_Projection", "DeepFM", "5 features", "6 features", "int32", "mean")  # others are like them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in CASES]
)
def test_equals_eager(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    with skeleton():
        hollow = case.build().eval()
    sample = case.make()
    artifact = export(hollow, sample, out=tmp_path / "skeleton", dynamic_shapes=case.shapes)
    models = [different(case.build, seed) for seed in (1, 2)]
    real = export(models[0], sample, out=tmp_path / "real", dynamic_shapes=case.shapes)
    assert real.graph_id == artifact.graph_id
    files = [pack(model, artifact, out=tmp_path / f"{index}.safetensors").path for index, model in enumerate(models)]
    found = load(artifact, files[0])
    signature = found.signatures["forward"]
    assert set(signature.dims) <= {"batch", "ids", "lengths"}
    assert "ids" in signature.dims
    for index, model in enumerate(models):
        if index:
            found.swap(files[index])
        rows = (4, 4) if name == "offsets" else (9, 5)
        for args in (sample, case.make(rows[0]), case.make(rows[1], most=1)):
            expected = eagerly(model, args)
            assert equal(found(*args), expected)
            apart = [as_fields(value, node) for value, (_, node) in zip(args, signature.args, strict=True)]
            assert equal(found(*apart), expected)


class Collisions(nn.Module):
    """Ids that a table learns while it is trained, with a record of when, which no answer needs."""

    def __init__(self) -> None:
        super().__init__()
        tables = bags()
        learned = {
            config.name: MCHManagedCollisionModule(
                zch_size=ROWS,
                device=torch.device("cpu"),
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=1,
                input_hash_size=4 * ROWS,
            )
            for config in tables.embedding_bag_configs()
        }
        managed = ManagedCollisionCollection(learned, tables.embedding_bag_configs())
        self.bags = ManagedCollisionEmbeddingBagCollection(tables, managed, return_remapped_features=True)

    def forward(self, ids: KeyedJaggedTensor) -> list[torch.Tensor]:
        pooled, remapped = self.bags(ids)
        return [pooled.values(), remapped.values()]


def test_managed_collisions_of_another_state_of_the_training_are_swapped_in(tmp_path: Path) -> None:
    models = [different(Collisions, seed).train() for seed in (1, 2)]
    for steps, model in zip((2, 5), models, strict=True):
        for _ in range(steps):
            eagerly(model, (kjt(9),))
        model.eval()
    with pytest.warns(UserWarning, match="how a checkpoint becomes weights cannot be recorded"):
        artifact = export(models[0], (kjt(9),), out=tmp_path / "a", dynamic_shapes=(fields(),))
    files = [pack(model, artifact, out=tmp_path / f"{index}.safetensors").path for index, model in enumerate(models)]
    found = load(artifact, files[0])
    for index in (0, 1, 0):
        found.swap(files[index])
        for ids in (kjt(4), kjt(9)):
            assert equal(found(ids), eagerly(models[index], (ids,)))


def test_dimensions_of_a_collection_of_shapes(tmp_path: Path) -> None:
    ids, shapes = kjt(), ShapesCollection()
    shapes[ids.values()], shapes[ids.lengths()] = {0: count}, {0: 3 * batch}
    artifact = export(bags().eval(), (ids,), out=tmp_path / "a", dynamic_shapes=shapes)
    assert set(artifact.manifest.methods["forward"].signature.dims) == {"batch", "ids"}


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Model]:
    model = different(bags, 1)
    return model, served(tmp_path_factory.mktemp("bags"), model, kjt(), dynamic_shapes=(fields(),))


def test_keys_are_recorded_and_checked(pooling: tuple[nn.Module, Model]) -> None:
    _, found = pooling
    signature = found.signatures["forward"]
    ((_, given),) = signature.args
    assert isinstance(given, Dict)
    assert isinstance(signature.output, Dict)
    assert (given.kind, given.context) == (KJT, '["f0", "f1", "f2"]')
    assert signature.output.context == '[["f0", "f1", "f2"], [16, 16, 16]]'
    assert node_text(signature.output) == f"KeyedTensor({signature.output.context}){{_values: F32[batch, 48]}}"
    assert node_words(given).startswith('a KeyedJaggedTensor ["f0", "f1", "f2"] with _values (')
    ids = kjt()
    whole = {"_values": ids.values(), "_lengths": ids.lengths()}
    others = [kjt(features=["f1", "f0", "f2"]), kjt(features=of(4)), kjt()["f0"], {"_values": ids.values()}]
    for wrong in (*others, {**whole, "values": ids.values()}, kjt(weighted=True), dense()):
        with pytest.raises(InputMismatch):
            found(wrong)


def test_what_an_object_has_computed_before_changes_nothing(pooling: tuple[nn.Module, Model], tmp_path: Path) -> None:
    model, with_lengths = pooling
    with_offsets = served(tmp_path, model, kjt(offsets=True), dynamic_shapes=(fields(offsets=True),))
    for takes, rows in ((with_lengths, 7), (with_offsets, 4)):
        for given in (False, True):
            value = kjt(rows, offsets=given)
            expected = eagerly(model, (value,))  # computes lengths, offsets and more
            assert equal(takes(value), expected)


def test_one_row_with_the_option_of_torch(tmp_path: Path) -> None:
    ranker, tables = different(lambda: DLRM(bags(), **DENSE), 1), different(bags, 1)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        whole = served(tmp_path / "whole", ranker, dense(), kjt(), dynamic_shapes=({0: batch}, fields()))
        alone = served(tmp_path / "alone", tables, kjt(), dynamic_shapes=(fields(),))
    for rows in (1, 2, 9):
        args = (dense(rows), kjt(rows))
        assert equal(whole(*args), eagerly(ranker, args))
        assert equal(alone(args[1]), eagerly(tables, args[1:]))


def quantised(sequence: bool, dtype: torch.dtype, seed: int, features: list[str] = FEATURES) -> nn.Module:
    observer = torch.ao.quantization.PlaceholderObserver
    model = different(sequences if sequence else lambda: bags(features), seed)
    model.qconfig = torch.ao.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float), weight=observer.with_args(dtype=dtype)
    )
    kind = QuantisedCollection if sequence else QuantisedBags
    return kind.from_float(model).eval()


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2])
@pytest.mark.parametrize("sequence", [False, True])
def test_quantised_tables_are_weights(tmp_path: Path, sequence: bool, dtype: torch.dtype) -> None:
    models = [quantised(sequence, dtype, seed) for seed in (1, 2)]
    artifact = export(models[0], (kjt(),), out=tmp_path / "a", dynamic_shapes=(fields(),))
    names = {f"embedding{'s' if sequence else '_bags'}.{table}.weight" for table in FEATURES if sequence}
    names |= set() if sequence else {f"embedding_bags.t{index}.weight" for index in range(3)}
    assert {weight.name for weight in artifact.manifest.weights} == names
    first = pack(models[0], artifact, out=tmp_path / "1.safetensors").path
    second = pack(models[1].state_dict(), artifact, out=tmp_path / "2.safetensors").path
    found = load(artifact, first)
    for index in (0, 1):
        if index:
            found.swap(second)
        for args in ((kjt(),), (kjt(9),), (kjt(5, most=1),)):
            assert equal(found(*args), eagerly(models[index], args))
    wrong = KeyedJaggedTensor(FEATURES, torch.tensor([1, ROWS, -3]), lengths=torch.tensor([1, 0, 0, 1, 0, 1]))
    apart = KeyedJaggedTensor(FEATURES, wrong.values().clone(), lengths=wrong.lengths())
    assert equal(found(wrong), eagerly(models[1], (apart,)))  # the row 0 instead


def test_rows_of_a_quantised_table_are_changed_by_a_delta(tmp_path: Path) -> None:
    model, other = quantised(False, torch.qint8, 1), quantised(False, torch.qint8, 2)
    artifact = export(model, (kjt(),), out=tmp_path / "a", dynamic_shapes=(fields(),))
    first = pack(model, artifact, out=tmp_path / "1.safetensors").path
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["embedding_bags.t1.weight"][3:7] = other.state_dict()["embedding_bags.t1.weight"][3:7]
    second = pack(state, artifact, out=tmp_path / "2.safetensors").path
    write_delta(first, second, out=tmp_path / "delta")
    found = load(artifact, first)
    receipt = found.swap(tmp_path / "delta")
    with torch.no_grad():
        model.state_dict()["embedding_bags.t1.weight"].copy_(state["embedding_bags.t1.weight"])
    args = (kjt(9, most=9),)
    assert equal(found(*args), eagerly(model, args))
    assert receipt.generation == 1


@pytest.mark.parametrize("engine", ["onnx", pytest.param("aoti", marks=[needs_compiler, pytest.mark.slow])])
def test_other_engines(tmp_path: Path, engine: str) -> None:
    model = different(bags, 1)
    artifact = export(model, (kjt(),), out=tmp_path / "a", dynamic_shapes=(fields(),), engines=("torch", engine))
    pooling = loaded(artifact, tmp_path, model, engine=engine)
    for args in ((kjt(),), (kjt(9),)):
        given = {"_values": args[0].values(), "_lengths": args[0].lengths()}
        if engine == "onnx":
            given = {name: value.numpy() for name, value in given.items()}
        found = pooling(given)["_values"]
        torch.testing.assert_close(torch.as_tensor(found), eagerly(model, args)["_values"])


@pytest.mark.parametrize("engine", ["onnx", pytest.param("aoti", marks=[needs_compiler, pytest.mark.slow])])
def test_engines_refuse_quantised_tables_by_name(tmp_path: Path, engine: str) -> None:
    with pytest.raises(CaptureError, match=r"method 'forward': .*fbgemm"):
        export(quantised(False, torch.qint8, 1), (kjt(),), out=tmp_path / "a", engines=("torch", engine))


def test_over_http_as_fields(tmp_path: Path) -> None:
    model, args = different(lambda: DLRM(bags(), **DENSE), 1), (dense(9), kjt(9))
    dlrm = served(tmp_path, model, *args, dynamic_shapes=({0: batch}, fields()))
    inputs = {"dense_features": args[0], "sparse_features._values": args[1].values()}
    inputs["sparse_features._lengths"] = args[1].lengths()
    with serving({"dlrm": dlrm}) as server:
        reply = ask(server, "/v2/models/dlrm/infer", infer_request(inputs))
    (output,) = reply.json["outputs"]
    found = torch.tensor(output["data"]).reshape(output["shape"])
    assert torch.equal(found, eagerly(model, args))


def infer_request(inputs: Mapping[str, torch.Tensor]) -> Any:
    kinds = {torch.float32: "FP32", torch.int64: "INT64"}
    return {
        "inputs": [
            {"name": name, "datatype": kinds[value.dtype], "shape": list(value.shape), "data": value.flatten().tolist()}
            for name, value in inputs.items()
        ]
    }
