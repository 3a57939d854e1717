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
def old_file(tmp_path) -> Path:
    """A file that is there already."""
    path = tmp_path / "model.onnx"
    path.write_bytes(OLD)
    return path


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, *chunks: bytes, error: BaseException | None = None) -> None:
    """Write chunks, then fail if an error is given."""
    with write_atomically(path) as file:
        for chunk in chunks:
            file.write(chunk)
        if error is not None:
            raise error


def raise_full_disk(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullFile:
    """A file on a disk that becomes full: after 15 bytes, or when the file is closed."""

    def __init__(self, handle, moment: str) -> None:
        self.handle, self.moment, self.room = handle, moment, 15

    def reject(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.moment == "write" and self.room < 0:
            self.reject()
        return self.handle.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.close()
        if self.moment == "close":
            self.reject()


def test_write_atomically_file_appears_at_end_of_block(tmp_path):
    """The file appears at the end of the block, not before."""
    path = tmp_path / "model.onnx"
    with write_atomically(str(path)) as file:
        file.write(NEW)
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == NEW
    assert list_names(tmp_path) == ["model.onnx"]


def test_write_atomically_replaces_file_and_keeps_mode(old_file):
    """An existing file is replaced and keeps its mode."""
    old_file.chmod(0o640)
    with write_atomically(old_file) as file:
        file.write(NEW)
        assert old_file.read_bytes() == OLD
    assert old_file.read_bytes() == NEW
    assert stat.S_IMODE(old_file.stat().st_mode) == 0o640


def test_write_atomically_new_file_follows_umask(tmp_path):
    """A new file has the mode of the umask."""
    before = os.umask(0o027)
    try:
        with write_atomically(tmp_path / "model.onnx"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.onnx").stat().st_mode) == 0o640


def test_write_atomically_syncs_before_rename(old_file, monkeypatch):
    """The bytes are synced before the rename, and the folder after it."""
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append("sync") or fsync(fd))
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append("rename") or replace(self, to))
    with write_atomically(old_file) as file:
        file.write(NEW)
    assert events == ["sync", "rename", "sync"]  # the last is the folder


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt(), SystemExit(1), OSError(errno.EIO, "odd")])
def test_write_atomically_failure_keeps_old_file(old_file, error):
    """Any failure is raised unchanged and keeps the old file."""
    with pytest.raises(type(error)) as caught:
        write(old_file, NEW, error=error)
    assert caught.value is error
    assert old_file.read_bytes() == OLD
    assert list_names(old_file.parent) == ["model.onnx"]


