"""ATen calls with another form than the operator compute the same as the operator, or are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clika_ref_aten.plugin import clika_ref_operators

from clika_ref.core.errors import ModelError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import Operator, index_by_overload
from clika_ref.core.types import TensorType

aten = torch.ops.aten
OPERATORS = index_by_overload(clika_ref_operators())


def convert_call(overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> tuple[Operator, Any]:
    """Return the operator and the call that an ATen call with tensors becomes; lists arrive as tuples."""
    graph = Graph("call")

    def add_as_constant(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return graph.add_constant(item, "x")
        return tuple(map(add_as_constant, item)) if isinstance(item, list | tuple) else item

    op = OPERATORS[overload]
    return op, op.converters[overload](
        *map(add_as_constant, args), **{k: add_as_constant(v) for k, v in kwargs.items()}
    )


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def make_gates(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [randn(*shape) for shape in shapes]


CONVOLUTION = aten._convolution.default
BICUBIC, BILINEAR = aten._upsample_bicubic2d_aa.vec, aten._upsample_bilinear2d_aa.vec

CALLS: list[tuple[Any, ...]] = [
    (CONVOLUTION, randn(1, 2, 5, 5), randn(2, 3, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [1, 1], 1, *[False] * 4),
    (aten.tensordot.default, randn(2, 3, 4), randn(4, 3, 5), [1, 2], [1, 0]),
    (aten.tensordot.default, randn(2, 3, 4), randn(4, 3, 5), [-1], [0]),
    (aten.inner.default, randn(2, 3), randn(4, 3)),
    (aten.inner.default, randn(), randn(3)),
    (aten.linalg_vecdot.default, randn(2, 3, 4), randn(3, 4)),
    (aten.einsum.default, "ij,jk", [randn(2, 3), randn(3, 4)]),
    (aten.cross.default, randn(2, 4, 3), randn(2, 4, 3), 2),
    (aten.norm.Scalar, randn(2, 3), 3),
    (aten.norm.ScalarOpt_dim, randn(2, 3), None, [0], True),
    (aten.scaled_dot_product_attention.default, randn(2, 3, 4), randn(2, 5, 4), randn(2, 5, 4), None, 0.0, True),
    (aten.upsample_nearest2d.vec, randn(1, 2, 5, 6), None, [1.5, 2.0]),
    (aten.upsample_nearest2d.default, randn(1, 2, 5, 6), [9, 7]),
    (aten.upsample_nearest1d.default, randn(1, 2, 5), [9], 1.9),
    (aten.upsample_bilinear2d.vec, randn(1, 2, 5, 6), None, False, [1.5, 2.3]),
    (aten.upsample_bilinear2d.default, randn(1, 2, 5, 6), [9, 7], True),
    (BICUBIC, randn(1, 2, 5, 6), [3, 9], False, None),
    (aten.lstm_cell.default, randn(2, 3), make_gates((2, 4), (2, 4)), *make_gates((16, 3), (16, 4))),
    (
        *(aten.lstm_cell.default, randn(2, 3), [randn(2, 4), torch.ones(2, 4, dtype=torch.int32)]),
        *make_gates((16, 3), (16, 4)),
    ),
    (aten.lstm.input, randn(5, 2, 3), make_gates((1, 2, 4), (1, 2, 4)), make_gates((16, 3), (16, 4)),
     False, 1, 0.0, False, False, False),
    (aten.gru.input, randn(5, 2, 3), randn(1, 2, 4), make_gates((12, 3), (12, 4)), False, 1, 0.5, True, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("overload", "args"), [(c[0], c[1:]) for c in CALLS], ids=[str(c[0]) for c in CALLS])
def test_converted_spatial_call_equals_aten_and_types(overload, args):
    """A converted call equals ATen's, and its inferred types are right."""
    op, call = convert_call(overload, *args)
    found = op(*(o.data if isinstance(o, Value) else o for o in call.operands), **call.attrs)
    found, expected = ([t] if isinstance(t, torch.Tensor) else [*t] for t in (found, overload(*args)))
    assert list(infer_types(op, call.operands, call.attrs)) == [TensorType(t.dtype, tuple(t.shape)) for t in found]
    for a, e in zip(found, expected, strict=True):
        # 1e-6: the same products, summed in another order at most.
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("overload", "args", "reason"),
    [
        (aten.scaled_dot_product_attention.default, (randn(2, 3, 4),) * 3 + (None, 0.1), "dropout inside attention"),
        (BILINEAR, (randn(1, 1, 4, 4), (2, 2), True, None), "Use align_corners=False"),
        (
            aten.gru.input,
            (randn(5, 2, 3), randn(2, 2, 4), (), False, 2, 0.5, True, False, False),
            "dropout between layers",
        ),
    ],
)
def test_converted_unsupported_call_raises_with_advice(overload, args, reason):
    """A call that is unsupported raises with advice."""
    with pytest.raises(ModelError, match=reason):
        convert_call(overload, *args)
