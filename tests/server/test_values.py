"""Requests whose shapes are right and whose values are not: ids that no table has, lengths that do not add up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from tests.support.exported import exported
from tests.support.served import Reply, ask, before_calls, occupied, serving
from tests.support.setups import different
from weightswap_runtime import InputMismatch, Unsupported
from weightswap_runtime.tensors import array_content
from weightswap_server import ServedMethod, Server


def request(inputs: Mapping[str, torch.Tensor]) -> Any:
    kinds = {torch.float32: "FP32", torch.int64: "INT64", torch.int32: "INT32"}
    return {
        "inputs": [
            {"name": name, "datatype": kinds[value.dtype], "shape": list(value.shape), "data": value.flatten().tolist()}
            for name, value in inputs.items()
        ]
    }


def infer(server: Server, inputs: Mapping[str, torch.Tensor], model: str = "model") -> Reply:
    return ask(server, f"/v2/models/{model}/infer", request(inputs))


class Embedded(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table, self.bag, self.row = nn.Embedding(10, 4), nn.EmbeddingBag(10, 4), nn.Parameter(torch.rand(10))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ways = {
            "table": lambda: self.table(ids).sum(),
            "bag": lambda: self.bag(ids.view(1, -1)),
            "bags": lambda: nn.functional.embedding_bag(ids, self.table.weight, torch.arange(3), mode="sum").sum(1),
            "largest": lambda: nn.functional.embedding_bag(ids, self.table.weight, torch.arange(3), mode="max").sum(1),
            "index": lambda: self.row[ids],
            "gather": lambda: self.row.gather(0, ids),
            "one_hot": lambda: nn.functional.one_hot(ids, 10) * self.row,
            "split": lambda: torch.stack([part.sum() for part in self.row.split([size.item() for size in ids])]),
        }
        return ways[self.how]() + x


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Each has a part of the rows, and words of its own for a wrong one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["table", "bag", "bags", "largest", "index", "gather", "one_hot", "split"])
def test_a_value_that_an_operator_refuses_is_the_requests_fault(tmp_path: Path, how: str, two_threads: None) -> None:
    model = different(lambda: Embedded(how), 1)
    good = {"x": torch.ones(1), "ids": torch.tensor([3, 3, 4])}
    with serving({"model": exported(model, tuple(good.values()), tmp_path)}) as server:
        for wrong in ([3, 10, 3], [1, -11, 2]):
            reply = infer(server, {**good, "ids": torch.tensor(wrong)})
            assert reply.status == 400, reply.body
            assert "forward: ids: the model cannot compute with these values: " in reply.error
        assert infer(server, good).status == 200


class Offset(nn.Module):
    """Bags by offsets that are an input, or made of one."""

    def __init__(self, computed: bool, last: bool) -> None:
        super().__init__()
        self.computed = computed
        self.bag = nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=last)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bag(ids, offsets * 1 if self.computed else offsets)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("engine", "computed"), [("torch", False), ("torch", True), ("onnx", False)])
def test_offsets_that_do_not_rise_are_the_requests_fault(
    tmp_path: Path, engine: Any, computed: bool, last: bool
) -> None:
    model = different(lambda: Offset(computed, last), 1)
    good = {"ids": torch.arange(6), "offsets": torch.tensor([0, 2, 2, 6])}
    shapes = {"ids": {0: Dim("count", min=0, max=99)}, "offsets": {0: Dim("bags", min=3, max=99)}}
    served = exported(model, tuple(good.values()), tmp_path, engine, dynamic_shapes=shapes)
    with serving({"model": served}) as server:
        for wrong in ([0, 5, 2, 4], [0, -1, -1, -1], [0, 3, 7], [1, 2, 4], [0, 2**62, 6]):
            reply = infer(server, {**good, "offsets": torch.tensor(wrong)})
            assert reply.status == 400, (wrong, reply.body)
            assert "offsets: " in reply.error
        reply = infer(server, good)
        assert reply.status == 200
        expected = model(**good).flatten().tolist()
        assert reply.json["outputs"][0]["data"] == pytest.approx(expected)


def test_offsets_are_checked_in_each_call(tmp_path: Path) -> None:
    model = different(lambda: Offset(False, False), 1)
    shapes = {"ids": {0: Dim("count", min=0, max=99)}, "offsets": {0: Dim("bags", min=2, max=99)}}
    served = exported(model, (torch.arange(6), torch.tensor([0, 2])), tmp_path, dynamic_shapes=shapes)
    for wrong in ([0, 5, 2, 4], [0, -1, -1, -1]):
        with pytest.raises(IndexError, match="offsets"):
            served(torch.arange(6), torch.tensor(wrong))


def test_calls_with_offsets_are_not_joined(tmp_path: Path) -> None:
    model, rows = different(lambda: Offset(False, False), 1), Dim("batch", min=2, max=99)
    args = (torch.arange(3), torch.arange(3))
    served = exported(model, args, tmp_path, dynamic_shapes=({0: rows}, {0: rows}))
    with pytest.raises(Unsupported, match="cannot be batched"):
        ServedMethod(served, "forward").batch_limit("batch")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec")
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES = ["a", "b"]


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{name}", embedding_dim=4, num_embeddings=10, feature_names=[name])
            for name in FEATURES
        ]
        self.bags = EmbeddingBagCollection(tables=tables)

    def forward(self, kjt: Any) -> torch.Tensor:
        return self.bags(kjt).values()


class Wrapped(Bags):
    """Makes the jagged tensor itself."""

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return super().forward(KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths))


IDS, LENGTHS = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 0, 1, 2])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("jagged")
    rows, count = Dim("rows", max=99), Dim("count", min=0, max=999)
    model, wrapped = different(Bags, 1), different(Wrapped, 1)
    kjt = KeyedJaggedTensor(keys=FEATURES, values=IDS, lengths=LENGTHS)
    shapes = ([{0: count}, None, {0: 2 * rows}, None, None, None],)
    both = {
        "model": exported(model, (kjt,), folder, dynamic_shapes=shapes),
        "wrapped": exported(wrapped, (IDS, LENGTHS), folder, dynamic_shapes=({0: count}, {0: 2 * rows})),
    }
    with serving(both) as running:
        yield running


WRONG: dict[str, tuple[str, Mapping[str, list[int]]]] = {
    "an id outside": ("_values", {"_values": [1, 2, 3, 4, 10]}),
    "a negative id": ("_values", {"_values": [1, 2, 3, 4, -1]}),
    "too many ids": ("_lengths", {"_values": [1, 2, 3, 4, 5, 6]}),
    "too few ids": ("_lengths", {"_values": [1, 2]}),
    "a negative length": ("_lengths", {"_lengths": [2, -1, 2, 2]}),
    "lengths that wrap around": ("_lengths", {"_lengths": [2**62, 2**62, 2**62, 2**62 + 5]}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_jagged_tensor_that_contradicts_itself_is_named(server: Server, what: str) -> None:
    name, changed = WRONG[what]
    good = {"_values": IDS, "_lengths": LENGTHS}
    inputs = good | {key: torch.tensor(value) for key, value in changed.items()}
    reply = infer(server, {f"kjt.{key}": value for key, value in inputs.items()})
    assert reply.status == 400, reply.body
    assert f"kjt.{name}: " in reply.error
    assert infer(server, {f"kjt.{key}": value for key, value in good.items()}).status == 200
    reply = infer(server, {key.removeprefix("_"): value for key, value in inputs.items()}, "wrapped")
    assert (reply.status, name.removeprefix("_") in reply.error) == (400, True)


class Summed(nn.Module):
    def forward(self, dense: torch.Tensor, kjt: Any) -> torch.Tensor:
        return kjt._lengths.reshape(2, -1).sum(0)[:, None] * dense * kjt._values.sum()


def test_ids_without_rows_are_refused(tmp_path: Path) -> None:
    """A request without rows that has ids: joined with another one, they would be the other's."""
    kjt = KeyedJaggedTensor(FEATURES, IDS, lengths=LENGTHS)
    rows, count = Dim("rows", min=0, max=99), Dim("count", min=0, max=99)
    shapes = ({0: rows}, [{0: count}, None, {0: 2 * rows}, None, None, None])
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        served = exported(Summed(), (torch.ones(2, 1), kjt), tmp_path, dynamic_shapes=shapes)
    method = ServedMethod(served, "forward")
    given = {"dense": torch.ones(0, 1), "kjt._values": IDS, "kjt._lengths": LENGTHS[:0]}
    with pytest.raises(InputMismatch, match="_lengths: add up to 0"):
        method.arguments({name: array_content(value.numpy()) for name, value in given.items()})


