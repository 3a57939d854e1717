"""Second process that compiles graphs and runs artifacts, with another hash seed and in another folder.

Run as a module, it is that process: one request per line on standard input, one answer per line on standard output.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError
from clika_ref.core.ir import Graph
from clika_ref.serialization.graph_format import graph_from_json, graph_to_json
from clika_ref_conformance.execution.error_attribution import exceptions_to_catch, reset_sigint
from clika_ref_conformance.execution.messages import WorkerSetup
from clika_ref_conformance.execution.pipe_reader import close_pipes, read_lines
from clika_ref_conformance.execution.worker import open_channel, start_suite
from clika_ref_conformance.suite import Suite

OTHER_PROCESS_HASH_SEED = "20011"
"""Any seed but this process's, which is usually random, so that sets of strings iterate in another order."""

START_TIMEOUT_S = 120.0
"""Time limit for the process to import torch and a runtime, on a busy machine."""


class FreshProcessError(ClikaError):
    """The other process died, hung or raised: ``kind`` is crash, hang, typed (by a `ClikaError`) or raw."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def digest_folder(folder: Path) -> str:
    """Return the hash of the names and contents of all files in a folder."""
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        found.update(f"{path.relative_to(folder)} {len(data)} ".encode())
        found.update(data)
    return found.hexdigest()


class FreshProcess:
    """Client of the other process, which starts with the first request, and again after a crash."""

    def __init__(self, suite: Suite) -> None:
        self.setup = _make_setup(suite)
        self.seconds = suite.profile.case_seconds
        self.home = Path(mkdtemp(dir=suite.folder))
        self.process: subprocess.Popen[str] | None = None
        self.answers: queue.Queue[str | None] = queue.Queue()
        self._end: Callable[[], Any] | None = None

    def compile(self, graph: Graph, folder: Path, options: Mapping[str, Any]) -> str:
        """Compile a graph into a folder in the other process, and return the digest of the written files.

        Raises:
            FreshProcessError: it failed.
        """
        constants = self.home / "constants.safetensors"
        save_file({n: v.data.clone().contiguous() for n, v in graph.constants.items() if v.data is not None}, constants)
        request = {"graph": graph_to_json(graph), "constants": str(constants), "folder": str(folder)}
        return self.request({"do": "compile", **request, "options": dict(options)})["digest"]

    def run(self, artifact: Artifact, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Load and run an artifact in the other process, and return the outputs.

        Raises:
            FreshProcessError: it failed.
        """
        given, taken = (self.home / f"{name}.safetensors" for name in ("inputs", "outputs"))
        save_file({f"{i:03}": t.clone().contiguous() for i, t in enumerate(inputs)}, given)
        names = {"inputs": artifact.input_names, "outputs": artifact.output_names}
        self.request(
            {"do": "run", "path": str(artifact.path), "names": names, "given": str(given), "taken": str(taken)}
        )
        outputs = load_file(taken)
        return [outputs[name] for name in sorted(outputs)]

    def close(self) -> None:
        """End the process."""
        if self._end is not None:
            self._end()
        self.process = self._end = None

    def request(self, request: Mapping[str, Any]) -> Any:
        """Send one request and return the answer.

        Raises:
            FreshProcessError: the request or the communication failed.
        """
        process = self.process or self._start()
        _send(process, request)
        answer = self._read_answer(self.seconds)
        if "error" in answer:
            raise FreshProcessError(answer["kind"], answer["error"])
        return answer

    def _read_answer(self, seconds: float) -> Any:
        assert self.process is not None
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            msg = f"the other process did not answer within {seconds:g} s"
            raise FreshProcessError("hang", msg) from None
        if line is None:
            code = self.process.wait()
            self.close()
            msg = f"the other process died ({'signal' if code < 0 else 'exit code'} {abs(code)})"
            raise FreshProcessError("crash", msg)
        return json.loads(line)

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": OTHER_PROCESS_HASH_SEED}
        command = [sys.executable, "-m", "clika_ref_conformance.execution.fresh_process"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(  # noqa: S603 - this interpreter on this module
            command, env=environment, cwd=self.home, text=True, bufsize=1, **pipes
        )
        self.process, self.answers = process, queue.Queue()
        listener = threading.Thread(target=_forward_lines, args=(process, self.answers), daemon=True)
        listener.start()
        self._end = weakref.finalize(self, _stop_process, process, listener)
        _send(process, self.setup.as_json())
        self._read_answer(START_TIMEOUT_S)
        return process


_PROCESS_BY_SUITE: weakref.WeakKeyDictionary[Suite, FreshProcess] = weakref.WeakKeyDictionary()


def get_fresh_process(suite: Suite) -> FreshProcess:
    """Return the other process of a suite. All its checks share one, as starting it takes seconds."""
    if suite not in _PROCESS_BY_SUITE:
        _PROCESS_BY_SUITE[suite] = FreshProcess(suite)
    return _PROCESS_BY_SUITE[suite]


def _send(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # reading the answer detects a dead process
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _forward_lines(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    for line in read_lines(process):
        answers.put(line)
    answers.put(None)


def _stop_process(process: subprocess.Popen[str], listener: threading.Thread) -> None:
    process.kill()
    process.wait()
    listener.join()  # it ends with the process
    close_pipes(process)


def _make_setup(suite: Suite) -> WorkerSetup:
    """Return the setup that lets the other process create the same suite."""
    if suite.setup:
        return WorkerSetup.of_json(suite.setup)
    return WorkerSetup(
        suite.target.name, suite.profile, {}, str(suite.folder), path=tuple(map(os.path.abspath, sys.path))
    )


@dataclass
class _Server:
    suite: Suite

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a request; errors become answers."""
        try:
            return self._compile(request) if request["do"] == "compile" else self._run(request)
        except ClikaError as error:
            return {"kind": "typed", "error": f"{type(error).__name__}: {error}"}
        except exceptions_to_catch() as error:  # the caller needs the kind of error
            return {"kind": "raw", "error": f"{type(error).__name__}: {error}"}

    def _compile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        tensors = load_file(request["constants"])
        graph = graph_from_json(request["graph"], self.suite.registry.operators.get, tensors)
        folder = Path(request["folder"])
        self.suite.target.compile(graph, folder / "model.onnx", **request["options"])
        return {"digest": digest_folder(folder)}

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        names = request["names"]
        path = Path(request["path"])
        artifact = Artifact(path, self.suite.target.name, tuple(names["inputs"]), tuple(names["outputs"]))
        runner = self.suite.target.load(artifact)
        given = load_file(request["given"])
        outputs = runner(
            [given[name].clone() for name in sorted(given)]
        )  # alignment decides the summation order of kernels
        save_file({f"{i:03}": t.clone().contiguous() for i, t in enumerate(outputs)}, request["taken"])
        return {}


def main() -> None:
    """Read the setup, then answer one request per line, until standard input ends."""
    reset_sigint()
    channel = open_channel()
    _, suite = start_suite(json.loads(sys.stdin.readline()))
    server = _Server(suite)
    channel.write("{}\n")
    for line in sys.stdin:
        channel.write(json.dumps(server.answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
