"""Type inference: static, symbolic, and rejected if a type holds for some sizes only."""

import re

import pytest
import torch
from torch import Tensor

from clika_ref.core.errors import PassError, PluginError
from clika_ref.core.inference import Builder, infer_types
from clika_ref.core.invariants import verify
from clika_ref.core.operators import operator
from clika_ref.core.symbols import make_symbol
from clika_ref.core.types import Origin, TensorType
from clika_ref.torch_internals.symbols import FloorDiv, torch_sympy

N, M = make_symbol("n"), make_symbol("m")


def float32(*shape) -> TensorType:
    return TensorType(torch.float32, shape)


def test_infer_types_static_shapes_match_result(operator_table):
    """Static types are those of the reference's result."""
    assert infer_types(operator_table["add"], [float32(2, 3), float32(3)], {}) == (float32(2, 3),)
    assert infer_types(operator_table["add"], [TensorType(torch.int64, (2,)), 1.5], {}) == (float32(2),)
    assert infer_types(operator_table["split_in_half"], [float32(5, 2)], {}) == (float32(2, 2), float32(3, 2))


def test_infer_types_symbolic_shapes_keep_symbols(operator_table):
    """Symbolic types are expressed in the symbols of the inputs."""
    assert infer_types(operator_table["neg"], [float32(N, 3, N + 1)], {}) == (float32(N, 3, N + 1),)
    first, second = infer_types(operator_table["split_in_half"], [float32(2 * N, M)], {})
    assert first == second == float32(N, M)


def test_infer_types_operand_sizes_are_not_negative(operator_table):
    """A size of an operand may be a difference, whose sign no rule finds."""
    size = (FloorDiv(N - 1, 8) + 1) * (FloorDiv(M - 1, 8) + 1)
    assert infer_types(operator_table["add"], [float32(N, size, 3), float32(3)], {}) == (float32(N, size, 3),)


@pytest.mark.parametrize("function", [torch_sympy.Min, torch_sympy.Max])
def test_infer_types_size_of_smaller_length_asks_no_condition(operator_table, function):
    """The smaller or larger of two sizes is a size like any other: it is not compared."""
    size = function(N, FloorDiv(M - 1, 8) * FloorDiv(N, 4))
    assert infer_types(operator_table["add"], [float32(M * size, 4), float32(4)], {}) == (float32(M * size, 4),)


def test_infer_types_attribute_may_hold_expression(operator_table):
    """An attribute may hold a size expression."""
    assert infer_types(operator_table["full"], [], {"size": (N, 2), "value": 0.0, "device": None}) == (float32(N, 2),)


def test_infer_types_large_input_allocates_no_memory(operator_table):
    """A type of four terabytes is inferred without memory."""
    assert infer_types(operator_table["neg"], [float32(2**20, 2**20)], {}) == (float32(2**20, 2**20),)


def test_infer_types_large_factory_allocates_no_memory(operator_table):
    """The type of a huge tensor that a node creates is inferred without memory."""
    wanted = {"size": (2**20, 2**20), "value": 0.0, "device": None}
    assert infer_types(operator_table["full"], [], wanted) == (float32(2**20, 2**20),)


def test_infer_types_nonempty_dim_required_raises():
    """A type that holds only for a non-empty dim raises an error."""

    @operator()
    def first(x: Tensor) -> Tensor:
        """Take the first element."""
        torch._check(x.shape[0] > 0)
        return x.sum()

    with pytest.raises(
        PassError, match=r"first\(float32\[n\]\): cannot infer the output type: the type holds only if "
    ):
        infer_types(first, [float32(N)], {})


def test_infer_types_failed_call_keeps_no_assumption(operator_table):
    """A failed call leaves no assumption about symbols to the next call."""
    with pytest.raises(PassError, match="cannot infer the output type"):
        infer_types(operator_table["add"], [float32(N), float32(M)], {})
    assert infer_types(operator_table["neg"], [float32(N)], {}) == (float32(N),)
    assert infer_types(operator_table["neg"], [float32(M)], {}) == (float32(M),)


def test_infer_types_equal_dims_required_raises(operator_table):
    """A type that holds only for equal dims raises an error."""
    with pytest.raises(PassError, match=r"add\(float32\[n\], float32\[m\]\): cannot infer the output type: "):
        infer_types(operator_table["add"], [float32(N), float32(M)], {})


