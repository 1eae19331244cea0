"""One export of a Llama topology, in a process of its own because peak memory is per process. Prints JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weightswap_exporter import export, skeleton


def build(layers: int, width: int) -> LlamaForCausalLM:
    """Return a model in bfloat16 with grouped keys and values; 32 layers of width 4096 are 8.0 billion parameters."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_attention_heads=width // 128,
        num_key_value_heads=max(1, width // 512),
        vocab_size=128_256 if width >= 1024 else 1024,
        use_cache=False,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def inputs() -> dict[str, Any]:
    shape = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=8192)}
    return {"kwargs": {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}, "dynamic_shapes": {"input_ids": shape}}


def ours(layers: int, width: int, folder: Path) -> float:
    """Export from the class to the artifact."""
    start = time.perf_counter()
    with skeleton():
        model = build(layers, width)
    export(model, **inputs(), out=folder / "model.artifact")
    return time.perf_counter() - start


def bare(layers: int, width: int, _: Path) -> float:
    """Run `torch.export.export` on the same skeleton, and nothing else."""
    with skeleton():
        model = build(layers, width)
    start = time.perf_counter()
    torch.export.export(model, (), **inputs(), strict=False)
    return time.perf_counter() - start


def saved(layers: int, width: int, folder: Path) -> float:
    """Run `torch.export.save` on the model with real weights, whose creation is not timed."""
    with skeleton():
        model = build(layers, width)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.full(parameter.shape, 0.01, dtype=parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    start = time.perf_counter()
    program = torch.export.export(model, (), **inputs(), strict=False)
    torch.export.save(program, folder / "model.pt2")
    return time.perf_counter() - start


WAYS: dict[str, Callable[[int, int, Path], float]] = {"ours": ours, "bare": bare, "saved": saved}


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes, mapped files included."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Run one export. Arguments: the way, layers, width, and an output folder."""
    way, layers, width, place = sys.argv[1:]
    with TemporaryDirectory(prefix="weightswap-bench-", dir=place) as folder:
        seconds = WAYS[way](int(layers), int(width), Path(folder))
        written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    print(json.dumps({"seconds": seconds, "peak": peak_bytes(), "written": written}))


if __name__ == "__main__":
    main()
