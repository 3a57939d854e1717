"""Lets the tests import the strange levels and targets of ``stand_ins``, as the workers that they start do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))
