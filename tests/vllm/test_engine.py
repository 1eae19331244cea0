"""The engine for vLLM, in the sessions of its workers: what is refused, when, and what was written by then."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import safetensors.torch
import torch
from torch import nn

from tests import ROOT
from tests.support.tiny import TinyArtifact, Values, WriteWeights
from tests.vllm.contract import WeightTransferEngineFactory, Worker, collective_rpc, pretend_installed
from weightswap_runtime import (
    DigestMismatch,
    GraphMismatch,
    NonFiniteWeights,
    UnexpectedWeights,
    WeightFile,
    WeightFileError,
    write_delta,
)
from weightswap_runtime.format.safetensors import METADATA_KEY


class Loads(nn.Module):
    """The tiny model, with loading code as models of vLLM have it."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in TinyArtifact.values(0).items():
            self.register_buffer(name, value.clone())
        self.loading = False
        self.fails_at = ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        assert self.loading
        loaded = set()
        for name, tensor in weights:
            if name == self.fails_at:
                raise KeyError(name)
            getattr(self, name).copy_(tensor)
            loaded.add(name)
        return loaded

    def has(self, values: Values) -> bool:
        return all(torch.equal(getattr(self, name), value) for name, value in values.items()) and not self.loading


class Workers(NamedTuple):
    """Two workers, as vLLM's client sees them."""

    workers: list[Worker]

    def has(self, seed: int) -> bool:
        return all(worker.model.has(TinyArtifact.values(seed)) for worker in self.workers)

    def start(self, **init_info: Any) -> None:
        collective_rpc(self.workers, "init_weight_transfer_engine", init_info)
        collective_rpc(self.workers, "start_weight_update")

    def update(self, path: Path, **info: Any) -> None:
        collective_rpc(self.workers, "update_weights", {"path": str(path), **info})

    def finish(self) -> None:
        collective_rpc(self.workers, "finish_weight_update")

    def load(self, path: Path) -> None:
        """Update to a file, in a session that has been started, and end it."""
        self.update(path)
        self.finish()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    pretend_installed(monkeypatch)
    from weightswap_vllm import register

    register()
    register()
    workers = Workers([Worker(Loads()), Worker(Loads())])
    yield workers
    collective_rpc(workers.workers, "shutdown")


def test_a_verified_file_is_loaded(workers: Workers, weight_file: WriteWeights, tiny: TinyArtifact) -> None:
    for seed in (1, 2, 3):
        path = weight_file(seed)
        workers.start(graph_id=tiny.manifest.graph_id)
        workers.update(path, expect=WeightFile(path).stamp.weights_id)  # type: ignore[union-attr]
        assert workers.has(seed - 1)
        workers.finish()
        assert workers.has(seed)


def damaged(path: Path, tiny: TinyArtifact) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x55" * 4)


def cut_off(path: Path, tiny: TinyArtifact) -> None:
    os.truncate(path, path.stat().st_size - 8)


def without_digests(path: Path, tiny: TinyArtifact) -> None:
    safetensors.torch.save_file(tiny.values(1), path)


def of_another_graph(path: Path, tiny: TinyArtifact) -> None:
    tiny.write(path, tiny.values(1), graph_id="0" * 64)


def with_nan(path: Path, tiny: TinyArtifact) -> None:
    tiny.write(path, tiny.values(1) | {"bias": torch.full((5,), torch.nan)})


def with_another_id(path: Path, tiny: TinyArtifact) -> None:
    """Claim the id of other weights."""
    raw = path.read_bytes()
    wanted = WeightFile(path).stamp.weights_id.encode()  # type: ignore[union-attr]
    assert raw.count(wanted) == 1
    path.write_bytes(raw.replace(wanted, b"0" * 64))


def a_delta(path: Path, tiny: TinyArtifact) -> None:
    old = tiny.write(path.with_name("old.safetensors"), tiny.values(1))
    new = tiny.write(path.with_name("new.safetensors"), tiny.values(1) | {"tied": torch.ones(1)})
    path.unlink()
    write_delta(old, new, path)


def goldens(path: Path, tiny: TinyArtifact) -> None:
    stamp = {"graph_id": tiny.manifest.graph_id, "weights_id": "0" * 64, "digests": {"x": "0" * 64}, "cases": []}
    safetensors.torch.save_file({"x": torch.ones(1)}, path, {METADATA_KEY: msgspec.json.encode(stamp).decode()})


REFUSED: dict[Callable[[Path, TinyArtifact], object], tuple[type[Exception], str]] = {
    damaged: (DigestMismatch, "the file records the digest"),
    cut_off: (WeightFileError, "bytes"),
    without_digests: (WeightFileError, "not a packed weight file"),
    of_another_graph: (GraphMismatch, "packed for the graph 000000000000"),
    with_nan: (NonFiniteWeights, "bias: 5 NaN"),
    with_another_id: (UnexpectedWeights, "claims 000000000000, gives "),
    a_delta: (WeightFileError, "not a packed weight file"),
    goldens: (WeightFileError, "not a packed weight file"),
    lambda path, _: path.unlink(): (WeightFileError, "cannot be opened"),
}


@pytest.mark.parametrize(("spoil", "refusal"), REFUSED.items())
def test_a_refused_file_is_loaded_by_nobody(
    spoil: Callable[[Path, TinyArtifact], object],
    refusal: tuple[type[Exception], str],
    workers: Workers,
    weight_file: WriteWeights,
    tiny: TinyArtifact,
) -> None:
    error, says = refusal
    path = weight_file(1)
    spoil(path, tiny)
    workers.start(graph_id=tiny.manifest.graph_id)
    with pytest.raises(error, match=says):
        workers.update(path)
    with pytest.raises(RuntimeError, match="without a matching start"):  # vLLM has ended the session
        workers.finish()
    assert workers.has(0)
    workers.start()
    workers.load(weight_file(2))
    assert workers.has(2)


