"""`weightswap delta`: what changes from one weight file to another, as a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from weightswap_runtime.format.delta_writing import write_delta
from weightswap_runtime.messages import plural
from weightswap_tools.terminal import (
    JsonOption,
    LabelOption,
    errors_as_exit,
    human_bytes,
    parse_labels,
    print_json,
    progress_bar,
    say,
)

delta_command = typer.Typer(add_completion=False)


@delta_command.command()
def delta(
    base: Annotated[str, typer.Argument(help="The weight file that servers have, or its URL.")],
    new: Annotated[str, typer.Argument(help="The weight file that they are to get, or its URL.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The delta file; a file there is replaced.")],
    label: LabelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what changes from one weight file to another, for servers that have the first.

    Both are files that weightswap packed. A server swaps the delta in as it does a weight file; the cost follows the
    bytes that changed, and the result is proven to be the second file's weights.
    """
    labels = parse_labels(label)
    with errors_as_exit(as_json):
        with progress_bar("comparing") as progress:
            written = write_delta(base, new, out, labels=labels, progress=progress)
        if as_json:
            print_json(written)
            return
        share = 100 * written.nbytes / max(1, written.total_bytes)
        say(f"delta file  {written.path}")
        say(f"from        {written.base}")
        say(f"to          {written.weights_id}")
        say(f"changes     {human_bytes(written.nbytes)} of {human_bytes(written.total_bytes)} ({share:.2f} %)")
        say(f"in          {plural(len(written.changed), 'tensor')}")
