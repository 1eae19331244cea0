"""`weightswap push`: send weights to a running server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from blake3 import blake3

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.delta_file import delta_stamp
from weightswap_runtime.format.weight_set import GOLDENS_SUFFIX, SUFFIX, open_weights
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.sources.location import is_url, printable
from weightswap_tools.admin_client import AdminClient, AdminRefused, AdminUnreachable, read_token
from weightswap_tools.terminal import (
    IgnoreOption,
    JsonOption,
    errors_as_exit,
    human_bytes,
    print_json,
    progress_bar,
    say,
    status_line,
)

from .swap import print_receipt

push_command = typer.Typer(add_completion=False)
TokenOption = Annotated[
    Path | None,
    typer.Option(
        help="A file with the server's token; by default the token is $WEIGHTSWAP_ADMIN_TOKEN.", dir_okay=False
    ),
]
UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="The server's admin plane: http://HOST:PORT or unix:///PATH.")
]
ModelOption = Annotated[str | None, typer.Option(help="The model, if the server has several.")]
WhyOption = Annotated[str, typer.Option(help="The reason, for the history and the audit log.")]
_POLL_SECONDS = 0.3


@push_command.command()
def push(
    url: UrlArgument,
    weights: Annotated[str, typer.Argument(help="A weight file or a delta; with --point, what the server can read.")],
    model: ModelOption = None,
    token_file: TokenOption = None,
    point: Annotated[bool, typer.Option("--point", help="Send only the path or URL, if the server allows it.")] = False,
    stage: Annotated[bool, typer.Option("--stage", help="Stage only, to be committed or discarded later.")] = False,
    why: WhyOption = "",
    revision: Annotated[
        int | None, typer.Option(help="The revision of the desired state to replace; refused if outdated.")
    ] = None,
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Accept a file of another graph, if its tensors fit.")
    ] = False,
    allow_nonfinite: Annotated[
        list[str] | None, typer.Option(help="Allow NaN and infinities in weights of this name; `*` allows all.")
    ] = None,
    ignore: IgnoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send weights to a server, which stages, verifies and commits them, and print the receipt.

    The file is uploaded with the goldens and the signature beside it, if there are any. If the server refuses the
    weights, nothing changes and the exit status is 1.
    """
    with errors_as_exit(as_json):
        client = AdminClient(url, read_token(token_file))
        name = model or only_model(client)
        request: dict[str, Any] = {
            "why": why,
            "revision": revision,
            "allow_other_graph": allow_other_graph,
            "allow_nonfinite": allow_nonfinite or False,
            "ignore": ignore or [],
        }
        request |= {"source": source_of(weights)} if point else upload(client, weights)
        with _staging_progress(client, name):
            response = client.post(f"/admin/models/{name}/{'stage' if stage else 'swap'}", request)
        if as_json:
            print_json(response)
        elif stage:
            say(f"staged      {response['status']['staged']['weights_id']}")
        else:
            print_receipt(msgspec.convert(response["receipt"], SwapReceipt))


def only_model(client: AdminClient) -> str:
    """Return the name of the server's only model. Raises Unsupported if there are several."""
    names = [str(model["name"]) for model in client.get("/admin/status")["models"]]
    if len(names) != 1:
        raise Unsupported(f"{client.where}: serves {', '.join(names)}; give --model")
    return names[0]


def source_of(weights: str) -> str:
    """Return a path as an absolute one, and a URL unchanged."""
    return weights if is_url(weights) else os.path.abspath(weights)  # noqa: PTH100 - the server resolves links


def upload(client: AdminClient, weights: str) -> dict[str, Any]:
    """Upload a weight file with the goldens and the signature beside it. Returns the fields of a request for it."""
    where, path = printable(weights), Path(weights)
    if not is_url(weights) and not path.exists():
        raise Unsupported(f"{where}: no such file")
    if not path.is_file() or path.suffix != SUFFIX:
        raise Unsupported(f"{where}: only a weight file can be uploaded; use --point for what the server can read")
    with open_weights(path) as opened:
        stamp, delta = opened.stamp, delta_stamp(opened)
    digest = _digest(path)
    stem = f"{path.name.removesuffix(SUFFIX)[:100]}-{digest[:16]}"
    goldens = path.with_name(path.name.removesuffix(SUFFIX) + GOLDENS_SUFFIX)
    for sibling, suffix in ((goldens, GOLDENS_SUFFIX), (path.with_name(path.name + ".sig"), f"{SUFFIX}.sig")):
        if sibling.is_file():
            _upload_file(client, sibling, stem + suffix, _digest(sibling), replace=True)
    expect = {"expect": stamp.weights_id} if stamp and not delta else {}
    return {"source": _upload_file(client, path, stem + SUFFIX, digest), **expect}


def _upload_file(client: AdminClient, path: Path, name: str, digest: str, *, replace: bool = False) -> str:
    with progress_bar(f"Uploading {path.name}") as progress:
        try:
            return str(client.upload(path, name, digest, progress)["source"])
        except AdminRefused as error:
            if error.status != 409:
                raise
    if replace:
        client.delete(f"/admin/uploads/{name}")
        return _upload_file(client, path, name, digest)
    return f"upload:{name}"  # already uploaded, as the name contains the digest


def _digest(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


@contextmanager
def _staging_progress(client: AdminClient, model: str) -> Iterator[None]:
    """Show the server's staging progress on a terminal while the block runs."""
    ended = threading.Event()
    with status_line(f"{model}: staging") as update:

        def poll() -> None:
            while not ended.wait(_POLL_SECONDS):
                try:
                    staging = client.get(f"/admin/models/{model}")["staging"]
                except (AdminRefused, AdminUnreachable):
                    continue
                if staging:
                    done, total = human_bytes(staging["bytes_done"]), human_bytes(staging["bytes_total"])
                    update(f"{model}: {staging['phase']} {done} of {total}")

        poller = threading.Thread(target=poll, daemon=True)
        poller.start()
        try:
            yield
        finally:
            ended.set()
            poller.join()
