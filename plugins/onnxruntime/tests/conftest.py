"""Let the tests import the modules that tests of all packages share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
