"""Run the check of terms and the figures of style over the files of the repository."""

from __future__ import annotations

from collections.abc import Mapping

from releasing.distributions import ROOT, list_files
from releasing.style.figures import measure_figures
from releasing.style.terms import TermTable, find_term_faults


def read_files() -> dict[str, str]:
    """Return the text of each file that git tracks, or would, by its path from the root."""
    return {name: (ROOT / name).read_text(encoding="utf-8", errors="replace") for name in list_files(ROOT)}


def check_style(files: Mapping[str, str], table: TermTable) -> int:
    """Print each term to replace and each figure, with the lines to change; return the exit status.

    Args:
        files: the text of each file, by its path from the root.
        table: the terms and their exceptions.
    """
    faults = list(find_term_faults(files, table))
    for fault in faults:
        print(fault)
    print(
        f"terms to replace: {len(faults)} (releasing/style/terms.toml, exceptions in releasing/style/exceptions.toml)"
    )
    figures = measure_figures(files)
    for figure in figures:
        print(*figure.lines(), sep="\n")
    return 1 if faults or any(figure.is_exceeded for figure in figures) else 0
