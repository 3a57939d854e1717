"""The text form of types and origins."""

import torch

from clika_ref.core.symbols import make_symbol
from clika_ref.core.types import Origin, TensorType, is_static


def test_tensor_type_str_shows_dtype_and_shape():
    """The text of a type shows dtype and shape."""
    assert str(TensorType(torch.float32, (make_symbol("batch"), 3, 2 * make_symbol("n")))) == "float32[batch, 3, 2*n]"
    assert str(TensorType(torch.bool, ())) == "bool[]"


def test_tensor_type_is_static_needs_number_dims():
    """A type is static if every dim is a number."""
    static, dynamic = TensorType(torch.int64, (2, 3)), TensorType(torch.int64, (2, make_symbol("n")))
    assert static.is_static
    assert not dynamic.is_static
    assert (static.rank, dynamic.rank) == (2, 2)
    assert is_static(4)
    assert not is_static(make_symbol("n"))


def test_tensor_type_equal_types_hash_equal():
    """Equal types are one key."""
    assert len({TensorType(torch.float32, (make_symbol("n"),)), TensorType(torch.float32, (make_symbol("n"),))}) == 1


def test_origin_str_shows_innermost_module_and_line():
    """The text of an origin shows the innermost module and line."""
    origin = Origin(("encoder", "encoder.layers.0"), ("model.py:3", "layers.py:8"))
    assert (origin.scope, origin.line) == ("encoder.layers.0", "layers.py:8")
    assert str(origin) == "encoder.layers.0 at layers.py:8"


def test_origin_unknown_str_shows_root():
    """The text of an unknown origin shows the root."""
    assert str(Origin()) == "<root>"
    assert str(Origin(lines=("model.py:3",))) == "<root> at model.py:3"
    assert str(Origin(("head",))) == "head"


def test_origin_with_rule_extends_copied_history():
    """`with_rule` returns a copy with a longer history."""
    origin = Origin(("head",))
    assert origin.with_rule("a").with_rule("b").history == ("a", "b")
    assert origin.history == ()
