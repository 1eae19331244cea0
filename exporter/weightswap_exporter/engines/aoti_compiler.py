"""Compilation of graphs with AOTInductor into shared libraries without weights, for a named target."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor
from torch._inductor import config, cpu_vec_isa, lowering
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.utils import fresh_inductor_cache
from torch.fx import GraphModule

from weightswap_runtime.engines.aoti.targets import BESIDE_GPUS, TARGETS, Target, is_gpu_target
from weightswap_runtime.errors import CaptureError, ExportError, Unsupported

from .aoti_lowerings import cpu_lowerings

_MISSING_COMPILER = "InvalidCxxCompiler"
_ERROR_LINE = re.compile(r"^.*\berror: (.*)$", re.MULTILINE)
_CUDA_HEADER = re.compile(r"((?:cuda|crt/|nv/)[^:]*): No such file")
_CHECK, _PARALLEL = "AOTI_TORCH_CHECK(", "#pragma omp parallel"

# Weights of every size stay out: by default, weights with one element and vectors of up to eight are compiled in.
_SETTINGS: Mapping[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.use_runtime_constant_folding": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "freezing": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    # precompiled headers would go into the user's cache
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.model_name_for_generated_files": "graph",
}
_THREADED: Mapping[str, Any] = {"cpp.dynamic_threads": True}  # else the thread count of this machine is compiled in
_SERIAL: Mapping[str, Any] = {"cpp.dynamic_threads": False, "cpp.threads": 1}
_ON_GPU: Mapping[str, Any] = {"aot_inductor.embed_kernel_binary": True}  # else kernels are files beside the library


def compile_library(where: str, module: GraphModule, samples: tuple[torch.Tensor, ...], target: str) -> bytes:
    """Compile a graph with flat inputs and outputs. Returns the bytes of the shared library.

    Raises CaptureError for a graph that AOTInductor cannot express, ExportError without a C++ compiler, and Unsupported
    if this torch cannot compile for the target.
    """
    _check_tools()
    try:
        return _compile(where, module, samples, target, _THREADED)
    except _ParallelChecks:
        return _compile(where, module, samples, target, _SERIAL)


def _unfit(where: str, reason: str) -> str:
    return f"{where}: AOTInductor cannot compile it for a server: {reason}. Use the engine 'torch'"


class _ParallelChecks(CaptureError):
    """Generated code has checks in parallel regions, where an exception ends the process."""


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(shlex.split(compiler)[0] if compiler.strip() else ""):
        raise ExportError(
            f"the engine 'aoti' compiles C++ and cannot find {compiler!r}. Install g++, or set CXX to a compiler"
        )
    if not hasattr(config.cpp, "march"):
        raise Unsupported(
            f"torch {torch.__version__} compiles only for the machine that it runs on, and what it compiles neither "
            "says why a call failed nor releases the tensors that it was bound to: it lacks AOTInductorGetLastError "
            "and AOTInductorModelContainerExtractConstantsMapEntries. Install torch>=2.13 to compile for the engine "
            "'aoti', on the CPU and on GPUs"
        )


def _compile(
    where: str, module: GraphModule, samples: tuple[torch.Tensor, ...], target: str, threads: Mapping[str, Any]
) -> bytes:
    on_gpu = is_gpu_target(target)
    processor = TARGETS[BESIDE_GPUS if on_gpu else target]
    # each compilation has a folder of its own: the cache would take files of the same names for the same files
    with tempfile.TemporaryDirectory(prefix="weightswap-") as folder, _compiling(where, processor, on_gpu, folder):
        cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        hidden = {cache: ".", str(Path(torch.__file__).parent): "torch", sysconfig.get_paths()["include"]: "python"}
        maps = [shlex.quote(f"-ffile-prefix-map={path}={name}") for path, name in hidden.items()]
        settings = {**_SETTINGS, **threads, "cpp.march": " ".join([processor.march, *maps])}
        settings |= _ON_GPU if on_gpu else {}
        files = torch._inductor.aot_compile(module, samples, options=settings)
        assert isinstance(files, list)
        return _library(where, [Path(file) for file in files if isinstance(file, str)])


def _library(where: str, files: list[Path]) -> bytes:
    """Return the bytes of the compiled library. Raises CaptureError if it calls operators without a C function."""
    proxies = [path for path in files if path.suffix == ".json" and not path.stem.endswith("_metadata")]
    nodes = [node for path in proxies for node in json.loads(path.read_bytes()).get("nodes", ())]
    # such as operators of Python packages, which torch's own loader would look up
    if foreign := sorted({str(node["node"]["target"]) for node in nodes}):
        raise CaptureError(_unfit(where, f"it calls {', '.join(foreign)}"))
    (library,) = (path for path in files if path.suffix == ".so")
    return library.read_bytes()


@contextmanager
def _compiling(where: str, processor: Target, on_gpu: bool, folder: str) -> Iterator[None]:
    """Run AOTInductor in isolation: in a fresh cache, without logs and warnings, and for `processor` alone."""
    loggers = [logging.getLogger(name) for name in ("torch._inductor", "torch._inductor.utils")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        vectors = mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[_vectors(processor)])
        sources = mock.patch.object(AotCodeCompiler, "compile", _compile_checked(where))
        lowerings = nullcontext() if on_gpu else mock.patch.dict(lowering.lowerings, cpu_lowerings())
        with warnings.catch_warnings(action="ignore"), fresh_inductor_cache(dir=folder), vectors, sources, lowerings:
            yield
    except Exception as error:
        if ours := next((cause for cause in _chain(error) if isinstance(cause, CaptureError)), None):
            raise ours from None
        raise _explained(where, error) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _compile_checked(where: str) -> Callable[..., Any]:
    """Return a replacement of `AotCodeCompiler.compile` that checks sources before the slow C++ compiler runs."""
    original: Callable[..., Any] = AotCodeCompiler.compile

    def checked(graph: Any, *sources: Any, **options: Any) -> Any:
        if any(_CHECK in source and _PARALLEL in source for source in sources if isinstance(source, str)):
            raise _ParallelChecks(_unfit(where, "its checks would crash the process"))
        return original(graph, *sources, **options)

    return checked


def _vectors(target: Target) -> cpu_vec_isa.VecISA:
    """Return the vector extensions of a target alone: torch would add those of this machine."""
    base: type[cpu_vec_isa.VecISA] = cpu_vec_isa.VecAVX512 if target.bits == 512 else cpu_vec_isa.VecAVX2

    class Vectors(base):  # type: ignore[misc, valid-type]
        __hash__ = cpu_vec_isa.VecISA.__hash__

        def __bool__(self) -> bool:  # not tried out, as this machine may lack them
            return True

    vectors: cpu_vec_isa.VecISA = Vectors()
    return vectors


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _explained(where: str, error: Exception) -> Exception:
    chain = _chain(error)
    if any(type(item).__name__ == _MISSING_COMPILER for item in chain):
        return ExportError(f"the engine 'aoti' needs a C++ compiler. Install g++, or set CXX ({error})")
    text = "\n".join(str(item) for item in chain)
    compiler_error = _ERROR_LINE.search(text)
    if compiler_error and (header := _CUDA_HEADER.match(compiler_error[1])):
        return ExportError(
            f"the engine 'aoti' compiles for GPUs with the CUDA toolkit, and cannot find {header[1]}. Install the "
            f"toolkit of CUDA {torch.version.cuda}, and set CUDA_HOME to its folder"
        )
    first_line = next(iter(str(error).strip().splitlines()), "")
    reason = f"the C++ compiler says: {compiler_error[1]}" if compiler_error else first_line
    return CaptureError(f"{where}: AOTInductor of torch {torch.__version__} cannot compile it: {reason:.500}")
