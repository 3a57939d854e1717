"""Unusual but legal attributes do not prevent a capture."""

import functools
from types import MappingProxyType

import pytest
import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.capture.attribute_snapshot import AttributeSnapshot, _is_opened
from clika_ref.capture.saved_tensors import save_tensor


class Holding(nn.Module):
    """Stores a value under a name and inside a container."""

    def __init__(self, stored):
        super().__init__()
        self.direct, self.inside = stored, {"a": [stored]}

    def forward(self, x):
        return x * 2


class Delegating:
    """Looks up missing attributes in ``_data``, such as its slot ``unset``, which is never set."""

    __slots__ = ("_data", "unset")

    def __init__(self):
        self._data = {"unset": 1}

    def __getattr__(self, name):
        return self._data[name]


class Empty(Delegating):
    def __init__(self):
        pass


class Hiding:
    @property
    def __dict__(self):
        raise RuntimeError("never read")


class Showing:
    @property
    def __dict__(self):
        return MappingProxyType({"a": 1})


def make_wrapper_loop():
    def call_again(x):
        return again(x)

    def again(x):
        return x

    call_again.__wrapped__, again.__wrapped__ = again, call_again
    return call_again


class Called:
    def __call__(self, x):
        return x


def make_float4_tensor(*values):
    return torch.tensor(values, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def wrap(wrapped):
    return functools.wraps(wrapped)(lambda x: x)


def make_nested_tensor(**options):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)


ODD = {
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": make_nested_tensor,
    "jagged": lambda: make_nested_tensor(layout=torch.jagged),
    "four bits": lambda: make_float4_tensor(0, 1, 2),
    "eight bits": lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
    "delegating": Delegating,
    "recursing": Empty,
    "hiding": Hiding,
    "showing": Showing,
    "loop": make_wrapper_loop,
    "wrapper of an object": lambda: wrap(Called()),
    "wrapper of a builtin": lambda: wrap(torch.relu),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_capture_unusual_unused_attributes_accepted(make):
    """A model may hold unusual attributes that it does not use."""
    x = torch.ones(2, 3)
    assert torch.equal(clika_compile(Holding(make()), tracing_inputs=[x], discard_input_model=False)(x), x * 2)


@pytest.mark.parametrize("make", [make_wrapper_loop, lambda: wrap(Called())], ids=["loop", "wrapper of an object"])
def test_capture_wrapped_functions_accepted(make):
    """Functions with unusual `__wrapped__` attributes are compiled."""
    x = torch.ones(2, 3)
    assert torch.equal(clika_compile(make(), tracing_inputs=[x])(x), x)


def test_attribute_snapshot_unset_slot_restored():
    """A slot that forward sets is emptied without `__getattr__` of its class."""
    module = nn.Module()
    module.held = Delegating()
    before = AttributeSnapshot(module)
    module.held.unset = 2
    assert before.find_changes() == ["self.held.unset"]
    before.restore()
    with pytest.raises(AttributeError):
        Delegating.__dict__["unset"].__get__(module.held)


def test_save_tensor_incomparable_dtype_restored():
    """Elements that PyTorch cannot compare are restored."""
    tensor = make_float4_tensor(0, 1, 2)
    before = save_tensor("tensor", tensor, is_state=False)
    assert not before.is_changed()
    tensor.view(torch.uint8)[1] = 7
    assert before.is_changed()
    before.restore()
    assert tensor.view(torch.uint8).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("module", "opened"),
    [("types", True), ("torch.distributions.normal", True), ("torch.distributionsx", False), ("typesx", True)],
)
def test_is_opened_matches_whole_module_names(module, opened):
    """Objects are opened by the whole name of their module."""
    assert _is_opened(type("Held", (), {"__module__": module})) is opened
