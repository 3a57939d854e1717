"""The failure of a test whose worker process ended has the exit status of the process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ended_worker_failure_has_exit_status(tmp_path):
    """A test that ends its worker fails with the number of the signal."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    code = "import os, signal\n\ndef test_end():\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "test_end.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "test_end.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "crashed while running 'test_end.py::test_end'; its exit status is -15" in done.stdout
