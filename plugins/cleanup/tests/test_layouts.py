"""Operators declared as independent of the order of dims are so, over drawn calls."""

import random

import pytest
import torch
from clika_ref_cleanup.layouts import (
    DIM_ATTRIBUTES,
    ELEMENTWISE,
    LAST_DIM_OPERATORS,
    REDUCTIONS,
    compose_orders,
    invert_order,
    operands_to_permute,
    permute_attrs,
    permute_type,
)

from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.samples import Descriptions, TensorSample, random_draw, realize
from clika_ref.core.types import TensorType

LISTED = sorted({*ELEMENTWISE, *DIM_ATTRIBUTES, *REDUCTIONS, *LAST_DIM_OPERATORS})


def draw_node(op, seed):
    """Return a node of a drawn call and its tensors."""
    draw = random_draw(random.Random(f"{op.name}-{seed}"))
    generator = torch.Generator().manual_seed(seed)
    call = op.sampler(draw, Descriptions())
    call = op.call(*call.operands, **call.attrs)
    tensors = [realize(o, generator) if isinstance(o, TensorSample) else o for o in call.operands]
    graph = Graph()
    inputs = [
        graph.add_input(TensorType(t.dtype, tuple(t.shape)), "x") if isinstance(t, torch.Tensor) else t for t in tensors
    ]
    return graph.insert(Node(op, inputs, call.attrs), infer_types(op, inputs, call.attrs)), tensors


@pytest.mark.parametrize("name", LISTED)
def test_operands_to_permute_listed_operators_commute(operators, name):
    """The listed operators compute the same in any order of dims."""
    tried = 0
    for seed in range(60):
        node, tensors = draw_node(operators[name], seed)
        follow = operands_to_permute(node)
        if follow is None:
            continue
        rank = node.outputs[0].type.rank
        order = list(range(rank))
        random.Random(seed).shuffle(order)
        order = tuple(order if name not in LAST_DIM_OPERATORS else [d for d in order if d != rank - 1] + [rank - 1])
        before = list(tensors)
        for i in follow:
            if isinstance(tensors[i], torch.Tensor) and tensors[i].dim():
                full = tensors[i].reshape((1,) * (rank - tensors[i].dim()) + tuple(tensors[i].shape))
                before[i] = full.permute(invert_order(order)).contiguous()
        expected, moved = node.op(*tensors, **node.attrs), node.op(*before, **permute_attrs(node, order))
        for e, m in zip(*((r,) if isinstance(r, torch.Tensor) else r for r in (expected, moved)), strict=True):
            half = e.dtype == torch.float16  # its steps are 1e-3; another order of a sum moves a result by a few
            torch.testing.assert_close(
                m.permute(order), e, equal_nan=True, rtol=1e-5 + 5e-3 * half, atol=1e-5 + 5e-3 * half
            )
        tried += order != tuple(range(rank))
    assert tried, f"no drawn call of {name} was moved"


def test_compose_and_invert_orders_equal_permute():
    """Orders compose and invert as permutes do."""
    x = torch.randn(2, 3, 4)
    first, second = (1, 2, 0), (0, 2, 1)
    assert torch.equal(x.permute(first).permute(second), x.permute(compose_orders(first, second)))
    assert torch.equal(x.permute(first).permute(invert_order(first)), x)
    kind = TensorType(x.dtype, tuple(x.shape))
    assert permute_type(kind, first).shape == tuple(x.permute(first).shape)
