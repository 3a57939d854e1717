"""Seed one-line faults, and count those that the default tests find of those that all tests find."""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from releasing.default_tests.measuring import ENVIRONMENT, compare, read_data
from releasing.distributions import ROOT

SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*",
    ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
"""Operators, and the text that takes their place."""


NO_TESTS = 5
"""Exit status of pytest if it selects no test."""


@dataclass(frozen=True)
class Fault:
    """A change of one line."""

    path: str
    line: int
    before: str
    after: str


def faults_of(path: str, lines: set[int]) -> Iterator[Fault]:
    """Yield the faults that can be seeded in some lines of a file, one per suitable expression.

    Only statements of functions count: other lines, such as tables and default arguments, run at import, and coverage
    names the first test that imports them, not those that use them.
    """
    source = (ROOT / path).read_text(encoding="utf-8")
    texts = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in {node for function in functions for statement in function.body for node in ast.walk(statement)}:
        line = getattr(node, "lineno", 0)
        if line in lines and node.end_lineno == line:
            for start, end, new in _edits(node, texts[line - 1]):
                text = texts[line - 1].encode()
                changed = (text[:start] + new.encode() + text[end:]).decode()
                if changed != texts[line - 1]:
                    yield Fault(path, line, texts[line - 1], changed)


def _edits(node: ast.AST, text: str) -> Iterator[tuple[int, int, str]]:
    """Yield replacements of bytes of the line that a node is on: start, end, new text."""
    operands: list[tuple[ast.expr, ast.AST, ast.expr]] = []
    if isinstance(node, ast.Compare):
        operands = [*zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)]
    elif isinstance(node, ast.BinOp):
        operands = [(node.left, node.op, node.right)]
    elif isinstance(node, ast.BoolOp):
        operands = [(a, node.op, b) for a, b in zip(node.values, node.values[1:], strict=False)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node.col_offset, node.end_col_offset or 0, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node.col_offset, node.end_col_offset or 0, str(node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp):
        test = node.test
        whole = text.encode()[test.col_offset : test.end_col_offset].decode()
        yield test.col_offset, test.end_col_offset or 0, f"not ({whole})"
    for left, operator, right in operands:
        if type(operator) in SWAPS:
            between = text.encode()[left.end_col_offset or 0 : right.col_offset].decode()
            if between.strip(" ()"):
                start = (left.end_col_offset or 0) + between.index(between.strip(" ()"))
                yield start, start + len(between.strip(" ()")), SWAPS[type(operator)]


def choose(seed: int, count: int) -> list[Fault]:
    """Draw faults in executed lines: packages in turn, then a file, then a line."""
    draw = random.Random(seed)  # noqa: S311 - a draw of lines keeps no secret
    packages: dict[str, list[str]] = {}
    for file in compare():
        if file.everything:
            packages.setdefault(file.package, []).append(file.path)
    order = sorted(packages)
    draw.shuffle(order)
    chosen: list[Fault] = []
    while len(chosen) < count:
        path = draw.choice(packages[order[len(chosen) % len(order)]])
        tests = {kind: tests_of(path, kind) for kind in ("default", "slow")}
        lines = {line for lines in tests.values() for line, names in lines.items() if names - {""}}
        if candidates := sorted(set(faults_of(path, lines)), key=repr):
            fault = draw.choice(candidates)
            if fault not in chosen:
                chosen.append(fault)
    return chosen


def tests_of(path: str, kind: str) -> dict[int, set[str]]:
    """Return the test functions that execute each line of a file, in one measurement.

    A context is a test function, or the test that started a process as pytest calls it: ``path::name[id] (call)``.
    """
    found = read_data(kind).contexts_by_lineno(str(ROOT / path))
    return {line: {re.split(r"\[| \(|\|", name)[0] for name in names} for line, names in found.items()}


def is_found(fault: Fault, kind: str) -> bool:
    """Seed a fault and run the tests of one measurement that execute its line, up to the first failure."""
    tests = sorted(tests_of(fault.path, kind).get(fault.line, set()) - {""})
    if not tests:
        return False
    file = ROOT / fault.path
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    lines[fault.line - 1] = fault.after + "\n"
    try:
        file.write_text("".join(lines), encoding="utf-8")
        failed = _run_to_first_failure(tests, kind)
    finally:
        file.write_text(source, encoding="utf-8")
    # A test that fails without the fault as well does not find it.
    return bool(failed) and not _run_to_first_failure(failed, kind)


def _run_to_first_failure(tests: Sequence[str], kind: str) -> list[str]:
    """Run the default or the slow ones of some tests, and return those that failed; all, if pytest reports none."""
    expression = "slow" if kind == "slow" else "not slow"
    words = ["-x", "-q", "-n", "2", "-p", "no:cacheprovider", "-rfE", "-m", expression, *tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode in (0, NO_TESTS):
        return []
    named = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", done.stdout, re.MULTILINE)
    return sorted({*named} & {*tests}) or [*tests]
