"""Atomic files: written to a temporary file in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

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
    place = require_path(path, f"model{next(iter(suffixes))}")
    if place.is_dir():
        msg = f"cannot write {kind} to {str(place)!r}: it is a folder; add a file name"
        raise ModelError(msg)
    if not place.suffix and default:
        return place.with_name(f"{place.name}{default}")
    if place.suffix.lower() not in suffixes:
        told = f"ends in {place.suffix!r}" if place.suffix else "has no suffix"
        msg = f"{place.name!r} {told}, and {kind} ends in {' or '.join(suffixes)}; write it so"
        raise ModelError(msg)
    return place


@contextlib.contextmanager
def write_atomically(path: Path | str) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces ``path`` when the block ends without an exception.

    Until then, and after any failure or interrupt, an existing file at ``path`` is unchanged.

    Raises:
        ModelError: the folder is missing or cannot be written, ``path`` cannot be a file, or the disk is full.
    """
    with AtomicFiles(path) as files:
        yield files.open(path)


@dataclass
class _PendingFile:
    """A temporary file that will be renamed."""

    path: Path
    temporary: Path
    handle: BinaryIO


class AtomicFiles:
    """Several files that are replaced together: ``main`` last, so that a new ``main`` implies new companions.

    After any failure or interrupt the old files are restored. Only a crash of the machine between two renames can leave
    new companions with an old ``main``: no file system renames several files at once.

    ```python
    with AtomicFiles("model.onnx") as files:
        files.open("model.onnx").write(graph)
        files.open("model.onnx.data").write(weights)
    ```
    """

    def __init__(self, main: Path | str) -> None:
        self.main = resolve_links(main)
        self._pending: list[_PendingFile] = []

    def open(self, path: Path | str) -> BinaryIO:
        """Return a binary file that becomes ``path`` when the block ends.

        Raises:
            ModelError: no file can be written there.
        """
        place = resolve_links(path)
        # A short name of its own: the file's name with a suffix could exceed the limit of 255 bytes. Opened with the
        # default mode, unlike tempfile's, so that the umask decides who may read the result.
        temporary = place.with_name(f".clika-{secrets.token_hex(8)}.tmp")
        with _translate_os_errors(place):
            check_writable(place)
            handle = temporary.open("xb")
        self._pending.append(_PendingFile(place, temporary, handle))
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with _translate_os_errors(self.main):
                    self._commit()
        finally:
            self._clear()
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
            raise _write_error(error, self.main) from error

    def _commit(self) -> None:
        for file in self._pending:
            file.handle.flush()
            os.fsync(file.handle.fileno())
            file.handle.close()
        _commit_renames([(file.temporary, file.path) for file in self._pending], self.main)

    def _clear(self) -> None:
        for file in self._pending:
            with contextlib.suppress(OSError):  # closing writes the buffer, which fails again on a full disk
                file.handle.close()
            file.temporary.unlink(missing_ok=True)
        self._pending.clear()


@contextlib.contextmanager
def stage_file(path: Path | str) -> Iterator[Path]:
    """Yield a path of the same name in a temporary folder; when the block ends, the files there are moved to ``path``.

    A file or a whole folder can thus be checked, and rejected, before it is visible. Errors name the final path, since
    the temporary folder no longer exists when they are read.

    Raises:
        ModelError: no file can be written there.
    """
    main = resolve_links(path)
    with _translate_os_errors(main):
        check_writable(main)
        folder = Path(tempfile.mkdtemp(prefix=".clika-", dir=main.parent))
    try:
        yield folder / main.name
        with _translate_os_errors(main):
            _commit_renames([(file, main.parent / file.name) for file in sorted(folder.iterdir())], main)
    except ClikaError as error:
        error.args = tuple(str(text).replace(str(folder), str(main.parent)) for text in error.args)
        raise
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise _write_error(error, main) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _translate_os_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _write_error(error, place) from error


def _commit_renames(moves: list[tuple[Path, Path]], main: Path) -> None:
    """Rename files, ``main`` last; restore the old files on any failure."""
    order = sorted(moves, key=lambda move: move[1] == main)  # stable, with main at the end
    backups: dict[Path, Path | None] = {}
    try:
        for temporary, place in order:
            if place.exists():
                shutil.copymode(place, temporary)
            if place != main:
                backups[place] = _back_up(place)
            temporary.replace(place)  # replacing main commits all files
    except BaseException:  # also on an interrupt: the old companions belong to the old main
        for temporary, place in order[:-1]:
            backup = backups.pop(place, None)
            if backup is not None:
                backup.replace(place)
            elif not temporary.exists():
                place.unlink(missing_ok=True)
        raise
    finally:
        for backup in backups.values():
            if backup is not None:
                backup.unlink(missing_ok=True)
    for folder in {place.parent for _, place in order}:
        _sync_folder(folder)


def check_writable(place: Path) -> None:
    """Reject a path that cannot be written as a plain file.

    Raises:
        ModelError: its folder is missing, or it is a folder, a device, a pipe or a socket.
    """
    if not place.parent.is_dir():
        reason = "is not a folder" if place.parent.exists() else "does not exist"
        remedy = "choose another path" if place.parent.exists() else "create it, or choose another path"
        msg = f"cannot write {str(place)!r}: {str(place.parent)!r} {reason}; {remedy}"
        raise ModelError(msg)
    if place.is_dir():
        msg = f"cannot write {str(place)!r}: it is a folder; add a file name"
        raise ModelError(msg)
    if place.exists() and not stat.S_ISREG(place.stat().st_mode):
        # Renaming would replace, for example, /dev/null by a plain file.
        msg = f"cannot write {str(place)!r}: it is a device, pipe or socket, not a plain file; choose another path"
        raise ModelError(msg)


def _back_up(path: Path) -> Path | None:
    if not path.exists():
        return None
    backup = path.with_name(f".clika-{secrets.token_hex(8)}.tmp")
    try:
        backup.hardlink_to(path)
    except OSError:  # exFAT and some network shares have no hard links
        path.rename(backup)
    return backup


def _sync_folder(folder: Path) -> None:
    # A rename is durable once the folder is synced. Windows cannot open folders, and does not need this.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_error(error: OSError, place: Path) -> ModelError:
    if error.errno in DISK_FULL_ERRORS:
        free = shutil.disk_usage(place.parent).free / 1e6
        reason = f"no more bytes fit there ({error.strerror}; {free:,.0f} MB are free)"
        remedy = "free some space, or choose a path on another disk"
    else:
        reason = error.strerror or str(error)
        remedy = "choose a path that you may write to"
    return ModelError(f"cannot write {str(place)!r}: {reason}; {remedy}. What was there before is unchanged.")
