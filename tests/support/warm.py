"""Interpreter that has imported slow packages, and forks itself for every program that it is asked to run.

`python()` returns a command that takes the arguments of `python -W error` (`-c CODE` or `-m MODULE`, and arguments; a
`-u` before them changes nothing). The program runs in the caller's folder and environment, with its input and outputs.
SIGINT and SIGTERM are passed on, and the program is killed with the command, whose process is another one. At the end
the program runs its exit handlers; with `-e` first, the interpreter is also finalised. Test processes share one
interpreter: see `share`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import ROOT

CLIENT = """#!{interpreter} -SE
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode()
    socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(asked)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = int(server.makefile().read() or 1)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


_SHARED = "WEIGHTSWAP_TESTS_WARM_PYTHON"


@cache
def python() -> str:
    """Return the command, and start its interpreter at the first call."""
    if shared := os.environ.get(_SHARED):
        return shared
    server, command = listen()
    start(server, command)
    return command


def share() -> None:
    """Let the processes that this one starts share an interpreter, which is started at the first request."""
    server, command = listen()
    os.environ[_SHARED] = command

    def wait() -> None:
        select.select([server], [], [])
        start(server, command)

    threading.Thread(target=wait, daemon=True).start()


def listen() -> tuple[socket.socket, str]:
    """Return the socket for requests, and the command that sends them."""
    folder = tempfile.mkdtemp(prefix="weightswap-tests-")
    atexit.register(remove, folder, os.getpid())
    address, command = f"{folder}/socket", Path(folder, "python")
    command.write_text(CLIENT.format(interpreter=sys.executable, address=address))
    command.chmod(0o755)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    return server, str(command)


def start(server: socket.socket, command: str) -> None:
    program = [sys.executable, "-W", "error", "-m", "tests.support.warm", str(server.fileno()), command]
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    running = subprocess.Popen(program, cwd=ROOT, pass_fds=[server.fileno()], env=environment)
    server.close()
    atexit.register(end, running)


def remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def end(running: subprocess.Popen[bytes]) -> None:
    running.kill()
    running.wait()


def serve(server: socket.socket) -> None:
    """Accept requests forever. Returns only in the forked processes, once for each program to run."""
    running: list[int] = []
    while True:
        connection, _ = server.accept()
        running = [child for child in running if os.waitpid(child, os.WNOHANG) == (0, 0)]
        if child := os.fork():
            running.append(child)
            connection.close()
            continue
        server.close()
        size, streams, _, _ = socket.recv_fds(connection, 4, 3)
        asked = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        if (program := os.fork()) == 0:
            connection.close()
            return take(json.loads(asked), streams)
        for stream in streams:
            os.close(stream)
        threading.Thread(target=pass_signals, args=(connection, os.pidfd_open(program)), daemon=True).start()
        _, status = os.waitpid(program, 0)
        with suppress(ConnectionError):  # the command was killed
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)


def pass_signals(connection: socket.socket, program: int) -> None:
    """Pass a command's signals on to its program, and kill the program when the command has ended."""
    with suppress(ProcessLookupError, ConnectionError):
        while number := connection.recv(1):
            signal.pidfd_send_signal(program, number[0])
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(program, signal.SIGKILL)


def take(asked: Any, streams: Sequence[int]) -> None:
    """Apply the folder, environment, arguments and streams of a request to this process."""
    folder, environment, sys.argv[:] = asked
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = map(partial(open, closefd=False), range(3), "rww")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = ""
    sys.path += [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]


def run() -> None:
    status, to_the_end = 1, sys.argv[0] == "-e"
    del sys.argv[:to_the_end]
    try:
        kind, *sys.argv[:] = sys.argv[sys.argv[0] == "-u" :]
        if kind == "-m":
            sys.modules.pop(sys.argv[0], None)  # it starts as in a new interpreter
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            code, sys.argv[0] = sys.argv[0], kind
            main = sys.modules["__main__"] = ModuleType("__main__")  # kept alive for the whole run
            exec(compile(code, "<string>", "exec"), main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    if to_the_end:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def prepare() -> None:
    import onnxscript  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.export  # noqa: F401

    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from tests.support import quick

    prepare()
    address, command = sys.argv[1:]
    quick.WarmInterpreter.executable = command  # used by engine checks of programs that export
    with quick.quick_exports():
        serve(socket.socket(fileno=int(address)))
        run()
