"""`weightswap push`: send weights to a server that runs."""

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

from .swap import say_receipt

push_command = typer.Typer(add_completion=False)
TokenOption = Annotated[
    Path | None,
    typer.Option(help="A file with the server's token. Without it, WEIGHTSWAP_ADMIN_TOKEN is one.", dir_okay=False),
]
UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="The server's admin plane: http://HOST:PORT or unix:///PATH.")
]
ModelOption = Annotated[str | None, typer.Option(help="Of several models, which one.")]
WhyOption = Annotated[str, typer.Option(help="For the history and the audit log.")]
_LOOK = 0.3  # seconds between two looks at how far the server is


@push_command.command()
def push(
    url: UrlArgument,
    weights: Annotated[str, typer.Argument(help="A weight file or a delta; with --point what the server can read.")],
    model: ModelOption = None,
    token_file: TokenOption = None,
    point: Annotated[
        bool, typer.Option("--point", help="Send the path or URL alone; the server has to allow it.")
    ] = False,
    stage: Annotated[bool, typer.Option("--stage", help="Stage it, and let somebody commit or discard it.")] = False,
    why: WhyOption = "",
    revision: Annotated[
        int | None, typer.Option(help="The revision of the desired state that was seen; another one is refused.")
    ] = None,
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Take a file packed for another graph, if its tensors fit.")
    ] = False,
    allow_nonfinite: Annotated[
        list[str] | None, typer.Option(help="Let NaN and infinities into weights of this name; `*` is all.")
    ] = None,
    ignore: IgnoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send weights to a server, which stages, verifies and commits them, and print the receipt.

    The file is uploaded, with its goldens and its signature where they lie beside it; what is refused changes nothing,
    with status 1.
    """
    with errors_as_exit(as_json):
        client = AdminClient(url, read_token(token_file))
        name = model or only_model(client)
        asked: dict[str, Any] = {
            "why": why,
            "revision": revision,
            "allow_other_graph": allow_other_graph,
            "allow_nonfinite": allow_nonfinite or False,
            "ignore": ignore or [],
        }
        source = {"source": pointed(weights)} if point else uploaded(client, Path(weights))
        with _progress_shown(client, name):
            answer = client.post(f"/admin/models/{name}/{'stage' if stage else 'swap'}", asked | source)
        if as_json:
            print_json(answer)
        elif stage:
            say(f"staged      {answer['status']['staged']['weights_id']}")
        else:
            say_receipt(msgspec.convert(answer["receipt"], SwapReceipt))


def only_model(client: AdminClient) -> str:
    """The name of the server's model. Raises Unsupported where there are several."""
    names = [str(each["name"]) for each in client.get("/admin/status")["models"]]
    if len(names) != 1:
        raise Unsupported(f"{client.where}: serves {', '.join(names)}; say --model")
    return names[0]


def pointed(weights: str) -> str:
    """A path or URL as the server is given it."""
    return weights if is_url(weights) else os.path.abspath(weights)  # noqa: PTH100 - links are the server's business


def uploaded(client: AdminClient, path: Path) -> dict[str, Any]:
    """Upload a file and what lies beside it; what the server is asked to take, then."""
    where = printable(str(path))
    if not is_url(str(path)) and not path.exists():
        raise Unsupported(f"{where}: there is no such file")
    if not path.is_file() or path.suffix != SUFFIX:
        raise Unsupported(f"{where}: one weight file is uploaded; --point names what the server can read")
    with open_weights(path) as opened:
        stamp, delta = opened.stamp, delta_stamp(opened)
    digest = _digest(path)
    stem = f"{path.name.removesuffix(SUFFIX)[:100]}-{digest[:16]}"
    goldens = path.with_name(path.name.removesuffix(SUFFIX) + GOLDENS_SUFFIX)
    for beside, suffix in ((goldens, GOLDENS_SUFFIX), (path.with_name(path.name + ".sig"), f"{SUFFIX}.sig")):
        if beside.is_file():
            _upload(client, beside, stem + suffix, _digest(beside), replace=True)
    expect = {"expect": stamp.weights_id} if stamp and not delta else {}
    return {"source": _upload(client, path, stem + SUFFIX, digest), **expect}


def _upload(client: AdminClient, path: Path, name: str, digest: str, *, replace: bool = False) -> str:
    with progress_bar(f"Uploading {path.name}") as told:
        try:
            return str(client.upload(path, name, digest, told)["source"])
        except AdminRefused as error:
            if error.status != 409:
                raise
    if replace:
        client.delete(f"/admin/uploads/{name}")
        return _upload(client, path, name, digest)
    return f"upload:{name}"  # its name has the digest: it is there already


def _digest(path: Path) -> str:
    hashed = blake3(max_threads=blake3.AUTO)
    hashed.update_mmap(path)
    return hashed.hexdigest()


@contextmanager
def _progress_shown(client: AdminClient, model: str) -> Iterator[None]:
    """A block in which a line says how far the server is, on a terminal."""
    ended = threading.Event()
    with status_line(f"{model}: staging") as tell:

        def look() -> None:
            while not ended.wait(_LOOK):
                try:
                    staging = client.get(f"/admin/models/{model}")["staging"]
                except (AdminRefused, AdminUnreachable):
                    continue
                if staging:
                    done, total = human_bytes(staging["bytes_done"]), human_bytes(staging["bytes_total"])
                    tell(f"{model}: {staging['phase']} {done} of {total}")

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()
