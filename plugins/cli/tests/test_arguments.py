"""Models and inputs in arguments: accepted forms, and messages for invalid ones."""

import itertools
import sys

import pytest
import torch
from clika_ref_cli.arguments import load_model
from clika_ref_cli.data import parse_example_input

from clika_ref.core.errors import ModelError

numbers = itertools.count()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write a module of a new name into the working directory; return the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> str:
        name = f"model_of_a_test_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(f"import torch\n{text}\n")
        return name

    return write


MODELS = """
class Net(torch.nn.Module):
    small = torch.nn.Tanh()
made = Net()
def make(): return Net()
def fail(): raise ZeroDivisionError("the fault")
def leave(): raise SystemExit(5)
def needs(size): return Net()
number = 3
def tensor(): return torch.ones(1)
"""


@pytest.mark.parametrize("path", ["Net", "made", "make"])
def test_load_model_accepts_instance_class_function(source, path):
    """A model is named by an instance, a class or a function."""
    assert type(load_model(f"{source(MODELS)}:{path}")).__name__ == "Net"


def test_load_model_accepts_dotted_path(source):
    """The path after the colon may have dots."""
    assert isinstance(load_model(f"{source(MODELS)}:Net.small"), torch.nn.Tanh)
    assert isinstance(load_model("torch.nn:ReLU"), torch.nn.ReLU)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("makes", r"cannot load model_of_a_test_\d+:makes: .*\.py has no 'makes'\. Did you mean make or made\?"),
        ("zzz", r"has no 'zzz'\. Check the spelling\.$"),
        ("fail", r"cannot call .*:fail\(\) without arguments: it raised ZeroDivisionError: the fault\. --debug shows"),
        ("leave", r":leave\(\) without arguments: it raised SystemExit: 5\. --debug shows the traceback\."),
        ("needs", r":needs\(\) without arguments: it raised TypeError: .*'size'\. --debug shows the traceback\."),
        ("number", r":number: it is of type int\. Name a torch\.nn\.Module, its class, or a function for one"),
        ("tensor", r":tensor: it is of type Tensor\. Name a torch\.nn\.Module"),
    ],
)
def test_load_model_no_model_reports_reason(source, path, message):
    """A path that gives no model raises an error with the reason."""
    with pytest.raises(ModelError, match=message):
        load_model(f"{source(MODELS)}:{path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", r"cannot load 'model': it is not of the form module:factory\. Write for example package\."),
        ("nets/model.py:Net", r"not of the form module:factory\. Write for example model:Net\."),
        ("model.py", r"not of the form module:factory\. Write for example model:Net\."),
        (
            "absent_package.net:Net",
            r"cannot import absent_package.net: there is no module 'absent_package'\. Run this in its folder, or",
        ),
        ("torch.absent:Net", r"there is no module 'torch\.absent'\. Run this"),
    ],
)
def test_load_model_wrong_form_shows_example(text, message):
    """A name of a wrong form or an unknown module raises an error with the remedy."""
    with pytest.raises(ModelError, match=message):
        load_model(text)


def test_load_model_failing_import_reports_cause(source):
    """A failing import raises an error with its cause."""
    with pytest.raises(ModelError, match=r"it imports 'absent_package', which is not installed\. Install it\."):
        load_model(f"{source('import absent_package')}:Net")
    with pytest.raises(
        ModelError, match=r"cannot import model_of_a_test_\d+: it raised ZeroDivisionError: .*\. --debug"
    ):
        load_model(f"{source('1 / 0')}:Net")


def test_parse_example_input_one_several_and_keywords():
    """One tensor, several and keywords are read."""
    one = parse_example_input("1x3x4")
    assert (one.shape, one.dtype) == ((1, 3, 4), torch.float32)
    several = parse_example_input("2x3, int64:5")
    assert [(t.shape, t.dtype) for t in several] == [((2, 3), torch.float32), ((5,), torch.int64)]
    keywords = parse_example_input("ids=int64:1x8,mask=bool:1x8")
    assert [(k, t.shape, t.dtype) for k, t in keywords.items()] == [
        ("ids", (1, 8), torch.int64),
        ("mask", (1, 8), torch.bool),
    ]
    x, named = parse_example_input("1x2,scale=scalar")
    assert (x.shape, named["scale"].shape) == ((1, 2), ())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float8_e4m3fn", "complex64", "uint8", "int32", "bool"])
def test_parse_example_input_every_dtype(dtype):
    """Tensors of every dtype are drawn; integers are valid indices."""
    drawn = parse_example_input(f"{dtype}:3x4")
    assert drawn.dtype == getattr(torch, dtype)
    if not (drawn.dtype.is_floating_point or drawn.dtype.is_complex):
        assert set(drawn.flatten().tolist()) <= {0, 1}  # legal as indices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1x",
            r"--input '1x': cannot parse '1x'\. Write dims joined by x \(1x3x224x224\), `scalar` for a 0-d tensor, or",
        ),
        ("", r"--input '': cannot parse ''\. Write dims"),
        ("1x2,,3", r"--input '1x2,,3': cannot parse ''"),
        ("-1x3", r"cannot parse '-1x3'"),
        ("in64:1x3", r"--input 'in64:1x3': PyTorch has no dtype 'in64'\. Did you mean int64\?"),
        ("a=1,a=2", r"--input 'a=1,a=2': 'a' is given twice\. Give keywords last, each once\."),
        ("a=1,2", r"'2' has no keyword, but follows one\. Give keywords last"),
    ],
)
def test_parse_example_input_wrong_form_reports_form(text, message):
    """A wrong input raises an error with the expected form."""
    with pytest.raises(ModelError, match=message):
        parse_example_input(text)
