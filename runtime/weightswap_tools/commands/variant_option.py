"""The option `--variant` of `run` and `generate`: the variants of a call."""

from __future__ import annotations

from typing import Annotated

import typer

from weightswap_runtime.live.model import Model
from weightswap_runtime.messages import visible

VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="group=path: a variant to use, such as lora=customer-a, a directory that PEFT wrote; may be repeated.",
    ),
]


def add_variants(model: Model, options: list[str] | None) -> dict[str, str]:
    """Add the variants of the options to a model. Returns their names by group. Raises as `add_variant` does."""
    paths: dict[str, str] = {}
    for option in options or ():
        group, equals, path = option.partition("=")
        if not equals or not group or not path:
            raise typer.BadParameter(f"--variant: expected group=path, got {visible(option)}")
        if group in paths:
            raise typer.BadParameter(f"--variant: {visible(group)} is chosen more than once")
        paths[group] = path
    for group, path in paths.items():
        model.add_variant(group, path, path)
    return paths


def variant_ids(model: Model) -> dict[str, str]:
    """Return the weights ids of the variants that `add_variants` added, by group."""
    return {group: receipt.weights_id for group, names in model.variants.items() for receipt in names.values()}
