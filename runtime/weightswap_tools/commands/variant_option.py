"""`--variant`: what a call chooses beside the weights, as `run` and `generate` take it."""

from __future__ import annotations

from typing import Annotated

import typer

from weightswap_runtime.live.model import Model
from weightswap_runtime.messages import visible

VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="group=path: the variant of a group, as lora=customer-a, which PEFT has written; may be repeated.",
    ),
]


def add_variants(model: Model, options: list[str] | None) -> dict[str, str]:
    """The names of the variants that a call chooses, by group; they are resident then. Raises as `add_variant` does."""
    chosen: dict[str, str] = {}
    for option in options or ():
        group, equals, path = option.partition("=")
        if not equals or not group or not path:
            raise typer.BadParameter(f"--variant: {visible(option)} is not group=path")
        if group in chosen:
            raise typer.BadParameter(f"--variant: {visible(group)} is chosen twice")
        chosen[group] = path
    for group, path in chosen.items():
        model.add_variant(group, path, path)
    return chosen


def variant_ids(model: Model) -> dict[str, str]:
    """The weights ids of what `add_variants` has chosen, by group."""
    return {group: receipt.weights_id for group, names in model.variants.items() for receipt in names.values()}
