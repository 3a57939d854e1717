"""Fixtures for tests of passes, whose helper modules this folder makes importable."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pass_sketches import OPERATORS, Sketch


@pytest.fixture
def sketch():
    """Return an empty sketch."""
    return Sketch()


@pytest.fixture(name="operators")
def operators_():
    """Return every operator of the plugin that declares ATen's."""
    return OPERATORS
