"""Compiling CUDA sources with torch's NVRTC. torch's own way to it needs the CUDA toolkit's folder and setuptools."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch


def compile_source(source: str, capability: tuple[int, int]) -> bytes:
    """Machine code of a source that includes nothing, for GPUs of a compute capability.

    Raises OSError where there is no NVRTC, and RuntimeError with what it says of the source.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)("--gpu-architecture=sm_{}{}".format(*capability).encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC: {log.rstrip(bytes(1)).decode(errors='replace')}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _library() -> ctypes.CDLL:
    """That of torch's version of CUDA. In wheels it is where only a library of torch's that needs it finds it."""
    name = f"libnvrtc.so.{str(torch.version.cuda).partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        return ctypes.CDLL(name)  # which is loaded now


def _read(size_of: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _check(get(program, found))
    return found.raw


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"NVRTC: error {code}")
