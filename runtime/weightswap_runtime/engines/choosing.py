"""The table of engines, and the choice among them. An engine's package is imported only when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, NamedTuple

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.memory.device_memory import HOST

from .aoti_package import can_run
from .engine import AUTO, Engine, EngineOptions

EngineName = Literal["torch", "aoti", "onnx", "auto"]


class EngineRow(NamedTuple):
    """One engine, and what is particular to it."""

    open: Callable[[Artifact, str, EngineOptions], Engine]
    offered: Callable[[Artifact], bool]  # whether this machine and the artifact have what it needs on the CPU
    compiled: bool = True  # it runs files compiled for it, those under engines/NAME
    by_device: bool = False  # each of these files is for one device
    is_exact: bool = False  # its outputs equal eager's bit for bit
    row_major: bool = False  # it needs all weights in row-major order
    takes_threads: bool = False
    takes_cuda_graphs: bool = False


def choose_engine(name: str, artifact: Artifact, device: str = HOST) -> str:
    """Return the engine's name; for "auto", the fastest engine that this machine and the artifact offer on a device.

    On the CPU that is `aoti` if the artifact has packages for this machine and this torch, else `torch`. Without
    torch it is `onnx`, which takes and returns numpy arrays. On other devices, and for several ranks, it is `torch`.

    Raises Unsupported if no engine has this name.
    """
    if name == AUTO:
        if device != HOST or artifact.manifest.ranks:
            return "torch"
        if _has_torch():
            return "aoti" if can_run(artifact) else "torch"
        return "onnx" if compiled_methods("onnx", artifact) else "torch"
    if name not in ENGINES:
        raise Unsupported(f"engine {name!r}: expected {', '.join(map(repr, (*ENGINES, AUTO)))}")
    return name


def as_taken(name: str, artifact: Artifact) -> Artifact:
    """Return the artifact with the strides of its weights as an engine needs them: row-major, or as captured.

    Raises Unsupported if the engine needs row-major weights, one was captured in another order, and `torch` runs
    some of the methods beside it.
    """
    if not ENGINES[name].row_major:
        return artifact
    compiled = compiled_methods(name, artifact)
    beside = [method for method in artifact.methods if compiled and method not in compiled]
    strided = [weight.name for weight in artifact.manifest.weights if weight.stride is not None]
    if beside and strided:
        raise Unsupported(
            f"{artifact.path}: {', '.join(beside)} was not compiled for the engine {name!r}, and 'torch' cannot run it "
            f"alongside: {strided[0]} was captured in an order other than row-major, which {name!r} needs. Compile "
            f"all methods for {name!r}, or none"
        )
    return artifact.row_major()


def available_engines(artifact: Artifact) -> tuple[str, ...]:
    """Return the engines that this machine and the artifact offer on the CPU."""
    return tuple(name for name, row in ENGINES.items() if row.offered(artifact))


def open_engine(name: str, artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    """Open the graphs of an artifact. `name` is a key of ENGINES. Raises Unsupported, ArtifactError, MissingExtra."""
    threads, cuda_graphs, row = options.threads, options.cuda_graphs, ENGINES[name]
    if artifact.manifest.ranks and (row.compiled or cuda_graphs is not None):
        what = f"the engine {name!r}" if row.compiled else "cuda_graphs"
        raise Unsupported(f"{artifact.path}: is for several ranks, which need the engine 'torch', not {what}")
    if cuda_graphs is not None and (device == HOST or not row.takes_cuda_graphs):
        raise Unsupported(f"cuda_graphs with the engine {name!r} on {device!r}: only 'torch' on \"cuda\" has them")
    if threads is not None and (device != HOST or not row.takes_threads or type(threads) is not int or threads < 1):
        raise Unsupported(f"threads={threads!r}: expected None, or a positive number with the engine 'onnx' on the CPU")
    if not compiled_methods(name, artifact):
        where = f" --device {device.partition(':')[0]}" if row.by_device and device != HOST else ""
        raise Unsupported(
            f"{artifact.path}: was not compiled for the engine {name!r}. Run: weightswap compile {artifact.path} "
            f"--engine {name}{where}"
        )
    return row.open(artifact, device, options)


def compiled_methods(name: str, artifact: Artifact) -> list[str]:
    """Return the methods that an artifact has an engine's files for; all methods if the engine needs no files."""
    return artifact.compiled_methods(name) if ENGINES[name].compiled else list(artifact.methods)


def _torch(artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    if device != HOST:
        from .torch_device import AcceleratedEngine

        _, prologue, on_host, cuda_graphs, group = options
        return AcceleratedEngine(
            artifact, device, prologue=prologue, on_host=on_host, cuda_graphs=cuda_graphs, group=group
        )
    from .torch_cpu import TorchEngine

    return TorchEngine(artifact, prologue=options.prologue, group=options.group)


def _aoti(artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    if device != HOST:
        from .aoti import AotiAcceleratedEngine

        return AotiAcceleratedEngine(artifact, device, prologue=options.prologue, on_host=options.on_host)
    from .aoti import AotiEngine

    return AotiEngine(artifact, prologue=options.prologue)


def _onnx(artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    if device != HOST:
        from .onnx_torch import OnnxAcceleratedEngine

        return OnnxAcceleratedEngine(artifact, device, prologue=options.prologue, on_host=options.on_host)
    if len(compiled_methods("onnx", artifact)) < len(artifact.methods):
        from .onnx_torch import OnnxBesideTorch

        return OnnxBesideTorch(artifact, options.threads, prologue=options.prologue)
    from .onnx import OnnxEngine

    return OnnxEngine(artifact, options.threads)


def _has_torch() -> bool:
    """Return whether torch is installed and can be imported."""
    try:
        import_module("torch")
    except ImportError:
        return False
    return True


def _has_onnx(artifact: Artifact) -> bool:
    compiled = compiled_methods("onnx", artifact)
    is_complete = len(compiled) == len(artifact.methods)
    return bool(compiled) and find_spec("onnxruntime") is not None and (is_complete or _has_torch())


ENGINES: dict[str, EngineRow] = {
    "torch": EngineRow(_torch, lambda _: _has_torch(), compiled=False, is_exact=True, takes_cuda_graphs=True),
    "aoti": EngineRow(_aoti, lambda artifact: _has_torch() and can_run(artifact), by_device=True),
    "onnx": EngineRow(_onnx, _has_onnx, row_major=True, takes_threads=True),
}
