"""The pipe reader returns messages up to the last whole line, and stops when the process ends."""

import subprocess
import sys

import pytest
from clika_ref_conformance.execution.pipe_reader import read_lines

SAYING = """
import os, pathlib, sys, time
if os.fork() == 0:
    time.sleep(20)
    pathlib.Path("lived").touch()
    os._exit(0)
sys.stdout.write("".join(f"{i} é\\n" for i in range(20_000)) + "half a li")
"""


@pytest.mark.slow
def test_read_lines_open_pipe_ends_with_process(tmp_path):
    """All lines are read, and reading ends with the process even if the pipe stays open."""
    command = [sys.executable, "-X", "utf8", "-c", SAYING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert list(read_lines(process)) == [f"{i} é" for i in range(20_000)]
        assert not (tmp_path / "lived").exists()
        assert process.returncode == 0
