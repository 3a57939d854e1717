"""The command line in a process: interrupts, pipes, and a terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

HEEDING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Restore SIGINT in a process whose parent ignores it, such as a script that starts it with ``&``."""

BEGIN = f"{HEEDING}; from clika_ref_cli.cli import main"

SLOW_MODEL = """
import pathlib, time, torch

class Net(torch.nn.Linear):
    def __init__(self): super().__init__(4, 4)

class Slow(Net):
    def forward(self, x):
        pathlib.Path("started").touch()
        time.sleep(30)
        return super().forward(x)

def batches():
    yield from [torch.randn(4, 4) for _ in range(4)]
    pathlib.Path("started").touch()
    time.sleep(30)
    yield torch.randn(4, 4)
"""

SLOW_COMPARISON = """
import pathlib, time
from clika_ref_onnxruntime.target import OnnxRuntime
def load(self, artifact):
    pathlib.Path("started").touch()
    time.sleep(30)
OnnxRuntime.load = load
"""

LAST = "interrupted: existing files are unchanged, and no incomplete file was written"


@pytest.fixture
def folder(tmp_path):
    """A folder with models that take long."""
    (tmp_path / "slow_model.py").write_text(SLOW_MODEL)
    return tmp_path


def start_command(folder, *words, before="", **how):
    """Start the command line in a folder."""
    environment = {**os.environ, "CLIKA_REF_PLUGINS": "aten,cleanup,onnxruntime"}
    command = [sys.executable, "-c", f"{BEGIN}\n{before}\nmain()", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **how)


def interrupt_command(folder, *words, before="", number=signal.SIGINT):
    """Start a command, send it a signal while it works, and return its status and its output."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_command(folder, *words, before=before, **pipes) as process:
        while not (folder / "started").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        out, said = process.communicate(timeout=60)
    return process.returncode, out, said.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["compile", "slow_model:Slow", "--input", "1x4", "-o", "m.onnx"],
        ["quantize", "slow_model:Net", "--calibrate", "slow_model:batches", "-o", "m.onnx", "--save", "m.clika"],
    ],
    ids=lambda words: words[0],
)
def test_main_interrupt_exits_130_without_files(folder, words):
    """An interrupt exits with 130 and one line, and leaves no file."""
    (folder / "m.onnx").write_bytes(b"what was there before")
    status, out, said = interrupt_command(folder, *words)
    assert (status, out, said[-1]) == (130, "", LAST), said
    assert not any("Traceback" in line for line in said)
    assert (folder / "m.onnx").read_bytes() == b"what was there before"
    assert list_names(folder) == {"m.onnx", "slow_model.py", "started"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_compile_interrupted_comparison_keeps_old_file(folder, number):
    """An interrupt during the comparison keeps the old file and leaves no other."""
    (folder / "m.onnx").write_bytes(b"what was there before")
    words = ("compile", "slow_model:Net", "--input", "1x4", "-o", "m.onnx")
    status, _, said = interrupt_command(folder, *words, before=SLOW_COMPARISON, number=number)
    assert (status, said[-1]) == (130, LAST), said
    assert any(line.startswith("Writing") for line in said)
    assert (folder / "m.onnx").read_bytes() == b"what was there before"
    assert list_names(folder) == {"m.onnx", "slow_model.py", "started"}


def list_names(folder):
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


@pytest.mark.slow
def test_compile_in_pipe_prints_result_only_to_stdout(folder):
    """In a pipe, stdout has the result only, and no progress bar is drawn."""
    words = ("compile", "slow_model:Net", "--input", "1x4", "--input", "2x4", "-o", "m.onnx", "--json")
    with start_command(folder, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert json.loads(out)["artifact"]["file"] == "m.onnx"
    assert "\x1b" not in said
    assert "\r" not in said
    assert "Loading" not in said
    assert said.startswith("Capturing"), "the log of a compilation is no bar"


@pytest.mark.slow
def test_compile_quiet_environment_prints_no_log(folder, monkeypatch):
    """`CLIKA_REF_QUIET` hides the log."""
    monkeypatch.setenv("CLIKA_REF_QUIET", "1")
    words = ("compile", "slow_model:Net", "--input", "1x4", "-o", "m.onnx")
    with start_command(folder, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, said = process.communicate(timeout=100)
    size = (folder / "m.onnx").stat().st_size
    assert (process.returncode, out, said) == (0, f"m.onnx  {size} bytes\n", "")


@pytest.mark.slow
def test_targets_on_terminal_draws_bar_on_stderr(folder):
    """On a terminal, the progress bar is drawn on stderr."""
    ours, theirs = pty.openpty()
    with start_command(folder, "targets", "--json", stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = read_all(ours)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "Loading plugins" in shown
    assert "Loading plugins" not in out
    assert [row["name"] for row in json.loads(out)["targets"]] == ["onnxruntime"]


def read_all(descriptor):
    """Read a terminal to its end, which Linux reports as an error."""
    shown = b""
    try:
        while part := os.read(descriptor, 4096):
            shown += part
    except OSError:
        pass
    os.close(descriptor)
    return shown.decode(errors="replace")


@pytest.mark.slow
def test_plugins_closed_reader_exits_without_traceback(folder):
    """A closed reader stops the command with exit status 1 and without a traceback."""
    with start_command(folder, "plugins", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
        process.wait(timeout=100)
    assert "Traceback" not in said
    assert process.returncode == 1


@pytest.mark.slow
def test_help_lists_commands_and_exit_statuses():
    """`--help` lists each command and every exit status."""
    code = "import sys; sys.argv = ['clika-ref', '--help']; from clika_ref_cli.cli import main; main()"
    environment = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    for word in ("compile", "quantize", "export", "inspect", "explain", "check", "compare", "plugins", "targets"):
        assert word in done.stdout
    assert "conformance" in done.stdout
    for status in (0, 1, 2, 3, 70, 130):
        assert f" {status} " in done.stdout.partition("Exit status:")[2]
