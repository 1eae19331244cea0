"""`weightswap delta`: a file with only the changes from one weight file to another."""

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
    base: Annotated[str, typer.Argument(help="The weight file that the servers have, or its URL.")],
    new: Annotated[str, typer.Argument(help="The weight file that they are to serve next, or its URL.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The delta file to write; an existing file is replaced.")],
    label: LabelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the changes from one weight file to another, for servers that have the first.

    Both must be packed by weightswap. A server swaps a delta in like a weight file: the cost grows with the bytes that
    changed, and the result is verified to be exactly the second file's weights.
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
