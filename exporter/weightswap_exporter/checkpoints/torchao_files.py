"""Quantised weights in safetensors files of torchao, and of transformers with it: names and metadata.

Such a file has `layer.weight` as `layer._weight_qdata`, `layer._weight_scale`, ...; the file's metadata has its class
and all values that are no tensors as JSON, under `layer.weight` (torchao/prototype/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weightswap_exporter.models.parts import Kind
from weightswap_runtime.errors import CheckpointError

from .tensor import CheckpointTensor, PartOf

_NAMES = "tensor_names"


def named_as_parts(
    tensors: Mapping[str, CheckpointTensor], metadata: Mapping[str, str], where: str
) -> dict[str, CheckpointTensor]:
    """Return a file's tensors, with parts of a quantised one named `NAME.PART`. Raises CheckpointError."""
    renamed = dict(tensors)
    for name in metadata if _NAMES in metadata else ():
        for stored, part, kind in _parts(name, metadata[name], where):
            if stored not in tensors:
                continue
            if stored not in renamed or f"{name}.{part}" in renamed:
                raise CheckpointError(f"{where}: has {name}.{part} twice. Save it again.")
            renamed[f"{name}.{part}"] = renamed.pop(stored)._replace(part_of=PartOf(f".{part}", kind))
    return renamed


def _parts(name: str, text: str, where: str) -> list[tuple[str, str, Kind]]:
    """Return, for each part, its name in the file, its own name, and the kind of the whole."""
    if not text.startswith("{"):
        return []
    try:
        entry = json.loads(text)
        kind = _plain(entry)
        parts = [str(part) for part in entry.get("_tensor_data_names", ())]
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where}: the metadata of {name} is not torchao's ({error}). Save it again.") from error
    module, dot, leaf = name.rpartition(".")
    return [(f"{module}{dot}_{leaf}_{part}", part, kind) for part in parts]


def _plain(value: Any) -> Any:
    """Return a value in the form of `models.parts.kind_of`."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "_type" not in value:
        return {name: _plain(item) for name, item in value.items()}
    content = value.get("_data")
    return {"type": value["_type"]} | _plain(content) if isinstance(content, dict) else content
