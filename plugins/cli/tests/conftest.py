"""Let the tests import their helper module, and the modules that tests of all packages share."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "tests")]
