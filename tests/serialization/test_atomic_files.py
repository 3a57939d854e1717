"""Files are complete or absent after failures, interrupts and full disks."""

import errno
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from clika_ref.core.errors import ModelError, TargetError
from clika_ref.serialization.atomic_files import stage_file, write_atomically

OLD, NEW = b"old", b"new content"


@pytest.fixture
def old(tmp_path) -> Path:
    """A file that is there already."""
    path = tmp_path / "model.onnx"
    path.write_bytes(OLD)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, *chunks: bytes, error: BaseException | None = None) -> None:
    """Write chunks, then fail if an error is given."""
    with write_atomically(path) as file:
        for chunk in chunks:
            file.write(chunk)
        if error is not None:
            raise error


class FullFile:
    """A file on a disk that turns out to be full at one moment: after 15 bytes, or when it is closed."""

    def __init__(self, handle, moment: str) -> None:
        self.handle, self.moment, self.room = handle, moment, 15

    def refuse(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.moment == "write" and self.room < 0:
            self.refuse()
        return self.handle.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.close()
        if self.moment == "close":
            self.refuse()


def test_write_atomically_file_appears_at_end_of_block(tmp_path):
    """The file appears at the end of the block, not before."""
    path = tmp_path / "model.onnx"
    with write_atomically(str(path)) as file:
        file.write(NEW)
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == NEW
    assert names(tmp_path) == ["model.onnx"]


def test_write_atomically_replaces_file_and_keeps_mode(old):
    """An existing file is replaced and keeps its mode."""
    old.chmod(0o640)
    with write_atomically(old) as file:
        file.write(NEW)
        assert old.read_bytes() == OLD
    assert old.read_bytes() == NEW
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_write_atomically_new_file_follows_umask(tmp_path):
    """A new file has the mode of the umask."""
    before = os.umask(0o027)
    try:
        with write_atomically(tmp_path / "model.onnx"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.onnx").stat().st_mode) == 0o640


def test_write_atomically_syncs_before_rename(old, monkeypatch):
    """The bytes are synced before the rename, and the folder after it."""
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append("sync") or fsync(fd))
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append("rename") or replace(self, to))
    with write_atomically(old) as file:
        file.write(NEW)
    assert events == ["sync", "rename", "sync"]  # the last is the folder


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt(), SystemExit(1), OSError(errno.EIO, "odd")])
def test_write_atomically_failure_keeps_old_file(old, error):
    """Any failure is raised unchanged and keeps the old file."""
    with pytest.raises(type(error)) as caught:
        write(old, NEW, error=error)
    assert caught.value is error
    assert old.read_bytes() == OLD
    assert names(old.parent) == ["model.onnx"]


