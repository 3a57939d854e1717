"""Calls that return their operand are removed; similar calls that do not are kept."""

import pytest
import torch
from clika_ref_cleanup.remove_identities import RemoveIdentities

F32, F16, I64, BOOL = torch.float32, torch.float16, torch.int64, torch.bool

IDLE = [
    ("identity", {}, (2, 3), F32),
    ("to", {"dtype": F32}, (2, 3), F32),
    ("reshape", {"shape": (2, 3)}, (2, 3), F32),
    ("reshape", {"shape": ()}, (), F32),
    ("reshape", {"shape": (0, 3)}, (0, 3), F32),
    ("expand", {"size": (2, 3)}, (2, 3), F32),
    ("permute", {"dims": (0, -1)}, (2, 3), F32),
    ("permute", {"dims": ()}, (), F32),
    ("slice", {"dim": 1, "start": 0, "end": 2**63 - 1}, (2, 3), F32),
    ("slice", {"dim": 1, "start": -5, "end": 9}, (2, 3), F32),
    ("slice", {"dim": 0, "start": 0, "end": 1, "step": 2}, (1, 3), F32),
    ("squeeze", {"dims": (0,)}, (2, 3), F32),
    ("repeat", {"repeats": (1, 1)}, (2, 3), F32),
    ("cat", {"dim": 1}, (2, 3), F32),
    ("split_with_sizes", {"split_sizes": (3,), "dim": 1}, (2, 3), F32),
    ("roll", {"shifts": (0, 0), "dims": (0, 1)}, (2, 3), F32),
]

ACTIVE = [
    ("to", {"dtype": F16}, (2, 3), F32),
    ("reshape", {"shape": (3, 2)}, (2, 3), F32),
    ("expand", {"size": (4, 2, 3)}, (2, 3), F32),
    ("permute", {"dims": (1, 0)}, (3, 3), F32),
    ("permute", {"dims": (-1, 0)}, (2, 2), F32),
    ("slice", {"dim": 1, "start": 1, "end": 3}, (2, 3), F32),
    ("slice", {"dim": 1, "start": 0, "end": 3, "step": 2}, (2, 3), F32),
    ("squeeze", {"dims": (0,)}, (1, 3), F32),
    ("repeat", {"repeats": (1, 1, 1)}, (2, 3), F32),
    ("repeat", {"repeats": (1, 2)}, (2, 3), F32),
    ("roll", {"shifts": (0, 1), "dims": (0, 1)}, (2, 3), F32),
    ("detach", {}, (2, 3), F32),
]


@pytest.mark.parametrize(("kind", "attrs", "shape", "dtype"), IDLE, ids=str)
def test_remove_identities_idle_call_removed(sketch, kind, attrs, shape, dtype):
    """An idle call is removed."""
    x = sketch("neg", sketch.input(*shape, dtype=dtype))
    y = sketch(kind, x, **attrs)
    y = y[0] if isinstance(y, tuple) else y
    assert sketch.returns(sketch("abs", y)).clean(RemoveIdentities()) == ["neg", "abs"]


@pytest.mark.parametrize(("kind", "attrs", "shape", "dtype"), ACTIVE, ids=str)
def test_remove_identities_similar_active_call_stays(sketch, kind, attrs, shape, dtype):
    """A similar call that changes its operand stays."""
    x = sketch("neg", sketch.input(*shape, dtype=dtype))
    assert sketch.returns(sketch("abs", sketch(kind, x, **attrs))).clean(RemoveIdentities()) == ["neg", kind, "abs"]


