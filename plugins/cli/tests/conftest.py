"""Fixtures of the command line, and the path of its helper module and of those that tests of all packages share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from command_folder import enter, make_quantized_folder


@pytest.fixture(scope="session")
def quantized_folder(tmp_path_factory):
    """Return a folder with a model and its quantized files, which the tests only read."""
    return make_quantized_folder(tmp_path_factory.mktemp("commands"))


@pytest.fixture
def _enter_quantized_folder(quantized_folder, monkeypatch):
    enter(quantized_folder.folder, monkeypatch)
