"""Models of timm, diffusers, torch_geometric, segmentation_models_pytorch and torchvision, in small configurations."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from tests.support.setups import equal
from tests.wild.survey import BROKEN, EQUAL, LARGE, REFUSED, TRACED, UNBUILT, Outcome, guarded_child, plain
from weightswap_exporter import export, pack, skeleton
from weightswap_runtime import CaptureError, OutOfMemory, Unsupported, load

_SMALL = ("test_", "femto", "pico", "atto", "nano", "micro", "tiny", "_xx", "small", "_s", "18", "b0")
_MOST_PARAMETERS = 100_000_000
_BATCH = 3  # of the sample, and 2 of the call


class Case(NamedTuple):
    """A model and its arguments for a batch of some size: by keyword in a mapping, else by position."""

    model: nn.Module
    arguments: Callable[[int], Mapping[str, torch.Tensor] | tuple[Any, ...]]
    batched: bool = True  # whether the first dimensions of all tensors are the batch
    shapes: Any = None  # dynamic_shapes where they are something else
    hollow: bool = False  # whether a skeleton shall give the same graph

    def call(self, values: Any) -> Any:
        return self.model(**values) if isinstance(values, Mapping) else self.model(*values)


def import_torchvision() -> None:
    """Import it without its operators, where they do not fit the build of torch: models need none of them."""
    for _ in range(20):
        try:
            import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"operator (torchvision::\S+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor boxes) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
        else:
            return


def cases() -> dict[str, Callable[[], Case]]:
    """The smallest model of every family, by library and name. Raises ImportError where a library is missing."""
    import_torchvision()
    import_module("torchao")  # once for all, and not in each child
    return _of_timm() | _of_torchvision() | _of_diffusers() | _of_geometric() | _of_segmentation()


def survey_case(build: Callable[[], Case], *, seconds: int) -> Outcome:
    """What becomes of a model in a child process; seconds: of its processor time."""
    return guarded_child(lambda: _outcome(build), seconds)


def some(found: Mapping[str, Callable[[], Case]], *, seed: int, seconds: float) -> None:
    """Print what becomes of as many as there is time for, in an order of the seed."""
    names = sorted(found)
    random.Random(seed).shuffle(names)
    end = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > end:
            break
        print(name, survey_case(found[name], seconds=60).what, sep="\t", flush=True)


def _outcome(build: Callable[[], Case]) -> Outcome:
    torch.manual_seed(0)
    try:
        case = build()
        case.model.eval()
        sample, values = case.arguments(_BATCH), case.arguments(2)
        with torch.no_grad():
            case.call(sample)
    except Exception as error:
        return Outcome(UNBUILT, reason=f"{type(error).__name__}: {error}")
    inputs = ", ".join(f"{name} {list(value.shape)}" for name, value in _tensors(values))
    batch = Dim("batch", max=64)
    shapes = case.shapes or (pytree.tree_map(lambda _: {0: batch}, sample) if case.batched else None)
    try:
        with TemporaryDirectory() as folder:
            if case.hollow and not _same_graph(case, build, sample, shapes, Path(folder)):
                return Outcome(BROKEN, inputs, "a skeleton gives another graph")
            return Outcome(_comparison(case, sample, values, shapes, Path(folder)), inputs)
    except (CaptureError, Unsupported) as error:
        return Outcome(REFUSED, inputs, str(error))
    except OutOfMemory as error:
        return Outcome(LARGE, inputs, str(error))


def _tensors(values: Any) -> list[tuple[str, torch.Tensor]]:
    found = pytree.tree_flatten_with_path(values)[0]
    names = [(pytree.keystr(path).replace("'", "").strip("[]").replace("][", "."), value) for path, value in found]
    return [(name.replace("]", ""), value) for name, value in names if isinstance(value, torch.Tensor)]


def _given(values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(values)) if isinstance(values, Mapping) else (values, {})


def _same_graph(case: Case, build: Callable[[], Case], sample: Any, shapes: Any, folder: Path) -> bool:
    with skeleton():
        hollow = build().model.eval()
    ids = [
        export(model, *_given(sample), out=folder / name, dynamic_shapes=shapes).graph_id
        for name, model in (("hollow", hollow), ("real", case.model))
    ]
    return ids[0] == ids[1]


def _comparison(case: Case, sample: Any, values: Any, shapes: Any, folder: Path) -> str:
    """How the outputs of swapped weights compare with eager's, or else with those of torch's own module."""
    artifact, model = folder / "a.artifact", case.model
    args, kwargs = _given(sample)
    export(model, args, kwargs, out=artifact, dynamic_shapes=shapes)
    served = load(artifact, pack(model, artifact, out=folder / "v1.safetensors").path)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1 + torch.rand_like(tensor) / 100)
        served.swap(pack(model, artifact, out=folder / "v2.safetensors").path)
        given = _given(values)
        found = served(*given[0], **given[1])
        if equal(found, _fields(plain(case.call(values)))):
            return EQUAL
        traced = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False).module()
        return TRACED if equal(found, _fields(plain(traced(*given[0], **given[1])))) else BROKEN


def _fields(value: Any) -> Any:
    """What a server gives in the place of torchrec's tensors."""
    if type(value).__module__.startswith("torchrec."):
        names = ("_values", "_weights", "_lengths", "_offsets")[: 1 if type(value).__name__ == "KeyedTensor" else 4]
        return {name: getattr(value, name) for name in names}
    return {key: _fields(item) for key, item in value.items()} if isinstance(value, dict) else value


