"""Output paths of commands: invalid ones are rejected before the work begins."""

import os
import re

import pytest
from clika_ref_cli.exit_status import MisuseError
from clika_ref_cli.output_paths import check_output_paths


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """The current folder, with a file and a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("what was there before")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("there")
    return tmp_path


@pytest.mark.parametrize("name", ["new.onnx", "there", "link", "folder/new.onnx"])
def test_check_output_paths_writable_file_accepted(working_folder, name):
    """A new or existing file is accepted."""
    check_output_paths({"-o": working_folder / name}, "give -o")
    check_output_paths({"-o": working_folder / name, "--save": None}, "give -o")


def test_check_output_paths_no_output_accepted():
    """No output is accepted if the command writes none."""
    check_output_paths({}, "give -o")


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("folder", "-o: cannot write '.*folder': it is a folder. Add a file name"),
        ("/dev/null", "-o: cannot write '/dev/null': it is a device, pipe or socket, not a plain file. Choose another"),
        ("gone/new.onnx", "-o: cannot write gone/new.onnx: there is no folder gone. Create it first."),
        ("there/new.onnx", "-o: cannot write there/new.onnx: there is no folder there. Create it first."),
        ("nu\0ll", "-o: cannot write '.*': .*null (byte|character).*. Choose a path without it"),
    ],
)
def test_check_output_paths_unwritable_path_names_option(working_folder, location, message):
    """A path that cannot be written raises an error that names the option."""
    with pytest.raises(MisuseError, match=message):
        check_output_paths({"-o": type(working_folder)(location)}, "give -o")


def test_check_output_paths_read_only_folder_raises(working_folder, monkeypatch):
    """A folder without write permission raises an error."""
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(
        MisuseError, match=f"-o: cannot write .*: the folder {working_folder} is read-only. Choose another one."
    ):
        check_output_paths({"-o": working_folder / "new.onnx"}, "give -o")


@pytest.mark.parametrize("location", ["there", "link", "./there"])
@pytest.mark.parametrize("word", ["there", "link", "ids=there", "float32:there,1x3", "folder/../there"])
def test_check_output_paths_input_file_rejected(working_folder, location, word):
    """An output that is also an input raises an error."""
    message = re.escape(f"--save: cannot write {working_folder / location}: it is also an input. Choose another name.")
    with pytest.raises(MisuseError, match=message):
        check_output_paths({"--save": working_folder / location}, "give -o", ["1x3", "my_model:Net", word])


def test_check_output_paths_words_without_file_ignored(working_folder):
    """Arguments that name no file are ignored."""
    check_output_paths(
        {"-o": working_folder / "there"}, "give -o", ["1x3", "my_model:Net", "None", "nu\0ll", "", "x" * 999]
    )
