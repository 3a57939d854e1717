"""Where a command writes: what is no place for it is told before the work begins, which may take hours."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clika_ref.command_line.endings import MisuseError
from clika_ref.core.errors import ModelError
from clika_ref.storage import behind_links, refuse_place


def refuse_no_place(places: Mapping[str, Path | None], remedy: str, read: Sequence[str] = ()) -> None:
    """Notice before the work begins that its result would have no place, or would take that of what is read for it.

    Args:
        places: by the flag that gives each; empty where nothing is to be written.
        remedy: what to do where none is given.
        read: what the command reads: words that may be names of files.

    Raises:
        MisuseError: none is given, two are one, one is no place for a file, or is a file that the command reads.
    """
    given = {flag: path for flag, path in places.items() if path is not None}
    if places and not given:
        raise MisuseError(remedy)
    if len({path.absolute() for path in given.values()}) < len(given):
        raise MisuseError(f"{' and '.join(given)} name one file; give each its own")
    for flag, path in given.items():
        _refuse(flag, path)
        if path.exists() and any(path.samefile(name) for word in read for name in _files_in(word)):
            msg = f"{flag}: {path} is read here, and would be written over; choose another name"
            raise MisuseError(msg)


@contextlib.contextmanager
def flagged(flag: str) -> Iterator[None]:
    """Let what is wrong with a path in the block count as wrong use of a flag, which stands before what is said.

    Raises:
        MisuseError: something is wrong.
    """
    try:
        yield
    except ModelError as error:
        msg = f"{flag}: {error}"
        raise MisuseError(msg) from error


def _refuse(flag: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        msg = f"{flag}: there is no folder {path.parent} to write to; make it first"
        raise MisuseError(msg)
    with flagged(flag):
        place = behind_links(path)
        refuse_place(place)
    if not os.access(place.parent, os.W_OK | os.X_OK):
        msg = f"{flag}: the folder {place.parent} cannot be written to; choose another one"
        raise MisuseError(msg)


def _files_in(word: str) -> list[Path]:
    """Return the files that a word names, such as ``ids=int64:x.npy``."""
    return [Path(part) for part in {word, *re.split("[,:=]", word)} if is_there(part)]


def is_there(word: str) -> bool:
    """Whether a word names a file or a folder; one that is too long for that does not."""
    try:
        return word != "" and Path(word).exists()
    except OSError:
        return False
