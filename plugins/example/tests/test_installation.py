"""The example is installed and removed by pip: its entry points appear and disappear, and nothing else changes."""

import hashlib
import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "plugins/example"
PACKAGE = "clika_ref_example"
GIT = shutil.which("git") or "git"

INSTALL = ("install", "--no-index", "--no-build-isolation", "--no-deps", "--no-compile")

PRINT_INSTALLED_PARTS = """
import importlib.util, json
from clika_ref_cli.plugin_facts import load_installed_plugins

found, package = load_installed_plugins(), importlib.util.find_spec("clika_ref_example")
print(json.dumps({"failures": found.failures, "file": package and package.origin, **found.as_json()}))
"""


class Environment:
    """A virtual environment with all packages of this one except the example."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder, symlinks=True)
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if PACKAGE not in entry.name and entry.name != "__pycache__":
                (self.packages / entry.name).symlink_to(entry)

    def run(self, *words):
        """Run its Python, which finds no plugin in the folder of the example, and return the output."""
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        others = os.pathsep.join(path for path in paths if Path(path).resolve() != FOLDER)
        set_to = {"PYTHONPATH": others, "PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        left = {name: value for name, value in os.environ.items() if name != "CLIKA_REF_PLUGINS"}
        python, cwd = self.folder / "bin/python", self.folder.parent
        done = subprocess.run(
            [python, *words], env={**left, **set_to}, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def plugins(self):
        """Return each plugin that clika-ref finds there, under its name, and where the example was found."""
        installed = json.loads(self.run("-c", PRINT_INSTALLED_PARTS))
        assert installed["failures"] == []
        return {plugin["name"]: plugin for plugin in installed["plugins"]}, installed["file"]

    def names(self):
        """Return the entries of its package folder."""
        return {entry.name for entry in self.packages.iterdir()}


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


def hash_files_outside():
    """Return the hash of each file of the project outside the folder of the example."""
    listed = subprocess.run([GIT, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    kept = [path for path in paths if path.is_file() and FOLDER not in path.parents]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


@pytest.mark.slow
def test_pip_install_and_uninstall_change_example_only(environment, tmp_path):
    """pip adds and removes the example, and nothing outside of its folder changes."""
    source = tmp_path / "example"  # a build leaves files next to the source
    shutil.copytree(FOLDER, source, ignore=shutil.ignore_patterns("tests", "build", "*.egg-info", "__pycache__"))
    files, names, (before, nowhere) = hash_files_outside(), environment.names(), environment.plugins()
    assert len(files) > 100
    assert nowhere is None
    assert {"aten", "onnxruntime"} <= before.keys()

    environment.run("-m", "pip", *INSTALL, str(source))
    during, place = environment.plugins()
    assert Path(place).parent.parent == environment.packages
    assert {name: during[name] for name in before} == before
    added = {name: during[name] for name in during.keys() - before.keys()}
    assert {name: plugin["targets"] for name, plugin in added.items()} == {
        "example": ["interpreter"],
        "reference": ["onnx-reference"],
    }
    assert {name.partition("-")[0] for name in environment.names() - names} == {PACKAGE}
    assert hash_files_outside() == files

    environment.run("-m", "pip", "uninstall", "--yes", "clika-ref-example")
    assert environment.plugins() == (before, None)
    assert environment.names() == names
    assert hash_files_outside() == files
