"""Every declared operator over drawn calls: its types, its lowering in ONNX Runtime, and its traits."""

from __future__ import annotations

import pytest
import torch
from clika_ref_aten.plugin import clika_ref_operators
from one_operator import build_case_graph, draw_case, find_mismatch, infer_case_types, run_onnx

from clika_ref.core.types import TensorType

OPERATORS = sorted((op for op in clika_ref_operators() if not op.bodies), key=lambda op: op.name)
"""All operators but control flow, whose bodies are not drawn (tests/capture/test_control_flow.py)."""
DRAWS = 12


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_infer_types_equals_types_of_results(op):
    """The inferred types are those of real results."""
    for seed in range(DRAWS):
        case = draw_case(op, seed)
        operands = [TensorType(o.dtype, tuple(o.shape)) if isinstance(o, torch.Tensor) else o for o in case.operands]
        real = tuple(TensorType(r.dtype, tuple(r.shape)) for r in case.eager())
        found = infer_case_types(case, operands)
        if all(t.is_static for t in found):
            assert found == real, str(case)
        else:  # sizes depend on the data
            assert [(t.dtype, t.rank) for t in found] == [(t.dtype, t.rank) for t in real], str(case)


@pytest.mark.parametrize("op", [op for op in OPERATORS if not op.random], ids=lambda op: op.name)
def test_onnx_lowering_agrees_with_eager(op):
    """The ONNX lowering agrees with eager."""
    assert op.lowering is not None, f"{op.name} has no ONNX lowering"
    for seed in range(DRAWS):
        case = draw_case(op, seed)
        difference = find_mismatch(case, case.eager(), run_onnx(build_case_graph(case), case.tensors))
        assert difference is None, f"{case}: {difference}"


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_samples_vary_each_attribute(op):
    """Samples vary every attribute."""
    drawn = [draw_case(op, seed).attrs for seed in range(80)]
    for name in op.attributes:
        if name not in ("device", "dtype"):
            assert len({repr(attrs[name]) for attrs in drawn}) > 1, f"{op.name}: no sample varies {name!r}"


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_operator_docstring_starts_with_sentence(op):
    """The docstring starts with a sentence."""
    assert op.__doc__, op.name
    assert op.__doc__.strip().splitlines()[0].endswith("."), op.name
