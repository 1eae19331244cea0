"""`weightswap push`, `canary` and `status`: operations on a running server, by its admin plane."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from blake3 import blake3

from weightswap_runtime.decoding import converted
from weightswap_runtime.errors import GraphMismatch, StageClosed, Unsupported, duration, percent
from weightswap_runtime.following.desired_state import SHOWN
from weightswap_runtime.format.delta import delta_stamp
from weightswap_runtime.format.weight_set import GOLDENS_SUFFIX, SIGNATURE_SUFFIX, SUFFIX, goldens_path, open_weights
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.sources.location import is_url, printable
from weightswap_runtime.transfer.admin_client import (
    AdminClient,
    AdminRefused,
    AdminUnreachable,
    pieces_of,
    read_token,
    size_of,
)
from weightswap_tools.terminal import (
    AllowNonfiniteOption,
    IgnoreOption,
    JsonOption,
    ModelOption,
    RevisionOption,
    TokenOption,
    errors_as_exit,
    human_bytes,
    parse_revision,
    print_json,
    print_table,
    progress_bar,
    say,
    status_line,
)

from .swap import print_receipt
from .weights import labels_text, time_text

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="The server's admin plane: http://HOST:PORT or unix:///PATH.")
]
WhyOption = Annotated[str, typer.Option(help="The reason, for the history and the audit log.")]
ShareOption = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="The share of requests that the canary answers, such as 0.2 for 20 %."),
]
ShadowOption = Annotated[bool, typer.Option("--shadow", help="Call it beside the served weights, and compare outputs.")]
PromoteIfOption = Annotated[str, typer.Option(help="A rule, such as `errors < 0.001 and p99_ratio < 1.1 for 5 min`.")]
AbortIfOption = Annotated[str | None, typer.Option(help="When to abort; by default on errors and NaN.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until it ends; exit with 1 unless it was promoted.")]
_POLL_SECONDS = 0.3
_SILENT = 3.0  # seconds without a heartbeat, which processes send each second
_MEASUREMENTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("requests", "requests", "{:.0f}".format),
    ("errors", "errors", percent),
    ("not finite", "nonfinite", percent),
    ("p50", "p50", duration),
    ("p99", "p99", duration),
    ("compared", "compared", "{:.0f}".format),
    ("differing", "differing", percent),
    ("largest difference", "max_abs", "{:.4g}".format),
    ("relative", "max_rel", percent),
)
push_command = typer.Typer(add_completion=False)
canary_command = typer.Typer(add_completion=False)
status_command = typer.Typer(add_completion=False)


@push_command.command()
def push(
    url: UrlArgument,
    weights: Annotated[str, typer.Argument(help="A weight file or a delta; with --point, what the server can read.")],
    model: ModelOption = None,
    token_file: TokenOption = None,
    point: Annotated[bool, typer.Option("--point", help="Send only the path or URL, if the server allows it.")] = False,
    stage: Annotated[bool, typer.Option("--stage", help="Stage only, to be committed or discarded later.")] = False,
    why: WhyOption = "",
    revision: RevisionOption = None,
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Accept a file of another graph, if its tensors fit.")
    ] = False,
    allow_nonfinite: AllowNonfiniteOption = None,
    ignore: IgnoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send weights to a server, which stages, verifies and commits them, and print the receipt.

    The file is uploaded with the goldens and the signature beside it, if there are any. A server without --upload-dir
    keeps no files, and stages what it gets as it arrives. If the server refuses the weights, nothing changes and the
    exit status is 1.
    """
    with errors_as_exit(as_json):
        client = AdminClient(url, read_token(token_file))
        name = model or only_model(client)
        request: dict[str, Any] = {
            "why": why,
            "revision": parse_revision(revision),
            "allow_other_graph": allow_other_graph,
            "allow_nonfinite": allow_nonfinite or False,
            "ignore": ignore or [],
        }
        what = "stage" if stage else "swap"
        if not point and not _keeps_uploads(client):
            response = _send(client, name, what, weights, request)
        else:
            request |= {"source": _source_of(weights)} if point else _upload(client, name, weights, allow_other_graph)
            with staging_progress(client, name):
                response = client.post(f"/admin/models/{name}/{what}", request)
        staged = _staged_id(response, request.get("expect")) if stage else None
        if stage and not as_json:
            say(f"staged      {staged}")
        else:
            print_change(response, as_json, commits=not stage)


def _staged_id(response: dict[str, Any], expected: str | None) -> str:
    """Return the weights id of what was just staged. Raises StageClosed if that is not staged any more.

    expected: its weights id, if it is known.
    """
    status = response["status"]
    staged = status["staged"] or {"ready": False}
    if not staged["ready"] or expected not in (None, staged["weights_id"]):
        raise StageClosed(
            f"{status['name']}: the weights were staged, and committed or discarded since, by others or by the desired "
            "store; look at the history, and stage them again if they are still wanted"
        )
    return str(staged["weights_id"])


