"""Operator declarations: reading of signatures, binding of ATen calls, and errors that quote the signature."""

import pickle
import re

import pytest
import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.accuracy import COMPOSE, EXACT, ulp
from clika_ref.core.errors import PluginError
from clika_ref.core.operators import format_schema, index_by_overload, operator
from clika_ref.core.registry import Plugin, build_registry
from clika_ref.core.samples import Call
from clika_ref.core.traits import KEEP_FLOAT, OWN_QPARAMS, compute_trait

aten = torch.ops.aten


@operator(aten.softplus.default, quant=OWN_QPARAMS, error=EXACT)
def softplus(x: Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``."""
    return torch.nn.functional.softplus(x, beta, threshold)


@operator(aten.cat.default)
def cat(*tensors: Tensor, dim: int = 0) -> Tensor:
    """Join."""
    return torch.cat(tensors, dim)


@operator(aten.add.Tensor)
def add_(x: Tensor, y: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    """``x + alpha * y``."""
    return torch.add(x, y, alpha=alpha)


def test_operator_signature_defines_operands_and_attributes():
    """The signature of the reference defines operands and attributes."""

    @operator()
    def mix(
        x: Tensor, y: Tensor | Number, bias: Tensor | None = None, *more: Tensor, size: int, dim: int = 0
    ) -> Tensor:
        """Nothing."""

    shown = [(p.name, p.optional, p.variadic, p.literal) for p in mix.operands]
    assert shown == [
        ("x", False, False, False),
        ("y", False, False, True),
        ("bias", True, False, False),
        ("more", False, True, False),
    ]
    assert mix.attributes == {"size": None, "dim": 0}
    assert mix.required == {"size"}


def test_operator_defaults_keep_float_and_compose():
    """Without options, an operator keeps float, composes its error and has no rules."""

    @operator()
    def plain(x: Tensor) -> Tensor:
        """Nothing."""

    assert (plain.trait, plain.error, plain.random) == (KEEP_FLOAT, COMPOSE, False)
    assert (plain.lowering, plain.sampler, plain.type_rule, plain.write_back_rule) == (None, None, None, None)
    assert plain.converters == {}


def test_operator_trailing_underscore_dropped_from_name():
    """A trailing underscore is dropped from the name of an operator."""
    assert add_.name == "add"
    assert repr(add_) == "<operator add>"


def test_operator_callable_with_docstring_and_schema():
    """An operator is callable as its reference and keeps its docstring and schema."""
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(softplus(x, beta=2.0), torch.nn.functional.softplus(x, 2.0))
    assert softplus.__doc__ == "``log(1 + exp(beta * x)) / beta``."
    assert (
        format_schema(softplus)
        == "softplus(x: torch.Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor"
    )


def test_operator_tuple_and_device_read_from_signature():
    """Tuple results and device arguments are read from the signature."""

    @operator()
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        """Two."""

    @operator()
    def make_tensor(*, device: torch.device | None = None) -> Tensor:
        """Nothing goes in."""

    assert pair.returns_tuple
    assert not softplus.returns_tuple
    assert make_tensor.takes_device
    assert not softplus.takes_device


def test_operator_pickle_returns_same_object():
    """Unpickling an operator returns the same object."""
    from clika_ref_aten.activation import relu  # noqa: PLC0415 - what pickle finds must be a module that is installed

    assert pickle.loads(pickle.dumps(relu)) is relu  # noqa: S301 - just written


# Calls


def test_operator_call_fills_in_defaults():
    """`call` fills in the default of every attribute."""
    assert softplus.call("x", beta=2.0) == Call(("x",), {"beta": 2.0, "threshold": 20.0})


def test_operator_call_unknown_attribute_lists_known():
    """An unknown attribute raises an error that lists the known ones."""
    message = (
        "call of softplus with the attributes ['beta', 'gamma']: it has no attribute ['gamma']. Give attributes of "
        "softplus(beta, threshold)."
    )
    with pytest.raises(PluginError, match=re.escape(message)):
        softplus.call("x", beta=1.0, gamma=2.0)


def test_operator_call_missing_attribute_raises():
    """A missing attribute raises an error that names it."""

    @operator()
    def reshape(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
        """Nothing."""

    message = "call of reshape with the attributes []: it requires the attribute ['shape']. Give attributes of "
    with pytest.raises(PluginError, match=re.escape(f"{message}reshape(shape).")):
        reshape.call("x")


def test_operator_kwargs_in_signature_rejected():
    """A signature with `**options` is rejected with the signature."""
    message = r"operator .*loose\(x: torch.Tensor, \*\*options\) -> torch.Tensor: \*\*options is not supported."
    with pytest.raises(PluginError, match=message):

        @operator()
        def loose(x: Tensor, **options) -> Tensor:
            """Nothing."""


# ATen calls


def test_converter_binds_attributes_by_name():
    """An ATen call binds attributes by name and tensors in order."""
    bind = softplus.converters[aten.softplus.default]
    assert bind("x", 2) == Call(("x",), {"beta": 2, "threshold": 20})
    assert bind("x", threshold=5) == Call(("x",), {"beta": 1, "threshold": 5})


def test_from_torch_custom_op_claimed_before_library_loads():
    """A custom op is claimed by name before its library is loaded."""

    @operator()
    def halve(x: Tensor) -> Tensor:
        """Half of ``x``."""
        return x / 2

    @halve.from_torch("clika_ref_test.halve.default")
    def _(given, *, scale=1.0):
        return halve.call(given)

    library = torch.library.Library("clika_ref_test", "DEF")
    library.define("halve(Tensor given, *, float scale=1.0) -> Tensor")
    overload = torch.ops.clika_ref_test.halve.default
    assert halve.convert_call(overload, "x", scale=1.0) == Call(("x",))
    assert index_by_overload([halve]) == {"clika_ref_test.halve.default": halve}
    assert build_registry([Plugin("p", "d", "1", operators=(halve,))]).operator_for(overload) is halve


def test_converted_unclaimed_overload_uses_own_schema():
    """A call of an unclaimed overload binds to the operator's own signature."""
    assert softplus.convert_call(aten.relu.default, "x", beta=2) == softplus.call("x", beta=2)


def test_converter_tensor_list_fills_variadic_operand():
    """A list of tensors fills a variadic operand."""
    assert cat.converters[aten.cat.default](("x", "y", "z"), 1) == Call(("x", "y", "z"), {"dim": 1})


def test_converter_unsupported_argument_needs_default():
    """An unsupported argument is accepted only with its default."""

    @operator(aten.gelu.default)
    def gelu(x: Tensor) -> Tensor:
        """Nothing."""

    bind = gelu.converters[aten.gelu.default]
    assert bind("x", approximate="none") == Call(("x",), {})
    with pytest.raises(
        PluginError,
        match=re.escape("operator gelu: the argument 'approximate' is 'tanh', but the operator has no such attribute."),
    ):
        bind("x", approximate="tanh")


def test_converter_memory_format_dropped():
    """An argument that only selects storage is dropped."""

    @operator(aten.clone.default)
    def clone(x: Tensor) -> Tensor:
        """Nothing."""

    assert clone.converters[aten.clone.default]("x", memory_format=torch.channels_last) == Call(("x",), {})


def test_operator_mismatched_schema_rejected():
    """A signature that does not match the ATen schema raises an error with both."""
    message = (
        "operator loud(x: torch.Tensor, y: torch.Tensor, *, volume: float) -> torch.Tensor: the signature does not "
        "match "
        "aten.relu.defaultaten::relu(Tensor self) -> Tensor. Give its attributes ATen's names, or declare "
        "@loud.from_torch(aten.relu.default)"
    )
    with pytest.raises(PluginError, match=re.escape(message)):

        @operator(aten.relu.default)
        def loud(x: Tensor, y: Tensor, *, volume: float) -> Tensor:
            """Nothing."""


def test_from_torch_converts_other_overload():
    """A converter maps another overload to the operator."""

    @operator(aten.add.Tensor)
    def plus(x: Tensor, y: Tensor | Number, *, alpha: Number = 1) -> Tensor:
        """``x + alpha * y``."""

    @plus.from_torch(aten.rsub.Tensor, aten.rsub.Scalar)
    def _(x, y, alpha=1):
        return plus.call(y, x, alpha=-alpha)

    assert plus.converters[aten.rsub.Scalar]("x", 3) == Call((3, "x"), {"alpha": -1})
    assert set(index_by_overload([plus, cat])) == {
        aten.add.Tensor,
        aten.rsub.Tensor,
        aten.rsub.Scalar,
        aten.cat.default,
    }
    assert index_by_overload([plus, cat])[aten.rsub.Tensor] is plus


def test_operator_decorators_fill_each_slot():
    """Each decorator fills its slot of the operator."""

    @operator()
    def thing(x: Tensor) -> Tensor:
        """Nothing."""

    slots = {"onnx": "lowering", "samples": "sampler", "types": "type_rule", "write_back": "write_back_rule"}
    for slot, attribute in slots.items():

        def do_nothing():
            """Do nothing."""

        assert getattr(thing, slot)(do_nothing) is do_nothing
        assert getattr(thing, attribute) is do_nothing


# Claims


def test_error_class_and_trait_str_match_declaration():
    """The text of error classes and traits matches their declaration."""
    assert str(EXACT) == "exact"
    assert str(ulp(8, 1.0)) == "ulp(8, 1.0)"
    assert OWN_QPARAMS.kind == "own-qparams"
    trait = compute_trait(weight=1, axis=0, bias=2)
    assert (trait.kind, trait.weight, trait.axis, trait.bias) == ("compute", 1, 0, 2)
