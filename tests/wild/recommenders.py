"""Models of torchrec, torch-rechub, deepctr-torch, recbole, fuxictr and pytorch-widedeep, in small configurations."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn
from torch.export import Dim

from tests.wild.libraries import Case

PACKAGES = (
    *("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0", "pyre-extensions", "pyvers", "tensordict", "typing_inspect"),
    *("deepctr-torch", "fuxictr", "pytorch-widedeep", "recbole", "torch-rechub"),
    *("colorlog", "einops", "gensim", "h5py", "lightning_utilities", "pandas", "polars", "torchmetrics"),
)
# what these libraries import for training and for data, and what no model here calls
_UNUSED = ("ray", "spacy", "smart_open", "implicit", "typeguard", "lightning", "colorama", "fastparquet", "torchvision")
_UNUSED += ("cv2", "thop", "kmeans_pytorch", "texttable", "lightning_fabric", "tensorboard")
_Build = Callable[[], Case]
batch, ids = Dim("batch", min=2, max=64), Dim("ids", min=0, max=4096)
K = ["f0", "f1", "f2"]


def cases() -> dict[str, _Build]:
    """The models, by library and name. Raises ImportError where a library is missing."""
    sys.meta_path.insert(0, _Absent())
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        return _of_torchrec() | _of_deepctr() | _of_rechub() | _of_recbole() | _of_widedeep() | _of_fuxictr()


class _Module(ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Absent(MetaPathFinder, Loader):
    """Gives modules of packages that these libraries import and that are not needed here."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        unused = name.partition(".")[0] in _UNUSED or name == "torch.utils.tensorboard"
        return ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def _ids(*shape: int, most: int = 50) -> torch.Tensor:
    return torch.randint(most, shape)


def _case(model: nn.Module, make: Callable[[int], tuple[Any, ...]], shapes: Any = None, hollow: bool = True) -> Case:
    return Case(model, make, shapes=shapes, hollow=hollow)


# torchrec


def _quantised(kind: Any, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    observer = torch.ao.quantization.PlaceholderObserver
    model.qconfig = torch.ao.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float), weight=observer.with_args(dtype=dtype)
    )
    return kind.from_float(model)


def _of_torchrec() -> dict[str, _Build]:
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.feature_processor_ import PositionWeightedModule
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
    from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantisedBags
    from torchrec.quant.embedding_modules import EmbeddingCollection as QuantisedCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def bags(weighted: bool = False, keys: Sequence[str] = K, **options: Any) -> nn.Module:
        tables = [
            EmbeddingBagConfig(name=key, embedding_dim=16, num_embeddings=50, feature_names=[key], **options)
            for key in keys
        ]
        return EmbeddingBagCollection(tables=tables, is_weighted=weighted)

    def sequences() -> nn.Module:
        tables = [EmbeddingConfig(name=key, embedding_dim=16, num_embeddings=50, feature_names=[key]) for key in K]
        return EmbeddingCollection(tables=tables)

    def kjt(rows: int, weighted: bool = False, keys: Sequence[str] = K) -> Any:
        lengths = torch.randint(5, (len(keys) * rows,))
        count = int(lengths.sum())
        return KeyedJaggedTensor(list(keys), _ids(count), torch.rand(count) if weighted else None, lengths=lengths)

    def fields(weighted: bool = False, keys: Sequence[str] = K) -> list[Any]:
        return [{0: ids}, {0: ids} if weighted else None, {0: len(keys) * batch}, None, None, None]

    sizes: dict[str, Any] = {"dense_in_features": 8, "dense_arch_layer_sizes": [32, 16]}
    sizes["over_arch_layer_sizes"] = [16, 1]
    branches = {"interaction_branch1_layer_sizes": [32, 32], "interaction_branch2_layer_sizes": [32, 32]}
    deep = {"num_dense_features": 8, "hidden_layer_size": 20, "deep_fm_dimension": 5}

    def scored(build: Callable[[], nn.Module]) -> _Build:
        return lambda: _case(build(), lambda rows: (torch.randn(rows, 8), kjt(rows)), ({0: batch}, fields()))

    def pooled(
        build: Callable[[], nn.Module], weighted: bool = False, keys: Sequence[str] = K, hollow: bool = True
    ) -> _Build:
        return lambda: _case(build(), lambda rows: (kjt(rows, weighted, keys),), (fields(weighted, keys),), hollow)

    def processed() -> nn.Module:
        weights = {key: PositionWeightedModule(max_feature_length=10) for key in K}
        return FeatureProcessedEmbeddingBagCollection(bags(weighted=True), weights)

    numbered = [[f"f{index}" for index in range(count)] for count in (5, 6, 7)]
    found = {
        "DLRM": scored(lambda: DLRM(bags(), **sizes)),
        "DLRM_DCN": scored(lambda: DLRM_DCN(bags(), dcn_num_layers=2, dcn_low_rank_dim=4, **sizes)),
        "DLRM_Projection": scored(lambda: DLRM_Projection(bags(), **branches, **sizes)),
        "SimpleDeepFMNN": scored(lambda: SimpleDeepFMNN(embedding_bag_collection=bags(), **deep)),
        "EmbeddingBagCollection": pooled(bags),
        "EmbeddingBagCollection, mean": pooled(lambda: bags(pooling=PoolingType.MEAN)),
        "EmbeddingBagCollection, half": pooled(lambda: bags(data_type=DataType.FP16)),
        "EmbeddingBagCollection, weighted": pooled(lambda: bags(weighted=True), weighted=True),
        "EmbeddingCollection": pooled(sequences),
        "FeatureProcessedEmbeddingBagCollection": pooled(processed),
        "quant EmbeddingBagCollection, int8": pooled(
            lambda: _quantised(QuantisedBags, bags(), torch.qint8), hollow=False
        ),
        "quant EmbeddingBagCollection, int4": pooled(
            lambda: _quantised(QuantisedBags, bags(), torch.quint4x2), hollow=False
        ),
        "quant EmbeddingCollection, int8": pooled(
            lambda: _quantised(QuantisedCollection, sequences(), torch.qint8), hollow=False
        ),
    }
    found |= {
        f"EmbeddingBagCollection of {len(keys)}": pooled(lambda keys=keys: bags(keys=keys), keys=keys)  # type: ignore[misc]
        for keys in numbered
    }
    return {f"torchrec {name}": build for name, build in found.items()}


