"""Conversions of dtype: a module rejects dtypes that it was not traced with, since the graph lacks their casts."""

import copy
import pickle

import pytest
import torch
from loaded_copies import load_copy
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError


class Norm(nn.Module):
    """As in Llama: the mean of squares in float32, whatever comes in; traced in float32, the casts are no calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-12)).to(x.dtype)


@pytest.fixture
def module():
    return clika_compile(Norm(), tracing_inputs=[torch.randn(2, 4)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_forward_after_dtype_cast_raises_with_remedy(module, dtype):
    """A module that was cast after compiling raises an error with the remedy; casting back works."""
    message = rf"cast after compilation \('weight' is {dtype} now\).*Convert .*model, model.to\({dtype}\)"
    x = torch.full((2, 4), 1e-4)  # its square is 0 in float16
    module.to(dtype)
    with pytest.raises(ModelError, match=message):
        module(x)
    module.float()
    torch.testing.assert_close(module(x), torch.ones(2, 4), rtol=1e-3, atol=0)  # eps 1e-12, added to a square of 1e-8


COPIES = [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), load_copy]  # noqa: S301 - our own bytes


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "state_dict"])
def test_copy_of_cast_module_raises_same_error(module, copied):
    """A copy of a cast module raises the same error."""
    x = torch.full((2, 4), 1e-4)
    copy_of = copied(module.half())
    with pytest.raises(ModelError, match=r"\('weight' is torch.float16 now\).*Convert .*model, model.to"):
        copy_of(x)
    assert torch.equal(copy_of.float()(x), module.float()(x))


def test_forward_after_submodule_cast_raises():
    """A cast submodule is detected."""
    module = clika_compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), tracing_inputs=[torch.ones(2, 3)])
    module.get_submodule("0").double()
    with pytest.raises(ModelError, match=r"'0\.weight' is torch.float64 now"):
        module(torch.ones(2, 3))


def test_forward_input_of_other_float_dtype_raises(module):
    """An input of another float dtype raises an error."""
    with pytest.raises(
        ModelError, match=r"float16\[2, 4\] does not match float32\[2, 4\] .* A graph computes in the dtypes .*traced"
    ):
        module(torch.ones(2, 4).half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_clika_compile_after_cast_matches_eager(dtype):
    """A model that is cast before compiling matches eager."""
    x = torch.full((2, 4), 1e-4, dtype=dtype)
    original = Norm().to(dtype)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    assert torch.equal(module(x), original(x))


def test_to_device_keeps_dtype(module):
    """Moving to another device is no cast."""
    assert module.to("meta")(torch.ones(2, 4, device="meta")).dtype == torch.float32
