"""The table of engines, and the choice among them. An engine is imported only when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, NamedTuple

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.memory.device_choice import HOST

from .aoti.package import can_run
from .engine import AUTO, Engine, EngineOptions

EngineName = Literal["torch", "aoti", "onnx", "auto"]


class EngineRow(NamedTuple):
    """One engine. `offered`: whether this machine and the artifact have what it needs on the CPU.

    `compiled`: whether it runs files of its own, those under engines/NAME; `by_device`: whether they are of one device.
    `is_exact`: whether its outputs equal eager's bit for bit. `row_major`: whether all weights have to be.
    """

    open: Callable[[Artifact, str, EngineOptions], Engine]
    offered: Callable[[Artifact], bool]
    compiled: bool = True
    by_device: bool = False
    is_exact: bool = False
    row_major: bool = False
    takes_threads: bool = False
    takes_cuda_graphs: bool = False


def _torch(artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    if device != HOST:
        from .torch.device import AcceleratedEngine

        _, prologue, on_host, cuda_graphs = options
        return AcceleratedEngine(artifact, device, prologue=prologue, on_host=on_host, cuda_graphs=cuda_graphs)
    from .torch.cpu import TorchEngine

    return TorchEngine(artifact, prologue=options.prologue)


def _aoti(artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    if device != HOST:
        from .aoti.device import AotiAcceleratedEngine

        return AotiAcceleratedEngine(artifact, device, prologue=options.prologue, on_host=options.on_host)
    from .aoti.engine import AotiEngine

    return AotiEngine(artifact, prologue=options.prologue)


def _onnx(artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    if device != HOST:
        from .onnx.device import OnnxAcceleratedEngine

        return OnnxAcceleratedEngine(artifact, device, prologue=options.prologue, on_host=options.on_host)
    if len(compiled_methods("onnx", artifact)) < len(artifact.methods):
        from .onnx.beside_torch import OnnxBesideTorch

        return OnnxBesideTorch(artifact, options.threads, prologue=options.prologue)
    from .onnx.engine import OnnxEngine

    return OnnxEngine(artifact, options.threads)


def _has_torch() -> bool:
    """Whether torch is installed, and can be imported."""
    try:
        import_module("torch")
    except ImportError:
        return False
    return True


def compiled_methods(name: str, artifact: Artifact) -> list[str]:
    """The methods that an artifact has files of an engine for; all of them for an engine that takes none."""
    return artifact.compiled_methods(name) if ENGINES[name].compiled else list(artifact.methods)


def _has_onnx(artifact: Artifact) -> bool:
    compiled = compiled_methods("onnx", artifact)
    whole = len(compiled) == len(artifact.methods)
    return bool(compiled) and find_spec("onnxruntime") is not None and (whole or _has_torch())


ENGINES: dict[str, EngineRow] = {
    "torch": EngineRow(_torch, lambda _: _has_torch(), compiled=False, is_exact=True, takes_cuda_graphs=True),
    "aoti": EngineRow(_aoti, lambda artifact: _has_torch() and can_run(artifact), by_device=True),
    "onnx": EngineRow(_onnx, _has_onnx, row_major=True, takes_threads=True),
}


def choose_engine(name: str, artifact: Artifact, device: str = HOST) -> str:
    """The engine's name, for "auto" the fastest that this machine and the artifact offer on a device.

    On the CPU that is `aoti` where the artifact has packages for this machine and this torch, else `torch`; without
    torch it is `onnx`, which takes and gives numpy arrays. On other devices it is `torch`.

    Raises Unsupported for an engine that there is not.
    """
    if name == AUTO:
        if device != HOST:
            return "torch"
        if _has_torch():
            return "aoti" if can_run(artifact) else "torch"
        return "onnx" if compiled_methods("onnx", artifact) else "torch"
    if name not in ENGINES:
        raise Unsupported(f"engine {name!r}: expected {', '.join(map(repr, (*ENGINES, AUTO)))}")
    return name


def as_taken(name: str, artifact: Artifact) -> Artifact:
    """The artifact, with its weights in the order in which an engine takes them.

    Raises Unsupported where a weight has another, in which the graphs were captured that `torch` runs beside it.
    """
    if not ENGINES[name].row_major:
        return artifact
    compiled = compiled_methods(name, artifact)
    beside = [method for method in artifact.methods if compiled and method not in compiled]
    turned = [weight.name for weight in artifact.manifest.weights if weight.stride is not None]
    if beside and turned:
        raise Unsupported(
            f"{artifact.path}: {', '.join(beside)} was not compiled for the engine {name!r}, and 'torch' cannot run it "
            f"beside that: {turned[0]} was captured in another order than row-major, which {name!r} needs. Compile all "
            f"methods for {name!r}, or none"
        )
    return artifact.row_major()


def available_engines(artifact: Artifact) -> tuple[str, ...]:
    """The engines that this machine and the artifact offer on the CPU."""
    return tuple(name for name, row in ENGINES.items() if row.offered(artifact))


def open_engine(name: str, artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    """Open the graphs of an artifact; `name` is one of ENGINES. Raises Unsupported, ArtifactError and MissingExtra."""
    (threads, _, _, cuda_graphs), row = options, ENGINES[name]
    if cuda_graphs is not None and (device == HOST or not row.takes_cuda_graphs):
        raise Unsupported(f"cuda_graphs with the engine {name!r} on {device!r}: they are for 'torch' on \"cuda\"")
    if threads is not None and (device != HOST or not row.takes_threads or type(threads) is not int or threads < 1):
        raise Unsupported(f"threads={threads!r}: expected None, or with the engine 'onnx' on the CPU a positive number")
    if not compiled_methods(name, artifact):
        where = f" --device {device.partition(':')[0]}" if row.by_device and device != HOST else ""
        raise Unsupported(
            f"{artifact.path}: was not compiled for the engine {name!r}. Run: weightswap compile {artifact.path} "
            f"--engine {name}{where}"
        )
    return row.open(artifact, device, options)
