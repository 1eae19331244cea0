"""The engine `aoti`: near eager, never rebound, and only what was compiled for this graph, this machine, this torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import nn

from tests.compiled import ATOL, RTOL, SIZES, WIDTH, WORDS, Mixtures, needs_compiler, sample
from tests.end_to_end.test_cold_warm import WAYS, Seen, Way
from tests.setups import equal
from tests.varied import RichFiles, X, addresses
from weightswap_exporter import MethodSpec, compile_engines, export, pack
from weightswap_exporter.compiling import with_files
from weightswap_runtime import (
    Artifact,
    ArtifactError,
    CaptureError,
    ExportError,
    InputMismatch,
    Model,
    Unsupported,
    load,
)
from weightswap_runtime.engines import aoti_library, aoti_package
from weightswap_runtime.engines.aoti_names import machine_targets, package_file
from weightswap_runtime.manifest import MANIFEST_NAME, encode_manifest

pytestmark = needs_compiler

Residency = Literal["double", "single"]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Mixtures:
    return Mixtures(tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> RichFiles:
    files = RichFiles(tmp_path_factory.mktemp("rich"), 3)
    files.artifact = compile_engines(files.artifact, ["aoti"])
    return files


def opened(files: Mixtures | RichFiles, weights: Path, residency: Residency = "double") -> Model:
    return load(files.artifact, weights, engine="aoti", residency=residency, keep_previous="host")


def near(one: Any, other: Any) -> bool:
    """Whether two trees are equal but for rounding."""
    if isinstance(other, torch.Tensor):
        same = (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, False)
        return same and torch.allclose(one, other, rtol=RTOL, atol=ATOL)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    return type(one) is type(other) and one == other


@torch.no_grad()
def eager(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """What the eager model gives, without the flags of its parameters. Its inputs stay as they are."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        return type(value)(map(plain, value)) if isinstance(value, list | tuple) else detached(value)

    def detached(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    return plain(model(*deepcopy(inputs)))


def test_it_is_near_eager_before_and_after_swaps(mixtures: Mixtures, residency: Residency) -> None:
    served = opened(mixtures, mixtures.files[0], residency)
    for model, file in zip(mixtures.models * 2, mixtures.files * 2, strict=True):
        served.swap(file)
        for rows in SIZES:
            inputs = sample(rows)
            assert near(served(*deepcopy(inputs)), eager(model, inputs)), rows
    served.rollback()
    assert near(served(*deepcopy(inputs)), eager(mixtures.models[-2], inputs))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_cold_b_equals_warm_a_to_b(way: Way, residency: Residency, rich: RichFiles) -> None:
    """Bit for bit: delta and partial swaps, rollbacks, ties, computed and strided weights, and state."""
    warm = opened(rich, rich.full[0], residency)
    warm.count(X)
    way(warm, rich, 0, 1)
    assert Seen.of(warm) == Seen.of(opened(rich, rich.full[1], residency))
    assert near(warm(X), rich.eager(rich.whole(1)))


def test_state_changes_in_place_and_starts_again(rich: RichFiles) -> None:
    served = opened(rich, rich.full[0])
    calls = [served.count(X) for _ in range(3)]
    assert [torch.equal(one + 1, other) for one, other in pairwise(calls)] == [True, True]
    served.swap(rich.full[1])
    assert torch.equal(served.count(X), rich.models[1].mix.bias.detach() + 1)


def test_outputs_are_no_windows_on_weights(mixtures: Mixtures) -> None:
    served = opened(mixtures, mixtures.files[0])
    inputs = sample(2)
    first = served(*deepcopy(inputs))
    for value in first["as they are"][:3]:
        value.zero_()
    assert near(served(*deepcopy(inputs)), eager(mixtures.models[0], inputs))


def test_inputs_need_not_be_in_order_in_memory(mixtures: Mixtures) -> None:
    served = opened(mixtures, mixtures.files[0])
    ids, seen, times = sample(5)
    expected = eager(mixtures.models[0], (ids, seen, times))
    scattered, turned = torch.stack([ids, ids], 1)[:, 0], seen.t().contiguous().t()
    assert not scattered.is_contiguous()
    before = turned.clone()
    assert near(served(scattered, turned, times), expected)
    assert torch.equal(turned, before + 1)  # the graph writes to it
    imaginary = torch.complex(torch.zeros(3, 4), -seen).conj().imag
    assert imaginary.is_neg()
    assert near(served(ids, imaginary, times), expected)


@pytest.mark.parametrize("bad", [WORDS, -1, 1 << 40])
def test_a_bad_index_is_an_error_and_not_the_end(bad: int, mixtures: Mixtures) -> None:
    served = opened(mixtures, mixtures.files[0])
    ids, seen, times = sample(SIZES[-1])
    ids[3] = bad
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of bounds"):
            served(ids, seen, times)
    inputs = sample(4)
    assert near(served(*deepcopy(inputs)), eager(mixtures.models[0], inputs))


class Picks(nn.Module):
    """Indices that the compiled code checks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(10.0).reshape(5, 2))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.table.gather(0, places) * 2


def test_a_bad_index_is_an_error_in_compiled_code_too(tmp_path: Path) -> None:
    places = torch.tensor([[0, 4], [3, 1]])
    artifact = export(Picks(), (places,), out=tmp_path / "picks.artifact", engines=["torch", "aoti"])
    weights = pack(Picks(), artifact, out=tmp_path / "picks.safetensors").path
    served = load(artifact, weights, engine="aoti")
    for bad in (5, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            served(torch.full((2, 2), bad))
    assert torch.equal(served(places), torch.tensor([[0.0, 18.0], [12.0, 6.0]]))


def test_foreign_tensors_are_refused(mixtures: Mixtures) -> None:
    from torch._subclasses import FakeTensorMode

    served = opened(mixtures, mixtures.files[0])
    ids, _, times = sample(4)
    with FakeTensorMode():
        fake = torch.rand(3, 4)
    with pytest.raises(InputMismatch, match="expected a plain tensor, got a FakeTensor"):
        served(ids, fake, times)


def test_calls_of_threads_never_mix_sets(mixtures: Mixtures, residency: Residency) -> None:
    served = opened(mixtures, mixtures.files[0], residency)
    ids, seen, times = sample(7)
    expected = []
    for file in mixtures.files[:2]:
        served.swap(file)
        expected.append(served(ids, seen.clone(), times))
    assert not equal(*expected)
    done = threading.Event()
    failures: list[object] = []

    def call() -> None:
        while not done.is_set():
            found = served(ids, seen.clone(), times)
            if not any(equal(found, each) for each in expected):
                failures.append(found)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for count in range(200):
            served.swap(mixtures.files[count % 2])
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_forked_child_goes_on(mixtures: Mixtures, residency: Residency) -> None:
    program = [sys.executable, "-c", FORK, str(mixtures.artifact.path), residency, *map(str, mixtures.files)]
    root = Path(__file__).parents[2]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


FORK = """
import sys
import torch
from tests.forks import in_a_child
from weightswap_runtime import load

torch.set_num_threads(1)  # more are lost in a child, whatever the engine
artifact, residency, *files = sys.argv[1:]
model = load(artifact, files[0], engine="aoti", residency=residency)


def answer():
    return model(torch.arange(4), torch.zeros(3, 4), 3)["y"]


expected = [answer(), (model.swap(files[1]), answer())[1]]


def work():
    found = [answer(), (model.swap(files[0]), answer())[1]]
    return torch.equal(found[0], expected[1]) and torch.equal(found[1], expected[0])


assert in_a_child(work)
assert torch.equal(answer(), expected[1])
"""


def test_nothing_is_bound_twice(mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    served = opened(mixtures, mixtures.files[0])
    before = addresses(served)

    def refuse(*_: object) -> None:
        raise AssertionError("bound again")

    monkeypatch.setattr(aoti_library.Library, "bind", refuse)
    for seed in (1, 2, 0):
        served.swap(mixtures.files[seed])
        inputs = sample(3)
        assert near(served(*deepcopy(inputs)), eager(mixtures.models[seed], inputs))
    assert addresses(served) == before


GROWTH = """
import sys
from pathlib import Path
import torch
from weightswap_runtime import load

torch.set_num_threads(1)
artifact, residency, *files = sys.argv[1:]
model = load(artifact, files[0], engine="aoti", residency=residency)
inputs = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4), 3


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def swaps(count):
    for number in range(count):
        model.swap(files[number % len(files)])
        model(*inputs)
    return resident()


