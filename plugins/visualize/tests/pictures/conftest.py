"""Let the tests import their helper modules: pytest's importlib mode does not add the folder of a test to the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
