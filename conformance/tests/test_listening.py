"""What another process says is heard to the last whole line, and no longer than it lives."""

import subprocess
import sys

from clika_ref_conformance.execution.pipe_reader import read_lines

SAYING = """
import os, pathlib, sys, time
if os.fork() == 0:
    time.sleep(20)
    pathlib.Path("lived").touch()
    os._exit(0)
sys.stdout.write("".join(f"{i} é\\n" for i in range(20_000)) + "half a li")
"""


def test_all_lines_are_heard_and_none_is_waited_for_where_the_pipe_outlives_the_process(tmp_path):
    command = [sys.executable, "-X", "utf8", "-c", SAYING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert list(read_lines(process)) == [f"{i} é" for i in range(20_000)]
        assert not (tmp_path / "lived").exists()
        assert process.returncode == 0
