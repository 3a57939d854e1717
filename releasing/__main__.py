"""The command line: build every distribution and try it in an empty environment."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from releasing.building import build
from releasing.code_lines import STARTING_COMMIT, commit_tree, comparison_table, measure_groups, working_tree
from releasing.distributions import ROOT, distributions, lowest_versions, read_pinned_versions
from releasing.fresh import Fresh
from releasing.trying import try_commands, try_first_artifact, try_missing_plugins

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

BUILD_DIR = ROOT / "build"
WHEELS = BUILD_DIR / "dist"

EXTRAS = "clika-ref[standard,openvino,tensorrt,torchvision,conformance]"
EXAMPLE = "clika-ref-example"

LOWEST_VERSION_TESTS = (
    *("plugins/onnxruntime/tests", "plugins/openvino/tests", "plugins/tensorrt/tests"),
    *("plugins/example/tests/test_example.py", "plugins/example/tests/test_reference.py"),
    *("tests/onnx_export", "tests/export"),
)
"""Tests of the code that uses onnx, onnxruntime and openvino."""


@app.command()
def code_lines(at: Annotated[str, typer.Option(help="The commit to compare with.")] = STARTING_COMMIT) -> None:
    """Count code lines and statements of the working tree and of a commit, without docstrings, comments and tests."""
    print(comparison_table(measure_groups(commit_tree(at)), measure_groups(working_tree()), at))


@app.command()
def package() -> None:
    """Build sdists and wheels, install them into an empty environment, and try them there."""
    build_all()
    environment = Fresh(BUILD_DIR / "fresh")
    install_distributions(environment, read_pinned_versions())
    with tempfile.TemporaryDirectory() as folder:
        try_first_artifact(environment, Path(folder))
        try_commands(environment, Path(folder))
        try_missing_plugins(environment, Path(folder), WHEELS)
    environment.show([f"{len(distributions())} sdists and as many wheels are in {WHEELS.relative_to(ROOT)}"])


@app.command()
def lowest() -> None:
    """Do the same with the lowest allowed versions of the libraries that run and read models, and run tests there."""
    build_all()
    environment = Fresh(BUILD_DIR / "lowest")
    versions = lowest_versions()
    install_distributions(environment, {**read_pinned_versions(), **versions})
    with tempfile.TemporaryDirectory() as folder:
        try_first_artifact(environment, Path(folder))
        try_commands(environment, Path(folder))
    with environment.measure_time("tests"):
        passed = environment.run("pytest", "-q", "-p", "no:cacheprovider", *LOWEST_VERSION_TESTS, cwd=ROOT)
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    environment.show([f"with {shown}:", passed.splitlines()[-1]])


def build_all() -> None:
    """Build every distribution into an empty folder."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    for found in distributions():
        build(found, WHEELS)


def install_distributions(environment: Fresh, versions: dict[str, str]) -> None:
    """Install the built distributions and their requirements at given versions."""
    # torch first and alone, as in the Makefile: otherwise pip may download another build, with all of CUDA.
    environment.install("torch", f"torch=={versions['torch']}")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={v}\n" for name, v in versions.items()), encoding="utf-8")
        words = ("--constraint", str(constraints), "--find-links", str(WHEELS))
        environment.install("clika-ref with every extra", *words, EXTRAS, EXAMPLE)


if __name__ == "__main__":
    app()
