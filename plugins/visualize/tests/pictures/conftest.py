"""Let the tests import what they share: the importlib mode of pytest leaves the folder of a test off the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
