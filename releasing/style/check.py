"""Run the check of terms and the figures of style over the files of the repository."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from releasing.distributions import ROOT
from releasing.style.figures import measure_figures
from releasing.style.terms import find_term_faults


def read_files() -> dict[str, str]:
    """Return the text of each file that git tracks, or would, by its path from the root."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {name: ROOT / name for name in sorted({*names.split("\0")} - {""})}
    return {name: path.read_text(encoding="utf-8", errors="replace") for name, path in paths.items() if path.is_file()}


def check_style(files: Mapping[str, str]) -> int:
    """Print each term to replace and each figure, with the lines to change; return the exit status."""
    faults = list(find_term_faults(files))
    for fault in faults:
        print(fault)
    print(
        f"terms to replace: {len(faults)} (releasing/style/terms.toml, exceptions in releasing/style/exceptions.toml)"
    )
    figures = measure_figures(files)
    for figure in figures:
        print(*figure.lines(), sep="\n")
    return 1 if faults or any(figure.is_exceeded for figure in figures) else 0
