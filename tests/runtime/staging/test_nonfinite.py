"""Non-finite values: detected in every dtype, counted through every swap, reported, and refused on request."""

from __future__ import annotations

import math
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import varied
from tests.support.sessions import live, live_bytes
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from tests.support.varied import Origin, Rich, RichFiles, small_blocks
from weightswap_runtime import Event, NonFiniteWeights, Unsupported, load, write_delta
from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.format import identity as nonfinite
from weightswap_runtime.format.identity import Counts, Nonfinite, count_nonfinite, identify, newly_nonfinite
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.hash_tree import HashTrees
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.staging.delta import overlay
from weightswap_runtime.tensors import DTYPES, block_digests, has_fractions
from weightswap_runtime.threads import WorkerThreads

NAN, INF = math.nan, math.inf
FRACTIONS = [name for name, row in DTYPES.items() if has_fractions(name) and row.torch]


def wider(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def counts(values: torch.Tensor) -> Counts:
    wide = wider(values)
    return Counts(int(torch.isnan(wide).sum()), int(torch.isinf(wide).sum()))


def codes_of(dtype: str) -> np.ndarray:
    """Return all bit patterns of a dtype if they are few, otherwise those around the limits."""
    size = DTYPES[dtype].bits // 8
    if size <= 2:
        return np.arange(1 << 8 * size).astype(f"u{size}")
    part = size // 2 if dtype == "C64" else size
    first = {4: 0x7F800000, 8: 0x7FF << 52}[part]
    edges = [sign + first + step for sign in (0, 1 << (8 * part - 1)) for step in (-1, 0, 1)]
    edges += [(1 << (8 * part)) - 1, (1 << (8 * part - 1)) - 1, 0, 1 << (8 * part - 1)]
    return np.array(edges, np.uint64).astype(f"u{part}")


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("dtype", FRACTIONS)
def test_each_code_is_judged_as_torch_does(dtype: str) -> None:
    """Each pattern alone, among zeros."""
    element = getattr(torch, DTYPES[dtype].torch or "")
    codes = codes_of(dtype)
    rows = torch.full((len(codes), DTYPES[dtype].bits), 1 if dtype == "F8_E8M0" else 0, dtype=torch.uint8)
    rows[:, : codes.itemsize] = torch.from_numpy(codes[:, None].view(np.uint8).copy())
    wide = wider(rows.view(element))
    expected = zip(wide.isnan().sum(1).tolist(), wide.isinf().sum(1).tolist(), strict=True)
    for code, row, nans_and_infs in zip(codes, rows.numpy(), expected, strict=True):
        found = count_nonfinite(dtype, memoryview(row))
        assert found == (Counts(*nans_and_infs) if any(nans_and_infs) else None), code


@pytest.mark.parametrize("dtype", [*(name for name in DTYPES if not has_fractions(name)), "F6_E2M3", "F6_E3M2", "F4"])
def test_integers_and_the_smallest_floats_are_always_finite(dtype: str) -> None:
    assert count_nonfinite(dtype, memoryview(b"\xff" * 48)) is None


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("offset", [0, 1, 3])  # bytes: a tensor in scratch memory may be unaligned
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F64", "F8_E4M3", "C64"])
def test_one_nonfinite_value_among_many_is_found(dtype: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "STEP", 256)
    size = DTYPES[dtype].bits // 8
    nan = {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\xff", "F64": bytes(6) + b"\xf8\xff", "F8_E4M3": b"\xff"}
    for place in (0, 1, 255 // size, 256 // size, 999 // size):
        raw = bytearray(offset + 1000)
        code = nan.get(dtype, bytes(4) + b"\0\0\xc0\xff")
        raw[offset + place * size : offset + (place + 1) * size] = code
        assert count_nonfinite(dtype, memoryview(raw)[offset:]) == (1, 0)
        raw[offset + place * size : offset + (place + 1) * size] = bytes(size)
        assert count_nonfinite(dtype, memoryview(raw)[offset:]) is None
    assert count_nonfinite(dtype, memoryview(b"")) is None


@pytest.mark.parametrize(
    ("found", "served", "trained", "alarms"),
    [
        ((1, 0), (0, 0), False, True),
        ((0, 1), (0, 0), False, True),
        ((1, 1), (0, 3), False, True),
        ((1, 1), (3, 0), False, True),
        ((9, 9), (1, 1), True, False),
        ((1, 0), None, False, True),
        ((0, 1), None, False, False),  # a mask
        ((0, 1), None, True, True),
    ],
)
def test_new_kinds_of_nonfinite_values_are_reported(
    found: tuple[int, int], served: tuple[int, int] | None, trained: bool, alarms: bool
) -> None:
    weight = NamedTensor(name="w", dtype="F32", shape=(4, 5), requires_grad=trained)
    before = None if served is None else {"w": Counts(*served)} if any(served) else {}
    expected = {"w": Nonfinite(*found, 20)} if alarms else {}
    assert newly_nonfinite([weight], {"w": Counts(*found)}, before) == expected


def poked(tiny: TinyArtifact, path: Path, seed: int, *pokes: tuple[str, float]) -> Path:
    """Write the weights of a seed with a given value at the end of some of them."""
    values = tiny.values(seed)
    for name, value in pokes:
        values[name].view(-1)[-1] = value
    return tiny.write(path, values)


@pytest.mark.parametrize("way", ["full", "part", "delta", "staged"])
def test_nonfinite_weights_are_reported_or_refused(
    way: str, residency: str, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    events: list[Event] = []
    model = load(tiny.path, weight_file(0), residency=residency, on_event=events.append)
    before = live_bytes(model)
    path = poked(tiny, tmp_path / "bad.safetensors", 1, ("weight", NAN), ("bias", INF))
    if way == "delta":
        path = write_delta(weight_file(0), path, tmp_path / "delta.safetensors").path
    only = "*" if way == "part" else None
    with pytest.raises(NonFiniteWeights) as refused:
        model.swap(path, only=only, allow_nonfinite=False)
    assert refused.value.problems == ("bias: 1 infinite of 5 values", "weight: 1 NaN of 15 values")
    assert "allow_nonfinite=True" in str(refused.value)
    assert pickle.loads(pickle.dumps(refused.value.problems)) == refused.value.problems
    assert (serves(model, 0), live_bytes(model), model.generation) == (True, before, 0)
    assert (events[-1].kind, type(events[-1].error)) == ("refused", NonFiniteWeights)
    with pytest.raises(NonFiniteWeights, match=r"1 problem\n.*weight: 1 NaN"):
        model.swap(path, only=only, allow_nonfinite="b*")
    expected = {"bias": Nonfinite(0, 1, 5), "weight": Nonfinite(1, 0, 15)}
    if way == "staged":
        with model.stage(path, allow_nonfinite=True) as staged:
            assert staged.nonfinite == expected
            assert not torch.isfinite(staged(torch.ones(1, 3))).all()
            receipt = staged.commit()
    else:
        receipt = model.swap(path, only=only)
    assert receipt.nonfinite == expected
    assert "not finite: bias, weight" in str(events[-1])
    again = poked(tiny, tmp_path / "again.safetensors", 2, ("weight", NAN), ("bias", INF))
    assert model.swap(again, allow_nonfinite=False).nonfinite == {}  # as what is served
    other = poked(tiny, tmp_path / "other.safetensors", 2, ("weight", INF), ("bias", INF))
    with pytest.raises(NonFiniteWeights):
        model.swap(other, allow_nonfinite=False)
    model.swap(weight_file(1), allow_nonfinite=False)
    with pytest.raises(NonFiniteWeights):
        model.swap(again, allow_nonfinite=False)


def test_a_chain_of_deltas_is_judged_by_what_is_served_and_not_by_what_it_goes_through(
    residency: str, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    bad = poked(tiny, tmp_path / "bad.safetensors", 1, ("bias", NAN))
    into, out = (
        write_delta(*files, tmp_path / f"{name}.safetensors")
        for name, files in {"into": (weight_file(2), bad), "out": (bad, weight_file(3))}.items()
    )
    start = (weight_file(2), into.base)
    with pytest.raises(NonFiniteWeights):
        model.stage(into.path, onto=[start], allow_nonfinite=False)
    assert serves(model, 0)
    receipt = model.stage(out.path, onto=[start, (into.path, into.weights_id)], allow_nonfinite=False).commit()
    assert (serves(model, 3), receipt.nonfinite) == (True, {})
    assert model.stage(into.path, onto=[start]).commit().nonfinite == {"bias": Nonfinite(1, 0, 5)}
    model.swap(poked(tiny, tmp_path / "other.safetensors", 4, ("bias", NAN)))
    assert model.stage(into.path, onto=[start], allow_nonfinite=False).commit().nonfinite == {}  # as what is served


def test_a_rollback_to_nonfinite_weights_is_reported(
    residency: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    bad = poked(tiny, tiny.path.parent / "bad.safetensors", 1, ("bias", NAN))
    model = load(tiny.path, bad, residency=residency, keep_previous="host")
    assert model.history[0].nonfinite == {"bias": Nonfinite(1, 0, 5)}
    assert model.swap(weight_file(2)).nonfinite == {}
    assert model.rollback().nonfinite == {"bias": Nonfinite(1, 0, 5)}
    assert model.swap(bad, allow_nonfinite=False).nonfinite == {}
    model.rollback()
    model.rollback()
    assert model.swap(poked(tiny, bad, 3, ("bias", NAN)), allow_nonfinite=False).nonfinite == {}


def test_nonfinite_first_weights_and_weights_of_models_that_share(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    bad = poked(tiny, tmp_path / "bad.safetensors", 1, ("tied", NAN))
    with pytest.raises(NonFiniteWeights):
        load(tiny.path, bad, allow_nonfinite=False)
    mask = poked(tiny, tmp_path / "mask.safetensors", 1, ("bias", -INF))
    model = load(tiny.path, mask, allow_nonfinite=False)  # the artifact's weights require no gradient, as buffers do
    other = load(tiny.path, share=model)
    with pytest.raises(NonFiniteWeights):
        other.swap(bad, allow_nonfinite=False)
    assert other.swap(bad, allow_nonfinite="again").nonfinite == {"tied": Nonfinite(1, 0, 1)}  # its other name
    assert model.swap(bad, allow_nonfinite=False).nonfinite == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [("nothing*", r"allow_nonfinite='nothing\*': matches no weight"), ([], r"allow_nonfinite=\[\]"), (3, "allow_non")],
)
def test_invalid_values_of_allow_nonfinite_are_refused(
    given: object, says: str, tiny: TinyArtifact, weight_file: WriteWeights
) -> None:
    model = load(tiny.path)
    for ask in (model.swap, model.stage, model.watch):
        with pytest.raises(Unsupported, match=says):
            ask(weight_file(0), allow_nonfinite=given)  # type: ignore[operator]


def test_a_pin_and_an_open_staging_do_not_confuse_what_was_served(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(0))
    bad = poked(tiny, tmp_path / "bad.safetensors", 1, ("bias", NAN))
    model.stage(bad).discard()
    with pytest.raises(NonFiniteWeights):
        model.swap(bad, allow_nonfinite=False)
    assert model.weights_id == load(tiny.path, weight_file(0)).weights_id


def spoiled(seed: int) -> Rich:
    """Write sets with different non-finite values, in some weights of every kind."""
    model, draw = varied_filled(seed), random.Random(seed)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for _, tensor in tensors:
            if tensor.is_floating_point() and tensor.numel() and draw.random() < 0.7:
                for _ in range(draw.randint(1, 9)):
                    index = tuple(draw.randrange(size) for size in tensor.shape)
                    tensor[index] = draw.choice([NAN, INF, -INF])
    return model


varied_filled = varied.filled
SETS = 3


@pytest.fixture(scope="module")
def spoiled_files(tmp_path_factory: pytest.TempPathFactory) -> RichFiles:
    with pytest.MonkeyPatch.context() as patch, small_blocks():
        patch.setattr(varied, "filled", lambda seed: spoiled(seed) if seed else varied_filled(seed))
        return RichFiles(tmp_path_factory.mktemp("spoiled"), SETS)


def numbers(files: RichFiles, origin: Origin) -> dict[str, Counts]:
    found = {name: counts(files.tensors(seed)[name]) for name, seed in zip(files.names, origin, strict=True)}
    return {name: some for name, some in found.items() if any(some)}


@pytest.mark.parametrize("seed", range(4))
def test_the_counts_follow_every_kind_of_swap(seed: int, residency: str, spoiled_files: RichFiles) -> None:
    """Full files, checkpoints with computed weights, parts, deltas and rollbacks, in any order; 64-byte blocks."""
    files, draw = spoiled_files, random.Random(seed)
    with small_blocks():
        model = load(files.artifact, files.full[0], residency=residency, keep_previous="host")  # type: ignore[arg-type]
        origin, before = files.whole(0), files.whole(0)
        for _ in range(25):
            new, kind = draw.randrange(SETS), draw.choice(["full", "checkpoint", "part", "delta", "rollback"])
            if kind == "rollback" and len(model.history) > 1:
                origin, before = before, origin
                receipt = model.rollback()
            elif kind == "part":
                pattern = draw.choice(["conv*", "fused*", "embed*", "*bias", "scale", "*"])
                origin, before = files.mixed(origin, pattern, new), origin
                receipt = model.swap(files.full[new], only=pattern)
            elif kind == "delta" and len(set(origin)) == 1 and origin[0] != new:
                origin, before = files.whole(new), origin
                receipt = model.swap(files.deltas[before[0], new])
            else:
                origin, before = files.whole(new), origin
                receipt = model.swap(files.checkpoints[new] if kind == "checkpoint" else files.full[new])
            now, then = numbers(files, origin), numbers(files, before)
            assert dict(live(model).identity.nonfinite) == now
            none = Counts(0, 0)
            alarms = [n for n, c in now.items() if any(a and not b for a, b in zip(c, then.get(n, none), strict=True))]
            assert sorted(receipt.nonfinite) == sorted(alarms)
    assert len({receipt.kind for receipt in model.history}) >= 3


@pytest.mark.parametrize(
    ("begin", "data", "expected"), [(2, "c07f", (1, 0)), (6, "807f00008000", (0, 1)), (7, "00", None)]
)
def test_a_change_of_half_a_value_is_judged_with_the_other_half(
    begin: int, data: str, expected: tuple[int, int] | None
) -> None:
    weight = NamedTensor(name="w", dtype="F32", shape=(4,))
    arena, content = HostArena(ArenaLayout([weight])), memoryview(bytes.fromhex(data))
    served = identify([weight], {"w": block_digests(arena.view("w"))}, {})
    parts = ByteRanges.of(np.array([[begin, begin + len(content)]]), content)
    _, _, found, _ = overlay({"w": parts}, arena, served, [weight], HashTrees(None), WorkerThreads(1), Job())
    assert found == ({} if expected is None else {"w": Counts(*expected)})


def test_single_bytes_of_many_values_are_judged_with_the_rest() -> None:
    random = np.random.default_rng(0)
    weight = NamedTensor(name="w", dtype="F32", shape=(5000,))
    arena = HostArena(ArenaLayout([weight]))
    arena.write(0, memoryview(bytearray(random.integers(0x7F, 0x81, 20_000, np.uint8))))  # many are nearly infinite
    served = identify([weight], {"w": block_digests(arena.view("w"))}, {}, {"w": Counts(*_numbers(arena.view("w")))})
    places = np.sort(random.choice(20_000, 6000, replace=False))
    new = memoryview(random.choice(np.array([0x7F, 0x80, 0], np.uint8), 6000))
    part = ByteRanges.of(np.stack([places, places + 1], axis=1), new)
    after = bytearray(arena.view("w"))
    for begin, data in part.pieces():
        after[begin] = data[0]
    _, _, found, _ = overlay({"w": part}, arena, served, [weight], HashTrees(None), WorkerThreads(2), Job())
    assert found["w"] == Counts(*_numbers(memoryview(after)))


def _numbers(content: memoryview) -> tuple[int, int]:
    values = np.frombuffer(content, np.float32)
    return int(np.isnan(values).sum()), int(np.isinf(values).sum())
