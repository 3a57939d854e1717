"""Calls that no plugin declares: lowered by torchlib, otherwise decomposed by PyTorch, otherwise all reported."""

import copy
import pickle

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.onnx_export.generic_operators import GenericOperator, find_operator, torchlib_operator


class ByTorchlib(nn.Module):
    def forward(self, x):
        return torch.special.erfcx(x), torch.linalg.det(x @ x.mT)


class ByDecomposition(nn.Module):
    def forward(self, x):
        first, second = torch.atleast_2d(x, x[0])  # a list, of which torchlib makes one ONNX sequence
        return torch.renorm(first, 2, 0, 1.0) + second


class ByNobody(nn.Module):
    def forward(self, x):
        first = torch.linalg.eigvals(x).real
        return first, torch.linalg.ldl_factor(x @ x.mT).LD


@pytest.mark.parametrize("static", [True, False])
def test_clika_compile_undeclared_calls_use_torchlib(static, tmp_path):
    """Calls that no plugin declares are lowered by torchlib."""
    inputs = [torch.randn(3, 4)] if static else [torch.randn(2, 3, 4), torch.randn(5, 3, 4)]
    module = clika_compile(ByTorchlib(), tracing_inputs=inputs)
    assert {n.op.name for n in module.graph.nodes if isinstance(n.op, GenericOperator)} >= {
        "aten.special_erfcx.default"
    }
    module.clika_export(tmp_path / "m.onnx")  # compares with the module in ONNX Runtime


def test_generic_operators_copied_pickled_and_exported(tmp_path):
    """A module with generic operators is copied, pickled and exported."""
    x = torch.randn(3, 4)
    module = clika_compile(ByTorchlib(), tracing_inputs=[x])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own bytes
        assert all(map(torch.equal, other(x), module(x)))
        other.clika_export(tmp_path / "m.onnx")


@pytest.mark.parametrize("name", ["aten.from_file.default", "aten.no_such.default", "os.system.default", "relu"])
def test_find_operator_accepts_only_torchlib_calls(name):
    """A saved graph may name only calls that torchlib lowers."""
    assert find_operator("aten.special_erfcx.default", {}, torchlib_operator) is not None
    assert find_operator(name, {}, torchlib_operator) is None


def test_clika_compile_decomposes_calls_torchlib_lacks(tmp_path):
    """PyTorch decomposes calls that torchlib does not have."""
    inputs = [torch.randn(3, 4), torch.randn(5, 4)]
    module = clika_compile(ByDecomposition(), tracing_inputs=inputs)
    x = torch.randn(7, 4)
    torch.testing.assert_close(module(x), ByDecomposition()(x))
    module.clika_export(tmp_path / "m.onnx")


def test_clika_compile_unsupported_calls_listed_together():
    """All unsupported calls are listed in one error."""
    with pytest.raises(ModelError) as caught:
        clika_compile(ByNobody(), tracing_inputs=[torch.randn(3, 3)])
    text = str(caught.value)
    assert "ByNobody makes 2 unsupported calls" in text
    assert "aten.linalg_eigvals.default in <root> at test_torchlib.py:" in text
    assert "aten.linalg_ldl_factor.default in <root> at test_torchlib.py:" in text
    assert "Declare operators for them in a plugin" in text
