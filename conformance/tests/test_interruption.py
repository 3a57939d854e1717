"""An interrupted run cleans up, after Ctrl-C and after a signal of the system."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clika_ref_conformance.execution.interruption import END_SIGNALS, RunInterruption, handle_end_signals

from clika_ref.core.errors import ClikaError

HERE = Path(__file__).parent
HEEDING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Code that restores SIGINT in a process that was started with it ignored, like a background process of a script."""

COMMAND = f"{HEEDING}; from clika_ref_cli.cli import main; main()"
STUCK = ["--target", "crashing_targets:Stuck", "-k", "relu/float32", "--level", "operators", "--workers", "1"]


@pytest.mark.parametrize("number", END_SIGNALS)
def test_handle_end_signals_interrupts_once_and_restores(number):
    """In the block a signal interrupts once; later it does the same as before."""
    heard = []
    before = signal.signal(number, lambda *_: heard.append("outside"))
    try:
        with pytest.raises(KeyboardInterrupt):
            send_twice_within_the_block(number)
        assert heard == []
        signal.raise_signal(number)
        assert heard == ["outside"]
    finally:
        signal.signal(number, before)


def send_twice_within_the_block(number):
    """Send a signal to this thread twice; a thread gets it before the call returns, a process possibly later."""
    with handle_end_signals():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)


def test_handle_end_signals_second_sigint_interrupts_run():
    """A second SIGINT raises RunInterruption."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(RunInterruption):
            send_twice_within_the_block(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_handle_end_signals_raised_interrupt_becomes_error():
    """A KeyboardInterrupt without a signal is an error with its line."""

    def draw():
        raise KeyboardInterrupt

    message = r"draw raised a KeyboardInterrupt \(.*test_interruption.py, line \d+\)"
    with pytest.raises(ClikaError, match=message), handle_end_signals():
        draw()


def test_handle_end_signals_keeps_ignored_signal():
    """A signal that was ignored stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_end_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_end_signal_reports_and_removes_folder(number, tmp_path):
    """An interrupted run writes its report and leaves no folder or worker."""
    path = os.pathsep.join([str(HERE / "fakes"), *sys.path])
    command = [sys.executable, "-c", COMMAND, "conformance", "run", *STUCK, "--out", str(tmp_path / "report")]
    environment = {**os.environ, "PYTHONPATH": path, "MARKS_FOLDER": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        folder = folder_of_the_run(tmp_path / "lock", process)
        process.send_signal(number)
        said, _ = process.communicate(timeout=100)
    assert process.returncode == 3
    assert " tasks did not end: the run was interrupted" in said
    assert "crashing_targets:Stuck PROVES TOO LITTLE" in said
    assert (tmp_path / "report/report.json").exists()
    assert not folder.exists()
    with (tmp_path / "lock").open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)  # until the worker is gone


def folder_of_the_run(lock_file, process):
    """Wait until a worker compiles, and return the folder of the run that it is to write into."""
    while process.poll() is None:
        time.sleep(0.1)
        if lock_file.exists() and lock_file.read_text(encoding="utf-8").endswith("\n"):
            path = Path(lock_file.read_text(encoding="utf-8").strip())
            return next(parent for parent in path.parents if parent.name.startswith("clika-ref-conformance-"))
    pytest.fail("the run ended before its target compiled anything")
