"""Calls that PyTorch decomposes: their writes, the sizes that they support, and messages for failures."""

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.capture.decomposition import load_decompositions
from clika_ref.capture.forms.composites import PYTHON_FORMS

aten = torch.ops.aten


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


FUNCTIONS = {
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "quantile of all": lambda x: x.quantile(0.3),
    "quantiles": lambda x: x.quantile(torch.tensor([0.3, 0.5]), dim=1, keepdim=True),
    "nanquantile": lambda x: x.nanquantile(0.3, dim=1),
    "vander": lambda x: torch.vander(x[0], 3),
    "vander, rising": lambda x: torch.vander(x[0], increasing=True),
    "kron": lambda x: torch.kron(x, x[0]),
    "block_diag": lambda x: torch.block_diag(x, x),
    "cov": torch.cov,
    "cov of integers": lambda x: torch.cov((x * 9).long(), correction=0),
    "cov of too few": lambda x: torch.cov(x, correction=90),
    "cov of one": lambda x: torch.cov(x[0]),
    "cov with weights": lambda x: torch.cov(x, aweights=x[0].abs(), fweights=(x[1] * 9).abs().int()),
    "gradient": lambda x: torch.stack(torch.gradient(x)),
    "gradient of one dim": lambda x: torch.gradient(x, spacing=0.5, dim=1, edge_order=2)[0],
    "gradient of two dims": lambda x: torch.stack(torch.gradient(x, spacing=[0.5, 3.0], dim=[1, 0])),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x, x[1:]]),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "take_along_dim of a column": lambda x: torch.take_along_dim(x, x[:1].argmax(1, keepdim=True), 1),
    "take_along_dim of all": lambda x: torch.take_along_dim(x, x.argmax()[None]),
    "corrcoef": torch.corrcoef,
    "corrcoef of one": lambda x: torch.corrcoef(x[0]),
    "corrcoef of complex numbers": lambda x: torch.view_as_real(torch.corrcoef(torch.complex(x, x.sin()))),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x.t(), x, x.t()]),
    "multi_dot of vectors": lambda x: torch.linalg.multi_dot([x[0], x.t(), x, x[1]]),
    "chain_matmul": lambda x: torch.chain_matmul(x, x.t(), x),
}


@pytest.mark.filterwarnings("ignore:.*(chain_matmul|degrees of freedom):UserWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shapes", [[(4, 6)], [(4, 6), (5, 6)], [(4, 6), (4, 7)], [(4, 6), (5, 7)]])
def test_decompositions_serve_any_size(name, shapes):
    """A call with in-place writes in its decomposition is captured for any size."""
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    module = clika_compile(Calls(function), tracing_inputs=[torch.randn(s) for s in shapes])
    sizes = [a if len({s[i] for s in shapes}) == 1 else a + 5 for i, a in enumerate(shapes[0])]
    x = torch.randn(sizes)
    expected = function(x)
    largest = float(expected.abs().nan_to_num(0.0, 0.0).max())  # another order of sums rounds what is of its size
    torch.testing.assert_close(module(x), expected, equal_nan=True, rtol=1.3e-6, atol=8 * 2.0**-24 * max(largest, 1.0))