@pytest.mark.parametrize(
    ("kind", "dtype", "number", "goes"),
    [
        ("add", I64, 0, True),
        ("add", F32, 0, True),
        ("add", F32, 0.0, True),
        ("add", F32, -0.0, True),
        ("add", I64, 0.0, False),
        ("sub", F32, 0, True),
        ("sub", F32, 0.0, True),
        ("sub", F32, -0.0, True),
        ("sub", F32, 1, False),
        ("mul", F32, 1, True),
        ("mul", F16, 1.0, True),
        ("mul", I64, 1.0, False),
        ("mul", BOOL, True, True),
        ("mul", BOOL, 1, False),
        ("div", F32, 1, True),
        ("div", F32, 1.0000001, False),
        ("div", I64, 1, False),
        ("pow", F32, 1, True),
        ("pow", F32, 0, False),
    ],
)
def test_remove_identities_neutral_number_removed_if_exact(sketch, kind, dtype, number, goes):
    """A neutral number is removed if the type and every bit stay."""
    x = sketch("identity", sketch.input(2, 3, dtype=dtype))
    sketch.returns(sketch("reshape", sketch(kind, x, number), shape=(6,)))
    assert sketch.clean(RemoveIdentities()) == (["reshape"] if goes else [kind, "reshape"])


def test_remove_identities_operand_order_matters(sketch):
    """The order of operands matters if the operator is not commutative."""
    x = sketch("neg", sketch.input(2, 3))
    sketch.returns(sketch("sub", 0, x), sketch("pow", 1, x), sketch("abs", sketch("mul", 1, x)))
    assert sketch.clean(RemoveIdentities()) == ["neg", "sub", "pow", "abs"]


def test_remove_identities_infinite_alpha_and_rounding_stay(sketch):
    """A scale or a rounding is not neutral."""
    x = sketch("neg", sketch.input(2, 3))
    sketch.returns(sketch("div", x, 1, rounding_mode="floor"), sketch("sub", x, 0.0, alpha=float("inf")))
    assert sketch.clean(RemoveIdentities()) == ["neg", "div", "sub"]


def test_remove_identities_parameters_never_read(sketch):
    """Parameters are never read."""
    x = sketch.input(2, 3)
    sketch.returns(sketch("mul", x, sketch.constant(torch.ones(3))))
    assert sketch.clean(RemoveIdentities()) == ["mul"]


def test_remove_identities_dynamic_dims_compared_by_expression(sketch):
    """Dynamic dims are compared as expressions."""
    x = sketch("neg", sketch.input("b", "n"))
    b, n = x.type.shape
    same, other = sketch("reshape", x, shape=(b, n)), sketch("reshape", x, shape=(n, b))
    sketch.returns(sketch("abs", same), sketch("abs", other))
    assert sketch.clean(RemoveIdentities(), sizes={"b": 2, "n": 5}) == ["neg", "reshape", "abs", "abs"]


def test_remove_identities_outputs_keep_names(sketch):
    """Outputs keep their names."""
    x, w = sketch.input(2, 3), sketch.constant(torch.ones(2))
    a = sketch("relu", x)
    sketch.returns(sketch("identity", a), sketch("identity", a), sketch("identity", x), sketch("identity", w), a)
    # `a` is an output under its own name already, an input and a constant have names of theirs.
    assert sketch.clean(RemoveIdentities()) == ["relu", *["identity"] * 4]


def test_remove_identities_returned_operand_keeps_name(sketch):
    """A returned tensor keeps its name if its copy is read."""
    a = sketch("relu", sketch.input(2, 3))
    sketch.returns(a, sketch("neg", sketch("identity", a)))
    assert sketch.clean(RemoveIdentities()) == ["relu", "neg"]


def test_remove_identities_state_copies_stay(sketch):
    """State is never an input or a constant itself."""
    x, w, v = sketch.input(2), sketch.constant(torch.ones(2), "w"), sketch.constant(torch.zeros(2), "v")
    sketch.graph.set_state("w", sketch("identity", v))
    sketch.graph.set_state("v", sketch("identity", x))
    # Without the copies, running would write `v` before it is read.
    assert sketch.returns(sketch("neg", w)).clean(RemoveIdentities()) == ["identity", "identity", "neg"]
