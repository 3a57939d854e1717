"""Run the command line, which the distribution clika-ref-cli provides: ``python -m clika_ref``."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from clika_ref.core.errors import format_install_command

COMMAND = "clika-ref"
"""The console script of the command line."""


def main() -> None:
    """Call the console script, or end with the command that installs it."""
    scripts = [*entry_points(group="console_scripts", name=COMMAND)]
    if not scripts:
        command = format_install_command("clika-ref-cli")
        sys.exit(f"python -m clika_ref: the command line is not installed. Run {command}.")
    scripts[0].load()()


if __name__ == "__main__":
    main()