before = swaps(100)
print(swaps(500) - before)
"""


def test_memory_does_not_grow_with_swaps(mixtures: Mixtures, residency: Residency) -> None:
    arguments = [sys.executable, "-c", GROWTH, str(mixtures.artifact.path), residency, *map(str, mixtures.files)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 << 20


def test_nothing_of_the_build_machine_is_inside(mixtures: Mixtures) -> None:
    content = b"".join(members(mixtures.artifact).values())
    for place in ("/tmp/", str(Path.home()), str(Path(torch.__file__).parent), sys.prefix, sys.base_prefix):
        assert place.encode() not in content


def package_path(artifact: Artifact) -> Path:
    return artifact.path / package_file(machine_targets()[0], "forward")


def members(artifact: Artifact) -> dict[str, bytes]:
    """The files in the package of `forward`."""
    with zipfile.ZipFile(package_path(artifact)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_torch_can_open_a_package_too(mixtures: Mixtures) -> None:
    found = torch._inductor.aoti_load_package(str(package_path(mixtures.artifact)))
    assert "body.3.weight" in found.get_constant_fqns()


def test_auto_says_that_it_takes_it(mixtures: Mixtures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(mixtures.artifact, engine="auto").engine == "aoti"
    assert load(relabelled(mixtures.artifact, tmp_path / "other.artifact"), engine="auto").engine == "torch"
    monkeypatch.setattr(aoti_package, "version", lambda _: "1.13.1")
    assert load(mixtures.artifact, engine="auto").engine == "torch"


def relabelled(artifact: Artifact, folder: Path, target: str = "cuda-sm90") -> Artifact:
    """A copy of the artifact whose packages are said to be for another machine."""
    shutil.copytree(artifact.path, folder)
    (folder / "engines/aoti" / machine_targets()[0]).rename(folder / "engines/aoti" / target)
    files = {
        name.replace(machine_targets()[0], target): (folder / name.replace(machine_targets()[0], target)).read_bytes()
        for name in artifact.manifest.files
    }
    manifest = with_files(msgspec.structs.replace(artifact.manifest, files={}), files)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return Artifact.open(folder)


def test_packages_for_another_machine_are_refused(mixtures: Mixtures, tmp_path: Path) -> None:
    other = relabelled(mixtures.artifact, tmp_path / "other.artifact")
    says = rf"compiled for cuda-sm90; this machine is {machine_targets()[0]}.*weightswap compile"
    with pytest.raises(Unsupported, match=says):
        load(other, engine="aoti")


def test_a_processor_that_lacks_something_is_refused(mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti_package, "machine_targets", lambda: ())
    with pytest.raises(Unsupported, match=rf"compiled for {machine_targets()[0]}; this machine"):
        load(mixtures.artifact, engine="aoti")


def test_another_torch_is_refused(mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti_package, "version", lambda _: "2.99.0")
    with pytest.raises(Unsupported, match=r"compiled with torch \d\.\d+, and this is torch 2\.99"):
        load(mixtures.artifact, engine="aoti")


def test_an_artifact_without_packages_is_refused(rich: RichFiles, tmp_path: Path) -> None:
    plain = export(nn.Linear(2, 2), (torch.zeros(1, 2),), out=tmp_path / "plain.artifact")
    with pytest.raises(Unsupported, match=r"was not compiled for the engine 'aoti'.*--engine aoti"):
        load(plain, engine="aoti")
    assert load(plain, engine="auto").engine == "torch"


Edit = Callable[[dict[str, Any]], object]


def tensor(note: dict[str, Any], fqn: str = "body.3.weight") -> list[Any]:
    """One row of the table: fqn, kind, name, dtype, shape, stride."""
    found: list[Any] = next(row for row in note["tensors"] if row[0] == fqn)
    return found


TAMPERED: dict[str, tuple[Edit, str]] = {
    "graph": (lambda note: note.update(graph_id="0" * 64), "made from the graph 000000000000, expected"),
    "method": (lambda note: note.update(method="encode"), "says that it is 'encode'"),
    "target": (lambda note: note.update(target="cuda-sm90"), "'forward' for cuda-sm90"),
    "dtype": (lambda note: tensor(note).__setitem__(3, "F64"), r"'body.3.weight' as F64\[3, 16\]"),
    "shape": (lambda note: tensor(note).__setitem__(4, [16, 3]), r"'body.3.weight' as F32\[16, 3\]"),
    "stride": (lambda note: tensor(note).__setitem__(5, [1, 3]), r"in the strides \[1, 3\], expected"),
    "weight": (lambda note: tensor(note).__setitem__(2, "no.weight"), "the weight 'no.weight', which the method"),
    "kind": (lambda note: tensor(note).__setitem__(1, "state"), "the state 'body.3.weight', which the method"),
    "name": (lambda note: tensor(note).__setitem__(0, "other"), "it takes 'body.3.weight', which is not listed"),
    "less": (lambda note: note["tensors"].remove(tensor(note)), "it takes 'body.3.weight', which is not listed"),
    "twice": (lambda note: note["tensors"].append(tensor(note)), "it lists 'body.3.weight' twice"),
    "unknown": (lambda note: note.update(more=1), "is not a package"),
}


@pytest.mark.parametrize(("edit", "says"), TAMPERED.values(), ids=TAMPERED)
def test_a_package_that_is_not_the_manifests_is_refused(
    edit: Edit, says: str, mixtures: Mixtures, tmp_path: Path
) -> None:
    parts = members(mixtures.artifact)
    (name,) = (name for name in parts if name.endswith("weightswap.json"))
    note = msgspec.json.decode(parts[name])
    edit(note)
    parts[name] = msgspec.json.encode(note)
    with pytest.raises(ArtifactError, match=says):
        load(replaced(mixtures.artifact, tmp_path / "a.artifact", zipped(parts)), engine="aoti")


def zipped(parts: dict[str, bytes]) -> bytes:
    written = BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return written.getvalue()


def replaced(artifact: Artifact, folder: Path, package: bytes) -> Artifact:
    """A copy of the artifact with another package, which its manifest lists."""
    shutil.copytree(artifact.path, folder)
    name = package_file(machine_targets()[0], "forward")
    (folder / name).write_bytes(package)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(with_files(artifact.manifest, {name: package})))
    return Artifact.open(folder)


def test_swapped_dtypes_are_found_in_the_machine_code(mixtures: Mixtures, tmp_path: Path) -> None:
    """Note and manifest agree, and the code does not: it would read other elements than there are."""
    graph = aoti_library.Library(
        next(raw for name, raw in members(mixtures.artifact).items() if name.endswith(".so")), ""
    )
    (constant,) = (each for each in graph.constants if each.fqn == "body.3.weight")
    assert constant.dtype == graph.dtype_code(torch.float32) != graph.dtype_code(torch.bfloat16)


@pytest.mark.parametrize(
    "raw", [b"", b"no zip", zipped({}), zipped({"m/extra/weightswap.json": b"{}", "m.wrapper.so": b""})]
)
def test_a_damaged_package_is_refused(raw: bytes, mixtures: Mixtures, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is not a package.*Compile it again"):
        load(replaced(mixtures.artifact, tmp_path / "a.artifact", raw), engine="aoti")


def test_damaged_machine_code_is_refused(mixtures: Mixtures, tmp_path: Path) -> None:
    parts = members(mixtures.artifact)
    (name,) = (name for name in parts if name.endswith(".so"))
    parts[name] = b"\x7fELF" + bytes(4096)
    with pytest.raises(ArtifactError, match="cannot be loaded by torch"):
        load(replaced(mixtures.artifact, tmp_path / "a.artifact", zipped(parts)), engine="aoti")


def test_a_package_that_has_been_altered_is_refused(mixtures: Mixtures, tmp_path: Path) -> None:
    copy = Artifact.open(shutil.copytree(mixtures.artifact.path, tmp_path / "a.artifact"))
    path = package_path(copy)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="altered since the export"):
        load(copy, engine="aoti")


@pytest.fixture
def linear(tmp_path: Path) -> Artifact:
    return export(nn.Linear(2, 2), (torch.zeros(1, 2),), out=tmp_path / "linear.artifact")


def test_without_a_compiler_nothing_is_written(linear: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(linear.path.rglob("*"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExportError, match=r"finds no 'no-such-compiler'. Install g\+\+"):
        compile_engines(linear, ["aoti"])
    assert sorted(linear.path.rglob("*")) == before


def test_a_machine_without_a_target_is_refused(linear: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightswap_exporter import aoti_packages

    monkeypatch.setattr(aoti_packages, "machine_targets", lambda: ())
    with pytest.raises(Unsupported, match="compiles for x86_64 with AVX2 on Linux; this machine is"):
        compile_engines(linear, ["aoti"])


def test_samples_in_another_order_are_refused(tmp_path: Path) -> None:
    turned = torch.zeros(3, WIDTH).t()
    artifact = export(nn.Linear(3, 3), (turned,), out=tmp_path / "turned.artifact")
    with pytest.raises(CaptureError, match=r"'input' of shape \[16, 3\] in the strides \[1, 16\].*contiguous sample"):
        compile_engines(artifact, ["aoti"])


class Own(nn.Module):
    """Calls an operator of a Python package."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.weightswap_aoti_tests.twice(x)
        return result


def test_operators_without_a_c_function_are_refused_by_name(tmp_path: Path) -> None:
    twice = torch.library.custom_op(
        "weightswap_aoti_tests::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    twice.register_fake(torch.empty_like)
    cache = tmp_path / "cache"
    artifact = export(
        Own(), methods={"forward": MethodSpec("forward", (torch.zeros(3),))}, out=tmp_path / "own.artifact"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        with pytest.raises(
            CaptureError, match=r"'forward'.*calls weightswap_aoti_tests::twice. Use the engine 'torch'"
        ):
            compile_engines(artifact, ["aoti"])
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
    assert not cache.exists()
