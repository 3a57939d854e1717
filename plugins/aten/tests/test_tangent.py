"""The tangent in float64: ONNX Runtime has no kernel, and its cosine is imprecise where the tangent is large."""

import math

import torch
from clika_ref_aten import trigonometry
from one_operator import Case, build_case_graph, run_onnx

ULPS = 8 * 2.0**-52  # what the operator claims

TURNS = torch.tensor([*range(40), 1e3, 123456, 2**27, 2**28 - 1], dtype=torch.float64)
POLES = (TURNS + 0.5) * math.pi
NEAR = torch.cat([POLES * (1 + sign * 10.0**-n) for n in range(1, 16) for sign in (1, -1)])
EVERYWHERE = torch.cat(
    [
        torch.linspace(-300, 300, 20_001, dtype=torch.float64),
        10.0 ** -torch.arange(1, 300, 7, dtype=torch.float64),
        TURNS * math.pi,
        POLES,
        NEAR,
        -NEAR,
        torch.tensor([0.0, math.inf, -math.inf, math.nan, 2.0**31, 1e15, 1e200], dtype=torch.float64),
    ]
)


def test_tan_float64_within_8_ulp():
    """tan is accurate to 8 ulp in float64."""
    call = trigonometry.tan.call(EVERYWHERE)
    case = Case(trigonometry.tan, list(call.operands), call.attrs)
    (expected,), (found,) = case.eager(), run_onnx(build_case_graph(case), case.tensors)
    finite = expected.isfinite()
    assert found[~finite].isnan().all()
    assert torch.equal(found.sign()[finite], expected.sign()[finite])
    assert ((found - expected).abs() <= ULPS * expected.abs().clamp(min=1))[finite].all()
