"""Data in arguments: shapes, files of tensors and functions, and messages for invalid ones."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from clika_ref_cli.data import (
    NamedBatches,
    note_random_calibration,
    randomize_floats,
    read_calls,
    read_single_call,
)
from clika_ref_cli.exit_status import MisuseError

numbers = itertools.count()

SOURCE = """
import torch
listed = [torch.ones(2, 3), torch.ones(1, 3)]
def generated():
    yield from listed
def mapped(): return {"x": torch.ones(1)}
def fails(): raise ZeroDivisionError("at once")
def fails_later():
    yield listed[0]
    raise ZeroDivisionError("later")
class Loader:
    def __iter__(self): return iter(listed)
    def __len__(self): return 2
number = 3
"""


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """A folder that is entered, with a module of functions under a new name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"data_of_a_test_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return name


def read_shapes(calls):
    return [tuple(call.shape) for call in calls]


def test_read_calls_array_in_own_or_given_dtype(data_folder):
    """An array is one call, in its own dtype or in a given one."""
    np.save("x.npy", np.arange(6.0).reshape(2, 3))
    (call,) = read_calls(["x.npy"])
    assert (call.dtype, call.tolist()) == (torch.float64, [[0, 1, 2], [3, 4, 5]])
    (call,) = read_calls(["float32:x.npy"])
    assert call.dtype == torch.float32
    (call,) = read_calls(["1x2,mask=bool:x.npy,scale=scalar"])
    first, named = call
    assert (first.shape, named["mask"].dtype, named["scale"].shape) == ((1, 2), torch.bool, ())


@pytest.mark.parametrize("dtype", [">f4", "<i8", "u1", "?", "f2"])
def test_read_calls_any_byte_order_and_dtype(data_folder, dtype):
    """Arrays of any byte order and dtype are read."""
    array = np.array([0, 1, 1]).astype(dtype)
    np.save("x.npy", array)
    (call,) = read_calls(["x.npy"])
    assert call.tolist() == array.tolist()


def test_read_calls_scalar_array(data_folder):
    """A scalar array is read as a scalar tensor."""
    np.save("x.npy", np.float32(3))
    (call,) = read_calls(["x.npy"])
    assert (call.shape, float(call)) == ((), 3.0)


def test_read_calls_archive_by_position_or_keyword(data_folder):
    """Unnamed tensors of an archive are positional, named ones are keywords."""
    x, y = np.zeros((1, 2), np.float32), np.ones((3,), np.int64)
    np.savez("by_position.npz", x, y)
    (call,) = read_calls(["by_position.npz"])
    assert [tuple(tensor.shape) for tensor in call] == [(1, 2), (3,)]
    np.savez("by_name.npz", ids=y, mask=x)
    (call,) = read_calls(["by_name.npz"])
    assert {name: tensor.dtype for name, tensor in call.items()} == {"ids": torch.int64, "mask": torch.float32}
    np.savez("by_both.npz", x, mask=y)
    (call,) = read_calls(["by_both.npz"])
    assert (call[0].shape, call[1]["mask"].shape) == ((1, 2), (3,))
    safetensors.torch.save_file({"ids": torch.ones(2, dtype=torch.bfloat16)}, "calls.safetensors")
    (call,) = read_calls(["calls.safetensors"])
    assert call["ids"].dtype == torch.bfloat16


def test_read_calls_archive_keeps_order_of_many_tensors(data_folder):
    """An archive of more than ten tensors keeps their order."""
    np.savez("many.npz", *[np.full((1,), i) for i in range(12)])
    (call,) = read_calls(["many.npz"])
    assert [int(tensor) for tensor in call] == list(range(12))


def test_read_calls_batch_size_splits_first_dim(data_folder):
    """Calls are split along the first dim; unequal first dims raise an error."""
    np.savez("two.npz", np.zeros((5, 2)), mask=np.zeros((5,)))
    calls = read_calls(["two.npz"], batch_size=2)
    assert [(len(first), len(named["mask"])) for first, named in calls] == [(2, 2), (2, 2), (1, 1)]
    assert read_shapes(read_calls(["5x2", "3x2"], batch_size=4)) == [(4, 2), (1, 2), (3, 2)]
    with pytest.raises(
        MisuseError, match=r"--calibrate '5x2,4x2': cannot split it into batches: the sizes of dim 0 are 4, 5\."
    ):
        read_calls(["5x2,4x2"], "--calibrate", batch_size=2)


def test_read_calls_functions_lists_and_loaders(data_folder):
    """Functions, lists and loaders give batches, read lazily."""
    assert read_shapes(read_calls([f"{data_folder}:generated"])) == [(2, 3), (1, 3)]
    assert len(read_calls([f"{data_folder}:listed"])) == 2
    loader = read_calls([f"{data_folder}:Loader"])
    assert (type(loader), len(loader), read_shapes(loader), read_shapes(loader)) == (
        NamedBatches,
        2,
        [(2, 3), (1, 3)],
        read_shapes(loader),
    )
    assert read_shapes(read_calls([f"{data_folder}:generated", "7x3"])) == [(2, 3), (1, 3), (7, 3)]


