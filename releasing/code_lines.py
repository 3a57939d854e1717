"""Count lines of code and statements of the working tree, compared with a commit.

Blank lines, comments, docstrings and tests do not count. The number of statements does not change if lines are joined
or reformatted.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from releasing.distributions import ROOT, list_files

STARTING_COMMIT = "c302f54"
"""The last commit before the present layout of packages."""

COUNTED_FOLDERS = ("clika_ref", "plugins", "conformance", "benchmarks", "examples", "releasing", "docs/building")

TESTS_FOLDER = "tests"
"""The folder of tests in each distribution, which is not counted."""

MUTANTS_GROUP = "conformance mutants"
"""Seeded faults, which test the suite and are in no wheel."""

NO_CODE_TOKENS = {
    *(tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@dataclass(frozen=True)
class CodeSize:
    """The size of some code."""

    lines: int = 0
    statements: int = 0

    def __add__(self, other: CodeSize) -> CodeSize:
        return CodeSize(self.lines + other.lines, self.statements + other.statements)


def measure(source: str) -> CodeSize:
    """Return the size of one file: lines with code, and statements."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    docstrings = [node for node in statements if _is_docstring(node)]
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in docstrings:
        lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return CodeSize(len(lines), len(statements) - len(docstrings))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def group_of(path: str) -> str | None:
    """Return the package or folder that a file is counted in, None if it is not counted."""
    parts = PurePosixPath(path).parts
    if not path.endswith(".py") or TESTS_FOLDER in parts:
        return None
    if "mutants" in parts:
        return MUTANTS_GROUP
    folders = [folder for folder in COUNTED_FOLDERS if path.startswith(f"{folder}/")]
    return "/".join(parts[:2]) if folders == ["plugins"] else folders[0] if folders else None


def working_tree() -> Iterator[tuple[str, str]]:
    """Return path and text of each Python file that git tracks, or would."""
    for name in list_files(ROOT, "*.py"):
        yield name, (ROOT / name).read_text(encoding="utf-8")


def commit_tree(commit: str) -> Iterator[tuple[str, str]]:
    """Return path and text of each Python file of a commit."""
    archived = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".py") and member.isfile() else None
            if content is not None:
                yield member.name, content.read().decode()


def measure_groups(files: Iterator[tuple[str, str]]) -> dict[str, CodeSize]:
    """Return the size of each package or folder."""
    sizes: dict[str, CodeSize] = {}
    for path, source in files:
        group = group_of(path)
        if group is not None:
            sizes[group] = sizes.get(group, CodeSize()) + measure(source)
    return sizes


def comparison_table(before: dict[str, CodeSize], after: dict[str, CodeSize], commit: str) -> str:
    """Return a table of sizes before and after, with the sums of all packages in wheels and of everything."""
    rows = {group: (before.get(group, CodeSize()), after.get(group, CodeSize())) for group in sorted({*before, *after})}
    shipped = {group for group in rows if group.startswith(("clika_ref", "plugins/")) or group == "conformance"}
    shipped_sum, total = _sum(rows[group] for group in shipped), _sum(rows.values())
    rows |= {"in wheels": shipped_sum, "total": total}
    heading = f"{'':<22}{'lines of code':^28}  {'statements':^28}"
    columns = f"{commit:>10}{'now':>9}{'change':>9}"
    lines = [heading.rstrip(), f"{'':<22}{columns}  {columns}"]
    for group, (old, new) in rows.items():
        figures = ((old.lines, new.lines), (old.statements, new.statements))
        lines.append(f"{group:<22}" + "  ".join(f"{a:>10,}{b:>9,}{b - a:>+9,}" for a, b in figures))
    return "\n".join(lines)


def _sum(pairs: Iterable[tuple[CodeSize, CodeSize]]) -> tuple[CodeSize, CodeSize]:
    before, after = zip((CodeSize(), CodeSize()), *pairs, strict=True)
    return sum(before, CodeSize()), sum(after, CodeSize())
