"""Types from the reference: static, symbolic, and refused where they would hold for some sizes only."""

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

N, M = make_symbol("n"), make_symbol("m")


def floats(*shape) -> TensorType:
    return TensorType(torch.float32, shape)


def test_a_static_type_is_that_of_the_result(table):
    assert infer_types(table["add"], [floats(2, 3), floats(3)], {}) == (floats(2, 3),)
    assert infer_types(table["add"], [TensorType(torch.int64, (2,)), 1.5], {}) == (floats(2),)
    assert infer_types(table["halves"], [floats(5, 2)], {}) == (floats(2, 2), floats(3, 2))


def test_a_symbolic_type_speaks_of_the_same_symbols(table):
    assert infer_types(table["neg"], [floats(N, 3, N + 1)], {}) == (floats(N, 3, N + 1),)
    first, second = infer_types(table["halves"], [floats(2 * N, M)], {})
    assert first == second == floats(N, M)


def test_an_attribute_may_hold_an_expression(table):
    assert infer_types(table["full"], [], {"size": (N, 2), "value": 0.0, "device": None}) == (floats(N, 2),)


def test_nothing_is_computed(table):
    """Four terabytes of floats have a type, but no memory."""
    assert infer_types(table["neg"], [floats(2**20, 2**20)], {}) == (floats(2**20, 2**20),)


def test_nothing_is_made_either(table):
    wanted = {"size": (2**20, 2**20), "value": 0.0, "device": None}
    assert infer_types(table["full"], [], wanted) == (floats(2**20, 2**20),)


def test_a_type_that_needs_a_side_not_to_be_empty_is_refused():
    @operator()
    def first(x: Tensor) -> Tensor:
        """Take the first element."""
        torch._check(x.shape[0] > 0)
        return x.sum()

    with pytest.raises(
        PassError, match=r"first\(float32\[n\]\): cannot infer the output type: the type holds only if "
    ):
        infer_types(first, [floats(N)], {})


def test_one_call_leaves_no_assumption_to_the_next(table):
    with pytest.raises(PassError, match="cannot infer the output type"):
        infer_types(table["add"], [floats(N), floats(M)], {})
    assert infer_types(table["neg"], [floats(N)], {}) == (floats(N),)
    assert infer_types(table["neg"], [floats(M)], {}) == (floats(M),)


def test_a_type_that_needs_two_sides_equal_is_refused(table):
    with pytest.raises(PassError, match=r"add\(float32\[n\], float32\[m\]\): cannot infer the output type: "):
        infer_types(table["add"], [floats(N), floats(M)], {})


def test_a_deferred_assertion_is_found_and_said_in_the_user_s_symbols():
    @operator()
    def checked(x: Tensor) -> Tensor:
        """Hold for even sides only."""
        torch._check(x.shape[0] % 2 == 0)
        return x

    message = (
        r"checked\(float32\[n\]\): cannot infer the output type: the type holds only if .*Mod\(n, 2\).*. Declare "
        "the rule with @checked.types."
    )
    with pytest.raises(PassError, match=message):
        infer_types(checked, [floats(N)], {})


def test_a_branch_on_a_size_is_refused_not_guessed():
    @operator()
    def branching(x: Tensor) -> Tensor:
        """Do this or that."""
        return x[:1] if x.shape[0] > 3 else x

    assert infer_types(branching, [floats(7)], {}) == (floats(1),)
    with pytest.raises(PassError, match=r"branching\(float32\[n\]\): cannot infer the output type: "):
        infer_types(branching, [floats(N)], {})


@pytest.mark.parametrize("shape", [(3,), (N,)])
def test_a_size_that_depends_on_data_is_refused(table, shape):
    with pytest.raises(PassError, match=r"nonzero\(float32\[\w\]\): cannot infer the output type: "):
        infer_types(table["nonzero"], [floats(*shape)], {})


def test_a_declared_rule_comes_first():
    @operator()
    def ruled(x: Tensor, *, times: int) -> Tensor:
        """Fail if run."""
        raise NotImplementedError

    @ruled.types
    def _(x, *, times):
        return TensorType(x.dtype, (x.shape[0] * times,))

    assert infer_types(ruled, [floats(N)], {"times": 3}) == (floats(3 * N),)


def test_the_error_shows_the_call_and_the_reference_s_own_words(table):
    message = (
        "reshape(float32[2, 3], shape=(4,)): cannot infer the output type: shape '[4]' is invalid for input of size 6"
    )
    with pytest.raises(PassError, match=re.escape(message)) as caught:
        infer_types(table["reshape"], [floats(2, 3)], {"shape": (4,)})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_numbers_that_are_equal_but_of_another_kind_have_types_of_their_own(table):
    ints = TensorType(torch.int64, (2,))
    assert infer_types(table["add"], [ints, 1], {}) == (ints,)
    assert infer_types(table["add"], [ints, 1.0], {}) == (floats(2),)
    assert infer_types(table["add"], [TensorType(torch.bool, (2,)), True], {}) == (TensorType(torch.bool, (2,)),)


# The builder


def test_the_builder_adds_typed_nodes_in_place_under_one_origin(graph, table):
    x = graph.takes("n")
    last = graph("neg", x).producer
    build = Builder(graph, table, last, Origin(("head",)))
    y = build("add", x, 1)
    assert y.type == floats(N)
    assert y.producer.origin.scope == "head"
    assert graph.kinds == ["add", "neg"]
    verify(graph)


def test_the_builder_returns_as_many_values_as_there_are(graph):
    first, second = graph("halves", graph.takes(5))
    assert (first.type, second.type) == (floats(2), floats(3))
    assert (first.index, second.index) == (0, 1)
    assert (first.name, second.name) == ("halves", "halves_1")


def test_given_types_are_taken_as_they_are(graph):
    assert graph("nonzero", graph.takes(3), types=(TensorType(torch.int64, (N, 1)),)).type.shape == (N, 1)


def test_the_builder_takes_operators_themselves_and_fills_in_defaults(graph, table):
    node = Builder(graph, {})(table["full"], size=(2,), value=1.0).producer
    assert node.attrs == {"size": (2,), "value": 1.0, "device": None}


def test_the_builder_refuses_an_unknown_attribute_and_adds_nothing(graph):
    with pytest.raises(PluginError, match="operator neg"):
        graph("neg", graph.takes(2), strength=3)
    assert graph.kinds == []


def test_the_builder_registers_constants_under_free_names(graph, table):
    build = Builder(graph, table)
    assert [build.constant(torch.ones(1), "clika.one").name for _ in range(2)] == ["clika.one", "clika.one_1"]