# deepctr-torch: one table of numbers, of which some are ids


def _of_deepctr() -> dict[str, _Build]:
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    sparse = [SparseFeat(f"s{index}", 50, embedding_dim=8) for index in range(4)]
    both = [*sparse, DenseFeat("d0", 1), DenseFeat("d1", 1)]
    history = SparseFeat("hist_item", 50, embedding_dim=8, embedding_name="item")
    visits = [SparseFeat("user", 50, embedding_dim=8), SparseFeat("item", 50, embedding_dim=8), DenseFeat("pay", 1)]
    visits.append(VarLenSparseFeat(history, maxlen=4, length_name="len"))

    def rows(count: int) -> tuple[Any, ...]:
        return (torch.cat([_ids(count, 4).float(), torch.rand(count, 2)], 1),)

    def visited(count: int) -> tuple[Any, ...]:
        parts = [_ids(count, 2).float(), torch.rand(count, 1), _ids(count, 4).float(), _ids(count, 1, most=4) + 1.0]
        return (torch.cat(parts, 1),)

    deep = {"dnn_hidden_units": (32,)}
    tasks = {"task_types": ["binary", "binary"], "task_names": ["a", "b"]}

    def of(build: Callable[[], nn.Module], make: Callable[[int], tuple[Any, ...]] = rows) -> _Build:
        return lambda: _case(build(), make)

    kinds = ("DeepFM", "AutoInt", "DCN", "DCNMix", "FiBiNET", "IFM", "DIFM", "NFM", "ONN", "WDL", "PNN")
    plain = {
        name: of(lambda name=name: getattr(models, name)(*([both] if name == "PNN" else [both, both]), **deep))  # type: ignore[misc]
        for name in kinds
    }
    plain["xDeepFM"] = of(lambda: models.xDeepFM(both, both, cin_layer_size=(16, 8), **deep))
    plain["AFN"] = of(lambda: models.AFN(sparse, sparse, afn_dnn_hidden_units=(32,)), lambda n: (_ids(n, 4).float(),))
    plain["MMOE"] = of(lambda: models.MMOE(both, **tasks))
    plain["DIN"] = of(lambda: models.DIN(visits, ["item"], att_weight_normalization=True, **deep), visited)
    plain["DIEN"] = of(lambda: models.DIEN(visits, ["item"], **deep), visited)
    return {f"deepctr-torch {name}": build for name, build in plain.items()}


# torch-rechub: a dict of features