def test_another_id_than_expected(workers: Workers, weight_file: WriteWeights) -> None:
    workers.start()
    with pytest.raises(UnexpectedWeights):
        workers.update(weight_file(1), expect="123")
    assert workers.has(0)


def test_nan_is_loaded_if_allowed(workers: Workers, weight_file: WriteWeights, tiny: TinyArtifact) -> None:
    path = weight_file(1)
    with_nan(path, tiny)
    workers.start()
    workers.update(path, allow_nonfinite=True)
    workers.finish()
    assert all(worker.model.bias.isnan().all() for worker in workers.workers)


def test_a_file_that_is_damaged_on_one_machine(workers: Workers, weight_file: WriteWeights, tiny: TinyArtifact) -> None:
    """All workers have verified, or the call fails: what a trainer that heeds it never finishes, nobody loads."""
    whole = weight_file(1)
    other = Path(shutil.copy(whole, whole.with_name("other.safetensors")))
    damaged(other, tiny)
    workers.start()
    workers.workers[0].update_weights({"path": str(whole)})
    with pytest.raises(DigestMismatch):
        workers.workers[1].update_weights({"path": str(other)})
    assert workers.has(0)


def test_finishing_without_an_update(workers: Workers, weight_file: WriteWeights) -> None:
    workers.start()
    with pytest.raises(RuntimeError, match="no verified weights to load; call update_weights first"):
        workers.finish()
    workers.load(weight_file(1))
    assert workers.has(1)


def test_of_several_updates_the_last_counts(workers: Workers, weight_file: WriteWeights, tiny: TinyArtifact) -> None:
    workers.start()
    workers.update(weight_file(1))
    workers.load(weight_file(2))
    assert workers.has(2)
    workers.start()
    workers.update(weight_file(3))
    path = weight_file(4)
    damaged(path, tiny)
    with pytest.raises(DigestMismatch):
        workers.update(path)
    for worker in workers.workers:
        with pytest.raises(RuntimeError, match="no verified weights"):
            worker.weight_transfer_engine.finish_weight_update()
    assert workers.has(2)


def test_what_an_earlier_session_verified_is_forgotten(workers: Workers, weight_file: WriteWeights) -> None:
    workers.start()
    workers.update(weight_file(1))
    for worker in workers.workers:
        worker.weight_transfer_engine.start_weight_update()
    with pytest.raises(RuntimeError, match="no verified weights"):
        workers.finish()
    assert workers.has(0)


@pytest.mark.parametrize("change", [damaged, cut_off])
def test_a_file_that_changes_before_it_is_loaded(
    change: Callable[[Path, TinyArtifact], None], workers: Workers, weight_file: WriteWeights, tiny: TinyArtifact
) -> None:
    path = weight_file(1)
    workers.start()
    workers.update(path)
    change(path, tiny)
    with pytest.raises(WeightFileError, match="was written to"):
        workers.finish()
    assert workers.has(0)
    workers.load(weight_file(2))  # the session is still open
    assert workers.has(2)


def test_a_file_that_is_replaced_is_loaded_as_it_was(workers: Workers, weight_file: WriteWeights) -> None:
    path = weight_file(1)
    workers.start()
    workers.update(path)
    weight_file(2).replace(path)
    workers.finish()
    assert workers.has(1)


def test_a_disguised_change_is_found_while_loading(
    workers: Workers, weight_file: WriteWeights, tiny: TinyArtifact
) -> None:
    path = weight_file(1)
    workers.start()
    workers.update(path)
    status = path.stat()
    damaged(path, tiny)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(RuntimeError, match="half loaded") as caught:
        workers.finish()
    assert isinstance(caught.value.__cause__, DigestMismatch)
    assert not workers.has(0)
    for worker in workers.workers:  # what was loaded is right, and what is wrong was not loaded
        state = worker.model.state_dict()
        known = [(tiny.values(0)[name], tiny.values(1)[name]) for name in state]
        assert all(any(map(value.equal, either)) for value, either in zip(state.values(), known, strict=True))
    workers.load(weight_file(2))
    assert workers.has(2)


def test_a_model_that_does_not_take_the_tensors(workers: Workers, weight_file: WriteWeights) -> None:
    workers.start()
    workers.update(weight_file(1))
    for worker in workers.workers:
        worker.model.fails_at = "steps"
    with pytest.raises(RuntimeError, match=r"'steps'. This worker's weights are half loaded, .* load a set of weights"):
        workers.finish()
    for worker in workers.workers:
        worker.model.fails_at = ""
    workers.load(weight_file(2))
    assert workers.has(2)


def test_a_draft_model_is_loaded_alone(workers: Workers, weight_file: WriteWeights) -> None:
    draft = Loads()
    workers.start()
    for worker in workers.workers:
        worker.weight_transfer_engine.set_weight_update_target(draft, None)
    workers.load(weight_file(1))
    assert draft.has(TinyArtifact.values(1))
    assert workers.has(0)


def test_what_is_not_known_is_refused(workers: Workers, weight_file: WriteWeights) -> None:
    with pytest.raises(ValueError, match="Invalid init_info for PackedFileEngine"):
        workers.start(master_address="localhost")
    workers.start()
    with pytest.raises(ValueError, match="Invalid update_info for PackedFileEngine"):
        workers.update(weight_file(1), names=["weight"])
    assert workers.has(0)


def test_the_entry_point_makes_it_known(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (place,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, function = place.partition(":")
    getattr(__import__(module), function)()
    assert list(WeightTransferEngineFactory._registry) == ["weightswap"]
