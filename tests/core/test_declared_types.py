"""Results of nodes are compared with the types in the graph."""

import pytest
import torch

from clika_ref import clika_compile
from clika_ref.core.declared_types import DeclaredTypes
from clika_ref.core.execution import interpret
from clika_ref.core.symbols import make_symbol
from clika_ref.core.types import TensorType


def find_mismatches_in(graph, inputs):
    found, types = [], DeclaredTypes(graph, inputs)
    interpret(graph, inputs, lambda node, results: found.extend(types.find_mismatches(node, results)))
    return found


@pytest.mark.parametrize(
    ("stated", "is_right"),
    [
        (TensorType(torch.float32, (make_symbol("batch"), 4)), True),
        (TensorType(torch.float32, (3, 4)), True),
        (TensorType(torch.float64, (make_symbol("batch"), 4)), False),
        (TensorType(torch.float32, (make_symbol("batch") + 1, 4)), False),
        (TensorType(torch.float32, (make_symbol("batch"),)), False),
        (TensorType(torch.float32, (make_symbol("of_data"), 4)), True),
        (TensorType(torch.float64, (make_symbol("of_data"), 4)), False),
    ],
)
def test_find_mismatches_other_dtype_or_shape_reported(stated, is_right):
    """Results of another dtype or shape than declared are reported; unknown symbols match."""
    graph = clika_compile(lambda x: x.exp() * 2, tracing_inputs=[torch.randn(2, 4), torch.randn(3, 4)]).graph.clone()
    next(iter(graph.nodes)).output.type = stated
    found = find_mismatches_in(graph, [torch.randn(3, 4)])
    assert [
        text for text in found if "returns torch.float32[3, 4], not the type that the graph declares" in text
    ] == found
    assert bool(found) != is_right


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.native_layer_norm(x.bfloat16(), (4,), None, None, 1e-5)[0],
        lambda x: torch.native_layer_norm(x.half(), (4,), None, None, 1e-5)[0],
        lambda x: torch.native_batch_norm(
            x.bfloat16(), None, None, torch.zeros(4), torch.ones(4), training=False, momentum=0.1, eps=1e-5
        )[0],
    ],
    ids=["layer norm of bfloat16", "layer norm of float16", "batch norm of bfloat16"],
)
def test_declared_types_unread_results_not_checked(function):
    """Results that no node reads are not compared with a declared type."""
    x = torch.randn(5, 4)
    module = clika_compile(function, tracing_inputs=[torch.randn(2, 4), torch.randn(3, 4)])
    assert torch.equal(module(x), function(x))