def _image(name: str, channels: int, size: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda batch: {name: torch.randn(batch, channels, size, size)}


def _small(model: nn.Module) -> nn.Module:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    return model


def _of_timm() -> dict[str, Callable[[], Case]]:
    import timm

    def build(name: str) -> Callable[[], Case]:
        def case() -> Case:
            model = _small(timm.create_model(name, pretrained=False, num_classes=10))
            channels, size, _ = model.default_cfg["input_size"]
            return Case(model, _image("x", channels, size))

        return case

    def smallest(module: str) -> str | None:
        names = timm.list_models(module=module)
        return min(names, key=lambda name: (not any(part in name for part in _SMALL), len(name)), default=None)

    found = [name for module in timm.list_modules() if (name := smallest(module))]
    return {f"timm {name}": build(name) for name in found}


def _of_torchvision() -> dict[str, Callable[[], Case]]:
    import torchvision

    names = ["alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v2"]
    names += ["mobilenet_v3_small", "regnet_x_400mf", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t"]
    names += ["segmentation.lraspp_mobilenet_v3_large"]

    def build(name: str) -> Callable[[], Case]:
        folder, _, short = name.rpartition(".")
        home = getattr(torchvision.models, folder) if folder else torchvision.models
        key = "input" if folder else "x"
        more = {"weights_backbone": None} if folder else {}
        return lambda: Case(_small(getattr(home, short)(weights=None, num_classes=10, **more)), _image(key, 3, 64))

    return {f"torchvision {name}": build(name) for name in names}


def _of_diffusers() -> dict[str, Callable[[], Case]]:
    import diffusers

    blocks: dict[str, Any] = {
        "sample_size": 16,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    attention: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}

    def noisy(channels: int, size: int = 16, **more: Any) -> Callable[[int], dict[str, torch.Tensor]]:
        return lambda batch: (
            {
                "sample": torch.randn(batch, channels, size, size),
                "timestep": torch.arange(batch),
            }
            | {name: torch.randn(batch, *shape) for name, shape in more.items()}
        )

    def hidden(channels: int, **more: Any) -> Callable[[int], dict[str, torch.Tensor]]:
        return lambda batch: (
            {
                "hidden_states": torch.randn(batch, channels, 8, 8),
                "timestep": torch.arange(batch),
            }
            | {name: torch.randn(batch, *shape) for name, shape in more.items()}
        )

    unet = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    conditional = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
    }
    coder = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
    }
    return {
        "diffusers UNet2DModel": lambda: Case(diffusers.UNet2DModel(**blocks, **unet, attention_head_dim=4), noisy(3)),
        "diffusers UNet2DConditionModel": lambda: Case(
            diffusers.UNet2DConditionModel(**blocks, **conditional), noisy(4, encoder_hidden_states=(5, 8))
        ),
        "diffusers AutoencoderKL": lambda: Case(diffusers.AutoencoderKL(**blocks, **coder), _image("sample", 3, 16)),
        "diffusers VQModel": lambda: Case(
            diffusers.VQModel(**blocks, **coder, num_vq_embeddings=8), _image("sample", 3, 16)
        ),
        "diffusers AutoencoderTiny": lambda: Case(
            diffusers.AutoencoderTiny(
                encoder_block_out_channels=(8, 8),
                decoder_block_out_channels=(8, 8),
                num_encoder_blocks=(1, 1),
                num_decoder_blocks=(1, 1),
            ),
            _image("sample", 3, 16),
        ),
        "diffusers DiTTransformer2DModel": lambda: Case(
            diffusers.DiTTransformer2DModel(**attention, in_channels=4, sample_size=8, norm_num_groups=4),
            lambda batch: hidden(4)(batch) | {"class_labels": torch.arange(batch)},
        ),
        "diffusers SD3Transformer2DModel": lambda: Case(
            diffusers.SD3Transformer2DModel(
                **attention,
                sample_size=8,
                in_channels=4,
                joint_attention_dim=8,
                caption_projection_dim=16,
                pooled_projection_dim=8,
                out_channels=4,
                pos_embed_max_size=8,
            ),
            hidden(4, encoder_hidden_states=(5, 8), pooled_projections=(8,)),
        ),
        "diffusers Transformer2DModel": lambda: Case(
            diffusers.Transformer2DModel(**attention, in_channels=4, norm_num_groups=4, cross_attention_dim=8),
            lambda batch: {
                "hidden_states": torch.randn(batch, 4, 8, 8),
                "encoder_hidden_states": torch.randn(batch, 5, 8),
            },
        ),
    }


