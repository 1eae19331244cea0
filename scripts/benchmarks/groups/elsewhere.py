"""New weights in other kinds of servers: AOTInductor's constants, and a rebuilt ONNX Runtime session."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from report import Row, compared
from safetensors.torch import load_file
from settings import Settings
from subjects import Stack, Stored, quiet, stored
from timing import Measure, in_turn, seconds

from weightswap_runtime import load

CLOSE = 1e-3


def rows(settings: Settings) -> Iterator[Row]:
    """Measure each with the same two sets of weights behind the same model, from files in the page cache."""
    with stored(settings.megabytes * 1_000_000) as large:
        model = load(large.artifact, large.versions[0].path)
        paths = itertools.cycle(version.path for version in large.versions)
        others = {
            "AOTInductor, load_constants(load_file())": _compiled(large),
            "ONNX Runtime, a new InferenceSession": _onnx(large),
        }
        measures: dict[str, Measure] = {"swap": lambda: seconds(lambda: model.swap(next(paths)))}
        timings = in_turn(measures | {name: partial(seconds, work) for name, work in others.items()}, settings.rounds)
        large.check(model)
        millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
        for name in others:
            yield compared(f"swap {large.size}, engine torch", "ms", millis["swap"], name, millis[name])


def _compiled(large: Stored) -> Callable[[], object]:
    """Compile without constants, which are copied in from a mapped file."""
    first = large.versions[0]
    program = torch.export.export(Stack(large.nbytes).eval(), (large.tokens,))
    with quiet(), torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(first.path.with_name("compiled.pt2")),
            inductor_configs={"aot_inductor.package_constants_in_so": False},
        )
        runner = torch._inductor.aoti_load_package(package)

    def update() -> None:
        runner.load_constants(load_file(first.path), check_full_update=True)

    update()
    _check(runner(large.tokens).detach().numpy(), large, "AOTInductor")
    return update


def _onnx(large: Stored) -> Callable[[], object]:
    """Export the same network, with separate external data for its weights."""
    path = large.versions[0].path.with_name("stack.onnx")
    onnx.save(_graph(large), path, save_as_external_data=True, location="stack.data")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    _check(session.run(None, {"tokens": large.tokens.numpy()})[0], large, "ONNX Runtime")
    return lambda: onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def _graph(large: Stored) -> onnx.ModelProto:
    tensors = {name: tensor.numpy() for name, tensor in load_file(large.versions[0].path).items()}
    nodes = [helper.make_node("Gather", ["embedding.weight", "tokens"], ["x0"])]
    layers = sum(name.endswith(".bias") for name in tensors)
    for index in range(layers):
        prefix = f"layers.{index}."
        inputs = [f"x{index}", f"{prefix}weight", f"{prefix}bias"]
        nodes.append(helper.make_node("Gemm", inputs, [f"y{index}"], transB=1))
        nodes.append(helper.make_node("Relu", [f"y{index}"], [f"x{index + 1}"]))
    graph = helper.make_graph(
        nodes,
        "stack",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, [None])],
        [helper.make_tensor_value_info(f"x{layers}", TensorProto.FLOAT, [None, None])],
        [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _check(output: np.ndarray, large: Stored, what: str) -> None:
    """Compare outputs approximately: other engines compute in another order."""
    expected = large.versions[0].expected.numpy()
    if not np.allclose(output, expected, rtol=CLOSE, atol=CLOSE * float(np.abs(expected).max())):
        raise RuntimeError(f"{what}: not the output of the eager model")
