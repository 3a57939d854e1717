"""Atomic files: written to a temporary folder next to them, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from clika_ref.core.errors import ClikaError, ModelError

DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""System errors for a full disk, an exhausted quota, or a file too large for the file system."""


def resolve_links(path: Path | str) -> Path:
    """Resolve symbolic links: writing replaces the file that a link points to, not the link.

    Raises:
        ModelError: the path contains a null byte, where the system would truncate it.
    """
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise ModelError(f"cannot write {str(path)!r}: {error}. Choose a path without it.") from error


def require_path(path: Any, example: str, *, name: str = "path") -> Path:
    """Return the path that a user gave as the argument ``name``.

    Raises:
        ModelError: it is no path; the message shows the example.
    """
    if not isinstance(path, str | os.PathLike):
        raise ModelError(f"{name} is {path!r}, a {type(path).__name__}. Give a path such as {example!r}.")
    return Path(os.fspath(path))


def require_suffix(path: Any, kind: str, suffixes: Collection[str], default: str = "") -> Path:
    """Return the path of a file after checking its suffix.

    Args:
        path: the user's path.
        kind: the kind of file, for messages: ``a picture``.
        suffixes: the accepted suffixes, in lower case; messages use the first as an example.
        default: the suffix to add to a path without one; empty if a suffix is required.

    Raises:
        ModelError: ``path`` is no path or is a folder, or it has another suffix.
    """
    destination = require_path(path, f"model{next(iter(suffixes))}")
    if destination.is_dir():
        raise ModelError(f"cannot write {kind} to {str(destination)!r}: it is a folder. Add a file name.")
    if not destination.suffix and default:
        return destination.with_name(f"{destination.name}{default}")
    if destination.suffix.lower() not in suffixes:
        problem = f"ends in {destination.suffix!r}" if destination.suffix else "has no suffix"
        raise ModelError(
            f"cannot write {kind} to {destination.name!r}: the name {problem}. Use {' or '.join(suffixes)}."
        )
    return destination


@contextlib.contextmanager
def write_atomically(path: Path | str) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces ``path`` when the block ends without an exception.

    Until then, and after any failure or interrupt, an existing file at ``path`` is unchanged.

    Raises:
        ModelError: the folder is missing or cannot be written, ``path`` cannot be a file, or the disk is full.
    """
    with stage_file(path) as destination, destination.open("xb") as file:
        yield file


@contextlib.contextmanager
def stage_file(path: Path | str) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder; when the block ends, the files there are moved to ``path``.

    A file or a whole folder can thus be checked, and rejected, before it is visible. Of several files, ``path`` itself
    is replaced last. After any failure or interrupt the old files are as before. Only a crash of the machine between
    two renames can leave new companions with an old ``path``: no file system renames several files at once.

    Errors name the final path, since the temporary folder no longer exists when they are read.

    Raises:
        ModelError: no file can be written there.
    """
    main = resolve_links(path)
    with _translate_os_errors(main):
        check_writable(main)
        folder = Path(tempfile.mkdtemp(prefix=".clika-", dir=main.parent))
    staged = folder / "new"
    try:
        staged.mkdir()
        yield staged / main.name
        with _translate_os_errors(main):
            _move_files(staged, main)
    except ClikaError as error:
        error.args = tuple(str(text).replace(str(staged), str(main.parent)) for text in error.args)
        raise
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise _write_error(error, main) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _translate_os_errors(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _write_error(error, destination) from error


def _move_files(staged: Path, main: Path) -> None:
    """Move files next to ``main``, and ``main`` last; restore the old files on any failure."""
    files = sorted(staged.iterdir(), key=lambda file: (file.name == main.name, file.name))
    for file in files:
        check_writable(main.with_name(file.name))
        _sync(file)
    replaced: list[tuple[Path, Path]] = []
    try:
        for file in files:
            destination, backup = main.with_name(file.name), staged.with_name(f"old-{len(replaced)}")
            replaced.append((destination, backup))
            if destination.exists():
                shutil.copymode(destination, file)
                if destination != main:
                    destination.rename(backup)
            file.replace(destination)  # replacing main commits all files
    except BaseException:  # also on an interrupt: the old companions belong to the old main
        for (destination, backup), file in zip(replaced, files, strict=False):
            if backup.exists():
                backup.replace(destination)
            elif destination != main and not file.exists():
                destination.unlink()
        raise
    _sync(main.parent)  # makes the renames durable


def _sync(path: Path) -> None:
    with contextlib.suppress(PermissionError):  # a umask may forbid reading; Windows cannot open folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_writable(destination: Path) -> None:
    """Reject a path that cannot be written as a plain file.

    Raises:
        ModelError: its folder is missing, or it is a folder, a device, a pipe or a socket.
    """
    if not destination.parent.is_dir():
        reason = "is not a folder" if destination.parent.exists() else "does not exist"
        remedy = "Choose another path." if destination.parent.exists() else "Create it, or choose another path."
        raise ModelError(f"cannot write {str(destination)!r}: {str(destination.parent)!r} {reason}. {remedy}")
    if destination.is_dir():
        raise ModelError(f"cannot write {str(destination)!r}: it is a folder. Add a file name.")
    if destination.exists() and not stat.S_ISREG(destination.stat().st_mode):
        # Renaming would replace, for example, /dev/null by a plain file.
        raise ModelError(
            f"cannot write {str(destination)!r}: it is a device, pipe or socket, not a plain file. Choose another path."
        )


def _write_error(error: OSError, destination: Path) -> ModelError:
    if error.errno in DISK_FULL_ERRORS:
        free = shutil.disk_usage(destination.parent).free / 1e6
        reason = f"the disk is full ({error.strerror}; {free:,.0f} MB are free)"
        remedy = "Free some space, or choose a path on another disk."
    else:
        reason = error.strerror or str(error)
        remedy = "Choose a path that you may write to."
    return ModelError(f"cannot write {str(destination)!r}: {reason}. The old file is unchanged. {remedy}")
