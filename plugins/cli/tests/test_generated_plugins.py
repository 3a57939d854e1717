"""Plugins written by ``clika-ref new-plugin``: they follow our style, install, and pass their tests unchanged."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from clika_ref_cli.new_plugin import MAX_NAME_LENGTH, write_plugin
from environments import Environment

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/new-plugin.md"
LINES = 30
"""From new-plugin to a passing run of the conformance suite, commands included."""

NAMES = ["acme", "my-2nd-ops"]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("new_plugin") / "environment")


def run_module(name, *words, cwd):
    done = subprocess.run([sys.executable, "-m", name, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=["x", "a" * MAX_NAME_LENGTH], ids=["shortest", "longest"])
def folder(request, tmp_path):
    """A new plugin, with a name that makes its lines as short or as long as any."""
    return write_plugin(request.param, tmp_path)[0]


def test_new_plugin_code_passes_ruff(folder):
    """A generated plugin passes ruff with our settings."""
    ours = SETTINGS["ruff"]["lint"]["per-file-ignores"]
    (tests,) = [codes for pattern, codes in ours.items() if pattern.startswith("{tests,plugins/*/tests")]
    ignored = {"**": ours["plugins/**"], "tests/**": tests}
    stated = "".join(f"{json.dumps(pattern)} = {json.dumps(codes)}\n" for pattern, codes in ignored.items())
    extend = f"extend = {json.dumps(str(ROOT / 'pyproject.toml'))}\n"
    (folder / "ruff.toml").write_text(f"{extend}[lint.per-file-ignores]\n{stated}", encoding="utf-8")
    run_module("ruff", "format", "--check", "--no-cache", ".", cwd=folder)
    run_module("ruff", "check", "--no-cache", ".", cwd=folder)


@pytest.mark.slow
def test_new_plugin_code_passes_pyright(tmp_path):
    """A generated plugin passes pyright with our settings."""
    folder, _ = write_plugin("acme", tmp_path)
    ours = {name: SETTINGS["pyright"][name] for name in ("pythonVersion", "typeCheckingMode", "reportPrivateUsage")}
    places = [str(ROOT), *(str(ROOT / path) for path in SETTINGS["pyright"]["extraPaths"])]
    settings = {**ours, "include": ["clika_ref_*", "tests"], "extraPaths": places}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    run_module("pyright", "--pythonpath", sys.executable, cwd=folder)


@pytest.mark.slow
def test_new_plugin_two_plugins_install_and_pass_tests(environment, tmp_path):
    """Two generated plugins install together and pass their tests unchanged."""
    steps = {}
    for name in NAMES:
        result = json.loads(environment.run("clika-ref", "new-plugin", name, "--json", cwd=tmp_path))
        (change, *folders), (pip, *install), steps[name] = map(shlex.split, result["next"])
        assert (change, folders, pip) == ("cd", [result["folder"]], "pip")
        environment.run(pip, *install, cwd=tmp_path / result["folder"])
    shown = environment.run("clika-ref", "plugins", "--names", cwd=tmp_path)
    for name in NAMES:
        assert f"{name} passes: fuse-{name}-squared-relu" in shown
        passed = environment.run(*steps[name], cwd=tmp_path / f"clika-ref-{name}")
        assert re.search(r" \d+ passed in ", passed), passed


@pytest.mark.slow
def test_new_plugin_page_at_most_thirty_lines(environment, tmp_path):
    """The page reaches a passing conformance run in at most 30 lines."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r'^```(\w+)(?: title="([\w./-]+)")?\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
    lines = [line for *_, block in blocks for line in block.splitlines() if line.strip()]
    assert lines[0].startswith("clika-ref new-plugin ")
    assert lines[-1].startswith("clika-ref conformance run ")
    assert len(lines) <= LINES
    place = tmp_path
    for _, title, block in blocks:
        if title:
            assert (tmp_path / title).exists(), "it is written over, or the page names another place"
            (tmp_path / title).write_text(block, encoding="utf-8")
            continue
        for line in block.splitlines():
            command, *words = shlex.split(line)
            if command == "cd":
                place /= words[0]
            else:
                printed = environment.run(command, *words, cwd=place)
    assert "pass" in printed
    assert (place / "report/index.html").exists()
