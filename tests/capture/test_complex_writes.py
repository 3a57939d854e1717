"""In-place writes to complex tensors become writes to their parts, and reach all views of the same memory."""

import pytest
import torch
from function_modules import Calls
from torch import nn
from torch.utils import _pytree as pytree

from clika_ref import clika_compile


class Spectral1d(nn.Module):
    """The layer of a Fourier neural operator: it writes the low frequencies."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.cfloat) / 4)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        filtered = torch.zeros(x.shape[0], 4, x.shape[-1] // 2 + 1, dtype=torch.cfloat)
        filtered[:, :, :3] = torch.einsum("bix,iox->box", spectrum[:, :, :3], self.weight)
        return torch.fft.irfft(filtered, n=x.shape[-1])


class Spectral2d(nn.Module):
    """The same in two dims, with the positive and negative low frequencies of the first."""

    def __init__(self):
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.randn(4, 4, 2, 3, dtype=torch.cfloat) / 4) for _ in range(2))

    def forward(self, x):
        spectrum = torch.fft.rfft2(x)
        filtered = torch.zeros(x.shape[0], 4, x.shape[-2], x.shape[-1] // 2 + 1, dtype=torch.cfloat)
        filtered[:, :, :2, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :2, :3], self.low)
        filtered[:, :, -2:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -2:, :3], self.high)
        return torch.fft.irfft2(filtered, s=x.shape[-2:])


def write_views(x):
    """Write through slices, parts and in-place calls; an earlier view shows the writes."""
    z = torch.fft.fft(x)
    view = z[:, 1:3]
    z[:, 0] = 2 - 1j
    view *= 2j
    z[:, 1] += x[:, 1]
    z.real[:, 2] = 7.0
    z[:, 3].imag.zero_()
    z[:, -1].fill_(1j)
    return torch.view_as_real(z), view.abs()


def write_masked(x):
    """Write at masks and indices."""
    z = torch.fft.fft(x)
    z[x > 0] = 3.0
    z.masked_fill_(x < -1, 1j)
    z[:, torch.tensor([0, 2])] = 1 + 2j
    z.unsqueeze_(0)
    return torch.view_as_real(z)


def write_through_complex_view(x):
    """Write to a real tensor through a complex view of it."""
    y = x.clone()
    z = torch.view_as_complex(y.reshape(x.shape[0], -1, 2))
    z[:, 0] *= 1j
    return y, torch.view_as_real(z)


def write_without_gradients(x):
    """Write in a region without gradients."""
    z = torch.fft.fft(x)
    with torch.no_grad():
        z[:, 0] = 0
    return z.abs()


SHAPES = [(1, 8), (3, 12)], [(4, 10), (2, 6)]

MODELS = {
    "Fourier neural operator, 1d": (Spectral1d, ([(1, 4, 16), (2, 4, 20)], [(3, 4, 26), (2, 4, 17)])),
    "Fourier neural operator, 2d": (Spectral2d, ([(1, 4, 16, 12), (2, 4, 20, 14)], [(3, 4, 26, 18)])),
    "views": (lambda: Calls(write_views), SHAPES),
    "masks and indices": (lambda: Calls(write_masked), SHAPES),
    "complex view of a real tensor": (lambda: Calls(write_through_complex_view), SHAPES),
    "no_grad": (lambda: Calls(write_without_gradients), SHAPES),
}


@pytest.mark.slow_cases("views", "Fourier neural operator, 2d")
@pytest.mark.parametrize("name", MODELS)
def test_complex_write_module_and_artifact_agree(name, tmp_path):
    """A model that writes to complex tensors agrees with eager at other sizes; the export compares the artifact."""
    make, (traced, unseen) = MODELS[name]
    torch.manual_seed(0)
    model = make()
    inputs = [torch.randn(shape) for shape in traced]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    assert not any(v.type.dtype.is_complex for node in module.graph.nodes for v in node.outputs)
    for shape in unseen:
        x = torch.randn(shape)
        for actual, expected in zip(pytree.tree_leaves(module(x)), pytree.tree_leaves(model(x)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    module.clika_export(tmp_path / "complex.onnx", example_inputs=torch.randn(unseen[0]))


def test_write_to_complex_input_reaches_the_caller():
    """A compiled module writes to its complex input, as eager does."""

    def write(z):
        z[:, 0] = 1j
        z *= 2
        return z + 1

    inputs = [torch.randn(n, m, dtype=torch.cfloat) for n, m in ((2, 3), (4, 5))]
    module = clika_compile(Calls(write), tracing_inputs=inputs)
    z = torch.randn(3, 4, dtype=torch.cfloat)
    expected, actual = z.clone(), z.clone()
    torch.testing.assert_close(module(actual), write(expected))
    torch.testing.assert_close(actual, expected)
    assert not any(v.type.dtype.is_complex for node in module.graph.nodes for v in node.outputs)


class Average(nn.Module):
    """A sum of spectra in a complex buffer, written through a view."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3, dtype=torch.cfloat))

    def forward(self, x):
        self.total[:2] += torch.fft.fft(x).mean(0)[:2]
        return self.total * 1


def test_write_to_complex_buffer_stays_complex():
    """A model that writes to a complex buffer compiles with complex numbers, and updates the buffer."""
    original = Average()
    module = clika_compile(original, tracing_inputs=[torch.randn(2, 8), torch.randn(3, 8)], discard_input_model=False)
    x = torch.randn(4, 8)
    torch.testing.assert_close(module(x), original(x))
    torch.testing.assert_close(module.total, original.total)


def read_real_view(x):
    """Read a view of the parts that was made before a write."""
    z = torch.fft.fft(x)
    parts = torch.view_as_real(z)
    z[:, 0] = 0
    return parts


def read_conjugate(x):
    """Read a conjugate that was made before a write."""
    z = torch.fft.fft(x)
    conjugate = z.conj()
    z[:, 0] = 1j
    return conjugate * 1


@pytest.mark.parametrize("function", [read_real_view, read_conjugate])
def test_view_of_parts_read_after_write_is_correct(function):
    """A view that pairs cannot express is read after a write: the model stays complex, and agrees with eager."""
    module = clika_compile(Calls(function), tracing_inputs=[torch.randn(1, 8), torch.randn(3, 12)])
    x = torch.randn(4, 10)
    torch.testing.assert_close(module(x), function(x))
