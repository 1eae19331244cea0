"""`weightswap serve`, and `weightswap sign` for weights that it may serve."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from weightswap_runtime.engines.choosing import ENGINES
from weightswap_runtime.engines.engine import AUTO
from weightswap_runtime.following.desired_store import known_weights
from weightswap_runtime.format.weight_set import SIGNATURE_SUFFIX
from weightswap_runtime.live.residency import ResidencyName
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.sources.writing import new_file
from weightswap_tools.terminal import (
    DeviceOption,
    EngineOption,
    OpLibraryOption,
    RequireSignatureOption,
    errors_as_exit,
    say,
)

if TYPE_CHECKING:
    from weightswap_server.serving import ModelSource, Server
    from weightswap_server.workers.manager import Workers


serve_command = typer.Typer(add_completion=False)
sign_command = typer.Typer(add_completion=False)
_PASSWORD = "WEIGHTSWAP_SIGNING_PASSWORD"
_NAME_AND_VALUE = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_MIB = 1 << 20


# the groups of `weightswap serve --help`, in their order
_PANELS = {
    "Models": (
        "engine",
        "device",
        "residency",
        "threads",
        "op_library",
        "variant",
        "max_variants",
        "max_hash_trees_mb",
    ),
    "Weights": ("weights", "watch", "follow", "receive", "keep", "interval"),
    "Listening": ("host", "port", "grpc_port", "max_connections", "workers", "worker_timeout", "grace"),
    "Batching": ("max_batch", "max_delay_ms", "batch_dim"),
    "Limits of requests": (
        *("max_queue", "max_body_mb", "max_bodies_mb", "body_timeout", "timeout", "max_streams", "stream_timeout"),
    ),
    "Operators and security": (
        *("admin_port", "admin_socket", "admin_host", "admin_token_file", "admin_allow", "upload_dir"),
        *("max_uploads_gb", "upload_keep", "staged_timeout", "require_signature"),
    ),
    "Observability": ("traces", "audit_log"),
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}


class _InPanels(TyperCommand):
    """A command whose options are shown in groups."""

    def get_params(self, ctx: Any) -> list[Any]:
        order = list(_PANEL_OF)
        params = sorted(
            super().get_params(ctx), key=lambda param: order.index(param.name) if param.name in order else -1
        )
        for param in params:
            if isinstance(param, TyperOption):
                param.rich_help_panel = _PANEL_OF.get(str(param.name))
        return params


@serve_command.command(cls=_InPanels)
def serve(
    artifacts: Annotated[list[str], typer.Argument(metavar="[NAME=]ARTIFACT...", help="Folders or URLs of artifacts.")],
    weights: Annotated[
        list[str] | None, typer.Option("--weights", "-w", help="The first weights to serve, as for swap.")
    ] = None,
    watch: Annotated[
        list[str] | None, typer.Option(help="Swap in each new weight file of this directory or URL.")
    ] = None,
    follow: Annotated[
        list[str] | None, typer.Option(help="Serve what the desired.json in this directory or URL names.")
    ] = None,
    receive: Annotated[
        list[str] | None,
        typer.Option(help="unix:PATH: serve what a Sender of this machine's same user sends to this socket."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="For weights that are sent: keep the last three sets that were served in this directory; a restart "
            "begins with the last."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="group=PATH or group/name=PATH: a variant that requests may choose, such as a directory that PEFT "
            "wrote; may be repeated."
        ),
    ] = None,
    max_variants: Annotated[
        int, typer.Option(help="Maximum resident variants of a group; the least recently used one is evicted.")
    ] = 16,
    max_hash_trees_mb: Annotated[
        int | None,
        typer.Option(
            help="Maximum memory of a model for the digests of tables of which rows change, in MiB; by default a "
            "sixteenth of these tables."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between polls of --watch and --follow.")] = 5.0,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The HTTP port; 0 picks a free one.")] = 8000,
    grpc_port: Annotated[int | None, typer.Option(help="The gRPC port; without it, gRPC is off.")] = None,
    max_batch: Annotated[int, typer.Option(help="Maximum rows of several requests to batch into one call.")] = 1,
    max_delay_ms: Annotated[float, typer.Option(help="Wait this long to fill a batch; 0 takes what is queued.")] = 0.0,
    batch_dim: Annotated[str, typer.Option(help="The name of the batch dimension.")] = "batch",
    max_queue: Annotated[int, typer.Option(help="Maximum waiting requests of a model; others get 503.")] = 256,
    max_body_mb: Annotated[int, typer.Option(help="Maximum size of a request body, in MiB.")] = 64,
    max_bodies_mb: Annotated[int, typer.Option(help="Maximum size of all request bodies in flight, in MiB.")] = 1024,
    body_timeout: Annotated[float, typer.Option(help="Seconds within which a request's bytes must arrive.")] = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds within which a request must be answered.")] = 60.0,
    max_connections: Annotated[int, typer.Option(help="Maximum concurrent connections.")] = 1024,
    max_streams: Annotated[int, typer.Option(help="Maximum concurrent generations, each with its own context.")] = 16,
    stream_timeout: Annotated[float, typer.Option(help="Maximum seconds of a generation.")] = 300.0,
    grace: Annotated[float, typer.Option(help="Seconds that accepted requests get to finish on shutdown.")] = 30.0,
    traces: Annotated[
        bool, typer.Option("--traces", help="Export OpenTelemetry spans as the environment variables OTEL_* configure.")
    ] = False,
    admin_port: Annotated[
        int | None, typer.Option(help="The port of the admin plane, which requires a token; 0 picks a free one.")
    ] = None,
    admin_socket: Annotated[
        str | None, typer.Option(help="Create this Unix socket for the admin plane, instead of a port.")
    ] = None,
    admin_host: Annotated[str, typer.Option(help="The address of the admin port.")] = "127.0.0.1",
    admin_token_file: Annotated[
        str | None, typer.Option(help="A file with a token or lines of NAME TOKEN; by default $WEIGHTSWAP_ADMIN_TOKEN.")
    ] = None,
    admin_allow: Annotated[
        list[str] | None,
        typer.Option(help="A directory, or a prefix of URLs, that operators may load from; may be repeated."),
    ] = None,
    upload_dir: Annotated[str | None, typer.Option(help="Accept uploads from operators into this directory.")] = None,
    max_uploads_gb: Annotated[float, typer.Option(help="Maximum size of all uploads together, in GiB.")] = 64.0,
    upload_keep: Annotated[
        int | None,
        typer.Option(
            help="After each change by operators, remove uploads that were served before this many earlier weights; "
            "without it, none."
        ),
    ] = None,
    staged_timeout: Annotated[float, typer.Option(help="Seconds after which staged weights are discarded.")] = 3600.0,
    audit_log: Annotated[
        str | None, typer.Option(help="Append changes by operators, and calls without a token, to this file as JSON.")
    ] = None,
    require_signature: RequireSignatureOption = None,
    workers: Annotated[
        int | None, typer.Option(help="The number of worker processes, which share one copy of the weights.")
    ] = None,
    worker_timeout: Annotated[
        float, typer.Option(help="Seconds after which a worker process that hangs is replaced; 0 for never.")
    ] = 30.0,
    threads: Annotated[
        int | None, typer.Option(help="Threads of one call; by default one per core, divided among the workers.")
    ] = None,
    engine: EngineOption = "torch",
    device: DeviceOption = HOST,
    residency: Annotated[ResidencyName, typer.Option(help="How many sets of weights are in memory.")] = "double",
    op_library: OpLibraryOption = None,
) -> None:
    """Serve models with the Open Inference Protocol until SIGTERM or Ctrl-C; accepted requests are then finished.

    A model is named like its artifact's folder, or as given before `=`. Methods other than the default one are served
    as NAME.METHOD. Without --weights, a model is not ready until --watch or --follow has found weights, or --receive or
    an operator has got some. With several artifacts, --weights, --watch, --follow, --receive, --keep and --variant take
    NAME=VALUE.
    """
    with errors_as_exit(as_json=False):
        _limit_threads(threads, workers)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        from weightswap_server.admin.access import AdminSettings
        from weightswap_server.serving import ModelSource, Server, default_name, variants_of
        from weightswap_server.settings import Settings
        from weightswap_server.signed_weights import requires
        from weightswap_server.workers.manager import Workers

        settings = Settings(
            host=host,
            http_port=port,
            grpc_port=grpc_port,
            max_batch=max_batch,
            max_delay=max_delay_ms / 1000,
            batch_dim=batch_dim,
            max_queue=max_queue,
            max_body=max_body_mb * _MIB,
            max_bodies=max_bodies_mb * _MIB,
            body_timeout=body_timeout,
            timeout=timeout,
            max_connections=max_connections,
            max_streams=max_streams,
            stream_timeout=stream_timeout,
            grace=grace,
            traces=traces,
        )
        settings.check()
        if traces:
            from weightswap_server.service.traces import export_spans

            export_spans()
        admin = None
        if admin_port is not None or admin_socket is not None:
            admin = AdminSettings(
                host=admin_host,
                port=admin_port,
                socket=admin_socket,
                token_file=admin_token_file,
                allow=tuple(admin_allow or ()),
                upload_dir=upload_dir,
                max_uploads=int(max_uploads_gb * (1 << 30)),
                upload_keep=upload_keep,
                staged_timeout=staged_timeout,
                audit_log=audit_log,
            )
            admin.check()
        elif admin_token_file or admin_allow or upload_dir or upload_keep is not None or audit_log:
            raise typer.BadParameter("options for operators need --admin-port or --admin-socket")
        matches = [_NAME_AND_VALUE.fullmatch(artifact) for artifact in artifacts]
        paths = {
            match[1] if match else default_name(artifact): match[2] if match else artifact
            for match, artifact in zip(matches, artifacts, strict=True)
        }
        if len(paths) < len(artifacts):
            raise typer.BadParameter("two artifacts have the same name; give NAME=ARTIFACT")
        first, watched = _by_name("--weights", weights, paths), _by_name("--watch", watch, paths)
        followed, variants = _by_name("--follow", follow, paths), _all_by_name("--variant", variant, paths)
        received, kept = _by_name("--receive", receive, paths), _by_name("--keep", keep, paths)
        empty = sorted(paths.keys() - {*first, *watched, *followed, *received})
        if empty and admin is None:  # to which they may be sent
            raise typer.BadParameter(
                f"{', '.join(empty)}: no weights; give --weights, --watch, --follow, --receive or --admin-port"
            )
        takes_threads = engine != AUTO and ENGINES[engine].takes_threads  # else OpenMP sets them
        options: Mapping[str, Any] = {
            "engine": engine,
            "device": device,
            "residency": residency,
            "op_libraries": op_library or (),
            "max_variants": max_variants,
            "max_hash_trees": None if max_hash_trees_mb is None else max_hash_trees_mb << 20,
            "admit": requires(*require_signature) if require_signature else None,
            "threads": threads if takes_threads else None,
        }
        sources: dict[str, ModelSource] = {
            name: ModelSource(
                artifact=path,
                weights=first.get(name),
                watch=watched.get(name),
                follow=followed.get(name),
                receive=received.get(name),
                keep=kept.get(name),
                interval=interval,
                variants=variants_of(variants.get(name, ())),
                options=options,
            )
            for name, path in paths.items()
        }
        if workers is not None:
            _run_workers(
                Workers(sources, settings, workers, admin, require_signature or (), worker_timeout), list(sources)
            )
        else:
            _run(Server({name: source.open() for name, source in sources.items()}, settings, admin))


def _limit_threads(threads: int | None, workers: int | None) -> None:
    """Set the number of OpenMP threads in the environment, which child processes inherit."""
    if threads is not None and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif workers:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))


def _run(server: Server) -> None:
    server.on_listening(
        lambda: _print_addresses(server, server.service.names, server.admin.where if server.admin is not None else "")
    )
    gc.collect()
    gc.freeze()  # else each full collection scans torch's objects, for a tenth of a second
    server.run()


def _run_workers(workers: Workers, names: Iterable[str]) -> None:
    workers.on_listening(lambda: _print_addresses(workers, names, workers.admin_where))
    workers.run()


def _by_name(option: str, texts: list[str] | None, paths: Mapping[str, str]) -> dict[str, str]:
    values = _all_by_name(option, texts, paths)
    if (most := max(map(len, values.values()), default=0)) > 1:
        raise typer.BadParameter(f"{option}: given {most} times for the same artifact")
    return {name: value for name, (value,) in values.items()}


def _all_by_name(option: str, texts: list[str] | None, paths: Mapping[str, str]) -> dict[str, list[str]]:
    if len(paths) == 1:
        return {name: texts for name in paths if texts}
    values: dict[str, list[str]] = {}
    for text in texts or ():
        match = _NAME_AND_VALUE.fullmatch(text)
        if match is None or match[1] not in paths:
            raise typer.BadParameter(f"{option}: expected NAME=..., with NAME one of {', '.join(paths)}, got {text!r}")
        values.setdefault(match[1], []).append(match[2])
    return values


def _print_addresses(server: Server | Workers, names: Iterable[str], admin: str) -> None:
    say(f"http://{server.settings.host}:{server.http_port} serves {', '.join(names)}")
    if server.grpc_port:
        say(f"{server.settings.host}:{server.grpc_port} is for gRPC")
    if admin:
        say(f"{admin} is for operators")
    sys.stdout.flush()


@sign_command.command()
def sign(
    weights: Annotated[Path, typer.Argument(help="A weight file or a delta that weightswap packed.")],
    key: Annotated[str, typer.Option(help=f"An elliptic-curve private key (PEM); its password is ${_PASSWORD}.")],
) -> None:
    """Sign the weights id of a file for `weightswap serve --require-signature`; writes FILE.sig beside it.

    The data of the file is not read: servers compare it with the weights id.
    """
    with errors_as_exit(as_json=False):
        from weightswap_server.signed_weights import sign

        weights_id = known_weights(weights).weights_id
        signature = sign(weights_id, key, os.environ.get(_PASSWORD))
        out = weights.with_name(weights.name + SIGNATURE_SUFFIX)
        with new_file(out) as file:
            file.write(signature)
        say(f"signature   {out}")
        say(f"weights id  {weights_id}")