def test_infer_types_deferred_assertion_names_user_symbols():
    """An error about a deferred assertion uses the symbols of the graph."""

    @operator()
    def halve_even(x: Tensor) -> Tensor:
        """Raise an error for odd sizes."""
        torch._check(x.shape[0] % 2 == 0)
        return x

    message = (
        r"halve_even\(float32\[n\]\): cannot infer the output type: the type holds only if .*Mod\(n, 2\).*. Declare "
        "the rule with @halve_even.types."
    )
    with pytest.raises(PassError, match=message):
        infer_types(halve_even, [float32(N)], {})


def test_infer_types_branch_on_size_raises():
    """A branch on a symbolic size raises an error."""

    @operator()
    def branching(x: Tensor) -> Tensor:
        """Do this or that."""
        return x[:1] if x.shape[0] > 3 else x

    assert infer_types(branching, [float32(7)], {}) == (float32(1),)
    with pytest.raises(PassError, match=r"branching\(float32\[n\]\): cannot infer the output type: "):
        infer_types(branching, [float32(N)], {})


@pytest.mark.parametrize("shape", [(3,), (N,)])
def test_infer_types_data_dependent_size_raises(operator_table, shape):
    """A data-dependent size raises an error."""
    with pytest.raises(PassError, match=r"nonzero\(float32\[\w\]\): cannot infer the output type: "):
        infer_types(operator_table["nonzero"], [float32(*shape)], {})


def test_infer_types_declared_rule_precedes_reference():
    """A declared type rule is used before the reference."""

    @operator()
    def repeat(x: Tensor, *, times: int) -> Tensor:
        """Fail if run."""
        raise NotImplementedError

    @repeat.types
    def _(x, *, times):
        return TensorType(x.dtype, (x.shape[0] * times,))

    assert infer_types(repeat, [float32(N)], {"times": 3}) == (float32(3 * N),)


def test_infer_types_error_shows_call_and_cause(operator_table):
    """The error shows the call and the message of the reference."""
    message = (
        "reshape(float32[2, 3], shape=(4,)): cannot infer the output type: shape '[4]' is invalid for input of size 6"
    )
    with pytest.raises(PassError, match=re.escape(message)) as caught:
        infer_types(operator_table["reshape"], [float32(2, 3)], {"shape": (4,)})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_infer_types_equal_int_float_bool_differ(operator_table):
    """Equal numbers of different Python types give different dtypes."""
    ints = TensorType(torch.int64, (2,))
    assert infer_types(operator_table["add"], [ints, 1], {}) == (ints,)
    assert infer_types(operator_table["add"], [ints, 1.0], {}) == (float32(2),)
    assert infer_types(operator_table["add"], [TensorType(torch.bool, (2,)), True], {}) == (
        TensorType(torch.bool, (2,)),
    )


# The builder


def test_builder_adds_typed_nodes_with_origin(graph, operator_table):
    """The builder adds typed nodes before a node, with one origin."""
    x = graph.takes("n")
    last = graph("neg", x).producer
    build = Builder(graph, operator_table, last, Origin(("head",)))
    y = build("add", x, 1)
    assert y.type == float32(N)
    assert y.producer.origin.scope == "head"
    assert graph.kinds == ["add", "neg"]
    verify(graph)


def test_builder_several_results_returns_all_values(graph):
    """The builder returns one value for each result."""
    first, second = graph("split_in_half", graph.takes(5))
    assert (first.type, second.type) == (float32(2), float32(3))
    assert (first.index, second.index) == (0, 1)
    assert (first.name, second.name) == ("split_in_half", "split_in_half_1")


def test_builder_given_types_used_unchanged(graph):
    """The builder uses given types without inference."""
    assert graph("nonzero", graph.takes(3), types=(TensorType(torch.int64, (N, 1)),)).type.shape == (N, 1)


def test_builder_operator_object_fills_in_defaults(graph, operator_table):
    """The builder accepts an operator object and fills in the defaults of its attributes."""
    node = Builder(graph, {})(operator_table["full"], size=(2,), value=1.0).producer
    assert node.attrs == {"size": (2,), "value": 1.0, "device": None}


def test_builder_unknown_attribute_raises_and_adds_no_node(graph):
    """An unknown attribute raises an error and adds no node."""
    with pytest.raises(PluginError, match=r"call of neg .* has no attribute \["):
        graph("neg", graph.takes(2), strength=3)
    assert graph.kinds == []


def test_builder_constant_name_taken_gets_number(graph, operator_table):
    """A constant with a taken name gets a number."""
    build = Builder(graph, operator_table)
    assert [build.constant(torch.ones(1), "clika.one").name for _ in range(2)] == ["clika.one", "clika.one_1"]
