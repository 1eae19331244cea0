"""A small model that is split over ranks, written by hand, and ranks that are threads of the test's process."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from blake3 import blake3
from torch import nn

from tests.support.ports import free_port
from weightswap_runtime import Ranks, WeightFile, process_group
from weightswap_runtime.format.canonical import canonical_order, new_weight_file, pack_ranges, render_header
from weightswap_runtime.format.goldens import Case, Environment, encode_goldens
from weightswap_runtime.format.manifest import (
    RANKS_VERSION,
    Conversion,
    Cut,
    GraphInput,
    Manifest,
    Method,
    NamedTensor,
    Producer,
    Split,
    WeightSource,
    encode_manifest,
    with_graph_id,
)
from weightswap_runtime.format.safetensors import TensorRow
from weightswap_runtime.format.signature import Dimension, Signature, Tensor, Tuple
from weightswap_runtime.format.weight_set import goldens_path
from weightswap_runtime.torch_tensors import tensor_content

WHOLE = "5" * 64  # the graph id of the model in one process
WIDTH, HIDDEN = 4, 8
X = torch.arange(8.0).reshape(2, WIDTH) / 4
Values = dict[str, torch.Tensor]
T = TypeVar("T")


class Split2(nn.Module):
    """Part of a rank: a packed and a plain column cut, a row cut, and a mark of each rank, which all ranks answer."""

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        part = HIDDEN // size
        self.size, self.scale = size, scale
        self.packed = nn.Parameter(torch.empty(2 * part, WIDTH))
        self.first = nn.Parameter(torch.empty(part, WIDTH))
        self.second = nn.Parameter(torch.empty(WIDTH, part))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.mark = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (x @ self.packed.T).chunk(2, -1)
        part = (gate * up + x @ self.first.T) @ self.second.T
        functional = torch.ops._c10d_functional
        total = functional.wait_tensor(functional.all_reduce(part, "sum", "ranks"))
        marks = functional.wait_tensor(functional.all_gather_into_tensor(self.mark + 0, self.size, "ranks"))
        return self.scale * (total + self.bias), marks


def whole(values: Values, x: torch.Tensor) -> torch.Tensor:
    """Return what one process computes."""
    gate, up = (x @ values["packed"].T).chunk(2, -1)
    return (gate * up + x @ values["first"].T) @ values["second"].T + values["bias"]


def values(seed: int) -> Values:
    """Return weights; the marks of all ranks are the seed."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return {
        "packed": draw(2 * HIDDEN, WIDTH),
        "first": draw(HIDDEN, WIDTH),
        "second": draw(WIDTH, HIDDEN),
        "bias": draw(WIDTH),
        "mark": torch.full((4,), float(seed)),
    }


CUTS = {"packed": Cut(dim=0, groups=2), "first": Cut(dim=0), "second": Cut(dim=1)}


def weights(size: int) -> tuple[NamedTensor, ...]:
    shapes = {name: tuple(value.shape) for name, value in values(0).items()} | {"mark": (size,)}
    return tuple(NamedTensor(name=name, dtype="F32", shape=shape) for name, shape in shapes.items())


def split_artifact(path: Path, size: int = 2, scale: float = 1.0) -> Path:
    """Write the artifact for so many ranks. scale: of the outputs, for another graph."""
    graph, targets = _graph(size, scale)
    constants = render_header(pack_ranges([]), {"format": "pt"})
    files = {"graphs/forward.pt2": graph, "constants.safetensors": constants}
    inputs = [GraphInput("weight" if name else "input", name or "x") for name in targets]
    signature = Signature(
        args=(("x", Tensor("x", "F32", ("batch", WIDTH))),),
        kwargs=(),
        output=Tuple((Tensor("y", "F32", ("batch", WIDTH)), Tensor("marks", "F32", (size,)))),
        dims={"batch": Dimension(0, 8)},
    )
    rows = weights(size)
    manifest = Manifest(
        format_version=RANKS_VERSION,
        graph_id="",
        producer=Producer(weightswap="0", torch=str(torch.__version__)),
        device="cpu",
        methods={"forward": Method(graph="graphs/forward.pt2", inputs=tuple(inputs), signature=signature)},
        weights=rows,
        state=(),
        constants=(),
        conversion=Conversion(sources=tuple(WeightSource(weight=row.name, keys=(row.name,)) for row in rows)),
        files={name: blake3(content).hexdigest() for name, content in files.items()},
        ranks=Split(size=size, whole=WHOLE, cuts=CUTS | {"mark": Cut(dim=0)}),
    )
    (path / "graphs").mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    (path / "manifest.json").write_bytes(encode_manifest(with_graph_id(manifest)))
    return path


def write_set(path: Path, seed: int, size: int = 2, *, with_blocks: bool = True, bias: float | None = None) -> Path:
    """Write a weight file of the whole model. bias: another one, which every rank has whole."""
    content = values(seed) | {"mark": values(seed)["mark"][:size]}
    if bias is not None:
        content["bias"] = torch.full((WIDTH,), bias)
    rows = canonical_order(TensorRow(row.name, row.dtype, row.shape) for row in weights(size))
    data = {row.name: [content[row.name].numpy().data.cast("B")] for row in rows}
    writing = new_weight_file(path, rows, data, graph_id=WHOLE, labels={}, cast={}, with_blocks=with_blocks)
    with writing as (file, _):
        file.rename(path)
    return path


@functools.cache
def _graph(size: int, scale: float) -> tuple[bytes, tuple[str | None, ...]]:
    batch = torch.export.Dim("batch", max=8)
    model = Split2(size, scale)
    program = torch.export.export(model, (torch.zeros(2, WIDTH),), dynamic_shapes={"x": {0: batch}})
    for name, tensor in program.state_dict.items():
        program.state_dict[name] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    program._example_inputs = None  # torch would pickle them
    saved = io.BytesIO()
    torch.export.save(program, saved)
    return saved.getvalue(), tuple(spec.target for spec in program.graph_signature.input_specs)


def on_ranks(size: int, work: Callable[[Ranks], T], *, timeout: float = 20.0) -> list[T | Exception]:
    """Do something in a thread for each rank; return what each returns or raises."""
    address = f"tcp://127.0.0.1:{free_port()}"

    def run(number: int) -> T | Exception:
        try:
            return work(Ranks(process_group(address, number, size), timeout=timeout))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def write_goldens(weights: Path, seed: int, outputs_of: int, x: torch.Tensor = X) -> None:
    """Write a recorded call beside a file of the weights `seed`: the outputs are those of the weights `outputs_of`."""
    with WeightFile(weights) as file:
        assert file.stamp is not None
        weights_id = file.stamp.weights_id
    recorded = {"x": x, "y": whole(values(outputs_of), x), "marks": torch.full((2,), float(seed))}
    raw = encode_goldens(
        [Case("forward", ("x",), ("y", "marks"))],
        {name: tensor_content(value) for name, value in recorded.items()},
        graph_id=WHOLE,
        weights_id=weights_id,
        environment=Environment("another", "cpu", "", 1),
        tolerance=(1e-4, 1e-4),
    )
    goldens_path(weights).write_bytes(raw)
