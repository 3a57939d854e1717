"""The fenced blocks of a documentation page, and their execution in order, in one folder."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clika_ref_torchvision.kernels import use_python_kernels
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r'^```(\w+)(?: title="([\w./-]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
"""A block: its language, the name of its file if it has one, and its text."""

RUNNING = ("python", "console")
WRITTEN = {"toml": tomllib.loads, "yaml": YAML(typ="safe", pure=True).load, "json": json.loads}
"""Parsers of data, by language."""

SHOWN = ("text", "output")
"""Languages of blocks without code: text drawings, and the output of the block before."""

BIN = Path(sys.executable).parent
BASH = shutil.which("bash") or "bash"
CHECKER, OPTIONS = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def location(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0]


def read_blocks(page: Path) -> list[Block]:
    """Return every fenced block of a page, in order."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    found = [Block(name, text.count("\n", 0, m.start()) + 1, m[1], m[2] or "", m[3]) for m in FENCE.finditer(text)]
    fences = len(re.findall(r"^\s*`{3,}", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{name} has a block that no test sees: write ```language at the start of a line"
    return found


@dataclass
class Run:
    """Runs the blocks of one page in a folder of its own, which holds a copy of ``examples/``."""

    folder: Path
    folder_in_use: Path
    """The working folder of the console, which a block may change for later ones."""
    namespace: dict[str, Any]
    commands: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment that lead to the commands of `warm_process.CommandServer`."""
    printed: str = ""
    """By the block that ran last."""

    @classmethod
    def begin(cls, folder: Path, commands: Mapping[str, str] | None = None) -> Run:
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        return cls(folder, folder, {"__name__": "page"}, commands or {})

    def take(self, block: Block) -> None:
        """Do with a block as a reader would."""
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self.printed = self._python(block)
        elif block.language == "console":
            self.printed = self._console(block)
        elif block.language == "output":
            found, wanted = self.printed, block.text
            difference = CHECKER.output_difference(doctest.Example("", wanted), found, OPTIONS)
            assert CHECKER.check_output(wanted, found, OPTIONS), f"{block.location}: {difference}"
        if block.language in WRITTEN:
            WRITTEN[block.language](block.text)

    def _python(self, block: Block) -> str:
        if block.text.startswith(">>> "):
            return self._session(block)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            # Lines of errors are those of the page.
            source = "\n" * block.line + block.text
            exec(compile(source, str(ROOT / block.page), "exec"), self.namespace)  # noqa: S102 - it is what is tested
        return printed.getvalue()

    def _session(self, block: Block) -> str:
        told: list[str] = []
        test = doctest.DocTestParser().get_doctest(block.text, self.namespace, block.location, block.page, block.line)
        runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
        failed = runner.run(test, out=told.append, clear_globs=False).failed
        self.namespace.update(test.globs)
        assert not failed, "".join(told)
        return ""

    def _console(self, block: Block) -> str:
        lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
        script = "\n".join(
            f"{{ {make_dry_run(line)}\n}} || {{ echo >&2 {shlex.quote(f'failed: {line}')}; exit 1; }}"
            for line in lines
            if line
        )
        script += f"\npwd > {shlex.quote(str(self.folder / '.folder'))}"
        how: Any = {"cwd": self.folder_in_use, "env": self._environment(), "capture_output": True, "text": True}
        done = subprocess.run([BASH, "-c", script], check=False, **how)
        assert done.returncode == 0, f"{block.location}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.folder_in_use = Path((self.folder / ".folder").read_text(encoding="utf-8").strip())
        return done.stdout

    def _environment(self) -> dict[str, str]:
        """``pip install .`` installs into the folder, without a download."""
        installed = str(self.folder / "installed")
        paths = [installed, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        pip = {"TARGET": installed, "NO_DEPS": "1", "NO_INDEX": "1", "NO_BUILD_ISOLATION": "0", "QUIET": "1"}
        return {
            **os.environ,
            **{f"PIP_{name}": value for name, value in pip.items()},
            **self.commands,
            "PATH": os.pathsep.join([*self.commands.get("PATH", "").split(), str(BIN), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
        }


def make_dry_run(line: str) -> str:
    """Return a console line for a test: commands of make are printed and not run, as CI itself is one."""
    return (
        f"make --dry-run --directory={ROOT} {line.partition(' ')[2]} > /dev/null" if line.startswith("make ") else line
    )


def run_page(blocks: Sequence[Block], folder: Path, commands: Mapping[str, str]) -> None:
    """Run the blocks of a page in a process of its own."""
    os.chdir(folder)
    use_python_kernels()  # transformers imports torchvision
    sys.path[:0] = [str(folder / "installed"), str(folder)]  # as a new process would find what a block installs
    run = Run.begin(folder, commands)
    for block in blocks:
        run.take(block)