def test_read_calls_failing_function_named(data_folder):
    """An error of a data function names the function."""
    with pytest.raises(
        MisuseError, match=rf"cannot call {data_folder}:fails\(\) .*: it raised ZeroDivisionError: at once\. --debug"
    ):
        read_calls([f"{data_folder}:fails"])
    later = iter(read_calls([f"{data_folder}:fails_later"]))
    next(later)
    with pytest.raises(
        MisuseError,
        match=rf"cannot read batches of {data_folder}:fails_later: it raised ZeroDivisionError: later\. --debug",
    ):
        next(later)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{}:number",
            r"--input data_of_a_test_\d+:number: it is of type int\. Name a list of batches, or a function that yields",
        ),
        ("{}:mapped", r":mapped: it is of type dict\. Name a list of batches"),
        ("{}:generate", r"has no 'generate'\. Did you mean generated\?"),
        ("absent_module:batches", r"there is no module 'absent_module'\. Run this in its folder"),
        ("absent.npz", r"--input: cannot read absent\.npz: No such file"),
        ("x=absent.npy", r"--input 'x=absent\.npy': cannot read absent\.npy: No such file"),
        ("junk.npy", r"--input 'junk\.npy': cannot read tensors from junk\.npy: "),
        ("junk.npz", r"--input: cannot read tensors from junk\.npz: "),
        ("junk.safetensors", r"--input: cannot read tensors from junk\.safetensors: "),
        (
            "objects.npy",
            r"cannot read tensors from objects\.npy: it is no NumPy array, or contains a pickle, which could run",
        ),
        ("words.npy", r"cannot read tensors from words\.npy: "),
        ("folder/x.txt", r"cannot parse 'folder/x\.txt'\. Write dims joined by x"),
        pytest.param("x" * 999, r"cannot parse 'x+'\. Write dims joined by x", id="long"),
        ("folder", r"cannot parse 'folder': it is a folder\. Write dims joined by x"),
        (
            "photo.jpg",
            r"cannot parse 'photo\.jpg': files with the suffix '\.jpg' are not supported\. Write dims joined",
        ),
    ],
)
def test_read_calls_unreadable_source_reports_reason(data_folder, text, message):
    """Unreadable data raises an error with the reason."""
    for suffix in ("npy", "npz", "safetensors"):
        with open(f"junk.{suffix}", "wb") as file:  # noqa: PTH123 - in the folder of the test
            file.write(b"no tensors at all")
    np.save("objects.npy", np.array([{}], dtype=object))
    np.save("words.npy", np.array(["a"]))
    Path("folder").mkdir()
    Path("photo.jpg").touch()
    with pytest.raises(MisuseError, match=message):
        list(read_calls([text.format(data_folder)]))


def test_read_calls_implicit_float64_prints_note(data_folder, capsys):
    """Arrays in float64 without an explicit dtype print a note."""
    np.save("x.npy", np.zeros((2, 3)))
    np.savez("calls.npz", np.zeros((2, 3)))
    read_calls(["x.npy"])
    said = "note: --input 'x.npy': it contains float64, NumPy's default. Most models expect float32:x.npy.\n"
    assert capsys.readouterr().err == said
    read_calls(["calls.npz"])
    assert capsys.readouterr().err.startswith(
        "note: --input calls.npz: it contains float64, NumPy's default. Most models expect float32."
    )
    np.save("y.npy", np.zeros((2, 3), np.float32))
    read_calls(["float64:x.npy", "float32:x.npy", "y.npy", "float64:2x3"])
    assert capsys.readouterr().err == ""


def test_read_single_call_rejects_several(data_folder):
    """A single call is returned; several raise an error."""
    assert read_single_call([]) is None
    assert read_single_call(["2x3"]).shape == (2, 3)
    with pytest.raises(
        MisuseError, match=r"cannot use 2 calls of --input: the comparison needs one. Give --input for one call."
    ):
        read_single_call(["2x3", "2x3"])


def test_randomize_floats_keeps_integers():
    """Only float tensors are randomized."""
    call = randomize_floats({"x": torch.ones(100), "ids": torch.ones(3, dtype=torch.int64)})
    assert call["x"].std() > 0.5
    assert call["ids"].tolist() == [1, 1, 1]


def test_note_random_calibration_shapes_only(capsys):
    """Only shapes print the note about random calibration data."""
    note_random_calibration(["x.npy", "data:batches", "mask=x.npy"], "--calibrate")
    assert capsys.readouterr().err == ""
    note_random_calibration(["x=1x3,y=x.npy"], "--calibrate")
    assert capsys.readouterr().err.startswith(
        "note: --calibrate x=1x3,y=x.npy draws random numbers. Their ranges differ"
    )
