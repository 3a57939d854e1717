"""Complex numbers become pairs of real ones: modules and artifacts agree with eager at sizes never traced."""

import pytest
import torch
from function_modules import Calls
from torch import nn
from torch.utils import _pytree as pytree

from clika_ref import ClikaModule, clika_compile


def rotate(x):
    """Rotary embedding by a product of complex numbers."""
    angles = torch.outer(torch.arange(x.size(1)).float(), torch.tensor([1.0, 0.1]))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(2)


def combine(x):
    """Arithmetic, shapes and reductions of complex numbers, without a divisor near 0, which amplifies roundings."""
    z = torch.fft.fft(x)
    w = torch.cat([z.conj() / (z * z.conj() + (2 + 1j)), 1j * z - z.real], -1).transpose(0, 1)
    return (
        w.sum(-1).abs(),
        (w**2).imag,
        torch.view_as_real((w.mean(1) / 10).exp()),
        torch.stack([z[:, 1], z[:, 0]]).angle(),
    )


def multiply(x):
    """Products of complex matrices."""
    z = torch.complex(x, x.cos())
    products = z @ z.transpose(-1, -2), torch.einsum("bij,bkj->bik", z, x.to(torch.complex64))
    return [part for p in products for part in (p.real, p.imag)]


WINDOW = torch.hann_window(16)


def analyze(x, **options):
    """The magnitudes of a short-time Fourier transform."""
    return torch.stft(x, 16, 4, window=WINDOW, return_complex=True, **options).abs()


def filter_spectrum(x, **options):
    """A short-time Fourier transform, a filter of its frequencies, and its inverse."""
    z = torch.stft(x, 16, 4, window=WINDOW, return_complex=True)
    return torch.istft(z * torch.linspace(0, 1, z.shape[1])[:, None], 16, 4, window=WINDOW, **options)


def compare(x):
    """Comparisons, statistics, functions and tensor products of complex numbers."""
    z = torch.fft.fft(x)
    functions = torch.view_as_real(z.sqrt() + z.sin() * z.cos().reciprocal() + z**0.3 + z.tanh())
    product = torch.view_as_real(torch.einsum("bi,bj,bk->bik", z, z, x.to(torch.complex64)))
    return z == torch.fft.fft(x.round()), z.var(-1), functions, product


def fill(x):
    """Fill and pad complex numbers with a real number, which has the imaginary part 0."""
    z = torch.fft.fft(x)
    filled = z.masked_fill(x > 0, 2.0)
    padded = torch.nn.functional.pad(z, (1, 2), value=3.0)
    return torch.view_as_real(filled), torch.view_as_real(padded)


SHAPES = [(1, 24), (2, 40)], [(3, 31), (1, 57)]

FUNCTIONS = {
    "fft": (lambda x: torch.view_as_real(torch.fft.fft(x, norm="ortho")), SHAPES),
    "ifft along the first dim": (lambda x: torch.fft.ifft(x, dim=0, norm="forward").real, SHAPES),
    "rfft": (lambda x: torch.fft.rfft(x).abs(), SHAPES),
    "rfft of a fixed length": (lambda x: torch.fft.rfft(x, n=15).abs(), SHAPES),
    "irfft, even": (lambda x: torch.fft.irfft(torch.fft.rfft(x), n=20), SHAPES),
    "irfft, odd": (lambda x: torch.fft.irfft(torch.fft.rfft(x), n=21, norm="ortho"), SHAPES),
    "irfft of real numbers": (lambda x: torch.fft.irfft(x, n=20), SHAPES),
    "hfft2 of real numbers": (lambda x: torch.fft.hfft2(x, s=(4, 20)), ([(4, 24), (6, 24)], [(5, 24)])),
    "fft2": (lambda x: torch.fft.fft2(x).real, SHAPES),
    "fftn of the inner dims": (
        lambda x: torch.fft.fftn(x, dim=(1, 2)).real,
        ([(1, 5, 8, 3), (2, 7, 8, 3)], [(3, 6, 8, 3)]),
    ),
    "rfft2 and back": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape), SHAPES),
    "rotation": (rotate, ([(1, 5, 4), (2, 9, 4)], [(3, 7, 4), (1, 1, 4)])),
    "arithmetic": (combine, SHAPES),
    "comparisons and functions": (compare, SHAPES),
    "index_put": (
        lambda x: torch.fft.fft(x).index_put((torch.tensor([0]), torch.tensor([3])), torch.tensor(2j)).real,
        SHAPES,
    ),
    "filled and padded": (fill, SHAPES),
    "products": (multiply, ([(1, 3, 4), (2, 5, 4)], [(3, 2, 4)])),
    "stft": (analyze, SHAPES),
    "stft, not centered": (lambda x: analyze(x, center=False, normalized=True, onesided=False), SHAPES),
    "stft of a vector": (
        lambda x: torch.stft(x[0], 16, window=WINDOW[:9], win_length=9, return_complex=True).abs(),
        SHAPES,
    ),
    "istft": (filter_spectrum, SHAPES),
    "istft to the length": (lambda x: filter_spectrum(x, length=x.shape[1]), SHAPES),
}


