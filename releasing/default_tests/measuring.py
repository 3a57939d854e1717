"""Measure coverage of the default tests and of all tests, and compare them by package and file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import coverage

from releasing.distributions import ROOT

DATA = ROOT / "build" / "coverage"
SOURCES = ("clika_ref", *(f"clika_ref_{path.name}" for path in sorted((ROOT / "plugins").iterdir()) if path.is_dir()))
LIMIT_ALL, LIMIT_PACKAGE = 2.0, 4.0
"""Maximum difference of coverage between the default tests and all tests, in points: in total, and of one package."""

CONFIG = """[run]
source_pkgs = {sources}
parallel = true
patch = fork, _exit
context = ${{PYTEST_CURRENT_TEST-}}
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class FileCoverage:
    """Statements of one file, and those that the default tests and all tests execute."""

    path: str
    statements: int
    default: int
    everything: int

    @property
    def package(self) -> str:
        """Folder of the file: a subpackage of ``clika_ref``, or a plugin."""
        parts = Path(self.path).parts
        return "/".join(parts[:2]) if len(parts) > 2 or parts[0] == "plugins" else parts[0]


def measure(kind: str, expression: str) -> None:
    """Run the tests that a marker expression selects, and write their data to ``build/coverage/<kind>``.

    Processes that tests start are measured too: coverage starts with each interpreter (its ``.pth`` file), goes on in
    forks, and names the data of a process by the test that started it.
    """
    DATA.mkdir(parents=True, exist_ok=True)
    for old in DATA.glob(f"{kind}*"):
        old.unlink()
    config = DATA / "coverage.ini"
    config.write_text(CONFIG.format(sources=",".join(SOURCES)), encoding="utf-8")
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "COVERAGE_FILE": str(DATA / kind),
        "COVERAGE_PROCESS_START": str(config),
    }
    words = ["-n", "2", "-q", "-m", expression, "-p", "no:cacheprovider", "-p", "releasing.default_tests.contexts"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        print(f"pytest -m {expression!r} ended with {done.returncode}: lines that failed tests execute are counted")
    measured = coverage.Coverage(data_file=str(DATA / kind), config_file=str(config))
    measured.combine([str(DATA)], strict=True)
    measured.save()


def read_data(kind: str) -> coverage.CoverageData:
    """Read a measurement of `measure`."""
    data = coverage.CoverageData(str(DATA / kind))
    data.read()
    return data


def count_executed_lines(kind: str) -> dict[str, set[int]]:
    """Return the lines that a measurement executed, by path from the root, without copies that tests install."""
    data = read_data(kind)
    files = [Path(file) for file in sorted(data.measured_files())]
    return {str(f.relative_to(ROOT)): set(data.lines(str(f)) or ()) for f in files if f.is_relative_to(ROOT)}


def compare() -> Iterator[FileCoverage]:
    """Yield the coverage of each file by the default tests, and by these and the slow ones."""
    default, slow = count_executed_lines("default"), count_executed_lines("slow")
    analysis = coverage.Coverage(data_file=None, config_file=str(DATA / "coverage.ini"))
    for path in sorted({*default, *slow}):
        statements = set(analysis.analysis2(str(ROOT / path))[1])
        fast, late = default.get(path, set()) & statements, slow.get(path, set()) & statements
        if statements:
            yield FileCoverage(path, len(statements), len(fast), len(fast | late))


def report(files: list[FileCoverage]) -> list[str]:
    """Print coverage by package; return the limits that are broken."""
    groups: dict[str, list[FileCoverage]] = {}
    for file in files:
        groups.setdefault(file.package, []).append(file)
    broken = [f"{file.path}: the default tests execute nothing of it" for file in files if not file.default]
    for name, group in [*sorted(groups.items()), ("all", files)]:
        total = sum(file.statements for file in group)
        default, everything = (
            100 * sum(values) / total for values in zip(*((f.default, f.everything) for f in group), strict=True)
        )
        print(f"{name:<28}{total:>8} statements{default:>8.1f} %{everything:>8.1f} %")
        limit = LIMIT_ALL if name == "all" else LIMIT_PACKAGE
        if everything - default > limit:
            broken.append(f"{name}: {everything - default:.1f} points below all tests, {limit:g} are allowed")
    return broken
