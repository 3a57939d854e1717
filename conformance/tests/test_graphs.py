"""Grown graphs: valid, of the requested size, equal for equal seeds, and diverse."""

from collections import Counter
from random import Random

import pytest
import torch
from clika_ref_conformance.drawing.eager_builder import EagerGraphBuilder, LeafTensor
from clika_ref_conformance.drawing.eager_values import (
    compute_eager_values,
    has_undefined_calls,
    is_undefined,
    is_zero_sign_sensitive,
)
from clika_ref_conformance.drawing.generation import collect
from clika_ref_conformance.drawing.graphs.graph_generator import MAX_ELEMENTS, GraphGenerator, is_match
from clika_ref_conformance.drawing.graphs.random_graphs import (
    MAX_NODES,
    MIN_NODES,
    grow_graph,
    make_case,
    make_graph_case_strategy,
    select_graph_operators,
)

from clika_ref.core.inference import Builder
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Value
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import Descriptions, random_draw
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
OPERATORS = select_graph_operators(REGISTRY.operators)
s = Descriptions()


def grow_random_graph(seed, **options):
    return grow_graph(OPERATORS, GraphGenerator(random_draw(Random(seed)), **options))


@pytest.fixture(scope="module")
def random_graphs():
    return [grow_random_graph(seed) for seed in range(60)]


def test_grow_graph_keeps_invariants_and_size_limits(random_graphs):
    """Each graph keeps the invariants and the limits of its size."""
    for growth in (d.builder for d in random_graphs):
        verify(growth.graph)
        assert MIN_NODES <= len(growth.graph) <= MAX_NODES
        assert growth.graph.outputs
        assert all(t.numel() <= MAX_ELEMENTS for t in growth.tensors.values())


def test_grow_graph_types_match_eager(random_graphs):
    """The types in a graph equal those of the tensors that eager returns."""
    for growth in (d.builder for d in random_graphs):
        values = compute_eager_values(growth.graph, [growth.tensors[v] for v in growth.graph.inputs])
        for value, tensor in values.items():
            assert (value.type.dtype, value.type.shape) == (tensor.dtype, tuple(tensor.shape))


def test_grow_graph_rejects_under_5_percent_of_calls(random_graphs):
    """Eager rejects fewer than 5 % of the drawn calls."""
    assert sum(len(d.builder.rejected) for d in random_graphs) < 0.05 * sum(d.tried for d in random_graphs)


def test_grow_graph_shares_weights_and_repeats_outputs(random_graphs):
    """Graphs share weights, and return inputs, inner tensors and repeated tensors."""
    seen = Counter()
    for graph in (d.builder.graph for d in random_graphs):
        seen["shared"] += any(len(v.uses) > 1 for v in graph.constants.values())
        seen["inner"] += any(len(v.uses) > 1 and v.producer for v in graph.outputs)
        seen["pass-through"] += any(v in graph.inputs for v in graph.outputs)
        seen["twice"] += len(set(graph.outputs)) < len(graph.outputs)
        seen["unused"] += any(not v.uses for v in graph.inputs)
        seen["dead"] += any(not any(v.uses for v in n.outputs) for n in graph.nodes)
        seen["constant"] += any(v.is_constant for v in graph.outputs)
    assert min(seen.values()) > 0
    assert len(seen) == 7


def test_grow_graph_repeats_operator_with_other_attributes(random_graphs):
    """An operator is applied again to its operand, with other attributes."""
    again = 0
    for graph in (d.builder.graph for d in random_graphs):
        calls = [(n.op_type, n.inputs[0]) for n in graph.nodes if n.inputs and isinstance(n.inputs[0], Value)]
        again += len(set(calls)) < len(calls)
    assert again > len(random_graphs) / 3


