"""The commands ``python -m releasing baseline record`` and ``compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from releasing.baseline.comparing import (
    compare_records,
    environment_warnings,
    read_renames,
    rename,
    show_differences,
)
from releasing.baseline.recording import Record, part_names, read_record, record, write_record

STARTING_COMMIT = Path(__file__).with_name("starting_commit.json")
"""Record of the starting commit. Every later commit is compared with it."""

app = typer.Typer(help="Record files, state dicts, --json outputs and signatures, and compare them later.")

Only = Annotated[
    str, typer.Option(metavar="PATTERN", help="Parts to record: lstm, networks/*, commands/linear, signatures.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Six networks, the commands for one model, and signatures.")]
Renames = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML table 'renames': old = 'new'.")]
ShowsAll = Annotated[bool, typer.Option("--all", help="List every path of a difference.")]


@app.command("record")
def record_baseline(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    *,
    only: Only = "*",
    quick: Quick = False,
) -> None:
    """Record the state of this checkout in a file."""
    found = record(_parts(only, is_quick=quick))
    write_record(found, file)
    print(f"{file}: {len(found['parts'])} parts, {file.stat().st_size / 1024:,.0f} KB")


@app.command("compare")
def compare_baseline(
    file: Annotated[Path, typer.Argument(metavar="FILE")] = STARTING_COMMIT,
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="A record, in place of a new one.")] = None,
    *,
    only: Only = "*",
    quick: Quick = False,
    renames: Renames = None,
    shows_all: ShowsAll = False,
) -> None:
    """Compare a record with the state of this checkout, or with another record. Exit with 1 where they differ."""
    parts = _parts(only, is_quick=quick)
    before = _select(read_record(file), parts)
    before = rename(before, read_renames(renames)) if renames else before
    after = _select(read_record(other), parts) if other else record([*before["parts"]])
    for warning in environment_warnings(before, after):
        print(f"warning: {warning}")
    found = compare_records(before, after)
    for line in show_differences(found, shows_all=shows_all):
        print(line)
    print(f"{len(found)} differences in {len(before['parts'])} parts from {before['header']['commit'][:12]}")
    if found:
        raise typer.Exit(1)


def _parts(only: str, *, is_quick: bool) -> list[str]:
    """Return the requested parts.

    Raises:
        BadParameter: there are none.
    """
    parts = part_names(only, is_quick=is_quick)
    if not parts:
        raise typer.BadParameter(f"--only {only} matches none of {', '.join(part_names())}")
    return parts


def _select(found: Record, parts: list[str]) -> Record:
    """Return a record with only the requested parts."""
    return {**found, "parts": {name: found["parts"][name] for name in parts if name in found["parts"]}}
