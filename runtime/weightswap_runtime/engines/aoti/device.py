"""The engine `aoti` on a GPU: machine code for its kind of GPU, run in the calling thread's current stream."""

from __future__ import annotations

from functools import cached_property

import torch

from weightswap_runtime.engines.engine import Bound
from weightswap_runtime.engines.torch.device import AcceleratedEngine
from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.memory.device.arena import DeviceArena

from .engine import AotiEngine
from .package import find_targets
from .targets import BESIDE_GPUS, gpu_target, machine_name, machine_targets


class AotiAcceleratedEngine(AotiEngine, AcceleratedEngine):
    """The packages of one artifact for this GPU. Staged weights are tried with the captured graphs.

    Machine code would load its kernels for each staging, and unload them in the commit, for which calls may wait.
    """

    def __init__(self, artifact: Artifact, device: str, *, prologue: bool = True, on_host: bool = False) -> None:
        """As for AcceleratedEngine."""
        super().__init__(artifact, device, prologue=prologue, on_host=on_host)
        self._artifact = artifact

    def bind(self, arena: Arena) -> Bound:
        """Bind machine code to arenas that serve calls, and the captured graphs to others."""
        if isinstance(arena, DeviceArena) and not arena.serves:
            return self._trial_engine.bind(arena)
        return super().bind(arena)

    @cached_property
    def _trial_engine(self) -> AcceleratedEngine:
        return AcceleratedEngine(self._artifact, str(self.device), prologue=False)

    def _targets(self, artifact: Artifact) -> dict[str, str]:
        return find_targets(artifact, target_of(self.device))


def target_of(device: torch.device) -> str:
    """Return the target of packages for a device. Raises Unsupported."""
    if device.type != "cuda" or torch.version.cuda is None:
        raise Unsupported(f"the engine 'aoti' runs on the CPU and on CUDA; {str(device)!r} is neither on this machine")
    if BESIDE_GPUS not in machine_targets():
        raise Unsupported(f"the engine 'aoti' on a GPU needs a {BESIDE_GPUS} host; this machine is {machine_name()}")
    return gpu_target(torch.cuda.get_device_capability(device))
