"""Build side: it exports the topology before there are weights, then packs a weight file for each checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from network import DigitsNet
from torch.export import Dim

from weightswap_exporter import Packed, Parallel, export, pack, skeleton
from weightswap_runtime import Artifact


def export_topology(out: Path, parallel: Parallel | None = None) -> Artifact:
    """Export the network from a skeleton, which has shapes but no weights. parallel: for several ranks."""
    with skeleton():
        model = DigitsNet().eval()
    dims = {"images": {0: Dim("batch", max=256)}}
    return export(model, (torch.zeros(2, 1, 8, 8),), out=out, dynamic_shapes=dims, parallel=parallel)


def pack_checkpoint(checkpoint: Path, artifact: Artifact, out: Path, epoch: int) -> Packed:
    return pack(checkpoint, artifact, out=out, labels={"epoch": str(epoch)})


def deliver(source: Path, inbox: Path, number: int, name: str) -> None:
    """Copy a weight file into the server's inbox, where it appears whole."""
    temporary = inbox / f"{number:03d}.tmp"
    shutil.copyfile(source, temporary)
    temporary.replace(inbox / f"{number:03d}-{name}.safetensors")


def truncated_copy(source: Path, out: Path) -> Path:
    """Write a copy without the last 1000 bytes, like an interrupted transfer."""
    out.write_bytes(source.read_bytes()[:-1000])
    return out


def flipped_copy(source: Path, out: Path) -> Path:
    """Write a copy with one flipped bit in the middle of the data."""
    raw = bytearray(source.read_bytes())
    data_start = 8 + int.from_bytes(raw[:8], "little")
    raw[(data_start + len(raw)) // 2] ^= 0x40
    out.write_bytes(raw)
    return out


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
