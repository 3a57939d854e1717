"""The distributions contain their type markers and the data files that they read."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = [
    ROOT / "pyproject.toml",
    *sorted(ROOT.glob("plugins/*/pyproject.toml")),
    ROOT / "conformance/pyproject.toml",
]


def read_package_data(project: Path) -> dict[str, list[str]]:
    """Return the package data of a distribution, by package."""
    return tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_distribution_contains_py_typed(project):
    """Each distribution contains py.typed."""
    ((package, patterns),) = read_package_data(project).items()
    assert "py.typed" in patterns
    assert (project.parent / package / "py.typed").read_bytes() == b""


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_distribution_package_data_complete(project):
    """Each distribution contains all files that are no code."""
    ((package, patterns),) = read_package_data(project).items()
    folder = project.parent / package
    taken = {path for pattern in patterns for path in folder.glob(pattern)}
    others = {p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc") and p.name != ".DS_Store"}
    assert others == taken
