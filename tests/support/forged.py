"""Artifacts as an attacker could make them: altered, with matching digests and ids."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from blake3 import blake3

from tests.support.graphs import Document
from weightswap_runtime.format.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest, with_graph_id


def replace_file(artifact: Path, name: str, raw: bytes) -> None:
    """Replace a file of an artifact, and make the manifest agree."""
    (artifact / name).write_bytes(raw)
    place = artifact / MANIFEST_NAME
    manifest: Manifest = decode_manifest(place.read_bytes(), str(place))
    files = manifest.files | {name: blake3(raw).hexdigest()}
    place.write_bytes(encode_manifest(with_graph_id(msgspec.structs.replace(manifest, files=files))))


def with_document(raw: bytes, change: Callable[[Document], object]) -> bytes:
    """Return a graph's archive with a changed document."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(written, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("/models/model.json"):
                document = json.loads(content)
                change(document)
                content = json.dumps(document).encode()
            target.writestr(name, content)
    return written.getvalue()