@pytest.mark.parametrize("moment", ["write", "close", "fsync"])
def test_write_atomically_full_disk_raises_keeps_old_file(old_file, monkeypatch, moment):
    """A full disk raises an error with the remedy, and the old file stays."""
    real_open = Path.open

    with monkeypatch.context() as patch:
        if moment == "fsync":
            patch.setattr(os, "fsync", raise_full_disk)
        else:
            patch.setattr(Path, "open", lambda path, mode: FullFile(real_open(path, mode), moment))
        with pytest.raises(ModelError) as caught:
            write(old_file, *[NEW] * 10)
    message = (
        r"cannot write '.*model\.onnx': the disk is full \(No space left on device; [\d,]+ MB are free\)\. "
        r"The old file is unchanged\. Free some space, or choose a path on another disk\."
    )
    assert re.fullmatch(message, str(caught.value))
    assert old_file.read_bytes() == OLD
    assert list_names(old_file.parent) == ["model.onnx"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs limits on the size of files")
def test_write_atomically_file_size_limit_raises(old_file):
    """A file size limit of the system raises the same error."""
    code = (
        "import resource, signal, sys\n"
        "from clika_ref.serialization.atomic_files import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "with write_atomically(sys.argv[1]) as file:\n"
        "    file.write(bytes(1 << 20))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, old_file], capture_output=True, text=True, check=False)
    assert "ModelError: cannot write" in done.stderr
    assert "the disk is full (File too large" in done.stderr
    assert old_file.read_bytes() == OLD
    assert list_names(old_file.parent) == ["model.onnx"]


@pytest.mark.slow
def test_write_atomically_interrupt_keeps_old_file(old_file):
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
    done = subprocess.run([sys.executable, "-c", code, old_file], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert old_file.read_bytes() == OLD
    assert list_names(old_file.parent) == ["model.onnx"]


@pytest.mark.parametrize(
    ("location", "message"),
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
def test_write_atomically_invalid_path_raises_with_remedy(tmp_path, location, message):
    """A path that cannot be a file raises an error with the remedy."""
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = list_names(tmp_path)
    with pytest.raises(ModelError, match=message), write_atomically(tmp_path / location):
        pass
    assert list_names(tmp_path) == before


def test_write_atomically_permission_denied_raises(tmp_path, monkeypatch):
    """A folder without write permission is named in the error."""

    def raise_permission_error(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(
        tempfile, "mkdtemp", raise_permission_error
    )  # file modes do not restrict root, as which tests may run
    with (
        pytest.raises(
            ModelError,
            match=r"cannot write '.*m': Permission denied. The old file is unchanged. Choose a path that",
        ),
        write_atomically(tmp_path / "m"),
    ):
        pass


def test_write_atomically_symlink_target_replaced(old_file, tmp_path):
    """The target of a symbolic link is replaced, and the link stays."""
    link = tmp_path / "link.onnx"
    link.symlink_to(old_file)
    with write_atomically(link) as file:
        file.write(NEW)
    assert link.is_symlink()
    assert old_file.read_bytes() == NEW


def test_write_atomically_accepts_longest_name(tmp_path):
    """A name of the maximal length is written."""
    path = tmp_path / ("n" * 255)
    with write_atomically(path) as file:
        file.write(NEW)
    assert path.read_bytes() == NEW


# Several files at once


@pytest.fixture
def old_pair(old_file) -> tuple[Path, Path]:
    """A model and its weights, both there already."""
    data = old_file.with_name("model.onnx.data")
    data.write_bytes(OLD)
    return old_file, data


def write_both(main: Path, data: Path) -> None:
    with stage_file(main) as location:
        location.write_bytes(NEW)
        location.with_name(data.name).write_bytes(NEW * 2)


def test_atomic_files_appear_together_main_last(old_pair, monkeypatch):
    """Several files appear together, the main file last."""
    order = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: order.append(to.name) or replace(self, to))
    write_both(*old_pair)
    assert [name for name in order if not name.startswith("old-")] == ["model.onnx.data", "model.onnx"]
    assert [path.read_bytes() for path in old_pair] == [NEW, NEW * 2]
    assert list_names(old_pair[0].parent) == ["model.onnx", "model.onnx.data"]


def test_atomic_files_new_files_written(tmp_path):
    """A new main file and a new companion are written."""
    write_both(tmp_path / "a.onnx", tmp_path / "a.data")
    assert list_names(tmp_path) == ["a.data", "a.onnx"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_atomic_files_failed_rename_restores_old_companion(old_pair, monkeypatch, error):
    """If the main file cannot be renamed, the old companion is restored."""
    replace = Path.replace

    def stop_at_main(self, to):
        if to.name == "model.onnx":
            raise error
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", stop_at_main)
    expected = ModelError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_both(*old_pair)
    assert [path.read_bytes() for path in old_pair] == [OLD, OLD]
    assert list_names(old_pair[0].parent) == ["model.onnx", "model.onnx.data"]


def test_atomic_files_failed_rename_removes_new_companion(old_file, monkeypatch):
    """If the main file cannot be renamed, the new companion is removed."""
    replace = Path.replace

    def stop_at_main(self, to):
        if to.name == "model.onnx":
            raise KeyboardInterrupt
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", stop_at_main)
    with pytest.raises(KeyboardInterrupt):
        write_both(old_file, old_file.with_name("model.onnx.data"))
    assert list_names(old_file.parent) == ["model.onnx"]
    assert old_file.read_bytes() == OLD


def test_stage_file_companion_is_a_folder_raises(old_file):
    """The folder keeps its files, and the main file stays as it was."""
    folder = old_file.with_name("model.onnx.data")
    folder.mkdir()
    (folder / "kept").write_bytes(OLD)
    with pytest.raises(ModelError, match=r"cannot write '.*model\.onnx\.data': it is a folder. Add a file name"):
        write_both(old_file, folder)
    assert list_names(folder) == ["kept"]
    assert list_names(old_file.parent) == ["model.onnx", "model.onnx.data"]
    assert old_file.read_bytes() == OLD


@pytest.mark.parametrize("kind", [ModelError, TargetError])
def test_stage_file_error_names_final_path(old_file, kind):
    """Errors about a staged file name its final path."""
    with pytest.raises(kind) as caught, stage_file(old_file) as location:
        raise kind(f"{location} is no model, nor is {str(location)!r}")
    assert str(caught.value) == f"{old_file} is no model, nor is {str(old_file)!r}"
    assert list_names(old_file.parent) == ["model.onnx"]
    assert old_file.read_bytes() == OLD


def test_stage_file_full_disk_names_final_path(old_file, monkeypatch):
    """A full disk is reported with the final path of a staged file."""
    monkeypatch.setattr(os, "fsync", raise_full_disk)
    with (
        pytest.raises(ModelError, match=rf"cannot write '{old_file}': the disk is full"),
        stage_file(old_file) as location,
    ):
        write(location, NEW)
    assert list_names(old_file.parent) == ["model.onnx"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_stage_file_full_disk_of_other_writer_reported(old_file, code):
    """A full disk that another writer meets is reported in the same way."""
    with pytest.raises(ModelError, match=rf"cannot write '{old_file}': the disk is full"), stage_file(old_file):
        raise OSError(code, os.strerror(code))


def test_stage_file_other_errors_raised_unchanged(old_file):
    """Other errors around a staged file are raised unchanged."""
    with pytest.raises(ConnectionError), stage_file(old_file):
        raise ConnectionError
    assert list_names(old_file.parent) == ["model.onnx"]


def test_stage_file_failed_rename_explained(old_file, monkeypatch):
    """A staged file that cannot be renamed raises an error, and the old file stays."""

    def raise_permission_error(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "replace", raise_permission_error)
    message = (
        rf"cannot write '{old_file}': Permission denied. The old file is unchanged. Choose a path that you may write to"
    )
    with pytest.raises(ModelError, match=message), stage_file(old_file) as location:
        location.write_bytes(NEW)
    assert old_file.read_bytes() == OLD
    assert list_names(old_file.parent) == ["model.onnx"]


def test_write_atomically_null_byte_raises():
    """A path with a null byte raises an error."""
    message = r"cannot write 'a\\x00b': embedded null byte. Choose a path without it"
    with pytest.raises(ModelError, match=message), write_atomically("a\0b"):
        pytest.fail("the block must not run")
    with pytest.raises(ModelError, match=message), stage_file(Path("a\0b")):
        pytest.fail("the block must not run")
