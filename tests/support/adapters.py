"""Two base models and several PEFT adapters of a small network, and the eager model of each pair."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from weightswap_exporter import export
from weightswap_runtime import Artifact

X = torch.linspace(-1, 1, 12).reshape(2, 6)
BASES = 2
RANK = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.relu(self.first(x)))
        return output


def base(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def with_lora(model: nn.Module, **options: Any) -> Any:
    """Return a PEFT model over a network, by default with adapters of the graph's rank and a scale of 2."""
    from peft import LoraConfig, get_peft_model

    config = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["first", "second"]} | options
    return get_peft_model(model, LoraConfig(**config)).eval()  # type: ignore[arg-type]


def write_conversion(path: Path, seed: int, **options: Any) -> Path:
    """Let PEFT write an adapter with random matrices."""
    model = with_lora(base(0), **options)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(path)
    return path


class Adapters:
    """Artifact that declares LoRA as a variant, the weights of its bases, and directories of PEFT adapters."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.folder = folder
        self.artifact: Artifact = export(
            with_lora(base(0)), (X,), out=folder / "net.artifact", variants={"lora": "*lora_*"}
        )
        self.weights = [folder / f"base-{seed}.safetensors" for seed in range(BASES)]
        for seed, path in enumerate(self.weights):
            save_file(base(seed).state_dict(), path)
        self.paths = [write_conversion(folder / f"adapter-{seed}", 10 + seed) for seed in range(count)]

    @functools.cache  # noqa: B019
    def expected(self, seed: int, adapter: int | Path | None) -> torch.Tensor:
        """Return the output for X of the eager model of a base and an adapter."""
        from peft import PeftModel

        model: Any = base(seed)
        if adapter is not None:
            path = self.paths[adapter] if isinstance(adapter, int) else adapter
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = PeftModel.from_pretrained(model, str(path)).eval()
        with torch.no_grad():
            output: torch.Tensor = model(X)
        return output
