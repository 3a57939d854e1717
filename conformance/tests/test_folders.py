"""The folder of a run: in memory where there is room for it."""

from clika_ref_conformance.execution import process


def test_a_run_works_in_memory_where_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(process, "ROOM_BYTES", 0)
    with process.folder_for() as folder:
        assert folder.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_run_works_on_disk_where_memory_is_short_or_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(process, "ROOM_BYTES", 2**80)
    with process.folder_for() as folder:
        assert not folder.startswith(str(tmp_path))
    monkeypatch.setattr(process, "SHARED_MEMORY", tmp_path / "absent")
    with process.folder_for() as folder:
        assert not folder.startswith(str(tmp_path))
