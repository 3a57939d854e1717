"""Check the terms and the style of the repository: ``python -m releasing.style``. Exit status 1: a line must change."""

import sys

from releasing.style.check import check_style, read_files
from releasing.style.terms import read_term_table

sys.exit(check_style(read_files(), read_term_table()))
