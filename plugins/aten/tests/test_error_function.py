"""The error function in float64: ONNX Runtime has only a float32 kernel, with half of the digits."""

import math

import pytest
import torch
from clika_ref_aten import exponential, gating
from one_operator import Case, build_case_graph, run_onnx

from clika_ref import clika_compile

ULPS = 8 * 2.0**-52  # what the operators claim

EVERYWHERE = torch.cat(
    [
        torch.linspace(-7, 7, 20_001, dtype=torch.float64),  # across both borders of the approximation
        10.0 ** -torch.arange(1, 300, 7, dtype=torch.float64),
        torch.tensor([0.0, 30.0, -1e3, 1e200, math.inf, -math.inf, math.nan], dtype=torch.float64),
    ]
)


@pytest.mark.parametrize("op", [exponential.erf, exponential.erfc, gating.gelu], ids=lambda op: op.name)
def test_erf_float64_within_8_ulp(op):
    """erf, erfc and gelu are accurate to 8 ulp in float64."""
    call = op.call(EVERYWHERE)
    case = Case(op, list(call.operands), call.attrs)
    (expected,), (found,) = case.eager(), run_onnx(build_case_graph(case), case.tensors)
    size = {"erf": expected.abs(), "erfc": torch.ones(()), "gelu": EVERYWHERE.abs()}[op.name]
    finite = expected.isfinite()
    assert torch.equal(found[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0))
    assert ((found - expected).abs() <= ULPS * size)[finite].all()


def test_clika_export_float64_gelu_writes_file(tmp_path):
    """A model with GELU in float64 is exported."""
    module = clika_compile(torch.nn.GELU(), tracing_inputs=[torch.randn(3, 4, dtype=torch.float64)])
    assert module.clika_export(tmp_path / "m.onnx").path.exists()