def test_decompositions_results_written_later():
    """Results of decompositions may be written later."""

    def compute(x):
        kron, blocks = torch.kron(x, x), torch.block_diag(x, x)
        kron[0].add_(1)
        blocks[:, 0] = 3
        return kron.mul_(2), blocks, x.quantile(0.2).add_(1)

    module = clika_compile(Calls(compute), tracing_inputs=[torch.randn(3, 4), torch.randn(2, 5)])
    x = torch.randn(4, 6)
    for actual, expected in zip(module(x), compute(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_decompositions_failure_named_with_line_and_reason(monkeypatch):
    """A failing decomposition raises an error with its line and reason."""

    def raise_error(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setitem(load_decompositions(), aten.renorm.default, raise_error)
    message = (
        r"aten.renorm.default in <root> at test_decompositions.py:\d+: no operator .*"
        r"its decomposition fails on these operands: no such thing"
    )
    with pytest.raises(ModelError, match=message):
        clika_compile(Calls(lambda x: torch.renorm(x, 2, 0, 1.0)), tracing_inputs=[torch.randn(3, 4)])


def test_decompositions_fixed_size_rejected(monkeypatch):
    """A decomposition that fixes a dynamic size raises an error."""
    monkeypatch.setitem(load_decompositions(), aten.renorm.default, lambda x, *_: x * int(x.shape[0]))
    with pytest.raises(ModelError, match=r"aten.renorm.default in .* fixes sizes that must be dynamic"):
        clika_compile(
            Calls(lambda x: torch.renorm(x, 2, 0, 1.0)), tracing_inputs=[torch.randn(3, 4), torch.randn(2, 4)]
        )


def test_decompositions_composite_fixed_size_rejected():
    """A composite call that fixes a size raises the error of a model that fixes it."""
    model, inputs = (
        Calls(lambda x: torch.gradient(x, spacing=(x[:, 0],), dim=0)[0]),
        [torch.randn(4, 6), torch.randn(5, 6)],
    )
    with pytest.raises(ModelError, match=r"has the lengths 4, 5 in the inputs, but the model fixes it: Eq\(batch, 5"):
        clika_compile(model, tracing_inputs=inputs)
    module = clika_compile(model, tracing_inputs=inputs[:1])
    torch.testing.assert_close(module(inputs[0]), model(inputs[0]))


@torch.library.custom_op("clika_ref_tests::swish", mutates_args=())
def swish(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * (scale * x).sigmoid()


@torch.library.custom_op("clika_ref_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


swish.register_fake(lambda x, scale: torch.empty_like(x))
scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda _, gradient: gradient * 3)


def test_custom_op_with_python_kernel_inlined(tmp_path):
    """A custom operator whose kernel consists of calls of PyTorch is captured as these calls."""
    model = Calls(lambda x: swish(x, 2.0) + 1)
    module = clika_compile(model, tracing_inputs=[torch.randn(2, 4), torch.randn(3, 4)])
    assert "sigmoid" in {node.op_type for node in module.graph.nodes}
    x = torch.randn(5, 4)
    assert torch.equal(module(x), model(x))
    module.clika_export(tmp_path / "model.onnx")


def test_custom_op_with_backward_rejected():
    """The backward pass of a custom operator would be lost, so that it is rejected."""
    with pytest.raises(ModelError, match=r"clika_ref_tests.scaled.default in .* no operator is declared for it"):
        clika_compile(Calls(scaled), tracing_inputs=[torch.randn(2, 4)])


def test_decompositions_registry_restored_after_trace():
    """The kernels of PyTorch are restored after a trace."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    overloads = [aten.lstm.input, aten.kron.default]
    before = [o.py_kernels.get(composite) for o in overloads]
    clika_compile(Calls(lambda x: torch.kron(x, x)), tracing_inputs=[torch.randn(2, 3)])
    assert [o.py_kernels.get(composite) for o in overloads] == before


def test_multi_dot_uses_cheapest_order():
    """A chain of matmuls is computed in the cheapest order."""

    def compute(x, y):
        return torch.linalg.multi_dot([x, y, x, y])

    shapes = [((2, 50), (50, 2)), ((50, 2), (2, 50))]
    wide, tall = (clika_compile(compute, tracing_inputs=[tuple(map(torch.randn, pair))]).graph.nodes for pair in shapes)
    assert {tuple(n.output.type.shape) for n in wide} == {(2, 2)}
    assert (50, 50) not in [tuple(n.output.type.shape) for n in list(tall)[:-1]]


@pytest.mark.parametrize("shapes", [[(4, 6)], [(4, 6), (5, 7)]], ids=["static", "dynamic"])
def test_decompositions_autocast_casts_inside_composite(shapes):
    """Autocast casts inside the decomposition of a call."""

    def compute(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.cov(x).float()

    module = clika_compile(Calls(compute), tracing_inputs=[torch.randn(s) for s in shapes])
    x = torch.randn(shapes[0])
    torch.testing.assert_close(module(x), compute(x), rtol=2**-7, atol=2**-7)  # an ulp of bfloat16 at 1


def compute_covariance(x):
    return torch.cov(x[:, 0])


LINE = compute_covariance.__code__.co_firstlineno + 1


def test_decompositions_guards_name_line_of_user():
    """A guard names the line of the user, not of our code."""
    inputs = [torch.randn(5, 4), torch.randn(6, 4)]
    guards = clika_compile(Calls(compute_covariance), tracing_inputs=inputs).graph.guards
    assert f"Ne(batch, 1) (from test_decompositions.py:{LINE})" in map(str, guards)


FREQUENCIES, RELIABILITIES = {"fweights": torch.tensor([1, 3, 2, 1])}, {"aweights": torch.tensor([0.5, 2, 1, 0.25])}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("weights", [FREQUENCIES, RELIABILITIES, FREQUENCIES | RELIABILITIES], ids=" ".join)
@pytest.mark.parametrize(
    ("correction", "dtype"), [(0, torch.complex64), (2, torch.complex64), (1, torch.float32), (90, torch.float32)]
)
def test_cov_with_weights_matches_eager(weights, correction, dtype):
    """A weighted covariance is that of eager, also with more corrections than observations."""
    function = Calls(lambda x: torch.cov(x, correction=correction, **weights))
    module = clika_compile(function, tracing_inputs=[torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype)])
    x = torch.randn(2, 4, dtype=dtype)
    torch.testing.assert_close(module(x), function(x), equal_nan=True)


@pytest.mark.parametrize("shapes", [[(3, 4)], [(3, 4), (5, 4)]], ids=["static", "dynamic"])
def test_decompositions_data_dependent_composite_rejected(monkeypatch, shapes):
    """Code of PyTorch that depends on data raises an error with advice."""
    monkeypatch.delitem(PYTHON_FORMS, aten.corrcoef.default)
    monkeypatch.delitem(PYTHON_FORMS, aten.cov.default)
    with pytest.raises(ModelError, match=r"aten.equal.default[\s\S]*depends on the values of a tensor. Compute both"):
        clika_compile(Calls(torch.corrcoef), tracing_inputs=[torch.rand(s) for s in shapes])
