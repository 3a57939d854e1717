"""The folder of a run: in memory if there is enough space."""

from clika_ref_conformance.execution import worker_process


def test_make_run_folder_enough_memory_uses_shared_memory(tmp_path, monkeypatch):
    """A run works in shared memory if it has enough space."""
    monkeypatch.setattr(worker_process, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(worker_process, "MIN_FREE_BYTES", 0)
    with worker_process.make_run_folder() as folder:
        assert folder.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_make_run_folder_short_memory_uses_disk(tmp_path, monkeypatch):
    """A run works on disk if shared memory is short or absent."""
    monkeypatch.setattr(worker_process, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(worker_process, "MIN_FREE_BYTES", 2**80)
    with worker_process.make_run_folder() as folder:
        assert not folder.startswith(str(tmp_path))
    monkeypatch.setattr(worker_process, "SHARED_MEMORY", tmp_path / "absent")
    with worker_process.make_run_folder() as folder:
        assert not folder.startswith(str(tmp_path))
