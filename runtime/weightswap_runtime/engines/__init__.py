"""Engines: what executes a graph. Each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol, get_args

from weightswap_runtime.arena import Arena
from weightswap_runtime.artifact import Artifact
from weightswap_runtime.contents import Content
from weightswap_runtime.devices.opening import HOST
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.goldens import Environment

from .aoti_package import can_run
from .onnx_names import graph_file

EngineName = Literal["torch", "aoti", "onnx", "auto"]
AUTO = "auto"
CudaGraphs = Literal["auto"] | Sequence[Mapping[str, int] | Sequence[int]]
ENGINES = tuple(name for name in get_args(EngineName) if name != AUTO)


class Bound(Protocol):
    """An engine bound to one arena, for good."""

    def run(self, method: str, inputs: list[Any]) -> list[Any]:
        """Flat inputs to flat outputs. No output shares memory with the arena, the state or the constants."""
        ...

    @property
    def has_prologue(self) -> bool:
        """Whether `prepare` does anything."""
        ...

    def prepare(self) -> None:
        """Called when new weights are in the arena, before it serves anybody. May raise what operators raise."""
        ...

    def adopt(self, other: Bound) -> bool:
        """Copy what `prepare` has computed in an engine that is bound to the same weights in another arena.

        Needs no memory. False, with nothing done, where that is not possible.
        """
        ...

    def keep(self) -> Callable[[], None]:
        """Copy what `prepare` has computed. The function that is returned puts it back, and needs no memory."""
        ...

    @property
    def has_state(self) -> bool: ...

    def reset_state(self) -> None:
        """Put the state back to its initial values, in place."""
        ...


class Engine(Protocol):
    """One artifact's graphs, ready to be bound. `dtypes` maps the engine's dtype objects to safetensors names."""

    @property
    def name(self) -> str: ...
    @property
    def tensor_type(self) -> type[Any]: ...
    @property
    def dtypes(self) -> Mapping[Any, str]: ...

    def misplaced(self, value: Any) -> str | None:
        """What is wrong with an input beside dtype and shape; None if nothing is."""
        ...

    def kind(self, value: Any) -> Hashable:
        """Everything about an input that its check looks at."""
        ...

    def tensor(self, content: Content) -> Any:
        """A tensor of the engine's, in memory that is allocated as its own are: kernels look at alignments.

        Raises Unsupported for a dtype that the engine lacks.
        """
        ...

    def content(self, value: Any) -> Content:
        """What is in a tensor of the engine's, whose memory it may share.

        Raises Unsupported for a dtype without a safetensors name.
        """
        ...

    def environment(self) -> Environment | None:
        """What decides the last bits of an output here; None where no output is expected to equal eager bit for bit."""
        ...

    def plainly(self) -> AbstractContextManager[object]:
        """A block without what the calling thread has switched on, where that changes what the engine computes."""
        ...

    def bind(self, arena: Arena) -> Bound: ...


def choose_engine(name: str, artifact: Artifact, device: str = HOST) -> str:
    """The engine's name, for "auto" the fastest that this machine and the artifact offer on a device.

    On the CPU that is `aoti` where the artifact has packages for this machine and this torch, else `torch`; without
    torch it is `onnx`, which takes and gives numpy arrays. On other devices it is `torch`.

    Raises Unsupported for an engine that there is not, or that the artifact was not compiled for.
    """
    if name == AUTO:
        if device != HOST:
            return "torch"
        if _has_torch():
            return "aoti" if can_run(artifact) else "torch"
        return "onnx" if _has_onnx(artifact) else "torch"
    if name not in ENGINES:
        raise Unsupported(f"engine {name!r}: expected {', '.join(map(repr, (*ENGINES, AUTO)))}")
    if name == "onnx" and not _has_onnx(artifact):
        raise Unsupported(
            f"{artifact.path}: was not compiled for the engine 'onnx'. Run: weightswap compile {artifact.path} "
            "--engine onnx"
        )
    return name


def available_engines(artifact: Artifact) -> tuple[str, ...]:
    """The engines that this machine and the artifact offer on the CPU."""
    torch = _has_torch()
    offered = {"torch": torch, "aoti": torch and can_run(artifact), "onnx": _has_onnx(artifact) and _has_runtime()}
    return tuple(name for name in ENGINES if offered[name])


def _has_runtime() -> bool:
    return find_spec("onnxruntime") is not None


def _has_torch() -> bool:
    """Whether torch is installed, and can be imported."""
    try:
        import_module("torch")
    except ImportError:
        return False
    return True


def _has_onnx(artifact: Artifact) -> bool:
    return all(graph_file(method) in artifact.manifest.files for method in artifact.methods)


def open_engine(
    name: str,
    artifact: Artifact,
    device: str,
    *,
    threads: int | None = None,
    prologue: bool = True,
    on_host: bool = False,
    cuda_graphs: CudaGraphs | None = None,
) -> Engine:
    """Open the graphs of an artifact; `name` is one of ENGINES. Raises Unsupported, ArtifactError and MissingExtra.

    on_host: on a device, weights in host memory can be bound, too, for trials.
    """
    if cuda_graphs is not None and (device == HOST or name != "torch"):
        raise Unsupported(f"cuda_graphs with the engine {name!r} on {device!r}: they are for 'torch' on \"cuda\"")
    if threads is not None and (device != HOST or name != "onnx" or type(threads) is not int or threads < 1):
        raise Unsupported(f"threads={threads!r}: expected None, or with the engine 'onnx' on the CPU a positive number")
    if device != HOST and name == "onnx":
        from .onnx_accelerated import OnnxAcceleratedEngine

        return OnnxAcceleratedEngine(artifact, device, on_host=on_host)
    if device != HOST and name == "aoti":
        from .aoti_accelerated import AotiAcceleratedEngine

        return AotiAcceleratedEngine(artifact, device, on_host=on_host)
    if name == "onnx":
        from .onnx import OnnxEngine

        return OnnxEngine(artifact, threads)
    if name == "aoti":
        from .aoti import AotiEngine

        return AotiEngine(artifact)
    if device != HOST:
        from .accelerated import AcceleratedEngine

        return AcceleratedEngine(artifact, device, prologue=prologue, on_host=on_host, cuda_graphs=cuda_graphs)
    from .torch import TorchEngine

    return TorchEngine(artifact, prologue=prologue)
