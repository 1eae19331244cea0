"""`weightswap serve`: models behind the Open Inference Protocol, over HTTP and gRPC."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightswap_runtime.engines.choosing import ENGINES
from weightswap_runtime.engines.engine import AUTO
from weightswap_runtime.live.residency.residency import ResidencyName
from weightswap_runtime.memory.device_choice import HOST
from weightswap_tools.terminal import DeviceOption, EngineOption, OpLibraryOption, errors_as_exit, say

if TYPE_CHECKING:
    from weightswap_server.serving import ModelSource, Server
    from weightswap_server.workers.manager import Workers

serve_command = typer.Typer(add_completion=False)
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_MIB = 1 << 20


@serve_command.command()
def serve(
    artifacts: Annotated[
        list[str], typer.Argument(metavar="[NAME=]ARTIFACT...", help="Folders of artifacts, or their URLs.")
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", "-w", help="What is served first, as for swap; of several artifacts NAME=FILE."),
    ] = None,
    watch: Annotated[
        list[str] | None,
        typer.Option(help="Swap in each new weight file of this directory or URL; of several artifacts NAME=DIR."),
    ] = None,
    follow: Annotated[
        list[str] | None,
        typer.Option(help="Serve what a desired.json in this directory or URL says; of several artifacts NAME=DIR."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="group=PATH or group/name=PATH: what requests may choose, as a directory of PEFT's; may be repeated. "
            "Of several artifacts NAME=group=PATH."
        ),
    ] = None,
    max_variants: Annotated[
        int, typer.Option(help="Variants of a group at once; the least recently used one goes for another.")
    ] = 16,
    interval: Annotated[float, typer.Option(help="Seconds between two looks at what is watched or followed.")] = 5.0,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="For HTTP; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[int | None, typer.Option(help="For gRPC, which is off without it.")] = None,
    max_batch: Annotated[int, typer.Option(help="Answer up to so many rows of several requests by one call.")] = 1,
    max_delay_ms: Annotated[float, typer.Option(help="Wait so long for more; 0 takes what is queued.")] = 0.0,
    batch_dim: Annotated[str, typer.Option(help="The dimension that is the batch.")] = "batch",
    max_queue: Annotated[int, typer.Option(help="Requests that may wait for a model; others get 503.")] = 256,
    max_body_mb: Annotated[int, typer.Option(help="Bytes of a request, in 2^20.")] = 64,
    max_bodies_mb: Annotated[int, typer.Option(help="Bytes of all requests under way, in 2^20.")] = 1024,
    body_timeout: Annotated[float, typer.Option(help="Seconds for the bytes of a request to come.")] = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds from a request to its answer.")] = 60.0,
    max_connections: Annotated[int, typer.Option(help="Connections at once.")] = 1024,
    max_streams: Annotated[int, typer.Option(help="Generations at once, each with a context.")] = 16,
    stream_timeout: Annotated[float, typer.Option(help="Seconds for which a generation may go on.")] = 300.0,
    grace: Annotated[float, typer.Option(help="Seconds in which a stop finishes what was accepted.")] = 30.0,
    traces: Annotated[
        bool, typer.Option("--traces", help="Send spans by OpenTelemetry, where its variables OTEL_* say.")
    ] = False,
    admin_port: Annotated[
        int | None, typer.Option(help="Listen to operators there, who need a token; 0 takes a free port.")
    ] = None,
    admin_socket: Annotated[
        str | None, typer.Option(help="Listen to operators at this Unix socket instead, which is made.")
    ] = None,
    admin_host: Annotated[str, typer.Option(help="The address of --admin-port.")] = "127.0.0.1",
    admin_token_file: Annotated[
        str | None,
        typer.Option(help="A token, or lines of NAME TOKEN. Without it, WEIGHTSWAP_ADMIN_TOKEN is one."),
    ] = None,
    admin_allow: Annotated[
        list[str] | None,
        typer.Option(help="A directory, or the beginning of URLs, that operators may name; may be repeated."),
    ] = None,
    upload_dir: Annotated[str | None, typer.Option(help="Take uploads of operators, into this directory.")] = None,
    max_uploads_gb: Annotated[float, typer.Option(help="What all uploads may take together, in 2^30 bytes.")] = 64.0,
    staged_timeout: Annotated[float, typer.Option(help="Seconds after which what is staged is given up.")] = 3600.0,
    audit_log: Annotated[str | None, typer.Option(help="Append a line of JSON for each call of operators.")] = None,
    require_signature: Annotated[
        list[str] | None,
        typer.Option(help="A public key (PEM): serve only weights that it has signed (weightswap sign); repeatable."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Serve from so many processes, which share one copy of the weights.")
    ] = None,
    worker_timeout: Annotated[
        float, typer.Option(help="Seconds after which a process of --workers that hangs is replaced; 0: never.")
    ] = 30.0,
    threads: Annotated[
        int | None, typer.Option(help="Of one call; by default one for each core, which workers share out.")
    ] = None,
    engine: EngineOption = "torch",
    device: DeviceOption = HOST,
    residency: Annotated[ResidencyName, typer.Option(help="How many sets of weights are held.")] = "double",
    op_library: OpLibraryOption = None,
) -> None:
    """Serve models by the Open Inference Protocol, until SIGTERM or Ctrl-C, which finish what was accepted.

    A model has the name of its artifact's folder, or the one before `=`; a method that is not the default one is
    NAME.METHOD. Without --weights it is not ready until --watch or --follow has found some.
    """
    with errors_as_exit(as_json=False):
        _limit_threads(threads, workers)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        from weightswap_server.admin.settings import AdminSettings
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
                staged_timeout=staged_timeout,
                audit_log=audit_log,
            )
            admin.check()
        elif admin_token_file or admin_allow or upload_dir or audit_log:
            raise typer.BadParameter("there are no operators without --admin-port or --admin-socket")
        named = [_NAMED.fullmatch(each) for each in artifacts]
        paths = {
            match[1] if match else default_name(each): match[2] if match else each
            for match, each in zip(named, artifacts, strict=True)
        }
        if len(paths) < len(artifacts):
            raise typer.BadParameter("two artifacts have one name; say NAME=ARTIFACT")
        first, watched = _by_name("--weights", weights, paths), _by_name("--watch", watch, paths)
        followed, chosen = _by_name("--follow", follow, paths), _all_by_name("--variant", variant, paths)
        if idle := sorted(paths.keys() - {*first, *watched, *followed}):
            raise typer.BadParameter(f"{', '.join(idle)}: where are the weights? Say --weights, --watch or --follow")
        takes_threads = engine != AUTO and ENGINES[engine].takes_threads  # else they are OpenMP's business
        options: Mapping[str, Any] = {
            "engine": engine,
            "device": device,
            "residency": residency,
            "op_libraries": op_library or (),
            "max_variants": max_variants,
            "admit": requires(*require_signature) if require_signature else None,
            "threads": threads if takes_threads else None,
        }
        sources: dict[str, ModelSource] = {
            name: ModelSource(
                artifact=path,
                weights=first.get(name),
                watch=watched.get(name),
                follow=followed.get(name),
                interval=interval,
                variants=variants_of(chosen.get(name, ())),
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
    """How many threads a call has, also of threads that are not yet there. Children inherit it."""
    if threads is not None and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    elif workers:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))


def _run(server: Server) -> None:
    server.on_listening(
        lambda: _say_where(server, server.service.names, server.admin.where if server.admin is not None else "")
    )
    gc.collect()
    gc.freeze()  # else each full collection looks at all that torch is made of, for a tenth of a second
    server.run()


def _run_workers(workers: Workers, names: Iterable[str]) -> None:
    workers.on_listening(lambda: _say_where(workers, names, workers.admin_where))
    workers.run()


def _by_name(option: str, given: list[str] | None, paths: Mapping[str, str]) -> dict[str, str]:
    found = _all_by_name(option, given, paths)
    if (most := max(map(len, found.values()), default=0)) > 1:
        raise typer.BadParameter(f"{option}: given {most} times, for one artifact")
    return {name: value for name, (value,) in found.items()}


def _all_by_name(option: str, given: list[str] | None, paths: Mapping[str, str]) -> dict[str, list[str]]:
    if len(paths) == 1:
        return {name: given for name in paths if given}
    values: dict[str, list[str]] = {}
    for each in given or ():
        match = _NAMED.fullmatch(each)
        if match is None or match[1] not in paths:
            raise typer.BadParameter(f"{option}: expected NAME=... with one of {', '.join(paths)}, got {each!r}")
        values.setdefault(match[1], []).append(match[2])
    return values


def _say_where(server: Server | Workers, names: Iterable[str], admin: str) -> None:
    say(f"http://{server.settings.host}:{server.http_port} serves {', '.join(names)}")
    if server.grpc_port:
        say(f"{server.settings.host}:{server.grpc_port} is gRPC's")
    if admin:
        say(f"{admin} is for operators")
    sys.stdout.flush()