def _of_rechub() -> dict[str, _Build]:
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models import matching, multi_task, ranking
    from torch_rechub.models.generative.hstu import HSTUModel

    mlp: dict[str, Any] = {"dims": [32, 16], "dropout": 0.2, "activation": "relu"}
    tasks = ["classification", "classification"]

    def sparse(*names: str) -> list[Any]:
        return [SparseFeature(name, 50, embed_dim=8) for name in names]

    def sequence(name: str, **options: Any) -> Any:
        return SequenceFeature(name, 50, embed_dim=8, **options)

    def of(
        build: Callable[[], nn.Module], names: Sequence[str], seq: Sequence[str] = (), dense: Sequence[str] = ()
    ) -> _Build:
        def make(rows: int) -> tuple[Any, ...]:
            found = {name: _ids(rows) for name in names} | {name: _ids(rows, 6) for name in seq}
            return (found | {name: torch.rand(rows) for name in dense},)

        return lambda: _case(build(), make)

    def visits() -> dict[str, Any]:
        hist = sequence("hist", pooling="concat", shared_with="item")
        return {"features": sparse("u"), "target_features": sparse("item"), "history_features": [hist]}

    def attentive() -> nn.Module:
        others = ("pos", "neg")
        features = [sequence("seq", pooling="concat")]
        features += [sequence(name, pooling="concat", shared_with="seq") for name in others]
        return matching.SASRec(features, max_len=6, num_heads=1)

    pooled = [sequence("h", pooling="mean", shared_with="i", padding_idx=0)]
    found = {
        "DeepFM": of(
            lambda: ranking.DeepFM([*sparse("a", "b"), DenseFeature("d")], sparse("a", "b"), mlp), "ab", dense="d"
        ),
        "DCNv2": of(lambda: ranking.DCNv2(sparse("a", "b", "c"), 3, mlp), "abc"),
        "WideDeep": of(lambda: ranking.WideDeep(sparse("a", "b"), sparse("c", "e"), mlp), "abce"),
        "DIN": of(
            lambda: ranking.DIN(**visits(), mlp_params={"dims": [32, 16]}, attention_mlp_params={"dims": [16]}),
            ["u", "item"],
            ["hist"],
        ),
        "BST": of(lambda: ranking.BST(**visits(), mlp_params={"dims": [32]}, max_seq_len=7), ["u", "item"], ["hist"]),
        "DSSM": of(lambda: matching.DSSM(sparse("u", "v"), sparse("i", "j"), dict(mlp), dict(mlp)), "uvij"),
        "DSSM of sequences": of(
            lambda: matching.DSSM(sparse("u") + pooled, sparse("i"), dict(mlp), dict(mlp)), "ui", "h"
        ),
        "MMOE": of(lambda: multi_task.MMOE(sparse("a", "b", "c"), tasks, 3, dict(mlp), [dict(mlp)] * 2), "abc"),
        "PLE": of(lambda: multi_task.PLE(sparse("a", "b", "c"), tasks, 1, 2, 1, dict(mlp), [dict(mlp)] * 2), "abc"),
        "SASRec": of(attentive, [], ["seq", "pos", "neg"]),
        "HSTU": lambda: _case(
            HSTUModel(50, d_model=32, n_heads=2, n_layers=2, dqk=16, dv=16, max_seq_len=8),
            lambda rows: (_ids(rows, 8), _ids(rows, 8, most=4000)),
        ),
    }
    return {f"torch-rechub {name}": build for name, build in found.items()}