@pytest.mark.parametrize("moment", ["write", "close", "fsync"])
def test_write_atomically_full_disk_raises_keeps_old_file(old, monkeypatch, moment):
    """A full disk raises an error with the remedy, and the old file stays."""
    real_open = Path.open

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if moment == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(Path, "open", lambda path, mode: FullFile(real_open(path, mode), moment))
        with pytest.raises(ModelError) as caught:
            write(old, *[NEW] * 10)
    message = (
        r"cannot write '.*model\.onnx': the disk is full \(No space left on device; [\d,]+ MB are free\)\. "
        r"The old file is unchanged\. Free some space, or choose a path on another disk\."
    )
    assert re.fullmatch(message, str(caught.value))
    assert old.read_bytes() == OLD
    assert names(old.parent) == ["model.onnx"]


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs limits on the size of files")
def test_write_atomically_file_size_limit_raises(old):
    """A file size limit of the system raises the same error."""
    code = (
        "import resource, signal, sys\n"
        "from clika_ref.serialization.atomic_files import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "with write_atomically(sys.argv[1]) as file:\n"
        "    file.write(bytes(1 << 20))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, old], capture_output=True, text=True, check=False)
    assert "ModelError: cannot write" in done.stderr
    assert "the disk is full (File too large" in done.stderr
    assert old.read_bytes() == OLD
    assert names(old.parent) == ["model.onnx"]


def test_write_atomically_interrupt_keeps_old_file(old):
    """An interrupt signal during writing keeps the old file."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell in the background ignores it
        "from clika_ref.serialization.atomic_files import write_atomically\n"
        "with write_atomically(sys.argv[1]) as file:\n"
        "    file.write(bytes(1 << 20))\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(1 << 10): file.write(bytes(1 << 10))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, old], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert old.read_bytes() == OLD
    assert names(old.parent) == ["model.onnx"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "absent/model.onnx",
            r"cannot write '.*model\.onnx': '.*absent' does not exist. Create it, or choose another path",
        ),
        ("file/model.onnx", r"cannot write '.*model\.onnx': '.*file' is not a folder. Choose another path"),
        ("folder", r"cannot write '.*folder': it is a folder. Add a file name"),
        ("pipe", r"cannot write '.*pipe': it is a device, pipe or socket, not a plain file. Choose another path"),
        (
            "n" * 300,
            r"cannot write '.*n': File name too long. The old file is unchanged. Choose a path that you may write to",
        ),
    ],
)
def test_write_atomically_invalid_path_raises_with_remedy(tmp_path, place, message):
    """A path that cannot be a file raises an error with the remedy."""
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    with pytest.raises(ModelError, match=message), write_atomically(tmp_path / place):
        pass
    assert names(tmp_path) == before


def test_write_atomically_permission_denied_raises(tmp_path, monkeypatch):
    """A folder without write permission is named in the error."""

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)  # file modes do not restrict root, as which tests may run
    with (
        pytest.raises(
            ModelError,
            match=r"cannot write '.*m': Permission denied. The old file is unchanged. Choose a path that",
        ),
        write_atomically(tmp_path / "m"),
    ):
        pass


def test_write_atomically_symlink_target_replaced(old, tmp_path):
    """The target of a symbolic link is replaced, and the link stays."""
    link = tmp_path / "link.onnx"
    link.symlink_to(old)
    with write_atomically(link) as file:
        file.write(NEW)
    assert link.is_symlink()
    assert old.read_bytes() == NEW


def test_write_atomically_accepts_longest_name(tmp_path):
    """A name of the maximal length is written."""
    path = tmp_path / ("n" * 255)
    with write_atomically(path) as file:
        file.write(NEW)
    assert path.read_bytes() == NEW


# Several files at once


@pytest.fixture
def both(old) -> tuple[Path, Path]:
    """A model and its weights, both there already."""
    data = old.with_name("model.onnx.data")
    data.write_bytes(OLD)
    return old, data


def write_both(main: Path, data: Path) -> None:
    with stage_file(main) as place:
        place.write_bytes(NEW)
        place.with_name(data.name).write_bytes(NEW * 2)


def test_atomic_files_appear_together_main_last(both, monkeypatch):
    """Several files appear together, the main file last."""
    order = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: order.append(to.name) or replace(self, to))
    write_both(*both)
    assert [name for name in order if not name.startswith("old-")] == ["model.onnx.data", "model.onnx"]
    assert [path.read_bytes() for path in both] == [NEW, NEW * 2]
    assert names(both[0].parent) == ["model.onnx", "model.onnx.data"]


def test_atomic_files_new_files_written(tmp_path):
    """A new main file and a new companion are written."""
    write_both(tmp_path / "a.onnx", tmp_path / "a.data")
    assert names(tmp_path) == ["a.data", "a.onnx"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_atomic_files_failed_rename_restores_old_companion(both, monkeypatch, error):
    """If the main file cannot be renamed, the old companion is restored."""
    replace = Path.replace

    def stop_at_main(self, to):
        if to.name == "model.onnx":
            raise error
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", stop_at_main)
    expected = ModelError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_both(*both)
    assert [path.read_bytes() for path in both] == [OLD, OLD]
    assert names(both[0].parent) == ["model.onnx", "model.onnx.data"]


def test_atomic_files_failed_rename_removes_new_companion(old, monkeypatch):
    """If the main file cannot be renamed, the new companion is removed."""
    replace = Path.replace

    def stop_at_main(self, to):
        if to.name == "model.onnx":
            raise KeyboardInterrupt
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", stop_at_main)
    with pytest.raises(KeyboardInterrupt):
        write_both(old, old.with_name("model.onnx.data"))
    assert names(old.parent) == ["model.onnx"]
    assert old.read_bytes() == OLD


def test_stage_file_companion_is_a_folder_raises(old):
    """The folder keeps its files, and the main file stays as it was."""
    folder = old.with_name("model.onnx.data")
    folder.mkdir()
    (folder / "kept").write_bytes(OLD)
    with pytest.raises(ModelError, match=r"cannot write '.*model\.onnx\.data': it is a folder. Add a file name"):
        write_both(old, folder)
    assert names(folder) == ["kept"]
    assert names(old.parent) == ["model.onnx", "model.onnx.data"]
    assert old.read_bytes() == OLD


@pytest.mark.parametrize("kind", [ModelError, TargetError])
def test_stage_file_error_names_final_path(old, kind):
    """Errors about a staged file name its final path."""
    with pytest.raises(kind) as caught, stage_file(old) as place:
        raise kind(f"{place} is no model, nor is {str(place)!r}")
    assert str(caught.value) == f"{old} is no model, nor is {str(old)!r}"
    assert names(old.parent) == ["model.onnx"]
    assert old.read_bytes() == OLD


def test_stage_file_full_disk_names_final_path(old, monkeypatch):
    """A full disk is reported with the final path of a staged file."""

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match=rf"cannot write '{old}': the disk is full"), stage_file(old) as place:
        write(place, NEW)
    assert names(old.parent) == ["model.onnx"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_stage_file_full_disk_of_other_writer_reported(old, code):
    """A full disk that another writer meets is reported in the same way."""
    with pytest.raises(ModelError, match=rf"cannot write '{old}': the disk is full"), stage_file(old):
        raise OSError(code, os.strerror(code))


def test_stage_file_other_errors_raised_unchanged(old):
    """Other errors around a staged file are raised unchanged."""
    with pytest.raises(ConnectionError), stage_file(old):
        raise ConnectionError
    assert names(old.parent) == ["model.onnx"]


def test_stage_file_failed_rename_explained(old, monkeypatch):
    """A staged file that cannot be renamed raises an error, and the old file stays."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "replace", refuse)
    message = (
        rf"cannot write '{old}': Permission denied. The old file is unchanged. Choose a path that you may write to"
    )
    with pytest.raises(ModelError, match=message), stage_file(old) as place:
        place.write_bytes(NEW)
    assert old.read_bytes() == OLD
    assert names(old.parent) == ["model.onnx"]


def test_write_atomically_null_byte_raises():
    """A path with a null byte raises an error."""
    message = r"cannot write 'a\\x00b': embedded null byte. Choose a path without it"
    with pytest.raises(ModelError, match=message), write_atomically("a\0b"):
        pytest.fail("there is no such place")
    with pytest.raises(ModelError, match=message), stage_file(Path("a\0b")):
        pytest.fail("there is no such place")
