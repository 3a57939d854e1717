"""Checks of output paths before the work begins, which may take hours."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clika_ref.core.errors import ModelError
from clika_ref.serialization.atomic_files import check_writable, resolve_links
from clika_ref_cli.exit_status import MisuseError


def check_output_paths(paths: Mapping[str, Path | None], message: str, read: Sequence[str] = ()) -> None:
    """Check, before the work begins, that the results can be written without overwriting an input.

    Args:
        paths: output paths by flag; empty if the command writes no file.
        message: the message if no path is given.
        read: arguments of the command that may name input files.

    Raises:
        MisuseError: no path is given, two are equal, or one is not writable or is also an input.
    """
    given = {flag: path for flag, path in paths.items() if path is not None}
    if paths and not given:
        raise MisuseError(message)
    if len({path.absolute() for path in given.values()}) < len(given):
        raise MisuseError(
            f"cannot write two results to one file: {' and '.join(given)} are equal. Give different files."
        )
    for flag, path in given.items():
        _check_path(flag, path)
        if path.exists() and any(path.samefile(name) for word in read for name in _find_named_files(word)):
            raise MisuseError(f"{flag}: cannot write {path}: it is also an input. Choose another name.")


@contextlib.contextmanager
def prefix_errors_with_flag(flag: str) -> Iterator[None]:
    """Convert errors in the block to `MisuseError`, prefixed with the flag of the path.

    Raises:
        MisuseError: in place of a `ModelError`.
    """
    try:
        yield
    except ModelError as error:
        raise MisuseError(f"{flag}: {error}") from error


def _check_path(flag: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise MisuseError(f"{flag}: cannot write {path}: there is no folder {path.parent}. Create it first.")
    with prefix_errors_with_flag(flag):
        resolved = resolve_links(path)
        check_writable(resolved)
    if not os.access(resolved.parent, os.W_OK | os.X_OK):
        raise MisuseError(
            f"{flag}: cannot write {path}: the folder {resolved.parent} is read-only. Choose another one."
        )


def _find_named_files(word: str) -> list[Path]:
    """Return the files that an argument names, such as ``ids=int64:x.npy``."""
    return [Path(part) for part in {word, *re.split("[,:=]", word)} if is_existing_path(part)]


def is_existing_path(word: str) -> bool:
    """Whether an argument names an existing file or folder; False if it is too long for a path."""
    try:
        return word != "" and Path(word).exists()
    except OSError:
        return False