def _of_recbole() -> dict[str, _Build]:
    import scipy.sparse
    from recbole.model.general_recommender.lightgcn import LightGCN
    from recbole.model.general_recommender.neumf import NeuMF
    from recbole.model.sequential_recommender.bert4rec import BERT4Rec
    from recbole.model.sequential_recommender.gru4rec import GRU4Rec
    from recbole.model.sequential_recommender.sasrec import SASRec

    class Config(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return self.get(key)

    config = Config(
        USER_ID_FIELD="user_id",
        ITEM_ID_FIELD="item_id",
        LIST_SUFFIX="_list",
        NEG_PREFIX="neg_",
        ITEM_LIST_LENGTH_FIELD="item_length",
        MAX_ITEM_LIST_LENGTH=8,
        MASK_FIELD="m",
        device=torch.device("cpu"),
        n_layers=2,
        n_heads=2,
        hidden_size=16,
        inner_size=32,
        hidden_act="gelu",
        hidden_dropout_prob=0.5,
        attn_dropout_prob=0.5,
        layer_norm_eps=1e-12,
        initializer_range=0.02,
        loss_type="CE",
        mask_ratio=0.2,
        embedding_size=16,
        num_layers=1,
        dropout_prob=0.3,
        reg_weight=1e-4,
        require_pow=False,
        mf_embedding_size=8,
        mlp_embedding_size=8,
        mlp_hidden_size=[16, 8],
        mf_train=True,
        mlp_train=True,
        use_pretrain=False,
    )
    # of an older scipy, which LightGCN fills its adjacency matrix with
    scipy.sparse.dok_matrix._update = lambda matrix, found: [matrix.__setitem__(*item) for item in found.items()]
    data = SimpleNamespace(
        num=lambda _: 50, inter_matrix=lambda form="coo", **_: scipy.sparse.random(50, 50, 0.1, form, random_state=1)
    )

    class Propagated(nn.Module):
        """What LightGCN's `full_sort_predict` computes; its `forward` takes nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.graph = LightGCN(config, data)

        def forward(self, users: torch.Tensor) -> torch.Tensor:
            user, item = self.graph()
            return user[users] @ item.T

    def of(kind: Any, make: Callable[[int], tuple[Any, ...]]) -> _Build:
        return lambda: _case(kind(config, data), make)

    def visited(rows: int) -> tuple[Any, ...]:
        return _ids(rows, 8, most=49) + 1, torch.full((rows,), 8)

    return {
        "recbole SASRec": of(SASRec, visited),
        "recbole GRU4Rec": of(GRU4Rec, visited),
        "recbole BERT4Rec": of(BERT4Rec, lambda rows: visited(rows)[:1]),
        "recbole NeuMF": of(NeuMF, lambda rows: (_ids(rows), _ids(rows))),
        "recbole LightGCN": lambda: _case(Propagated(), lambda rows: (_ids(rows),)),
    }


def _of_widedeep() -> dict[str, _Build]:
    from pytorch_widedeep.models import SAINT, FTTransformer, TabMlp, TabResnet, TabTransformer, Wide, WideDeep

    index = {"a": 0, "b": 1, "c": 2, "x": 3}
    sized = [(name, 50, 8) for name in "abc"]
    common: dict[str, Any] = {"column_idx": index, "continuous_cols": ["x"]}
    attentive = {"cat_embed_input": [(name, 50) for name in "abc"], "input_dim": 16, "n_heads": 2, "n_blocks": 2}

    def rows(count: int) -> Mapping[str, torch.Tensor]:
        return {"wide": _ids(count, 3) + 1, "deeptabular": torch.cat([_ids(count, 3).float(), torch.rand(count, 1)], 1)}

    def deep(count: int) -> tuple[Any, ...]:
        return ({"deeptabular": rows(count)["deeptabular"]},)

    def tabular() -> nn.Module:
        return TabMlp(cat_embed_input=sized, mlp_hidden_dims=[16, 8], **common)

    kinds = (TabTransformer, FTTransformer, SAINT)
    found: dict[str, _Build] = {
        "Wide and TabMlp": lambda: _case(
            WideDeep(wide=Wide(200, 1), deeptabular=tabular()), lambda count: (rows(count),)
        ),
        "TabResnet": lambda: _case(
            WideDeep(deeptabular=TabResnet(cat_embed_input=sized, blocks_dims=[16, 8], **common)), deep
        ),
    }
    found |= {
        kind.__name__: lambda kind=kind: _case(WideDeep(deeptabular=kind(**attentive, **common)), deep)  # type: ignore[misc]
        for kind in kinds
    }
    return {f"pytorch-widedeep {name}": build for name, build in found.items()}


def _of_fuxictr() -> dict[str, _Build]:
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch import layers
    from fuxictr.pytorch.models import BaseModel

    def features() -> Any:
        found = FeatureMap("d", "out")
        kind = {"type": "categorical", "source": "", "vocab_size": 50, "padding_idx": 0}
        found.features = OrderedDict((name, dict(kind)) for name in "abc")
        found.num_fields, found.input_length, found.labels, found.total_features = 3, 4, ["y"], 150
        found.set_column_index()
        return found

    class Scored(BaseModel):  # type: ignore[misc]
        def __init__(self, crossed: bool) -> None:
            given = features()
            super().__init__(given, verbose=0, model_root="/tmp", metrics=["AUC"])
            self.embedding_layer = layers.FeatureEmbedding(given, 8)
            self.cross = layers.CrossNetV2(24, 3) if crossed else layers.FactorizationMachine(given)
            self.mlp = layers.MLP_Block(input_dim=24, output_dim=1, hidden_units=[32])
            self.fc, self.crossed = nn.Linear(24, 1), crossed

        def forward(self, given: Any) -> Any:
            inputs = self.get_inputs(given)
            embedded = self.embedding_layer(inputs)
            flat = embedded.flatten(start_dim=1)
            wide = self.fc(self.cross(flat)) if self.crossed else self.cross(inputs, embedded)
            return {"y_pred": (wide + self.mlp(flat)).sigmoid()}

    def rows(count: int) -> tuple[Any, ...]:
        return ({name: _ids(count) for name in "abc"} | {"y": torch.zeros(count)},)

    return {
        "fuxictr DCNv2": lambda: _case(Scored(crossed=True), rows),
        "fuxictr DeepFM": lambda: _case(Scored(crossed=False), rows),
    }
