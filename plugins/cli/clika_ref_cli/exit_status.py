"""Exit statuses and error reports on stderr. An interrupt leaves no partially written file."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Annotated

import typer

from clika_ref.core.errors import ClikaError, DisagreementError, ModelError


class Status(IntEnum):
    """The exit status of a command."""

    DONE = 0
    NEGATIVE = 1
    MISUSE = 2
    INCOMPATIBLE = 3
    BUG = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT, the convention of shells


STATUS_MEANINGS: Mapping[Status, str] = {
    Status.DONE: "success",
    Status.NEGATIVE: "negative result: a rule is violated, models differ, or a plugin or target cannot be used",
    Status.MISUSE: "invalid usage: an argument, a settings file or a data file is invalid",
    Status.INCOMPATIBLE: "unsupported: model, data, target and installation do not match, or a model file is invalid",
    Status.BUG: "a bug in clika-ref or in a plugin",
    Status.INTERRUPTED: "interrupted",
}
"""Meaning of each status, for the help and the manual."""

STATUS_HELP = f"Exit status: {'; '.join(f'{status:d} {meaning}' for status, meaning in STATUS_MEANINGS.items())}."

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

INTERRUPTED_MESSAGE = "interrupted: existing files are unchanged, and no incomplete file was written"

DEBUG_HINT = "--debug shows the traceback."

BUG_MESSAGE = "This is a bug in clika-ref or in a plugin. Run again with --debug, and report the traceback."


class MisuseError(ModelError):
    """Invalid command line, or an invalid file that it names."""


@contextlib.contextmanager
def raise_as_misuse() -> Iterator[None]:
    """Convert errors in the block to `MisuseError`, for code that parses input of the user.

    Raises:
        MisuseError: in place of any other `ClikaError`.
    """
    try:
        yield
    except MisuseError:
        raise
    except ClikaError as error:
        misuse = MisuseError(str(error))
        for note in getattr(error, "__notes__", ()):
            misuse.add_note(note)
        raise misuse from error


@contextlib.contextmanager
def report_errors(*, debug: bool, default: Status = Status.INCOMPATIBLE) -> Iterator[None]:
    """Convert errors in the block to a message on stderr and an exit status.

    Args:
        debug: whether to show tracebacks.
        default: exit status for errors without a status of their own.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        _print_to_stderr(INTERRUPTED_MESSAGE)
        raise typer.Exit(Status.INTERRUPTED) from interrupt
    except ClikaError as error:
        _report_error(error, "\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), debug=debug)
        raise typer.Exit(_select_status(error, default)) from error
    except (typer.Exit, typer.Abort, BrokenPipeError):  # typer handles the closed pipe of `| head`
        raise
    except SystemExit as error:  # raised by a library or the model: its own status would mean something else here
        text = f"error: the model or the data exited the process: {error!r}. Remove its call of sys.exit()."
        _report_error(error, text, debug=debug)
        raise typer.Exit(default) from error
    except Exception as error:
        _report_error(error, f"error: {type(error).__name__}: {str(error).rstrip('.')}. {BUG_MESSAGE}", debug=debug)
        raise typer.Exit(Status.BUG) from error


def _select_status(error: ClikaError, default: Status) -> Status:
    if isinstance(error, MisuseError):
        return Status.MISUSE
    return Status.NEGATIVE if isinstance(error, DisagreementError) else default


def _report_error(error: BaseException, text: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    else:
        _print_to_stderr(text)


def print_note(text: str) -> None:
    """Print a note on stderr, for behavior that the user may not expect."""
    _print_to_stderr(f"note: {text}")


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - messages for the user go here
