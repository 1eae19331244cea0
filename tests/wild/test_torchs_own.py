"""The models by which torch tests itself: the examples of torch.export, and every layer of torch.nn with its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.wild.survey import plain
from weightswap_exporter import export, pack
from weightswap_runtime import CaptureError, load

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
UNCAPTURED = {
    "FractionalMaxPool2d": "same dtype",
    "CTCLoss": "_ctc_loss",
    "GaussianNLLLoss": "data-dependent",
}
"""Layers that torch.export does not capture, and what it says."""
UNBUILT = ("Lazy", "FractionalMaxPool3d")  # no parameters yet; eager refuses torch's own inputs


@pytest.fixture(autouse=True)
def ordinary_path() -> Iterator[None]:
    """Without nn.TransformerEncoderLayer's fused path, which no export captures."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def test_examples_of_torch_export(tmp_path: Path) -> None:
    from torch._export.db.case import SupportLevel
    from torch._export.db.examples import all_examples  # takes seconds

    found = {
        name: outcome(case.model, case.example_args, case.example_kwargs, case.dynamic_shapes, tmp_path / name)
        for name, case in all_examples().items()
    }
    unsupported = {
        name for name, case in all_examples().items() if case.support_level is SupportLevel.NOT_SUPPORTED_YET
    }
    assert {name for name, what in found.items() if what} == unsupported
    assert all("torch.export cannot capture it" in found[name] for name in unsupported)
    assert len(found) > 30


def layers() -> Iterator[tuple[str, type[nn.Module], Any]]:
    """Each layer with the first two of torch's own inputs, and a name."""
    from torch.testing._internal.common_modules import module_db  # takes seconds

    for layer, info in {info.module_cls: info for info in module_db}.items():
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
        for number, given in enumerate(inputs[:2]):
            if given.forward_input is not None and not layer.__name__.startswith(UNBUILT):
                yield f"{layer.__name__}-{number}", layer, given


def test_layers_of_torch(tmp_path: Path) -> None:
    found = {}
    for name, layer, given in layers():
        torch.manual_seed(0)
        model = layer(*given.constructor_input.args, **given.constructor_input.kwargs).eval()
        found[name] = outcome(model, given.forward_input.args, given.forward_input.kwargs, None, tmp_path / name)
    expected = {name: UNCAPTURED.get(name.partition("-")[0], "") for name in found}
    wrong = {name: what for name, what in found.items() if expected[name] not in what or (what and not expected[name])}
    assert wrong == {}
    assert len(found) > 150


def outcome(model: nn.Module, args: Any, kwargs: Any, shapes: Any, folder: Path) -> str:
    """Nothing where all is equal, or else why the export was refused."""
    try:
        compare(model, args, kwargs, shapes, folder)
    except CaptureError as error:
        return str(error)
    return ""


def compare(model: nn.Module, args: Any, kwargs: Any, shapes: Any, folder: Path) -> None:
    """Outputs after a swap against eager's, bit for bit. Inputs are copied, as some models write to them."""
    folder.mkdir()
    export(model, copied(args), copied(kwargs) or None, out=folder / "a.artifact", dynamic_shapes=shapes)
    served = load(folder / "a.artifact", pack(model, folder / "a.artifact", out=folder / "v1.safetensors").path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
        served.swap(pack(model, folder / "a.artifact", out=folder / "v2.safetensors").path)
        torch.manual_seed(1)
        found = served(*copied(args), **copied(kwargs))
        torch.manual_seed(1)
        expected = plain(model(*copied(args), **copied(kwargs)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def copied(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)
