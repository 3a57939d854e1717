"""``python -m clika_ref``, with and without the distribution that provides the command line."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import clika_ref.__main__ as command


def test_main_without_the_command_line_names_package(monkeypatch):
    monkeypatch.setattr(command, "entry_points", lambda **_: ())
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == (
        "python -m clika_ref: the command line is not installed. "
        "Run pip install clika-ref-cli (in a clone: pip install plugins/cli; from wheels: add --find-links FOLDER)."
    )


def test_main_calls_the_console_script_of_the_command_line(monkeypatch):
    called = []
    script = SimpleNamespace(load=lambda: lambda: called.append("main"))
    monkeypatch.setattr(command, "entry_points", lambda **asked: [script] if asked["name"] == "clika-ref" else [])
    command.main()
    assert called == ["main"]


@pytest.mark.slow
def test_main_in_a_process_prints_the_version(tmp_path):
    words = [sys.executable, "-m", "clika_ref", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("clika-ref ")
