"""The engine `aoti`: near eager, never rebound, and only with code for this graph, this machine, this torch."""

from __future__ import annotations

import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests import ROOT
from tests.promises.no_reload.test_cold_warm import WAYS, Seen, Way
from tests.support import warm
from tests.support.aoti import Residency, near, opened
from tests.support.compiled import SIZES, WORDS, Mixtures, needs_compiler, sample
from tests.support.sessions import addresses
from tests.support.setups import equal
from tests.support.storm import Ledger, content, storm
from tests.support.varied import RichFiles, X
from weightswap_exporter import export, pack
from weightswap_runtime import InputMismatch
from weightswap_runtime.engines import aoti as aoti_library

pytestmark = needs_compiler


@torch.no_grad()
def eager(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return the eager model's outputs, without gradients. The inputs are not changed."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        return type(value)(map(plain, value)) if isinstance(value, list | tuple) else detached(value)

    def detached(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    return plain(model(*deepcopy(inputs)))


@pytest.mark.sampled(1)
def test_it_is_near_eager_before_and_after_swaps(mixtures: Mixtures, residency: Residency) -> None:
    served = opened(mixtures, mixtures.files[0], residency)
    for model, file in zip(mixtures.models * 2, mixtures.files * 2, strict=True):
        served.swap(file)
        for rows in SIZES:
            inputs = sample(rows)
            assert near(served(*deepcopy(inputs)), eager(model, inputs)), rows
    served.rollback()
    assert near(served(*deepcopy(inputs)), eager(mixtures.models[-2], inputs))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_cold_b_equals_warm_a_to_b(way: Way, residency: Residency, rich: RichFiles) -> None:
    """Bit for bit: delta and partial swaps, rollbacks, ties, computed and strided weights, and state."""
    warm = opened(rich, rich.full[0], residency)
    warm.count(X)
    way(warm, rich, 0, 1)
    assert Seen.of(warm) == Seen.of(opened(rich, rich.full[1], residency))
    assert near(warm(X), rich.eager(rich.whole(1)))


def test_outputs_share_no_memory_with_weights(mixtures: Mixtures) -> None:
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
def test_a_bad_index_raises_and_does_not_abort(bad: int, mixtures: Mixtures) -> None:
    served = opened(mixtures, mixtures.files[0])
    ids, seen, times = sample(SIZES[-1])
    ids[3] = bad
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of bounds"):
            served(ids, seen, times)
    inputs = sample(4)
    assert near(served(*deepcopy(inputs)), eager(mixtures.models[0], inputs))


def test_foreign_tensors_are_refused(mixtures: Mixtures) -> None:
    from torch._subclasses import FakeTensorMode

    served = opened(mixtures, mixtures.files[0])
    ids, _, times = sample(4)
    with FakeTensorMode():
        fake = torch.rand(3, 4)
    with pytest.raises(InputMismatch, match="expected a plain tensor, got a FakeTensor"):
        served(ids, fake, times)


@pytest.mark.sampled(1)
def test_calls_of_threads_never_mix_sets(mixtures: Mixtures, residency: Residency) -> None:
    served = opened(mixtures, mixtures.files[0], residency)
    ids, seen, times = sample(7)

    def call() -> Any:
        return served(ids, seen.clone(), times)

    answers = {}
    for number, file in enumerate(mixtures.files[:2]):
        served.swap(file)
        answers[content(call())] = number
    assert len(answers) == 2
    ledger = Ledger(served, 1)
    with storm(lambda _: ledger.watch(call, answers), 4) as found:
        for count in range(200):
            ledger.committed(served.swap(mixtures.files[count % 2]), count % 2)
    ledger.check(found)


def test_a_forked_child_goes_on(mixtures: Mixtures, residency: Residency) -> None:
    program = [warm.python(), "-c", FORK, str(mixtures.artifact.path), residency, *map(str, mixtures.files)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


FORK = """
import sys
import torch
from tests.support.forks import in_a_child
from weightswap_runtime import load

torch.set_num_threads(1)  # a child loses other threads, whatever the engine
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


@pytest.mark.slow
def test_memory_does_not_grow_with_swaps(mixtures: Mixtures, residency: Residency) -> None:
    arguments = [warm.python(), "-c", GROWTH, str(mixtures.artifact.path), residency, *map(str, mixtures.files)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 << 20


def test_an_interrupt_leaves_no_outputs_behind(mixtures: Mixtures, monkeypatch: pytest.MonkeyPatch) -> None:
    served = opened(mixtures, mixtures.files[0])
    inputs = sample(3)
    expected = served(*deepcopy(inputs))
    run, forget, forgotten = aoti_library.Library.run, aoti_library.Library.forget, list[int]()

    def interrupted(self: aoti_library.Library, *arguments: object) -> None:
        run(self, *arguments)
        raise KeyboardInterrupt

    def counted(self: aoti_library.Library, pointers: Any) -> None:
        forgotten.extend(pointers)
        forget(self, forgotten[-self.outputs :])

    with monkeypatch.context() as patch:
        patch.setattr(aoti_library.Library, "run", interrupted)
        patch.setattr(aoti_library.Library, "forget", counted)
        with pytest.raises(KeyboardInterrupt):
            served(*deepcopy(inputs))
    assert len(forgotten) == len(set(forgotten)) > 1
    assert equal(served(*deepcopy(inputs)), expected)


def test_calls_with_no_rows(mixtures: Mixtures) -> None:
    served = opened(mixtures, mixtures.files[0])
    for rows in (3, 0, 2):
        inputs = sample(rows)
        assert near(served(*deepcopy(inputs)), eager(mixtures.models[0], inputs)), rows


class Attention(nn.Module):
    """Its machine code divides by the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, count: int) -> dict[str, Any]:
        self.calls += 1
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return {
            "mixed": mixed,
            "calls": self.calls.clone(),
            "rows": torch.ones(count, 2) * self.qkv.bias[0],
            "none": None,
        }


@pytest.mark.slow
def test_calls_with_empty_inputs(tmp_path: Path) -> None:
    """In a process of its own, as a failure would end it with a signal."""
    torch.manual_seed(0)
    model = Attention().eval()
    sizes = {"x": {0: Dim("batch", max=8), 1: Dim("tokens", max=16)}, "count": Dim.DYNAMIC}
    artifact = export(model, (torch.randn(2, 3, 8), 4), out=tmp_path / "a", dynamic_shapes=sizes, engines=["aoti"])
    weights = pack(model, artifact, out=tmp_path / "v.safetensors").path
    program = f"""
import torch
from weightswap_runtime import load
model = load({str(artifact.path)!r}, {str(weights)!r}, engine="aoti")
context = model.new_context()
for batch, tokens, count in ((2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 7), (1, 1, 2)):
    out = model(torch.ones(batch, tokens, 8), count, context=context)
    print(*out["mixed"].shape, *out["rows"].shape, out["calls"].item(), out["none"])
"""
    done = subprocess.run([warm.python(), "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.returncode
    assert done.stdout.splitlines() == [
        "2 2 3 4 4 2 1.0 None",
        "0 2 3 4 4 2 2.0 None",
        "2 2 0 4 4 2 3.0 None",
        "2 2 3 4 7 2 4.0 None",
        "1 2 1 4 2 2 5.0 None",
    ]
