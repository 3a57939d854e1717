"""The input and output names of an artifact: the user's, otherwise unique ones."""

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx_sessions import open_session
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError
from clika_ref.export.interface import resolve_names


class Rows(nn.Module):
    """Returns how many rows each input has, on each row."""

    def forward(self, a, b):
        return a + a.shape[0], b + b.shape[0]


def compile_rows(**options):
    inputs = [(torch.zeros(n, 1), torch.zeros(m, 1)) for n, m in ((2, 9), (3, 5))]
    return clika_compile(Rows(), tracing_inputs=inputs, **options)


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("names", [["b", "c"], ["b", "a"], ["c", "a"]])
def test_clika_export_input_takes_name_of_other_input(tmp_path, names, compare):
    """An input may get the name of another input."""
    artifact = compile_rows(compare_after_export=compare).clika_export(tmp_path / "m.onnx", input_names=names)
    assert list(artifact.input_names) == names
    feed = dict(zip(names, (np.zeros((2, 1), np.float32), np.zeros((9, 1), np.float32)), strict=True))
    assert [r[0, 0] for r in open_session(artifact.path).run(None, feed)] == [2, 9]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return (x * self.scale).exp()


def test_clika_export_inner_names_avoid_given_names(tmp_path):
    """Inner values with a given name are renamed."""
    module = clika_compile(Weighted(), tracing_inputs=[torch.ones(2)])
    artifact = module.clika_export(tmp_path / "m.onnx", input_names=["scale"], output_names=["scale_1"])
    (found,) = open_session(artifact.path).run(None, {"scale": np.ones(2, np.float32)})
    np.testing.assert_allclose(found, np.exp([2.0, 2.0]), rtol=1e-6)  # 8 roundings of float32
    assert [t.name for t in onnx.load(artifact.path).graph.initializer] == ["scale_2"]


def test_clika_export_default_output_names_unique(tmp_path):
    """Default output names are unique."""

    def model(x):
        return {"a_b": x + 1, "a": {"b": x + 2}, "x": x + 3, 0: x + 4}

    artifact = clika_compile(model, tracing_inputs=[torch.zeros(1)]).clika_export(tmp_path / "m.onnx")
    assert artifact.output_names == ("a_b", "a_b_output", "x_output", "output_0")
    assert [r[0] for r in open_session(artifact.path).run(None, {"x": np.zeros(1, np.float32)})] == [1, 2, 3, 4]


def test_clika_export_input_takes_default_output_name(tmp_path):
    """An input may take the default name of an output."""
    module = clika_compile(nn.ReLU(), tracing_inputs=[torch.ones(2)])
    artifact = module.clika_export(tmp_path / "m.onnx", input_names=["output"])
    assert (artifact.input_names, artifact.output_names) == (("output",), ("output_output",))


@dataclasses.dataclass
class Checked:
    """Takes nothing but matrices."""

    a: torch.Tensor
    b: torch.Tensor

    def __post_init__(self):
        assert self.a.dim() == self.b.dim() == 2


class Checking(nn.Module):
    def forward(self, x):
        return Checked(x + 1, x + 2)


def test_clika_export_outputs_named_without_dataclass_init(tmp_path):
    """Outputs are named without constructing the model's result from other objects."""
    module = clika_compile(Checking(), tracing_inputs=[torch.ones(2, 2)])
    assert module.clika_export(tmp_path / "m.onnx").output_names == ("a", "b")


@pytest.mark.parametrize("names", [[1, "b"], ["", "b"], "ab", 7, ["a"], ["a", "a"], {"a": 0, "b": 1}])
def test_clika_export_names_of_wrong_form_rejected(tmp_path, names):
    """Names of a wrong form raise an error with the default names."""
    with pytest.raises(ModelError, match=r"input_names is .*Give 2 distinct names; the defaults are \['a', 'b'\]"):
        compile_rows().clika_export(tmp_path / "m.onnx", input_names=names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["input_names", "output_names"])
def test_resolve_names_leading_slash_rejected(what):
    """Names that start with a slash raise an error."""
    with pytest.raises(ModelError, match=rf"{what} contains \['/constant_0'\], which start with '/', as internal"):
        resolve_names(what, ["/constant_0"], ["x"])