def print_change(response: dict[str, Any], as_json: bool, *, commits: bool) -> None:
    """Print the server's answer to a change: its receipt, or else the status after it.

    commits: without a receipt, exit with 1, as the followed desired store wants weights that are not served yet.
    """
    receipt, status = response["receipt"], response["status"]
    if as_json:
        print_json(response)
    elif receipt is not None:
        print_receipt(converted(receipt, SwapReceipt))
    else:
        _print(status)
    if commits and receipt is None:
        say(f"not served yet: {status['name']} follows the desired store, which desires the weights", err=True)
        raise typer.Exit(1)


def only_model(client: AdminClient) -> str:
    """Return the name of the server's only model. Raises Unsupported if there are several."""
    names = [str(model["name"]) for model in client.get("/admin/status")["models"]]
    if len(names) != 1:
        raise Unsupported(f"{client.where}: serves {', '.join(names)}; give --model")
    return names[0]


def _source_of(weights: str) -> str:
    """Return a path as an absolute one, and a URL unchanged."""
    return weights if is_url(weights) else os.path.abspath(weights)  # noqa: PTH100 - the server resolves links


def _keeps_uploads(client: AdminClient) -> bool:
    """Return whether the server has a directory for uploads."""
    try:
        client.get("/admin/uploads")
    except AdminRefused as error:
        if error.status == 403:
            return False
        raise
    return True


def _send(client: AdminClient, model: str, what: str, weights: str, request: dict[str, Any]) -> Any:
    """Let the server stage or swap a weight file as it arrives, and return its answer. Raises as `_checked`."""
    path, expect = _checked(client, model, weights, request["allow_other_graph"])
    if (goldens := goldens_path(path)).is_file():
        raise Unsupported(
            f"{client.where}: keeps no uploads, so that it could not try {goldens.name}, which is beside the weights. "
            "Start it with --upload-dir, or move the goldens away to do without them"
        )
    with path.open("rb") as file, progress_bar(f"Sending {path.name}") as progress:
        return client.send(model, what, pieces_of(file, progress), size_of(file), request | expect)


def _upload(client: AdminClient, model: str, weights: str, allow_other_graph: bool = False) -> dict[str, Any]:
    """Upload a weight file with the goldens and the signature beside it. Returns the fields of a request for it.

    Raises what `_checked` raises, before the upload.
    """
    path, expect = _checked(client, model, weights, allow_other_graph)
    beside = {
        GOLDENS_SUFFIX: goldens_path(path),
        SUFFIX + SIGNATURE_SUFFIX: path.with_name(path.name + SIGNATURE_SUFFIX),
    }
    # the weights last: who finds them shall find their goldens, too
    files = {suffix: file for suffix, file in beside.items() if file.is_file()} | {SUFFIX: path}
    digests = {suffix: _digest(file) for suffix, file in files.items()}
    # of all files: a name that is there already has the same ones beside it
    stem = f"{path.name.removesuffix(SUFFIX)[:100]}-{blake3(''.join(digests.values()).encode()).hexdigest()[:16]}"
    for suffix, file in files.items():
        _upload_file(client, file, stem + suffix, digests[suffix])
    return {"source": f"upload:{stem}{SUFFIX}", **expect}


def _checked(client: AdminClient, model: str, weights: str, allow_other_graph: bool) -> tuple[Path, dict[str, str]]:
    """Return the path of a weight file, and the weights id to expect of it, if it is a full set that says so.

    Raises Unsupported for anything else, and GraphMismatch for a file of another graph, which the server would refuse.
    """
    where, path = printable(weights), Path(weights)
    if not is_url(weights) and not path.exists():
        raise Unsupported(f"{where}: no such file")
    if not path.is_file() or path.suffix != SUFFIX:
        raise Unsupported(f"{where}: only a weight file can be uploaded; use --point for what the server can read")
    with open_weights(path) as opened:
        stamp, delta = opened.stamp, delta_stamp(opened)
    packed_for, served = getattr(delta or stamp, "graph_id", ""), client.get(f"/admin/models/{model}")["graph_id"]
    if packed_for not in ("", served) and not allow_other_graph:
        raise GraphMismatch(
            f"{where}: packed for another graph, {packed_for[:SHOWN]}; {model} has {served[:SHOWN]}. Nothing was sent. "
            "Pack its checkpoint for this one. If both graphs compute their weights alike from checkpoints, "
            "`weightswap push --allow-other-graph` sends it as it is."
        )
    return path, {"expect": stamp.weights_id} if stamp and not delta else {}


