"""Virtual environments for tests, built from the packages of this one, without some of them and without a download."""

import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

ALONE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Variables with which pip installs a folder without an index. For pip's ``no_...`` options, 0 enables them."""

COMMANDS = {
    "clika-ref": ("-c", "from clika_ref_cli.cli import main; main()"),
    "pip": ("-m", "pip"),
    "pytest": ("-m", "pytest"),
}
"""Commands of a console, each with the arguments of Python that run it."""


class Environment:
    """A virtual environment in a folder, with packages of this one by links."""

    def __init__(self, folder: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
        """Create it, with each package whose name passes the filter."""
        self.folder = folder
        venv.create(folder, symlinks=True)
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.name != "__pycache__" and keep(entry.name):
                (self.packages / entry.name).symlink_to(entry)

    def run(self, command: str, *words: str, cwd: Path) -> str:
        """Run one of `COMMANDS` in a folder, which must succeed; return its output."""
        left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CLIKA_REF_"))}
        done = subprocess.run(
            [self.folder / "bin/python", *COMMANDS[command], *words],
            env={**left, **ALONE, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout
