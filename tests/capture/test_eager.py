"""Eager runs leave the original model unchanged."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.capture.callables import make_callable
from clika_ref.capture.eager import preserve_module
from clika_ref.capture.saved_tensors import storage_id


class Expanded(nn.Module):
    """A buffer that stores three numbers, one of them NaN, as an expanded tensor of six."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.tensor([1.0, float("nan"), 2.0]).expand(2, 3))

    def forward(self, x):
        return x + self.rows


def test_run_eager_expanded_buffer_with_nan_accepted():
    """An expanded buffer with NaN counts as unchanged."""
    x = torch.ones(2, 3)
    module = clika_compile(Expanded(), tracing_inputs=[x])
    torch.testing.assert_close(module(x), Expanded()(x), equal_nan=True)


def test_run_eager_writes_to_expanded_buffer_undone():
    """Writes of eager to an expanded buffer are undone."""

    class Writes(Expanded):
        def forward(self, x):
            self.rows[0].add_(1)
            return x + self.rows

    module = Writes()
    with pytest.raises(ModelError, match="the traced graph disagrees with eager on input 1"):
        clika_compile(module, tracing_inputs=[torch.ones(2, 3)])
    torch.testing.assert_close(module.rows, Expanded().rows, equal_nan=True)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


def test_transformer_encoder_trailing_padding_matches_eager():
    """Padding at the end matches eager, in spite of the fast path of eager without gradients."""
    model = Encoder().eval()
    inputs = [(torch.randn(b, n, 8), torch.arange(n).expand(b, n) >= n - 1) for b, n in ((2, 4), (3, 5))]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    assert torch.backends.mha.get_fastpath_enabled()
    x, padding = torch.randn(4, 7, 8), torch.arange(7).expand(4, 7) >= torch.tensor([[7], [3], [5], [1]])
    torch.testing.assert_close(module(x, padding), model(x, padding))


class Rebinding(nn.Module):
    """Changes a plain tensor by a given function; has a buffer and a parameter, too."""

    def __init__(self, change):
        super().__init__()
        self.plain, self.change = torch.zeros(4), change
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("buffer", torch.full((4,), 2.0))

    def forward(self, x):
        y = x + self.buffer + self.weight
        self.change(self)
        return y


def share_a_buffer(model):
    model.plain.data = model.buffer


def share_a_parameter(model):
    model.plain.data = model.weight.data


def share_among_buffers(model):
    model.buffer.data = torch.full((4,), 2.0)


def widen(model):
    model.plain.data = model.plain.data.double()


def lengthen(model):
    model.plain.data = torch.zeros(7)


CHANGES = {
    "resize": lambda model: model.plain.resize_(8),
    "set": lambda model: model.plain.set_(torch.zeros(9)),
    "unsqueeze": lambda model: model.plain.unsqueeze_(0),
    "require": lambda model: model.plain.requires_grad_(),
    "require buffer": lambda model: model.buffer.requires_grad_(),
    "freeze": lambda model: model.weight.requires_grad_(False),
} | {f.__name__: f for f in (share_a_buffer, share_a_parameter, share_among_buffers, widen, lengthen)}


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_preserve_module_inplace_metadata_changes_restored(change, stays):
    """In-place changes of shape, dtype, storage or requires_grad are undone, without writing to weights."""
    model, x = Rebinding(change), torch.ones(2, 4)
    tensors = {"plain": model.plain, "buffer": model.buffer, "weight": model.weight}
    places = {name: storage_id(tensor) for name, tensor in tensors.items()}
    module = clika_compile(model, tracing_inputs=[x], discard_input_model=not stays)
    for name, (value, trained) in {"plain": (0, False), "buffer": (2, False), "weight": (1, True)}.items():
        tensor = tensors[name]
        assert torch.equal(tensor, torch.full((4,), float(value)))
        assert (tensor.dtype, tensor.requires_grad, storage_id(tensor)) == (torch.float32, trained, places[name])
    assert torch.equal(module(x), x + 3)


def test_preserve_module_failed_model_keeps_shared_weights():
    """A failing model keeps the weights that a tensor shared."""

    def change(model):
        share_a_buffer(model)
        if model.plain.sum() > 0:
            raise ValueError

    model = Rebinding(change)
    with pytest.raises(ModelError, match="Rebinding itself fails in eager mode on tracing input 1: ValueError"):
        clika_compile(model, tracing_inputs=[torch.ones(2, 4)])
    assert (model.plain.sum(), model.buffer.sum()) == (0, 8)


def test_preserve_module_tensor_with_history_leaf_again():
    """A tensor that got an autograd history is a leaf again."""

    class Double(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x * 2)
        backward = staticmethod(lambda ctx, gradient: gradient)

    model = Rebinding(lambda model: model.plain.add_(Double.apply(model.weight)))
    clika_compile(model, tracing_inputs=[torch.ones(2, 4)])
    assert (model.plain.is_leaf, model.plain.requires_grad, model.plain.sum()) == (True, False, 0)


@pytest.mark.parametrize("stays", [True, False])
def test_preserve_module_views_copied_with_parameters_only(stays):
    """Views of parameters are copied only if the parameters are."""
    model = nn.Linear(4, 4)
    model.views = list(model.weight.detach().chunk(2))
    with preserve_module(replace(make_callable(model), is_preserved=stays)) as before:
        assert {t.elements is not None for t in before.tensors} == {stays}


class PaddedEncoder(nn.Module):
    """An encoder with padding."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, x, mask=None):
        return self.encoder(x, src_key_padding_mask=mask)


def test_fast_path_of_encoder_with_padding_warned(capsys):
    """The zeros that eager's fast path returns at padded positions are named, and only if there are some."""
    x, mask = torch.randn(2, 5, 8), torch.arange(5).expand(2, -1) >= 4
    clika_compile(PaddedEncoder().eval(), tracing_inputs=[(x, mask)])
    assert "returns zeros at padded positions" in capsys.readouterr().err
    clika_compile(PaddedEncoder().eval(), tracing_inputs=[(x,)])
    assert "padded positions" not in capsys.readouterr().err
