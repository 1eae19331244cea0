"""`weightswap export-onnx`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightswap_tools.terminal import JsonOption, errors_as_exit, human_bytes, print_json, say

export_onnx_command = typer.Typer(add_completion=False)


@export_onnx_command.command(name="export-onnx")
def export_onnx(
    artifact: Annotated[str, typer.Argument(help="An artifact's folder, or its URL.")],
    weights: Annotated[
        Path, typer.Argument(help="Weight file, or .safetensors files that hold every weight unchanged.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The .onnx file to write, in the folder of the weight file or above it.")
    ],
    method: Annotated[str | None, typer.Option(help="Method to write; by default forward, or the only one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a method as an ONNX model whose weights stay in a weight file, for tools that load ONNX files."""
    with errors_as_exit(as_json):
        from weightswap_exporter.engines.onnx_external import export_onnx as write

        path = write(artifact, weights, out=out, method=method)
        size = path.stat().st_size
        if as_json:
            print_json({"path": path, "bytes": size})
            return
        say(f"ONNX model  {path}, {human_bytes(size)}, with its weights in {weights}")
