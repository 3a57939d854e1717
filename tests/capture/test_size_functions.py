"""Functions of PyTorch that take sizes as numbers keep dynamic sizes, in the module and in the file."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clika_ref import clika_compile
from clika_ref.stages import capture, interpret, load_registry, make_callable, make_calls

SHAPES = ((2, 3, 8, 9), (3, 3, 10, 14))
UNSEEN = (4, 3, 7, 5)


def transform(x):
    theta = x.mean((2, 3)).new_ones(x.shape[0], 6).view(-1, 2, 3) / 3
    return F.affine_grid(theta, list(x.shape), align_corners=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.linspace(0, 1, x.shape[3]),
        lambda x: x * torch.linspace(-1.5, x.shape[2] - 1, steps=x.shape[3], dtype=torch.float64),
        lambda x: torch.linspace(0, x.shape[2], 5) + x.mean(),
        lambda x: x.mean() / torch.tensor([x.shape[2], x.shape[3]]),
        lambda x: x.sum() + torch.as_tensor([[x.shape[2], 1.5], [0, x.shape[3] / 2]]),
        lambda x: x * torch.as_tensor(x.shape[0]),
        lambda x: F.avg_pool2d(x, 3, 3, 1, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        lambda x: F.max_pool2d(x, (2, 3), (3, 2), dilation=(2, 1), ceil_mode=True),
        lambda x: F.max_pool1d(x.flatten(1, 2), 3, 2, 1, ceil_mode=True),
        lambda x: F.max_pool1d(x[0, 0], 2),
        transform,
        lambda x: torch.combinations(x[0, 0, 0]),
        lambda x: torch.combinations(x[0, 0, :, 0], 3, with_replacement=True),
    ],
    ids=[
        *("linspace", "linspace of sizes", "linspace to a size", "tensor", "as_tensor of floats", "as_tensor of one"),
        *("avg_pool2d", "max_pool2d", "dilated max_pool2d", "max_pool1d"),
        *("max_pool1d of rows", "affine_grid", "combinations", "combinations with replacement"),
    ],
)
def test_function_of_sizes_stays_dynamic(function, tmp_path):
    """A size that was never traced gives the result of eager, and the file agrees with the module."""
    torch.manual_seed(0)
    module = clika_compile(function, tracing_inputs=[torch.randn(shape) for shape in SHAPES])
    for shape in (UNSEEN, (1, 3, 9, 9), (2, 3, 6, 13)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), function(x), rtol=0, atol=1e-6)
    module.clika_export(tmp_path / "model.onnx")


def test_len_of_tensor_stays_dynamic_in_export():
    """``len`` of a tensor is a size for the first tracer already."""

    class Counted(nn.Module):
        def forward(self, x):
            return x.sum((1, 2, 3)).reshape(len(x), 1) / len(x[0]) + torch.zeros(len(x), 2) * len([x])

    callee = make_callable(Counted())
    calls = make_calls(callee, [torch.randn(shape) for shape in SHAPES])
    captured = capture(callee, calls, load_registry())
    assert captured.tracer == "torch.export"
    x = torch.randn(UNSEEN)
    torch.testing.assert_close(interpret(captured.graph, [x])[0][0], Counted()(x))
    assert "len" not in globals()


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_pad_sequence_lengths_stay_dynamic(batch_first, is_left, tmp_path):
    """The longest sequence may be another one than in the tracing inputs."""

    class Padded(nn.Module):
        def forward(self, sequences):
            return nn.utils.rnn.pad_sequence(sequences, batch_first, 0.5, "left" if is_left else "right") * 2

    def draw(*lengths):
        return ([torch.randn(length, 4) for length in lengths],)

    module = clika_compile(Padded(), tracing_inputs=[draw(5, 3), draw(7, 6)])
    for given in (draw(2, 9), draw(8, 4), draw(5, 5)):
        assert torch.equal(module(*given), Padded()(*given))
    module.clika_export(tmp_path / "model.onnx")


def test_tensor_of_numbers_stays_constant():
    """Without a size, `torch.tensor` makes a constant, as in eager."""
    module = clika_compile(lambda x: x + torch.tensor([1, 2.5]), tracing_inputs=[torch.randn(2, 2), torch.randn(3, 2)])
    x = torch.randn(4, 2)
    assert torch.equal(module(x), x + torch.tensor([1, 2.5]))


def test_min_and_max_of_sizes_serve_any_order(tmp_path):
    """The smaller and the larger of two sizes stay dynamic, whichever it is."""

    def average(x):
        return x.sum((2, 3)) * min(x.shape[2], x.shape[3], 8) / max(x.shape[2:]) / min([x.shape[0], 2.5])

    module = clika_compile(average, tracing_inputs=[torch.randn(shape) for shape in SHAPES])
    for shape in (UNSEEN, (1, 3, 9, 9), (2, 3, 6, 13), (5, 3, 13, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), average(x))
    module.clika_export(tmp_path / "model.onnx", example_inputs=torch.randn(2, 3, 13, 6))


def test_range_with_step_of_size_keeps_length_dynamic():
    """A loop over chunks of the whole length runs once, for any length; a range is still one of Python's."""

    def sum_chunks(x):
        assert isinstance(range(3), range)
        assert issubclass(type(range(3)), range)
        chunks = [x[:, start : start + x.shape[1]].cumsum(1) for start in range(0, x.shape[1], x.shape[1])]
        return torch.stack(chunks)

    module = clika_compile(sum_chunks, tracing_inputs=[torch.randn(2, 8), torch.randn(3, 12)])
    for shape in ((1, 1), (4, 15)):
        x = torch.randn(shape)
        assert torch.equal(module(x), sum_chunks(x))