def _of_geometric() -> dict[str, Callable[[], Case]]:
    from torch_geometric.nn import GAT, GCN, GIN, EdgeCNN, GraphSAGE, HeteroConv, SAGEConv

    def graph(nodes: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(7, 8), "edge_index": torch.randint(7, (2, 12))}

    class Hetero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            edges = {("a", "to", "b"): SAGEConv((8, 8), 4), ("b", "to", "a"): SAGEConv((8, 8), 4)}
            self.conv = HeteroConv(edges)

        def forward(self, a: torch.Tensor, b: torch.Tensor, ab: torch.Tensor, ba: torch.Tensor) -> Any:
            return self.conv({"a": a, "b": b}, {("a", "to", "b"): ab, ("b", "to", "a"): ba})

    def mixed(nodes: int) -> dict[str, torch.Tensor]:
        return {
            "a": torch.randn(5, 8),
            "b": torch.randn(6, 8),
            "ab": torch.randint(5, (2, 9)),
            "ba": torch.randint(5, (2, 9)),
        }

    def build(kind: Any) -> Callable[[], Case]:
        return lambda: Case(kind(8, 16, num_layers=2, out_channels=4), graph, batched=False)

    plain_kinds = {f"torch_geometric {kind.__name__}": build(kind) for kind in (GCN, GraphSAGE, GIN, GAT, EdgeCNN)}
    return plain_kinds | {"torch_geometric HeteroConv": lambda: Case(Hetero(), mixed, batched=False)}


def _of_segmentation() -> dict[str, Callable[[], Case]]:
    import segmentation_models_pytorch as models

    def build(name: str) -> Callable[[], Case]:
        return lambda: Case(getattr(models, name)("resnet18", encoder_weights=None), _image("x", 3, 64))

    names = (
        "Unet",
        "UnetPlusPlus",
        "FPN",
        "PSPNet",
        "DeepLabV3",
        "DeepLabV3Plus",
        "Linknet",
        "MAnet",
        "PAN",
        "UPerNet",
    )
    return {f"segmentation_models_pytorch {name}": build(name) for name in (*names, "Segformer")}
