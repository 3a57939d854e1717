"""Output of the commands: results on stdout, as text or JSON, and progress on stderr."""

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

from clika_ref.reporting.console import format_size, is_quiet, progress_console
from clika_ref.reporting.progress import SimpleProgressBar
from clika_ref_cli.exit_status import MisuseError


def import_lazily(name: str) -> Any:
    """Import a module of this package when a command runs, so that ``--help`` does not wait a second for torch."""
    return importlib.import_module(f"clika_ref_cli.{name}")


def seed_all(seed: int) -> None:
    """Seed PyTorch's random number generator, for weights and inputs.

    Raises:
        MisuseError: the seed has more than 64 bits.
    """
    if not -(2**63) <= seed < 2**64:  # the range that torch.manual_seed accepts
        raise MisuseError(f"cannot use --seed {seed}: it has more than 64 bits. Give a smaller number.")
    importlib.import_module("torch").manual_seed(seed)


def show_spinner(activity: str) -> contextlib.AbstractContextManager[Any]:
    """Show a spinner on stderr while the block runs; silent if stderr is no terminal."""
    console = progress_console()
    if is_quiet() or not console.is_terminal:
        return contextlib.nullcontext()
    return console.status(f"{activity} ...")


def show_progress(activity: str, items: Iterable[Any]) -> Iterable[Any]:
    """Return the items, with a progress bar on stderr during iteration; silent if stderr is no terminal."""
    return SimpleProgressBar(items, activity, disable=not progress_console().is_terminal)


@contextlib.contextmanager
def divert_stdout(*, applies: bool = True) -> Iterator[None]:
    """Redirect stdout to stderr in the block, for prints of models and libraries: stdout contains only the result."""
    with contextlib.redirect_stdout(sys.stderr) if applies else contextlib.nullcontext():
        yield


def print_result(result: object, data: Any, *, as_json: bool) -> None:
    """Print a result as text by ``str``, or its plain ``data`` as JSON."""
    if as_json:
        print_json(data)
    else:
        typer.echo(str(result))


def print_json(data: Any) -> None:
    """Print plain data as JSON; NaN and infinities become null."""
    typer.echo(json.dumps(_to_json_data(data), indent=2, allow_nan=False))


def _to_json_data(item: Any) -> Any:
    """Convert mappings, sequences, floats and paths to types that JSON has."""
    if isinstance(item, Mapping):
        return {str(name): _to_json_data(value) for name, value in item.items()}
    if isinstance(item, Sequence) and not isinstance(item, str):
        return [_to_json_data(value) for value in item]
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    return str(item) if isinstance(item, Path) else item


def describe_file(path: Path) -> str:
    """Return the line to print for a written file: its path and size."""
    return f"{path}  {format_size(path.stat().st_size)}"
