"""Functions of `torch.fft` agree with eager at sizes never traced, on both sides of the length of a transform."""

import pytest
import torch
from function_modules import Calls

from clika_ref import clika_compile

fft = torch.fft

SHAPES = [(1, 6, 8), (2, 9, 8)], [(3, 7, 8), (2, 12, 8), (2, 3, 8)]

FUNCTIONS = {
    "irfft, fixed length": (lambda x: fft.irfft(fft.rfft(x)[..., :3], n=8), ([(1, 8), (2, 8)], [(3, 8)])),
    "irfft, low frequencies": (lambda x: fft.irfft(fft.rfft(x, dim=1)[:, :3], n=x.shape[1], dim=1), SHAPES),
    "irfft, twice the length": (lambda x: fft.irfft(fft.rfft(x, dim=1), n=2 * x.shape[1], dim=1), SHAPES),
    "irfft, default length": (lambda x: fft.irfft(fft.rfft(x, dim=1), dim=1, norm="ortho"), SHAPES),
    "rfft, length between": (lambda x: fft.rfft(x, n=7, dim=1).abs(), SHAPES),
    "fft and ifft2": (
        lambda x: fft.ifft2(fft.fft2(x, s=(2 * x.shape[1], 12)), s=(x.shape[1], 9), norm="forward").real,
        SHAPES,
    ),
    "ifft of real numbers": (lambda x: torch.view_as_real(fft.ifft(x, dim=1).resolve_conj()), SHAPES),
    "ifftn of real numbers": (lambda x: torch.view_as_real(fft.ifftn(x, dim=(1, 2))), SHAPES),
    "fftn of whole numbers": (lambda x: fft.fftn(x.int(), s=(-1, 9), dim=(1, 2)).abs(), SHAPES),
    "hfft": (lambda x: fft.hfft(fft.fft(x, dim=1), n=2 * x.shape[1], dim=1, norm="ortho"), SHAPES),
    "ihfft": (lambda x: torch.view_as_real(fft.ihfft(x, n=2 * x.shape[1], dim=1).resolve_conj()), SHAPES),
    "hfftn": (lambda x: fft.hfftn(fft.fft(x), s=(x.shape[1], 10)), SHAPES),
    "ihfft2": (lambda x: torch.view_as_real(fft.ihfft2(x, s=(x.shape[1], 10))), SHAPES),
    "rfftn and irfftn": (lambda x: fft.irfftn(fft.rfftn(x, dim=(1, 2)), s=(x.shape[1], 16), dim=(1, 2)), SHAPES),
    "rfftfreq": (lambda x: x + fft.rfftfreq(x.shape[1], d=1 / 16)[:1] + fft.rfftfreq(x.shape[1]).sum(), SHAPES),
    "fftfreq": (lambda x: x.transpose(1, 2) * fft.fftfreq(x.shape[1], 1 / x.shape[1]), SHAPES),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fourier_function_module_and_artifact_agree(name, tmp_path):
    """A function agrees with eager at other sizes; the export compares the artifact."""
    function, (traced, unseen) = FUNCTIONS[name]
    torch.manual_seed(0)
    module = clika_compile(Calls(function), tracing_inputs=[torch.randn(shape) * 4 for shape in traced])
    assert not any(v.type.dtype.is_complex for node in module.graph.nodes for v in node.outputs)
    for i, shape in enumerate(unseen):
        x = torch.randn(shape) * 4
        torch.testing.assert_close(module(x), function(x), rtol=1e-4, atol=1e-4)
        module.clika_export(tmp_path / f"{i}.onnx", example_inputs=x)


def test_rfft_angle_of_real_frequencies_agrees(tmp_path):
    """The frequencies 0 and n / 2 of real elements are exactly real, with the imaginary part +0 and the angle pi."""
    function = lambda x: fft.rfft(x).angle()  # noqa: E731
    module = clika_compile(Calls(function), tracing_inputs=[torch.randn(2, 8), torch.randn(3, 12)])
    x = torch.randn(20, 10)
    torch.testing.assert_close(module(x)[:, [0, -1]], function(x)[:, [0, -1]])
    module.clika_export(tmp_path / "angle.onnx", example_inputs=x)
