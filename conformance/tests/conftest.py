"""Let the tests and the workers that they start import the faulty levels and targets of ``stand_ins``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fakes"))
