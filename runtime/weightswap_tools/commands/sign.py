"""`weightswap sign`: sign weights for servers that require signatures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weightswap_runtime.desired.place import known_weights
from weightswap_runtime.format.weight_set import SIGNATURE_SUFFIX
from weightswap_runtime.sources.atomic import new_file
from weightswap_tools.terminal import errors_as_exit, say

sign_command = typer.Typer(add_completion=False)
PASSWORD = "WEIGHTSWAP_SIGNING_PASSWORD"


@sign_command.command()
def sign(
    weights: Annotated[Path, typer.Argument(help="A weight file or a delta that weightswap packed.")],
    key: Annotated[str, typer.Option(help=f"An elliptic-curve private key (PEM); its password is ${PASSWORD}.")],
) -> None:
    """Sign the weights id of a file for `weightswap serve --require-signature`; writes FILE.sig beside it.

    The data of the file is not read: servers compare it with the weights id.
    """
    with errors_as_exit(as_json=False):
        from weightswap_server.signed_weights import sign

        weights_id = known_weights(weights).weights_id
        signature = sign(weights_id, key, os.environ.get(PASSWORD))
        out = weights.with_name(weights.name + SIGNATURE_SUFFIX)
        with new_file(out) as file:
            file.write(signature)
        say(f"signature   {out}")
        say(f"weights id  {weights_id}")
