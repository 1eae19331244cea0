"""Code, paths and attributes in every text of an artifact: only the graph's own operators ever run.

One text at a time is replaced in archives and manifests, and the digests are made to agree. Then the artifact is
opened, called, verified and swapped under an audit hook that sees every file, import, process and piece of code that
Python is asked for. Actions of C++ would show by files in a folder.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.forged import replace_file, with_document
from tests.support.graphs import Whole, archived, compiled, parts
from weightswap_exporter import export, pack
from weightswap_exporter.capture.archive import method_program
from weightswap_exporter.parity import compare
from weightswap_runtime import Artifact, WeightswapError, load
from weightswap_runtime.format.manifest import CONVERSION_NAME, MANIFEST_NAME

FORWARD = "graphs/forward.pt2"
MARK = "planted_by_somebody"
IN_SHORT = 25  # texts of each file; all of them in the long run
# events that a server or a verification never needs, whatever the arguments
NEVER = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.symlink",
    "os.chmod",
    "os.putenv",
    "subprocess.",
    "shutil.",
    "socket.",
    "ctypes.dlopen",
    "pickle.",
    "marshal.",
    "webbrowser.",
)


class Split(nn.Module):
    """Model whose checkpoint has transposed halves of a weight, so that the conversion has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("seen", torch.zeros(()))
        self._register_state_dict_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        self.seen.add_(1)
        y = torch.cond(x.sum() > 1, torch.sin, torch.cos, (x,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = nn.functional.gelu(self.linear(y), approximate="tanh")
        return {"z": z.masked_fill(mask, float("-inf")), "rows": [x.shape[0] * 2, self.seen + 0]}


def _split(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
    upper, lower = state.pop(f"{prefix}linear.weight").t().chunk(2, dim=1)
    state |= {f"{prefix}upper": upper, f"{prefix}lower": lower}


def _join(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
    halves = [state.pop(f"{prefix}{name}") for name in ("upper", "lower")]
    state[f"{prefix}linear.weight"] = torch.cat(halves, dim=1).t()


class Setting(NamedTuple):
    """Artifact, two sets of weights (one packed, one that the conversion computes), and a folder that must stay
    empty."""

    artifact: Path
    packed: Path
    checkpoint: Path
    trap: Path


X = torch.linspace(-1, 1, 8).reshape(2, 4), torch.tensor([True, False, False, False, False, False])


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("hostile")
    torch.manual_seed(0)
    model = Split().eval()
    dynamic = {"x": {0: torch.export.Dim("rows", max=64)}, "mask": None}
    artifact = export(model, X, out=folder / "a", dynamic_shapes=dynamic)
    assert CONVERSION_NAME in artifact.manifest.files
    packed = pack(model, artifact, out=folder / "packed.safetensors").path
    checkpoint = {name: value.contiguous() for name, value in model.state_dict().items()}
    safetensors.torch.save_file(checkpoint, folder / "c.safetensors")
    (folder / "trap").mkdir()
    return Setting(artifact.path, Path(packed), folder / "c.safetensors", folder / "trap")


def payloads(trap: Path) -> list[str]:
    place = trap / MARK
    return [
        f"__import__('os').mkdir({str(place)!r})",
        f"x=__import__('os').mkdir({str(place)!r})",
        f"a\n    __import__('os').mkdir({str(place)!r})\n",
        "torch.ops.aten.from_file.default",
        "torch.os.mkdir",
        f"{MARK}.__class__.__init__.__globals__",
        f"import {MARK}",
        str(place),
        f"../{MARK}",
        f'x")\rexec("__import__(\'os\')\\x2emkdir({str(place)!r})")\rdef zz(self):\r    z = ("',
        f"y): return x\r__import__('os').mkdir({str(place)!r})\rdef zz(y):#",
    ]


seen: list[str] = []
watching = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if watching and (event.startswith(NEVER) or _is_planted(event, args)):
        seen.append(f"{event} {args!r:.300}")


def _is_planted(event: str, args: tuple[Any, ...]) -> bool:
    """Return True if a planted text is opened or imported, or has become a name in compiled code."""
    if event == "exec":
        return any(MARK in name or name in ("system", "mkdir", "__import__") for name in _names(args[0]))
    return event in ("open", "import") and any(MARK in str(each) for each in args)


def _names(code: Any) -> Iterator[str]:
    if isinstance(code, CodeType):
        yield from (*code.co_names, *code.co_varnames)
        for constant in code.co_consts:
            yield from _names(constant)


@pytest.fixture(scope="module", autouse=True)
def _hook() -> None:
    sys.addaudithook(_audit)


@contextmanager
def audited() -> Iterator[None]:
    global watching  # noqa: PLW0603
    watching = True
    try:
        yield
    finally:
        watching = False


def use(artifact: Path, setting: Setting) -> None:
    """Use an artifact like servers and verifications do; only our errors, or torch's in a call, may be raised."""
    with suppress(WeightswapError):
        model = load(artifact, setting.packed)
        with suppress(RuntimeError, TypeError, ValueError, IndexError):
            model(*X)
        model.swap(setting.checkpoint, allow_other_graph=True)
        model.rollback()
        with suppress(RuntimeError, TypeError, ValueError, IndexError):
            model(*X)
    with suppress(WeightswapError):
        load(artifact, setting.checkpoint)
    with suppress(WeightswapError):
        opened = Artifact.open(artifact)
        for name in opened.manifest.methods:
            with suppress(RuntimeError, TypeError, ValueError, IndexError, KeyError, AssertionError):
                method_program(opened, name).module()(*X)


def texts(document: Any) -> list[tuple[list[Any], bool]]:
    """Return the way to every text in a document, and whether it is a key."""
    positions: list[tuple[list[Any], bool]] = []

    def walk(value: Any, way: list[Any]) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            if isinstance(key, str):
                positions.append(([*way, key], True))
            if isinstance(item, str):
                positions.append(([*way, key], False))
            walk(item, [*way, key])

    walk(document, [])
    return positions


def planted(document: Any, way: list[Any], key: bool, payload: str) -> None:
    place = document
    for step in way[:-1]:
        place = place[step]
    if key:
        place[payload] = place.pop(way[-1])
    else:
        place[way[-1]] = payload


def document_of(raw: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/models/model.json"))
        return json.loads(archive.read(name))


def variants(setting: Setting, name: str, count: int | None, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield what was replaced, and the file with one text, or every mention of one, replaced; `count` times or all."""
    raw = (setting.artifact / name).read_bytes()
    document = json.loads(raw) if name == MANIFEST_NAME else document_of(raw)
    places = texts(document)
    values = sorted({str(way[-1]) for way, key in places if key} | {place[key] for place, key in _strings(document)})
    for way, key in places if count is None else chance.sample(places, min(count, len(places))):
        payload = chance.choice(payloads(setting.trap))
        yield f"{way}, {key}: {payload}", _changed(raw, name, partial(planted, way=way, key=key, payload=payload))
    for value in values if count is None else chance.sample(values, min(count, len(values))):
        payload = chance.choice(payloads(setting.trap))
        yield f"every {value!r:.100}: {payload}", _changed(raw, name, partial(replaced, value=value, payload=payload))


def replaced(document: Any, value: str, payload: str) -> None:
    """Replace every mention of a text by a payload."""
    for place, key in _strings(document):
        if place[key] == value:
            place[key] = payload
    for mapping in [document, *(place[key] for place, key in parts(document))]:
        if isinstance(mapping, dict) and value in mapping:
            mapping[payload] = mapping.pop(value)


def _strings(document: Any) -> list[tuple[Any, Any]]:
    return [(place, key) for place, key in parts(document) if isinstance(place[key], str)]


def _changed(raw: bytes, name: str, change: Callable[[Any], None]) -> bytes:
    if name != MANIFEST_NAME:
        return with_document(raw, change)
    document = json.loads(raw)
    change(document)
    return json.dumps(document).encode()


def check(setting: Setting, name: str, count: int | None, seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    use(setting.artifact, setting)  # do lazy imports now
    for what, raw in variants(setting, name, count, chance):
        artifact = folder / "altered"
        shutil.copytree(setting.artifact, artifact)
        if name == MANIFEST_NAME:
            (artifact / name).write_bytes(raw)
        else:
            replace_file(artifact, name, raw)
        with audited():
            use(artifact, setting)
        assert not seen, (what, seen)
        assert not list(setting.trap.iterdir()), what
        shutil.rmtree(artifact)


FILES = [FORWARD, CONVERSION_NAME, MANIFEST_NAME]
QUICK = [FORWARD, pytest.param(CONVERSION_NAME, marks=pytest.mark.slow), MANIFEST_NAME]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", QUICK)
def test_no_text_of_an_artifact_runs_or_reaches_a_file(name: str, setting: Setting, tmp_path: Path) -> None:
    check(setting, name, IN_SHORT, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FILES)
def test_no_text_at_all_runs_or_reaches_a_file(name: str, seed: int, setting: Setting, tmp_path: Path) -> None:
    check(setting, name, None, seed, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_verification_of_an_artifact_with_code_for_an_input(setting: Setting, tmp_path: Path) -> None:
    def plant(document: Any) -> None:
        for place, key in list(parts(document)):
            if place[key] == "mask":
                place[key] = payloads(setting.trap)[1]

    shutil.copytree(setting.artifact, tmp_path / "a")
    replace_file(tmp_path / "a", FORWARD, with_document((setting.artifact / FORWARD).read_bytes(), plant))
    with audited(), suppress(WeightswapError):
        compare(None, tmp_path / "a", setting.packed, engines=["torch"])
    assert not [event for event in seen if MARK in event]
    seen.clear()
    assert not list(setting.trap.iterdir())


def test_the_hook_sees_what_it_is_for(setting: Setting) -> None:
    """Each payload has its effect if it is executed."""
    code, *_ = payloads(setting.trap)
    with audited():
        eval(code)
    (setting.trap / MARK).rmdir()
    with audited(), suppress(ImportError, OSError):
        __import__(MARK)
    with audited(), suppress(OSError):
        (setting.trap / MARK).open()
    events = {event.partition(" ")[0] for event in seen}
    seen.clear()
    assert {"exec", "os.mkdir", "import", "open"} <= events


def moved(edges: torch.Tensor) -> torch.Tensor:
    sparse = torch.sparse_coo_tensor(edges, torch.ones(2), (3, 3))
    edges.add_(1 << 20)  # torch's own tensor would now have indices that nobody has checked
    return sparse.to_dense()


def moved_by_alias(edges: torch.Tensor) -> torch.Tensor:
    sparse = torch.sparse_coo_tensor(edges, torch.ones(2), (3, 3)).coalesce()
    sparse.indices().add_(1 << 20)
    return sparse.to_dense()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("function", [moved, moved_by_alias])
def test_no_index_of_a_sparse_tensor_leads_out_of_it(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    edges = torch.tensor([[0, 2], [1, 0]])
    graph = compiled(archived(torch.export.export(Whole(function), (edges,), strict=False))).call
    assert graph(edges.clone())[0].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
    for far in (3, -1, 1 << 40):
        with pytest.raises(RuntimeError, match=r"size is inconsistent with indices|found negative index"):
            graph(torch.tensor([[0, far], [1, 0]]))