def test_graph_case_strategy_same_seed_repeats():
    """A strategy gives the same graphs for the same seed."""
    first, second, other = (
        [str(c.graph) for c in collect(make_graph_case_strategy(OPERATORS), 5, seed)] for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_grow_graph_unsupported_node_rejected():
    """A node that the target does not support is not inserted."""
    growth = grow_random_graph(
        3, unsupported_reason=lambda node: "no" if node.inputs and isinstance(node.inputs[0], Value) else None
    ).builder
    assert all(not any(isinstance(v, Value) for v in n.inputs[:1]) for n in growth.graph.nodes)
    assert any(reason == "no" for _, reason in growth.rejected)


@pytest.mark.parametrize(
    ("name", "tensors", "attrs", "free"),
    [
        ("one_hot", [torch.tensor([0, 2])], {"num_classes": 3}, {"num_classes": -1}),
        ("repeat_interleave", [torch.ones(2), torch.tensor([1, 2])], {"output_size": 3}, {"output_size": None}),
    ],
)
def test_graph_builder_data_dependent_size_rejected(name, tensors, attrs, free):
    """A call whose sizes depend on data is rejected by the type rule."""
    op = REGISTRY.operators[name]
    growth = EagerGraphBuilder()
    leaves = [LeafTensor(t) for t in tensors]
    complete = op.call(*leaves, **attrs)
    assert growth.add_call(op, leaves, complete.attrs) is not None
    assert growth.add_call(op, leaves, {**complete.attrs, **free}) is None
    ((_, reason),) = growth.rejected
    assert "depends on the data" in reason


def test_make_case_other_inputs_have_no_undefined_calls(random_graphs):
    """Other inputs of a case have no undefined calls."""
    cases = [make_case(drawing, "case", Random(seed)) for seed, drawing in enumerate(random_graphs[:20])]
    for case in cases:
        assert case.runs
        for run in case.runs:
            assert not has_undefined_calls(case.graph, compute_eager_values(case.graph, run.inputs))
    with_all = [case for case in cases if len(case.runs) == 3]  # others read the sign of a zero in some of them
    assert len(with_all) > len(cases) / 2


@pytest.mark.parametrize(
    ("description", "tensor", "expected"),
    [
        (s.tensor(rank=2), torch.ones(2, 3), True),
        (s.tensor(rank=3), torch.ones(2, 3), False),
        (s.tensor(shape=(2, 3)), torch.ones(2, 3), True),
        (s.tensor(shape=(3, 2)), torch.ones(2, 3), False),
        (s.tensor(dtype=torch.int64), torch.ones(2, 3), False),
        (s.tensor(rank=2, size=(3, 5)), torch.ones(2, 3), False),
        (s.tensor(unique=True), torch.ones(2, 3), False),
        (s.tensor(domain=(0, 1)), torch.ones(2, 3), True),
        (s.tensor(dtype=torch.int64, domain=(0, 1)), torch.ones(2, 3).long(), False),
        (s.tensor(dtype=torch.int64, low=0, high=1), torch.ones(2, 3).long(), False),
        (s.tensor(dtype=torch.int64), torch.ones(2, 3).long(), True),
    ],
)
def test_is_match_requires_exact_description(description, tensor, expected):
    """A tensor matches a description only without changes."""
    assert is_match(description, tensor) is expected


def test_is_undefined_cast_out_of_integer_bounds():
    """A cast is undefined if the integer cannot hold the float."""
    x, byte = torch.tensor([1.5, -0.5, 255.9]), {"dtype": torch.uint8}
    assert not is_undefined([x], byte, [x.to(torch.uint8)])
    for bad in (-1.0, 256.0, float("nan"), float("inf")):
        assert is_undefined([torch.tensor([bad])], byte, [torch.zeros(1, dtype=torch.uint8)])
    nan = torch.tensor([float("nan")])
    assert is_undefined([nan], {"dtype": torch.int32, "dim": ()}, [torch.zeros((), dtype=torch.int32)])  # a sum
    assert not is_undefined([nan], {"dtype": torch.bool}, [torch.ones(1, dtype=torch.bool)])
    assert not is_undefined([nan], {"dtype": torch.float16}, [nan.half()])
    assert not is_undefined([nan], {}, [torch.zeros(1, dtype=torch.int64)])  # an argmax


@pytest.mark.parametrize(("x", "reads"), [(-0.0, True), (0.5, False), (float("nan"), False)])
def test_is_zero_sign_sensitive_finds_reciprocal_of_zero(x, reads):
    """A run whose result depends on the sign of a zero is detected."""
    graph = Graph()
    build = Builder(graph, REGISTRY.operators)
    graph.add_output(build("reciprocal", build("ceil", graph.add_input(TensorType(torch.float32, ()), "x"))))
    assert is_zero_sign_sensitive(graph, compute_eager_values(graph, [torch.tensor(x)])) is reads
