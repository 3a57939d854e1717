"""Sizes that forward computes with 0-d tensors stay dynamic, if their buffers are no part of the state dict."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clika_ref import clika_compile
from clika_ref.capture.size_tensors import SizeRatio, find_size_buffers, trace_size_tensors


class SamePad(nn.Module):
    """A strided convolution with padding that depends on the length, computed as in EnCodec."""

    def __init__(self, kernel_size=6, stride=3):
        super().__init__()
        self.conv = nn.Conv1d(1, 2, kernel_size, stride)
        self.stride = nn.Buffer(torch.tensor(stride), persistent=False)
        self.kernel_size = nn.Buffer(torch.tensor(kernel_size), persistent=False)
        self.padding_total = nn.Buffer(torch.tensor(kernel_size - stride), persistent=False)

    def forward(self, x):
        length = x.shape[-1]
        frames = (length - self.kernel_size + self.padding_total) / self.stride + 1
        frames = torch.ceil(frames).to(torch.int64) - 1
        extra = frames * self.stride + self.kernel_size - self.padding_total - length
        right = self.padding_total // 2
        pads = self.padding_total - right, right + extra
        return self.conv(F.pad(x, pads, "constant" if length <= max(pads) else "reflect"))


class Prefix(nn.Module):
    """A slice up to a number that a function computes from a buffer and a length."""

    def __init__(self, function, *, persistent=False):
        super().__init__()
        self.function = function
        self.count = nn.Buffer(torch.tensor(2), persistent=persistent)

    def forward(self, x):
        return x[:, : self.function(self.count, x.shape[1])] * 2


def test_padding_from_buffers_stays_dynamic(tmp_path):
    """The module and its file equal eager at lengths of each remainder, and the range without rounding is a guard."""
    torch.manual_seed(0)
    original = SamePad().eval()
    inputs = [torch.randn(1, 1, 30), torch.randn(2, 1, 52)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    for length in (3, 10, 11, 12, 100):
        x = torch.randn(3, 1, length)
        torch.testing.assert_close(module(x), original(x), rtol=0, atol=1e-6)
    assert any("3*x_2 < 16777216" in str(guard) for guard in module.graph.guards)
    module.clika_export(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "function",
    [
        lambda count, length: int(count),
        lambda count, length: length - count,
        lambda count, length: length // count.item(),
        lambda count, length: torch.floor((length - count) / count.float()).long(),
        lambda count, length: torch.minimum(count * 2, length - count),
        lambda count, length: count if length > count + 1 else count - 1,
    ],
    ids=["int", "subtraction", "item", "floor", "minimum", "comparison"],
)
def test_slice_to_buffer_stays_dynamic(function):
    """Numbers from a buffer and a length are sizes of the graph."""
    module = clika_compile(Prefix(function), tracing_inputs=[torch.randn(2, 6), torch.randn(3, 9)])
    for length in (5, 8):
        x = torch.randn(4, length)
        assert torch.equal(module(x), Prefix(function)(x))
    assert all(symbol.source.dim is not None for symbol in module.graph.symbols.values())


def test_trace_size_tensors_write_in_place_makes_unknown():
    """A number is known until a write in place to any tensor of one element, as tensors may share memory."""
    model = Prefix(int)
    with trace_size_tensors(model, ()):
        count = model.count + 1
        assert (int(model.count), int(count)) == (2, 3)
        count += 4
        assert int(count) == 7


def test_trace_size_tensors_written_slice_equals_eager():
    """A slice to a number that was written in place has the length of eager."""

    def count_rows(count, _length):
        count = count * 1
        count += 1
        return int(count)

    module = clika_compile(Prefix(count_rows), tracing_inputs=[torch.randn(2, 6), torch.randn(3, 9)])
    x = torch.randn(4, 8)
    assert torch.equal(module(x), Prefix(count_rows)(x))


def test_find_size_buffers_skips_state_and_written_buffers():
    """Only buffers that neither a checkpoint nor forward changes are settings."""
    model = nn.Sequential(Prefix(int), Prefix(int, persistent=True), nn.BatchNorm1d(3))
    assert [(b.name, b.value) for b in find_size_buffers(model, ())] == [("count", 2)]
    assert not find_size_buffers(model, {"0.count"})


def test_size_ratio_beyond_exact_floats_unknown():
    """A value that float32 may round across an integer is not exact."""
    assert SizeRatio(2**23 - 1, 3, roundings=1).is_exact_in(torch.float32)
    assert not SizeRatio(2**23, 3, roundings=1).is_exact_in(torch.float32)
    assert SizeRatio(2**23, 3, roundings=1).is_exact_in(torch.float64)
