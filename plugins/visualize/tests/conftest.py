"""Let the tests import the modules that tests of all packages share, and open pages in a browser."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

from browser import browser, open_page

__all__ = ["browser", "open_page"]
