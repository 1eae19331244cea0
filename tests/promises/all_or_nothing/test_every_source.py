"""One table of weights that cannot be served, through every source: each refuses them alike, and changes nothing."""

from __future__ import annotations

import functools
import http.server
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.runtime.transfer.test_gathering import cut, send_on_all
from tests.runtime.transfer.test_groups import group_of
from tests.support.administered import TOKEN, administered
from tests.support.arriving import arriving
from tests.support.tiny import TinyArtifact, Values, WriteWeights, serves
from weightswap_runtime import Model, NonFiniteWeights, Sender, SwapError, WeightsMismatch, load

Give = Callable[[Values], object]


class Rig(NamedTuple):
    """A model, its artifact, and an empty folder."""

    model: Model
    tiny: TinyArtifact
    folder: Path

    def swap(self, given: Any) -> object:
        return self.model.swap(given, allow_nonfinite=False)

    def save(self, values: Values, name: str = "given.safetensors") -> Path:
        path = self.folder / name
        safetensors.torch.save_file(values, path)
        return path


def as_file(rig: Rig, values: Values) -> object:
    return rig.swap(rig.save(values))


def as_shards(rig: Rig, values: Values) -> object:
    files = {name: rig.save({name: value}, f"{name}.safetensors").name for name, value in values.items()}
    index = rig.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return rig.swap(index)


def as_parts(rig: Rig, values: Values) -> object:
    """Half of the first dimension is in the file of each rank."""
    for rank in range(2):
        edges = {
            name: [len(value) * edge // 2 for edge in (rank, rank + 1)] for name, value in values.items() if value.dim()
        }
        rows = {name: values[name][low:high].clone() for name, (low, high) in edges.items()}
        offsets = {name: {"saved_offsets": [low] + [0] * (values[name].dim() - 1)} for name, (low, _) in edges.items()}
        alone = {name: value for name, value in values.items() if not (value.dim() or rank)}
        info = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        path = rig.folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file(rows | alone, path, info)
    return rig.swap(rig.folder)


def as_module(rig: Rig, values: Values) -> object:
    module = nn.Module()
    for name, value in values.items():
        module.register_buffer(name, value)
    return rig.swap(module)


DIRECT: dict[str, Callable[[Rig, Values], object]] = {
    "file": as_file,
    "shards": as_shards,
    "files of ranks": as_parts,
    "mapping": lambda rig, values: rig.swap(values),
    "iterator": lambda rig, values: rig.swap(iter(values.items())),
    "module": as_module,
    "in order": lambda rig, values: rig.swap(arriving(rig.save(values), 7)),
}


@contextmanager
def behind_a_url(rig: Rig) -> Iterator[Give]:
    handler = functools.partial(Quiet, directory=rig.folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        numbers = iter(range(100))  # each file has a name of its own

        def give(values: Values) -> object:
            name = rig.save(values, f"{next(numbers)}.safetensors").name
            return rig.swap(f"http://127.0.0.1:{server.server_port}/{name}")

        try:
            yield give
        finally:
            server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def over_a_socket(rig: Rig) -> Iterator[Give]:
    at = f"unix:{rig.folder / 's'}"
    with rig.model.receive(at, allow_nonfinite=False), Sender(at, rig.tiny.path, timeout=20.0) as sender:
        yield sender.send


@contextmanager
def over_http(rig: Rig) -> Iterator[Give]:
    with administered({"tiny": rig.model}) as server:
        assert server.admin is not None
        with Sender(server.admin.where, rig.tiny.path, timeout=20.0) as sender:
            yield sender.send


@contextmanager
def over_a_group(rig: Rig) -> Iterator[Give]:
    first, second = group_of(2)
    with rig.model.receive(second, allow_nonfinite=False), Sender(first, rig.tiny.path) as sender:
        yield sender.send


@contextmanager
def from_ranks_of_a_trainer(rig: Rig) -> Iterator[Give]:
    at = f"unix:{rig.folder / 's'}"
    first, second = group_of(2)
    with (
        rig.model.receive(at, allow_nonfinite=False),
        Sender(at, rig.tiny.path, trainers=first) as one,
        Sender(at, rig.tiny.path, trainers=second) as other,
    ):

        def give(values: Values) -> None:
            for outcome in send_on_all([one, other], lambda rank: cut(values, rank, 2)):
                if isinstance(outcome, Exception):
                    raise outcome

        yield give


@contextmanager
def directly(give: Callable[[Rig, Values], object], rig: Rig) -> Iterator[Give]:
    yield functools.partial(give, rig)


SOURCES: dict[str, Callable[[Rig], AbstractContextManager[Give]]] = {
    **{name: functools.partial(directly, give) for name, give in DIRECT.items()},
    "url": behind_a_url,
    "socket": over_a_socket,
    "http": over_http,
    "group": over_a_group,
    "ranks of a trainer": from_ranks_of_a_trainer,
}
REFUSED: dict[str, tuple[dict[str, torch.Tensor | None], type[SwapError], str]] = {
    "missing": ({"bias": None}, WeightsMismatch, "bias: missing"),
    "unexpected": ({"biass": torch.ones(5)}, WeightsMismatch, "biass: unexpected"),
    "another shape": ({"bias": torch.ones(4)}, WeightsMismatch, "bias: expected F32[5], found F32[4]"),
    "another dtype": ({"bias": torch.ones(5).half()}, WeightsMismatch, "bias: expected F32[5], found F16[5]"),
    "ties that differ": ({"again": torch.ones(1)}, WeightsMismatch, "tied and again are one tensor"),
    "NaN": ({"bias": torch.full((5,), torch.nan)}, NonFiniteWeights, "bias: 5 NaN of 5 values"),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_what_cannot_be_served_is_refused_alike(
    source: Callable[[Rig], AbstractContextManager[Give]],
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    residency: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    (tmp_path / "given").mkdir()
    with load(tiny.path, weight_file(0), residency=residency) as model:
        before = model.weights_id
        with source(Rig(model, tiny, tmp_path / "given")) as give:
            for change, error, says in REFUSED.values():
                for given in (tmp_path / "given").glob("*.*"):
                    given.unlink()
                values = {name: value for name, value in (tiny.values(1) | change).items() if value is not None}
                with pytest.raises(SwapError) as refused:
                    give(values)
                assert (type(refused.value), says in str(refused.value)) == (error, True), refused.value
                assert (model.generation, model.weights_id, serves(model, 0)) == (0, before, True)
            give(tiny.values(2))
            assert serves(model, 2)
            assert model.weights_id == load(tiny.path, weight_file(2)).weights_id
