"""Swaps on a GPU beside AOTInductor's own ways to take new weights. Compiling takes minutes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import safetensors.torch
import torch
from groups.cuda import check, opened, paths_of, settled
from report import Row, compared
from settings import Settings
from subjects import Stack, Stored, close, quiet, stored
from timing import in_turn


def rows(settings: Settings) -> Iterator[Row]:
    """Raises SystemExit if it cannot be measured here."""
    if not torch.cuda.is_available():
        raise SystemExit("scripts/bench constants needs a GPU, but torch finds none here")
    if lacks := _lacks():
        raise SystemExit(f"scripts/bench constants needs {lacks}")
    with stored(settings.megabytes * 1_000_000, pickling=False) as large:
        yield from _constants(large, "cuda", settings.rounds)


def _constants(stored: Stored, device: str, rounds: int) -> Iterator[Row]:
    """Measure AOTInductor's ways to take new weights: over the served ones, or beside them and exchanged."""
    model, paths, first = opened(stored, device), paths_of(stored), stored.versions[0]
    package = _compiled(stored, device)
    with quiet():
        loaded = torch._inductor.aoti_load_package(str(package))
    with ZipFile(package) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".so"))
        library = archive.extract(member, package.parent)
    runner = torch._C._aoti.AOTIModelContainerRunnerCuda(library, 1, device)
    names = {fqn: name for name, fqn in runner.get_constant_names_to_original_fqns().items()}
    tokens = stored.tokens.to(device)

    def load_constants() -> None:
        loaded.load_constants(safetensors.torch.load_file(first.path, device=device), check_full_update=True)

    def swap_constants() -> None:
        tensors = safetensors.torch.load_file(first.path, device=device)
        runner.update_constant_buffer({names[fqn]: tensor for fqn, tensor in tensors.items()}, True, True)
        runner.swap_constant_buffer()

    peers = {"AOTInductor, load_constants": load_constants, "AOTInductor, swap_constant_buffer": swap_constants}
    for (name, work), call in zip(peers.items(), (loaded, lambda x: runner.run([x])[0]), strict=True):
        work()
        close(call(tokens).cpu(), first.expected, name)
    measures = {"swap": lambda: settled(lambda: model.swap(next(paths)))}
    timings = in_turn(measures | {name: partial(settled, work) for name, work in peers.items()}, rounds)
    millis = {name: [second * 1e3 for second in values] for name, values in timings.items()}
    check(stored, model)
    for name in peers:
        yield compared(f"swap {stored.size}, double residency", "ms", millis["swap"], name, millis[name])


def _lacks() -> str | None:
    """Return what AOTInductor needs to compile and is missing here."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "a C++ compiler"
    try:
        from torch.utils.cpp_extension import CUDA_HOME
    except ImportError as error:
        return f"a module that torch imports ({error})"
    return None if CUDA_HOME else "the CUDA toolkit, with its folder in CUDA_HOME"


def _compiled(stored: Stored, device: str) -> Path:
    with torch.device(device), torch.no_grad():
        eager = Stack(stored.nbytes).eval()
    with quiet(), torch.no_grad():
        program = torch.export.export(eager, (stored.tokens.to(device),))
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(stored.pickled.with_name("compiled.pt2")),
            inductor_configs={
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.embed_kernel_binary": True,
            },
        )
    return Path(package)
