"""The folder of a run: in memory where there is room for it."""

from clika_ref_conformance.execution import worker_process


def test_a_run_works_in_memory_where_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(worker_process, "MIN_FREE_BYTES", 0)
    with worker_process.make_run_folder() as folder:
        assert folder.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_run_works_on_disk_where_memory_is_short_or_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(worker_process, "MIN_FREE_BYTES", 2**80)
    with worker_process.make_run_folder() as folder:
        assert not folder.startswith(str(tmp_path))
    monkeypatch.setattr(worker_process, "SHARED_MEMORY", tmp_path / "absent")
    with worker_process.make_run_folder() as folder:
        assert not folder.startswith(str(tmp_path))
