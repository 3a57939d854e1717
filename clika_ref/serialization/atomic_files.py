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
        msg = f"cannot write {str(path)!r}: {error}; choose a path without it"
        raise ModelError(msg) from error


def require_path(path: Any, example: str, *, name: str = "path") -> Path:
    """Return the path that a user gave as the argument ``name``.

    Raises:
        ModelError: it is no path; the message shows the example.
    """
    if not isinstance(path, str | os.PathLike):
        msg = f"{name} is {path!r}, a {type(path).__name__}; give a path such as {example!r}"
        raise ModelError(msg)
    return Path(os.fspath(path))


def require_suffix(path: Any, kind: str, suffixes: Collection[str], default: str = "") -> Path:
    """Return the path of a file after checking its suffix.

    Args:
        path: the user's path.
        kind: the kind of file, for messages: ``a picture``.
        suffixes: the accepted suffixes, in lower case; messages use the first as an example.
        default: the suffix to add to a path without one; empty if a suffix is required.

    Raises:
        ModelError: it is no path, a folder, or has another suffix.
    """
    target = require_path(path, f"model{next(iter(suffixes))}")
    if target.is_dir():
        msg = f"cannot write {kind} to {str(target)!r}: it is a folder; add a file name"
        raise ModelError(msg)
    if not target.suffix and default:
        return target.with_name(f"{target.name}{default}")
    if target.suffix.lower() not in suffixes:
        fault = f"ends in {target.suffix!r}" if target.suffix else "has no suffix"
        msg = f"{target.name!r} {fault}, and {kind} ends in {' or '.join(suffixes)}; write it so"
        raise ModelError(msg)
    return target


@contextlib.contextmanager
def write_atomically(path: Path | str) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces ``path`` when the block ends without an exception.

    Until then, and after any failure or interrupt, an existing file at ``path`` is unchanged.

    Raises:
        ModelError: the folder is missing or cannot be written, ``path`` cannot be a file, or the disk is full.
    """
    with stage_file(path) as target, target.open("xb") as file:
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
def _translate_os_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _write_error(error, target) from error


def _move_files(staged: Path, main: Path) -> None:
    """Move files next to ``main``, and ``main`` last; restore the old files on any failure."""
    files = sorted(staged.iterdir(), key=lambda file: (file.name == main.name, file.name))
    for file in files:
        check_writable(main.with_name(file.name))
        _sync(file)
    replaced: list[tuple[Path, Path]] = []
    try:
        for file in files:
            target, backup = main.with_name(file.name), staged.with_name(f"old-{len(replaced)}")
            replaced.append((target, backup))
            if target.exists():
                shutil.copymode(target, file)
                if target != main:
                    target.rename(backup)
            file.replace(target)  # replacing main commits all files
    except BaseException:  # also on an interrupt: the old companions belong to the old main
        for (target, backup), file in zip(replaced, files, strict=False):
            if backup.exists():
                backup.replace(target)
            elif target != main and not file.exists():
                target.unlink()
        raise
    _sync(main.parent)  # makes the renames durable


def _sync(path: Path) -> None:
    with contextlib.suppress(PermissionError):  # a umask may forbid reading; Windows cannot open folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_writable(target: Path) -> None:
    """Reject a path that cannot be written as a plain file.

    Raises:
        ModelError: its folder is missing, or it is a folder, a device, a pipe or a socket.
    """
    if not target.parent.is_dir():
        reason = "is not a folder" if target.parent.exists() else "does not exist"
        remedy = "choose another path" if target.parent.exists() else "create it, or choose another path"
        msg = f"cannot write {str(target)!r}: {str(target.parent)!r} {reason}; {remedy}"
        raise ModelError(msg)
    if target.is_dir():
        msg = f"cannot write {str(target)!r}: it is a folder; add a file name"
        raise ModelError(msg)
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        # Renaming would replace, for example, /dev/null by a plain file.
        msg = f"cannot write {str(target)!r}: it is a device, pipe or socket, not a plain file; choose another path"
        raise ModelError(msg)


def _write_error(error: OSError, target: Path) -> ModelError:
    if error.errno in DISK_FULL_ERRORS:
        free = shutil.disk_usage(target.parent).free / 1e6
        reason = f"no more bytes fit there ({error.strerror}; {free:,.0f} MB are free)"
        remedy = "free some space, or choose a path on another disk"
    else:
        reason = error.strerror or str(error)
        remedy = "choose a path that you may write to"
    return ModelError(f"cannot write {str(target)!r}: {reason}; {remedy}. What was there before is unchanged.")
