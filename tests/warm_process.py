"""A server process with torch and the plugins imported, which forks once for each tested page or command."""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch",
    "onnxruntime",
    "clika_ref.api",
    "clika_ref_cli.cli",
    "clika_ref_aten.plugin",
    "clika_ref_cleanup.plugin",
    "clika_ref_conformance.cli",
    "clika_ref_onnxruntime.plugin",
    "clika_ref_openvino.plugin",
    "clika_ref_tensorrt.plugin",
    "clika_ref_visualize.plugin",
]
"""Modules that the server imports before it forks. They start no threads, so that a fork of them is safe."""

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(PRELOADED)

CLIENT = f"""#!{sys.executable} -ISE
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.environ["CLIKA_REF_WARM_SOCKET"])
    request = json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([len(request).to_bytes(8, "big")], streams)
    server.sendall(request)
    status = int.from_bytes(server.recv(4), "big", signed=True)
sys.exit(status if status >= 0 else 128 - status)
"""
"""The client command: it sends its arguments, folder, environment and streams to `CommandServer`."""


def run_forked(function: Callable[..., None], *arguments: Any) -> None:
    """Run a module-level function in a fork of the server; raise AssertionError with its traceback if it fails."""
    receiver, sender = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=_report, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        failure = receiver.recv()
    except EOFError:
        failure = f"{function.__name__} ended without a result"
    process.join()
    assert failure is None, failure


def _report(sender: connection.Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        function(*arguments)
    except BaseException:  # noqa: BLE001 - the test that waits for it raises it
        sender.send(traceback.format_exc())
    else:
        sender.send(None)


class CommandServer:
    """Runs ``clika-ref`` and ``pytest`` in forks of the server for whoever calls the commands of its folder.

    Args:
        folder: where the commands and the socket are made.

    Attributes:
        environment: the socket, and the folder to put first on the ``PATH``.
    """

    def __init__(self, folder: Path) -> None:
        self.environment = {"CLIKA_REF_WARM_SOCKET": str(folder / "socket"), "PATH": str(folder)}
        for name in ("clika-ref", "pytest"):
            (folder / name).write_text(CLIENT, encoding="utf-8")
            (folder / name).chmod(0o755)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.environment["CLIKA_REF_WARM_SOCKET"])
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        atexit.register(self._socket.close)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:  # the socket is closed at exit
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            process = FORKED.Process(target=_run_command, args=(_Client(client),))
            process.start()
            process.join()
            client.sendall((process.exitcode or 0).to_bytes(4, "big", signed=True))


class _Client:
    """A connected socket that can be sent to a fork."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client

    def __reduce__(self) -> Any:
        return _open_socket, (reduction.DupFd(self.client.fileno()),)


def _open_socket(descriptor: Any) -> socket.socket:
    return socket.socket(fileno=descriptor.detach())


def _run_command(client: Any) -> None:
    """Take the streams, folder and environment of a client, and run its words."""
    header, streams, _, _ = socket.recv_fds(client, 8, 3)
    request, size = b"", int.from_bytes(header, "big")
    while len(request) < size:
        request += client.recv(size - len(request))
    client.close()
    name, words, folder, environment = json.loads(request)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
    enter(folder, environment)
    sys.argv = [name, *words]
    if name == "pytest":
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    else:
        importlib.import_module("clika_ref_cli.cli").main()


def enter(folder: str, environment: Mapping[str, str]) -> None:
    """Change to a folder and an environment; its ``PYTHONPATH`` becomes the start of the module path."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
