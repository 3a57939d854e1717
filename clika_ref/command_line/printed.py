"""What commands print: a result on stdout, for people or for machines, and on stderr what takes a while."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from clika_ref.command_line.endings import MisuseError
from clika_ref.reporting.console import is_quiet, progress_console, size
from clika_ref.reporting.progress import SimpleProgressBar


def late(name: str) -> Any:
    """Import a module of this package when a command needs it: torch takes a second, for which ``--help`` waits not."""
    return importlib.import_module(f"clika_ref.command_line.{name}")


def seed_all(seed: int) -> None:
    """Let random weights and inputs from here on be those of a seed.

    Raises:
        MisuseError: it has more than 64 bits.
    """
    if not -(2**63) <= seed < 2**64:  # what torch takes
        msg = f"--seed {seed} has more than 64 bits; give a smaller one"
        raise MisuseError(msg)
    importlib.import_module("torch").manual_seed(seed)


def working(what: str) -> contextlib.AbstractContextManager[Any]:
    """Show on stderr that something is going on, for as long as the block lasts; silent where nobody sees it move."""
    console = progress_console()
    if is_quiet() or not console.is_terminal:
        return contextlib.nullcontext()
    return console.status(f"{what} ...")


def counted(what: str, each: Iterable[Any]) -> Iterable[Any]:
    """Return what is iterated over, with a bar on stderr that counts; silent where nobody sees it move."""
    return SimpleProgressBar(each, what, disable=not progress_console().is_terminal)


@contextlib.contextmanager
def alone_on_stdout(*, applies: bool = True) -> Iterator[None]:
    """Let what a model or a library prints in the block go to stderr: stdout is for the result."""
    with contextlib.redirect_stdout(sys.stderr) if applies else contextlib.nullcontext():
        yield


def show(result: object, told: Any, *, as_json: bool) -> None:
    """Print a result: to people as it prints itself, to machines as the plain data that is told of it."""
    if as_json:
        print_json(told)
    else:
        typer.echo(str(result))


def written(path: Path) -> str:
    """Return what people are told of a file that was written."""
    return f"{path}  {size(path.stat().st_size)}"


def print_json(result: Any) -> None:
    """Write a result as JSON; numbers that JSON lacks, infinite ones and NaN, are null."""
    typer.echo(json.dumps(_plain(result), indent=2, allow_nan=False))


def _plain(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {str(name): _plain(value) for name, value in item.items()}
    if isinstance(item, Sequence) and not isinstance(item, str):
        return [_plain(value) for value in item]
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    return str(item) if isinstance(item, Path) else item