class PaddedJaggedTensor:
    """A class of another library, whose lengths are of padded rows."""

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        self._values, self._lengths = values, lengths


pytree.register_pytree_node(
    PaddedJaggedTensor, lambda it: ([it._values, it._lengths], None), lambda found, _: PaddedJaggedTensor(*found)
)


class Masked(nn.Module):
    def forward(self, rows: Any) -> torch.Tensor:
        return rows._values * (torch.arange(4) < rows._lengths[:, None])


def test_lengths_of_other_classes_mean_what_these_say(tmp_path: Path) -> None:
    inputs = {"_values": torch.rand(3, 4), "_lengths": torch.tensor([1, 4, 0])}
    padded = PaddedJaggedTensor(**{name[1:]: value for name, value in inputs.items()})
    with serving({"model": exported(Masked(), (padded,), tmp_path)}) as server:
        reply = infer(server, {f"rows.{name}": value for name, value in inputs.items()})
        assert reply.status == 200, reply.body


def test_the_warm_up_is_with_ids_that_fit(tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    method = server.service.served[0].methods["model"]
    values, _, lengths, *_ = method.sample() or []
    assert (values.shape, bytes(lengths.data)) == ((1,), bytes([1, *[0] * 31]))


class Scored(Bags):
    """A model with numbers beside the ids, which have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=self.bags.embedding_bag_configs(), is_weighted=True)

    def forward(self, dense: torch.Tensor, kjt: Any) -> torch.Tensor:
        return super().forward(kjt) * dense


def arguments(rows: int, most: int = 4, *, weighted: bool = False) -> dict[str, torch.Tensor]:
    lengths = torch.randint(most, (2 * rows,))
    found = {"_values": torch.randint(10, (int(lengths.sum()),)), "_lengths": lengths}
    return found | ({"_weights": torch.rand(len(found["_values"]))} if weighted else {})


@pytest.mark.parametrize("weighted", [False, True])
def test_jagged_requests_are_joined_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    torch.manual_seed(0)
    batch, count = Dim("batch", max=99), Dim("count", min=0, max=30)
    model = different(Scored if weighted else Bags, 1)
    sample = arguments(3, 9, weighted=weighted)
    kjt = KeyedJaggedTensor(FEATURES, sample["_values"], sample.get("_weights"), lengths=sample["_lengths"])
    shapes = [{0: count}, {0: count} if weighted else None, {0: 2 * batch}, None, None, None]
    args, sizes = ((torch.rand(3, 1), kjt), ({0: batch}, shapes)) if weighted else ((kjt,), (shapes,))
    served = exported(model, args, tmp_path, dynamic_shapes=sizes)
    seen: list[int] = []
    called = ServedMethod.call
    before_calls(monkeypatch, lambda method, _, flat: seen.append(method.rows(flat)))
    with serving({"model": served}, max_batch=8, warm=True) as server:
        given = [arguments(rows, most, weighted=weighted) for rows, most in ((2, 3), (2, 4), (2, 1), (4, 6), (4, 6))]
        calls = []
        for each in given:
            tensors = {f"kjt.{name}": array_content(value.numpy()) for name, value in each.items()}
            dense = {"dense": array_content(torch.rand(len(each["_lengths"]) // 2, 1).numpy())} if weighted else {}
            calls.append(server.service.call("model", "", dense | tensors))
        alone = [dict(called(call.method, served, call.flat)) for call in calls]
        seen.clear()
        with occupied(server):
            for call in calls:
                server.service.served[0].thread.submit(call)
        for call, expected in zip(calls, alone, strict=True):
            found = dict(call.answer.result(120).outputs)
            assert {name: bytes(value.data) for name, value in found.items()} == {
                name: bytes(value.data) for name, value in expected.items()
            }
    assert seen[0] == 6  # 2 + 2 + 2; the last two have more ids together than the graph takes, and go one by one
    assert seen[1:] == [4, 4]


class Mixed(Bags):
    def __init__(self, way: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, kjt: Any) -> torch.Tensor:
        return self.way(super().forward(kjt), kjt)


MIXING: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], str | None]] = {
    "mean": (lambda rows, _: rows - rows.mean(0), "output"),
    "longest": (lambda rows, kjt: rows + kjt.lengths().max(), "output"),
    "none": (lambda rows, _: rows.softmax(1), None),
}


@pytest.mark.parametrize("way", MIXING)
@pytest.mark.parametrize("most", [3, 999])
def test_rows_of_bags_that_depend_on_those_of_others_are_found(way: str, most: int, tmp_path: Path) -> None:
    batch, count = Dim("batch", max=99), Dim("count", min=0, max=most)
    function, expected = MIXING[way]
    model = different(lambda: Mixed(function), 1)
    kjt = KeyedJaggedTensor(FEATURES, IDS[:3], lengths=torch.tensor([1, 0, 0, 0, 1, 1]))
    shapes = ([{0: count}, None, {0: 2 * batch}, None, None, None],)
    with exported(model, (kjt,), tmp_path, dynamic_shapes=shapes) as served:
        method = ServedMethod(served, "forward")
        assert method.batch_limit("batch") == 99
        if most > 3:  # else two calls have too many ids together
            assert method.mixed_output(served, 99) == expected
        (values, *_) = method.sample(rows=5) or []
        assert values.shape[0] == min(5, most)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, int]:
        return x * k, k * 2


def test_an_integer_that_the_protocol_cannot_hold_is_the_requests_fault(tmp_path: Path) -> None:
    model = exported(Doubled(), (torch.ones(2), 3), tmp_path, dynamic_shapes=({}, Dim.AUTO))
    with serving({"tiny": model}) as server:
        for k, status in ((5, 200), (1 << 62, 400)):
            x = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 1]}
            number = {"name": "k", "datatype": "INT64", "shape": [1], "data": [k]}
            answer = ask(server, "/v2/models/tiny/infer", {"inputs": [x, number]})
            assert answer.status == status
        assert "1: would be 9223372036854775808, which INT64 cannot hold" in answer.error