def _upload_file(client: AdminClient, path: Path, name: str, digest: str) -> None:
    """Upload a file, unless it is there already."""
    with progress_bar(f"Uploading {path.name}") as progress:
        try:
            client.upload(path, name, digest, progress)
        except AdminRefused as error:
            if error.status != 409:
                raise


def _digest(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


@contextmanager
def staging_progress(client: AdminClient, model: str) -> Iterator[None]:
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


@canary_command.command()
def canary(
    url: UrlArgument,
    weights: Annotated[
        str | None, typer.Argument(help="Weights to upload and stage first, as for push; by default the staged ones.")
    ] = None,
    model: ModelOption = None,
    token_file: TokenOption = None,
    share: ShareOption = None,
    shadow: ShadowOption = False,
    tolerance: Annotated[float, typer.Option(help="Relative difference above which outputs differ.")] = 0.01,
    promote_if: PromoteIfOption = "",
    abort_if: AbortIfOption = None,
    promote: Annotated[bool, typer.Option("--promote", help="Commit it now.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Discard it now.")] = False,
    wait: WaitOption = False,
    point: Annotated[bool, typer.Option("--point", help="Send only the path or URL of WEIGHTS.")] = False,
    why: WhyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show a server's canary, start one (--share, --shadow), promote it or abort it.

    Without any of these options, the command shows the measurements. The canary always answers requests with the header
    `X-Weightswap-Canary: 1`, even if its share is 0.
    """
    if promote and abort:
        raise typer.BadParameter("--promote and --abort: give only one")
    starts = share is not None or shadow or weights is not None
    if (promote_if or abort_if is not None) and not starts:
        raise typer.BadParameter("--promote-if and --abort-if apply to a new canary: give --share or --shadow, too")
    with errors_as_exit(as_json):
        client = AdminClient(url, read_token(token_file))
        name = model or only_model(client)
        path, started, failure = f"/admin/models/{name}", None, ""
        before = client.get(f"{path}/history") if wait else {}
        if promote or abort:
            failure = _end(client, path, why, promote=promote, wait=wait)
        elif starts:
            request: dict[str, Any] = {"share": share or 0.0, "shadow": shadow, "tolerance": tolerance, "why": why}
            request |= {"promote_if": promote_if} | ({"abort_if": abort_if} if abort_if is not None else {})
            if weights is not None:
                request |= {"source": _source_of(weights)} if point else _of_canary(client, name, weights, why)
            started = client.post(f"{path}/canary", request)["canary"]
        if wait and not (promote or abort):
            failure = _wait_for_end(client, path, started, before)
        _show(client.get(path), as_json, has_ended=promote or wait)
        if failure:
            say(f"not promoted: {failure}", err=True)
            raise typer.Exit(1)


def _of_canary(client: AdminClient, model: str, weights: str, why: str) -> dict[str, Any]:
    """Upload a canary's weights, or let them be staged as they arrive. Returns the fields of the request for them."""
    if _keeps_uploads(client):
        return _upload(client, model, weights)
    staged = _send(client, model, "stage", weights, {"why": why, "allow_other_graph": False})
    return {"expect": _staged_id(staged, None)}


def _present(client: AdminClient, path: str, doing: str) -> str:
    """Return the weights id of the canary. Raises Unsupported if there is none."""
    now = client.get(path)
    if now["canary"] is None:
        raise Unsupported(f"{now['name']}: no canary to {doing}")
    return str(now["canary"]["weights_id"])


def _end(client: AdminClient, path: str, why: str, *, promote: bool, wait: bool) -> str:
    """Promote the canary, or abort it. Returns why it is not served, if it should be."""
    weights_id = _present(client, path, "promote" if promote else "abort")
    if not promote:
        client.post(f"{path}/discard", {"why": why})
        return "it was discarded" if wait else ""
    done = client.post(f"{path}/commit", {"why": why, "expect": weights_id})
    return "" if done["receipt"] else "the desired store desires it, but it is not served yet"


def _wait_for_end(client: AdminClient, path: str, started: str | None, before: dict[str, Any]) -> str:
    """Wait until the canary ends. Returns why its weights were not promoted; empty if they were.

    started: the weights id of a canary that was just started, and may have ended; by default that of the present one.
    before: the history when it was not yet started, or had not yet ended.
    """
    weights_id, now = started or _present(client, path, "wait for"), client.get(path)
    with status_line(f"{now['name']}: canary") as update:
        while now["canary"] is not None and now["canary"]["weights_id"] == weights_id:
            update(f"{now['name']}: canary, {now['canary']['values']['requests']:.0f} requests")
            time.sleep(_POLL_SECONDS)
            now = client.get(path)
    after, earlier = client.get(f"{path}/history"), {receipt["generation"] for receipt in before["receipts"]}
    served = [each["weights_id"] for each in after["receipts"] if each["generation"] not in earlier]
    if weights_id in (now["served"]["weights_id"], *served):  # others may be served since
        return ""
    reasons = [
        each["error"]
        for each in after["refusals"]
        if each["event"] == "canary aborted" and each not in before["refusals"]
    ]
    return str(reasons[-1]) if reasons else "it was discarded"


def _show(status: dict[str, Any], as_json: bool, *, has_ended: bool) -> None:
    """Print the served weights, and the canary; after its end, whose decision and which reason they are served by."""
    if as_json:
        print_json(status)
        return
    served = status["served"]
    say(f"serves      {served['weights_id']}")
    if has_ended:
        _print_since(served)
    if (trial := status["canary"]) is None:
        return
    say(f"canary      {trial['weights_id']}, {percent(trial['share'])}{' and shadow' if trial['shadow'] else ''}")
    if trial["promote_if"]:
        say(f"promote if  {trial['promote_if']} (held for {trial['promote_held']:.0f} s)")
    say(f"abort if    {trial['abort_if']}")
    print_measurements(trial["values"])


def print_measurements(values: Mapping[str, float | None]) -> None:
    """Print the measurements of the canary and of the served weights, which rules refer to."""
    rows = [
        [title, *("" if (value := values.get(side + name)) is None else text(value) for side in ("", "served_"))]
        for title, name, text in _MEASUREMENTS
    ]
    print_table("", ["", "canary", "served"], rows)


@status_command.command()
def status(url: UrlArgument, token_file: TokenOption = None, as_json: JsonOption = False) -> None:
    """Show what a server serves and since when, what is staged, and what it follows or watches."""
    with errors_as_exit(as_json):
        document = AdminClient(url, read_token(token_file)).get("/admin/status")
        if as_json:
            print_json(document)
            return
        for model in document["models"]:
            _print(model)
            if len(document["processes"]) > 1:
                _print_processes(document, model["name"])


def _print(model: dict[str, Any]) -> None:
    state = "ready" if model["ready"] else "unloaded" if not model["loaded"] else "not ready"
    say(f"model       {model['name']} ({state}, {model['engine']} on {model['device']})")
    if served := model["served"]:
        say(f"serves      {served['weights_id']}{labels_text(served['labels'])}")
        _print_since(served)
    else:
        say("serves      nothing yet")
    if staging := model["staging"]:
        done, total = human_bytes(staging["bytes_done"]), human_bytes(staging["bytes_total"])
        say(f"staging     {staging['phase']} {done} of {total}")
    if (staged := model["staged"]) and staged["ready"]:
        say(f"staged      {staged['weights_id']}{labels_text(staged['labels'])} by {staged['by']}")
    if following := model["following"]:
        say(f"follows     {following['desired_store']}, revision {following['revision']}{_agreement(following)}")
    if watching := model["watching"]:
        error = f": {_one_line(watching['error'])}" if watching["error"] else ""
        say(f"watches     {watching['directory']}{error}")


def _print_since(served: dict[str, Any]) -> None:
    by = f" by {served['by']}" if served["by"] else ""
    say(f"since       {time_text(served['since'])}{by}, generation {served['generation']}")
    if served["why"]:
        say(f"why         {_one_line(served['why'])}")


def _print_processes(server: dict[str, Any], model: str) -> None:
    for process in server["processes"]:
        serving = process["models"].get(model)
        serves = serving is not None and serving["weights_id"] is not None
        what = f"generation {serving['generation']}, {serving['weights_id'][:12]}" if serves else "nothing yet"
        answered = f", {process['answered']} answered" if process["role"] == "worker" else ""
        since = f"process {process['pid']} since {time_text(process['since'])}"
        silent = server["time"] - process["heard"] if process["heard"] > process["since"] else 0  # else it is starting
        state = f", SILENT for {silent:.0f} s" if silent > _SILENT else "" if process["ready"] else ", not ready"
        say(f"{process['name']:<12}{what}, {since}{answered}{state}")


def _agreement(following: dict[str, Any]) -> str:
    by = f" by {following['held_by']}" if following["held_by"] else ""
    why = f": {following['held_why']}" if following["held_why"] else ""
    hold, error = f", on hold{by}{why}" if following["on_hold"] else "", _one_line(following["error"])
    if not following["reachable"]:
        return f"{hold}, and CANNOT BE READ now: {error}"
    return hold + ("" if following["agrees"] else f", NOT served: {error or 'not yet'}")


def _one_line(error: str) -> str:
    return " ".join(error.split())
