"""Convolution, products, attention, pooling, resampling and recurrence with dynamic dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clika_ref_aten import (
    adaptive_pooling,
    attention,
    contraction,
    convolution,
    folding,
    grids,
    linear,
    pooling,
    recurrent,
    resampling,
    vector_norms,
)
from one_operator import run_onnx

from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol, resolve
from clika_ref.core.types import TensorType

N, H, W = make_symbol("n"), make_symbol("h"), make_symbol("w")
SIZES = ({"n": 1, "h": 6, "w": 7}, {"n": 3, "h": 8, "w": 5}, {"n": 2, "h": 26, "w": 9})
BATCH = (N, 4, H, W)
STEP = {"kernel_size": (2,), "stride": (3,), "padding": (1,)}
aten = torch.ops.aten


def convert_aten_call(op: Operator, overload: torch._ops.OpOverload, *args: Any) -> Any:
    """Return a function that calls the operator as the importer does."""
    return lambda x: op.converters[overload](x, *args)


def make_call(op: Operator, *rest: Any, **attrs: Any) -> Any:
    return lambda *operands: op.call(*operands, *rest, **attrs)


CASES = [
    (convolution.conv2d, [BATCH, (6, 2, 2, 3), (6,)], make_call(convolution.conv2d, padding="same", groups=2)),
    (convolution.conv2d, [(4, H, W), (6, 4, 2, 3)], make_call(convolution.conv2d, padding=(1, 0), stride=(2,))),
    (convolution.conv_transpose2d, [BATCH, (4, 2, 2, 3)], make_call(convolution.conv_transpose2d, stride=(2, 1))),
    (linear.linear, [(N, H, 4), (6, 4), (6,)], make_call(linear.linear)),
    (linear.matmul, [(N, 2, H, W), (N, 2, W, H)], make_call(linear.matmul)),
    (linear.addbmm, [(H, 5), (N, H, W), (N, W, 5)], make_call(linear.addbmm, beta=2)),
    (linear.bilinear, [(N, H, 3), (N, H, 2), (4, 3, 2)], make_call(linear.bilinear)),
    (contraction.einsum, [(N, 2, H, W), (N, 2, 3, W)], make_call(contraction.einsum, equation="bhid,bhjd->bhij")),
    (contraction.trace, [(H, W)], make_call(contraction.trace)),
    (vector_norms.linalg_vector_norm, [(N, H, W)], make_call(vector_norms.linalg_vector_norm, ord=3, dim=(1,))),
    *(
        (attention.scaled_dot_product_attention, shapes, make_call(attention.scaled_dot_product_attention, **attrs))
        for shapes, attrs in (
            ([(N, 4, H, 8), (N, 4, W, 8), (N, 4, W, 5)], {"is_causal": True}),
            ([(N, 4, H, 8), (N, 2, W, 8), (N, 1, W, 5), (H, W)], {"enable_gqa": True}),
            ([(4, H, W), (4, N, W), (4, N, 3)], {}),
        )
    ),
    *((op, [BATCH], make_call(op, **STEP, ceil_mode=ceil)) for op in (pooling.max_pool2d,) for ceil in (False, True)),
    (pooling.max_pool2d_with_indices, [BATCH], make_call(pooling.max_pool2d_with_indices, **STEP, ceil_mode=True)),
    *(
        (pooling.avg_pool2d, [BATCH], make_call(pooling.avg_pool2d, **STEP, ceil_mode=True, **attrs))
        for attrs in ({}, {"count_include_pad": False}, {"divisor_override": 3})
    ),
    *((op, [BATCH], make_call(op, output_size=size)) for op in (adaptive_pooling.adaptive_avg_pool2d,
      adaptive_pooling.adaptive_max_pool2d) for size in ((1, 1), (3, 2), (7, 1), (H + 1, W))),
    *(
        (resampling.upsample_nearest2d, [BATCH], convert_aten_call(resampling.upsample_nearest2d, overload, *args))
        for overload, args in (
            (aten.upsample_nearest2d.vec, (None, (2.0, 3.0))),
            (aten.upsample_nearest2d.vec, (None, (1.5, 0.7))),
            (aten.upsample_nearest2d.vec, ((64, W + 3), None)),
            (aten.upsample_nearest2d.default, ((64, W + 3),)),
        )
    ),
    *(
        (op, [BATCH], convert_aten_call(op, aten.upsample_bilinear2d.vec, *args))
        for op in (resampling.upsample_bilinear2d,)
        for args in ((None, False, (1.5, 0.7)), (None, True, (1.5, 0.7)), ((64, W + 3), False, None))
    ),
    (folding.pixel_shuffle, [BATCH], make_call(folding.pixel_shuffle, upscale_factor=2)),
    (folding.channel_shuffle, [BATCH], make_call(folding.channel_shuffle, groups=2)),
    (folding.im2col, [BATCH], make_call(
        folding.im2col, kernel_size=(2, 3), stride=(3, 1), padding=(1, 0), dilation=(2, 1))),
    (grids.affine_grid_generator, [(N, 2, 3), (H, W)], lambda theta, _: grids.affine_grid_generator.call(
        theta, size=(N, 4, H, W), align_corners=True)),
    (recurrent.gru, [(H, N, 3), (1, N, 5), (15, 3), (15, 5)], make_call(
        recurrent.gru, has_biases=False, num_layers=1, bidirectional=False, batch_first=False)),
]  # fmt: skip


def build_graph(op: Operator, shapes: list[Any], call_of: Any) -> tuple[Graph, Any]:
    graph = Graph(op.name)
    values = [graph.add_input(TensorType(torch.float32, shape), "x") for shape in shapes]
    for value in values:
        for dim, side in enumerate(value.type.shape):
            if side in (N, H, W) and side.name not in graph.symbols:
                graph.symbols[side.name] = Symbol(side.name, 1, None, SymbolSource(value.name, dim))
    call = call_of(*values)
    node = graph.insert(Node(op, call.operands, call.attrs), infer_types(op, call.operands, call.attrs))
    for value in node.outputs:
        graph.add_output(value)
    return graph, call


@pytest.mark.parametrize(
    ("op", "shapes", "call_of"), CASES, ids=[f"{i}-{case[0].name}" for i, case in enumerate(CASES)]
)
def test_spatial_one_artifact_serves_all_sizes(op, shapes, call_of):
    """One artifact computes eager's results at all sizes."""
    graph, call = build_graph(op, shapes, call_of)
    for sizes in SIZES:
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(resolve(shape, sizes), generator=generator) for shape in shapes]
        own = tensors[: len(call.operands)]
        expected = op(*own, **{name: resolve(attr, sizes) for name, attr in call.attrs.items()})
        expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
        for value, e, a in zip(graph.outputs, expected, run_onnx(graph, tensors), strict=True):
            assert resolve(value.type.shape, sizes) == tuple(e.shape), sizes
            # 1e-5: a rounding error of a few units in the sums of at most some hundred numbers near 1.
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
