"""Small model whose weights torchao has quantised, in each way that runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(7))
BATCH = {"input": {0: torch.export.Dim("batch", max=64)}}


def floats(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def _float8_dynamic(model: nn.Module) -> None:
    """Quantise like `quantize_` on a GPU: it refuses CPUs, although torch's own kernels run there."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, PerRow
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    rows, torchs = PerRow(), KernelPreference.TORCH
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            quantised = Float8Tensor.from_hp(
                layer.weight.detach(),
                granularity=rows,
                mm_config=Float8MMConfig(use_fast_accum=False),
                act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=rows, kernel_preference=torchs),
                kernel_preference=torchs,
            )
            layer.weight = nn.Parameter(quantised, requires_grad=False)


def _by(config: str, **options: Any) -> Callable[[nn.Module], None]:
    """Return a function that quantises with one of torchao's configurations, given by its class name."""

    def quantise(model: nn.Module) -> None:
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, config)(**options))

    return quantise


def _int4(config: str, granularity: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        from torchao.quantization import PerGroup

        _by(config, weight_dtype=torch.int4, **{granularity: PerGroup(32)})(model)

    return quantise


def _packed_int4(model: nn.Module) -> None:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=32))


KINDS: dict[str, Callable[[nn.Module], None]] = {
    "int8": _by("Int8WeightOnlyConfig"),
    "int8 dynamic": _by("Int8DynamicActivationInt8WeightConfig"),
    "int4": _int4("IntxWeightOnlyConfig", "granularity"),
    "int4 dynamic": _int4("Int8DynamicActivationIntxWeightConfig", "weight_granularity"),
    "int4 packed for a CPU": _packed_int4,
    "float8": _by("Float8WeightOnlyConfig"),
    "float8 dynamic": _float8_dynamic,
}


def quantised(kind: str, seed: int = 0) -> nn.Module:
    model = floats(seed)
    KINDS[kind](model)
    return model
