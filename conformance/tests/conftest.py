"""Let the tests import the faulty levels and targets of ``fakes``, as their workers do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
