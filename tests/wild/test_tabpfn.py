"""TabPFN's architecture: what stops its export, and that it is served once that is out of the way."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import CaptureError, load

architecture: Any = pytest.importorskip("tabpfn.architectures.tabpfn_v2_6", reason="needs the extra wild")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Importing from:DeprecationWarning")]
SIZES = {
    "max_num_classes": 4,
    "num_buckets": 100,
    "emsize": 24,
    "nlayers": 2,
    "nhead": 2,
    "num_thinking_rows": 4,
    "encoder_mlp_hidden_dim": 16,
}
ROWS, NEW, FEATURES, CLASSES = 9, 4, 5, 4


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training rows, their classes, and new rows."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS + NEW, 1, FEATURES, generator=random)
    y = torch.randint(CLASSES, (ROWS, 1), generator=random).float()
    return x[:ROWS], y, x[ROWS:]


def built() -> Any:
    config, _ = architecture.parse_config(SIZES)
    torch.manual_seed(0)
    return architecture.get_architecture(config).eval()


class Fitted(nn.Module):
    """TabPFN with the cache that its fit gives as buffers; called once, as its first call looks for NaN."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        x, y, _ = data(0)
        with torch.no_grad():
            _, cache = model(x, y, return_kv_cache=True)
        self.model, self.like = model, cache
        for name, value in tensors(cache).items():
            self.register_buffer(name, torch.zeros_like(value))

    def fit(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _, cache = self.model(x, y, return_kv_cache=True)
        found = tensors(cache)
        for name, value in found.items():
            getattr(self, name).copy_(value)
        return found["test_y"] + 0

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        like = self.like
        cache = type(like)(
            kv={
                layer: type(entry)(getattr(self, f"key_{layer}"), getattr(self, f"value_{layer}"), None)
                for layer, entry in like.kv.items()
            },
            scaler_cache={name: getattr(self, f"scaler_{name}") for name in like.scaler_cache},
            feature_state={name: getattr(self, f"feature_{name}") for name in like.feature_state},
            test_y_embedding=self.test_y,
            train_shape=like.train_shape,
        )
        scores: torch.Tensor = self.model(x, None, kv_cache=cache, x_is_test_only=True)
        return scores


def tensors(cache: Any) -> dict[str, torch.Tensor]:
    found = {f"key_{layer}": entry.key for layer, entry in cache.kv.items()}
    found |= {f"value_{layer}": entry.value for layer, entry in cache.kv.items()}
    found |= {f"scaler_{name}": value for name, value in cache.scaler_cache.items()}
    found |= {f"feature_{name}": value for name, value in cache.feature_state.items()}
    return found | {"test_y": cache.test_y_embedding}


def leave_targets_unchecked(model: Any, _: pytest.MonkeyPatch) -> None:
    model.task_type = "export"


def keep_all_columns(_: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(architecture, "select_features", lambda x, _: x)


def draw_embeddings_once(model: Any, _: pytest.MonkeyPatch) -> None:
    groups, width = -(-FEATURES // 3), SIZES["emsize"] // 4
    random = torch.Generator().manual_seed(42)
    model.register_buffer("column_embeddings", torch.randn((groups, width), generator=random))

    def add(self: Any, x: torch.Tensor) -> torch.Tensor:
        x += self.feature_positional_embedding_embeddings(self.column_embeddings)[None, None]
        return x

    model._add_column_embeddings = types.MethodType(add, model)


OBSTACLES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    r"data-dependent expression[\s\S]*tabpfn_v2_6.py": leave_targets_unchecked,
    r"data-dependent expression[\s\S]*select_features": keep_all_columns,
    "draws random numbers from a torch.Generator": draw_embeddings_once,
}


def specs() -> dict[str, MethodSpec]:
    x, y, new = data(0)
    return {"fit": MethodSpec("fit", (x, y)), "predict": MethodSpec("predict", (new,))}


@torch.no_grad()
def test_the_architecture_is_served_once_what_stops_it_is_out_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, wrapped = built(), Fitted(built())
    for reason, mend in OBSTACLES.items():
        with pytest.raises(CaptureError, match=reason):
            export(wrapped, methods=specs(), out=tmp_path / "a.artifact")
        mend(wrapped.model, monkeypatch)
    artifact = export(wrapped, methods=specs(), out=tmp_path / "a.artifact")
    weights = pack(wrapped, artifact, out=tmp_path / "v.safetensors").path
    model, again = load(artifact, weights), load(artifact, weights)
    for seed in range(3):
        x, y, new = data(seed)
        expected = plain(torch.cat([x, new]), y)  # all at once, as TabPFN was trained
        with model.new_context() as context:
            model.fit(x, y, context=context)
            found = model.predict(new, context=context)
            context.save(tmp_path / "fit.safetensors")
        torch.testing.assert_close(found, expected)
        wrapped.fit(x, y)
        assert torch.equal(found, wrapped.predict(new))
        with again.load_context(tmp_path / "fit.safetensors") as context:
            assert torch.equal(again.predict(new, context=context), found)
