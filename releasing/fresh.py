"""An empty environment that records the time of each step."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

TOOLS = ("HF_HUB_OFFLINE", "HOME", "LANG", "PATH", "TMPDIR")
"""Variables that programs get, in addition to those of pip and of certificates. None refers to this repository."""


class Fresh:
    """A virtual environment that contains only pip, in a new folder."""

    def __init__(self, folder: Path) -> None:
        """Create the environment."""
        self.folder = folder
        self.seconds: dict[str, float] = {}
        """Time of each step, by its label."""
        with self.measure_time("an empty environment"):
            venv.create(folder, with_pip=True, clear=True)

    @contextlib.contextmanager
    def measure_time(self, label: str) -> Iterator[None]:
        """Record the time of a block."""
        start = time.perf_counter()
        yield
        self.seconds[label] = time.perf_counter() - start

    def install(self, label: str, *words: str) -> None:
        """Install packages with pip."""
        with self.measure_time(label):
            self.run("pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *words)

    def run(self, command: str, *words: object, cwd: Path | None = None) -> str:
        """Run a command of the environment; return its output on stdout.

        Raises:
            SystemExit: it fails.
        """
        here = {name: value for name, value in os.environ.items() if _is_passed_on(name)}
        variables = {**here, "PATH": f"{self.folder / 'bin'}{os.pathsep}{here['PATH']}", "OMP_NUM_THREADS": "2"}
        output = [str(self.folder / "bin" / command), *map(str, words)]
        done = subprocess.run(output, cwd=cwd, env=variables, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join([command, *output[1:]])} ended with {done.returncode}\n{done.stdout[-8000:]}")
        return done.stdout

    def show(self, lines: Iterable[str] = ()) -> None:
        """Print the time of each step, and further lines."""
        for label, seconds in self.seconds.items():
            print(f"{seconds:8.1f} s  {label}")
        for line in lines:
            print(line)
        sys.stdout.flush()


def _is_passed_on(name: str) -> bool:
    return name in TOOLS or name.startswith(("PIP_", "SSL_", "REQUESTS_", "LC_", "OPENBLAS_"))