@pytest.mark.slow_cases("irfft of real numbers", "comparisons and functions", "products")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_function_module_and_artifact_agree(name, tmp_path):
    """A function of complex numbers agrees with eager at other sizes; the export compares the artifact."""
    function, (traced, unseen) = FUNCTIONS[name]
    torch.manual_seed(0)
    module = clika_compile(Calls(function), tracing_inputs=[torch.randn(shape) for shape in traced])
    assert not any(v.type.dtype.is_complex for node in module.graph.nodes for v in node.outputs)
    for shape in unseen:
        x = torch.randn(shape)
        for actual, expected in zip(pytree.tree_leaves(module(x)), pytree.tree_leaves(function(x)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    module.clika_export(tmp_path / "complex.onnx", example_inputs=torch.randn(unseen[0]))


class Spectral(nn.Module):
    """A filter of complex weights, as in a Fourier neural operator: complex input and output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(4, dtype=torch.complex64))

    def forward(self, z):
        return {"filtered": z * self.weight + self.shift, "power": z.abs().square()}


def test_complex_inputs_outputs_and_weights_stay_complex(tmp_path):
    """A module takes and returns complex tensors, and keeps complex weights; the file has a dim of 2 for the parts."""
    torch.manual_seed(0)
    original = Spectral()
    inputs = [torch.randn(n, 4, dtype=torch.complex64) for n in (2, 3)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    z = torch.randn(5, 4, dtype=torch.complex64)
    for name, expected in original(z).items():
        torch.testing.assert_close(module(z)[name], expected)
    torch.testing.assert_close(module(z.conj())["filtered"], original(z.conj())["filtered"])
    assert module.state_dict()["weight"].dtype == torch.complex64
    artifact = module.clika_export(tmp_path / "spectral.onnx", example_inputs=z)
    assert artifact.path.exists()
    module.clika_save(tmp_path / "spectral.clika")
    loaded = ClikaModule.clika_load(tmp_path / "spectral.clika")
    torch.testing.assert_close(loaded(z)["filtered"], original(z)["filtered"])


def test_complex_weights_train_like_eager():
    """Gradients of complex weights agree with eager."""
    torch.manual_seed(0)
    original = Spectral()
    inputs = [torch.randn(n, 4, dtype=torch.complex64) for n in (2, 3)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    z = torch.randn(5, 4, dtype=torch.complex64)
    for network in (module, original):
        network(z)["filtered"].abs().sum().backward()
    torch.testing.assert_close(module.weight.grad, original.weight.grad)


def test_complex_magnitude_of_zero_has_zero_gradient():
    """The gradient of a magnitude at 0 is 0, as in eager."""
    module = clika_compile(Calls(lambda x: torch.fft.rfft(x).abs()), tracing_inputs=[torch.randn(2, 8)])
    x = torch.zeros(2, 8, requires_grad=True)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros(2, 8))


def test_rfft_abs_of_large_and_small_numbers_agrees(tmp_path):
    """The magnitude of numbers whose squares overflow or underflow agrees with eager, in the artifact too."""
    torch.manual_seed(0)
    scale = torch.tensor([1e22, 1e-24, 1, 1, 1])[:, None]
    function = lambda x: torch.fft.rfft(x).abs()  # noqa: E731
    module = clika_compile(Calls(function), tracing_inputs=[torch.randn(1, 6, 8), torch.randn(2, 9, 8)])
    x = torch.randn(1, 5, 8) * scale
    torch.testing.assert_close(module(x) / scale, function(x) / scale)
    module.clika_export(tmp_path / "abs.onnx", example_inputs=x)


def test_complex_decomposition_of_itself_ends():
    """A call without a rule whose decomposition contains it stays complex."""
    function = lambda z: z.prod(-1)  # noqa: E731
    inputs = [torch.randn(n, m, dtype=torch.cfloat) for n, m in ((2, 3), (4, 5))]
    module = clika_compile(Calls(function), tracing_inputs=inputs)
    z = torch.randn(5, 7, dtype=torch.cfloat)
    torch.testing.assert_close(module(z), function(z))


def test_complex_call_without_rule_stays_complex():
    """A model with an unsupported call on complex numbers still compiles; only its export is rejected."""
    function = lambda x: torch.fft.fft(x).cumprod(-1).real  # noqa: E731
    module = clika_compile(Calls(function), tracing_inputs=[torch.randn(2, 8), torch.randn(3, 8)])
    x = torch.randn(4, 8)
    torch.testing.assert_close(module(x), function(x), rtol=1e-3, atol=1e-3)
