"""Losses as simpler calls: equal to PyTorch's, with their gradients, in the module and in the file."""

import pytest
import torch
import torch.nn.functional as F

from clika_ref import clika_compile
from clika_ref.capture.forms.loss_forms import CHUNKED_LOSS_FORMS, CTC_FORMS

aten = torch.ops.aten

TARGETS = torch.tensor([[1, 2, 2], [3, 3, 0], [1, 2, 3]])
TARGET_LENGTHS = torch.tensor([3, 2, 0])
INPUT_LENGTHS = torch.tensor([8, 5, 6])


def make_log_probs(batch=3, seed=0):
    return torch.randn(8, batch, 4, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_ctc_form_equals_kernel(reduction):
    form, x = CTC_FORMS[aten.ctc_loss.Tensor], make_log_probs()
    joined = torch.cat([row[:n] for row, n in zip(TARGETS, TARGET_LENGTHS, strict=True)])
    for targets in (TARGETS, joined, TARGETS.int()):
        args = (x, targets, INPUT_LENGTHS, TARGET_LENGTHS, 0, reduction)
        torch.testing.assert_close(form(*args), aten.ctc_loss.Tensor(*args))
    lists = (x, TARGETS, INPUT_LENGTHS.tolist(), TARGET_LENGTHS.tolist(), 0, reduction)
    torch.testing.assert_close(form(*lists), aten.ctc_loss.IntList(*lists))
    one = (x[:, 0], TARGETS[0], INPUT_LENGTHS[0], TARGET_LENGTHS[0], 0, reduction)
    torch.testing.assert_close(form(*one), aten.ctc_loss.Tensor(*one))


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_form_of_impossible_targets_equals_kernel(zero_infinity):
    args = (make_log_probs()[:3], TARGETS, torch.tensor([3, 2, 3]), TARGET_LENGTHS, 0, 0, zero_infinity)
    found = CTC_FORMS[aten.ctc_loss.Tensor](*args)
    torch.testing.assert_close(found, aten.ctc_loss.Tensor(*args))
    assert found[:2].tolist() == [0.0 if zero_infinity else float("inf")] * 2


def find_losses(scores, x, var):
    # PyTorch's gradient of ctc_loss is that of the scores before a log_softmax only.
    return (
        F.ctc_loss(scores.log_softmax(-1), TARGETS, INPUT_LENGTHS, TARGET_LENGTHS),
        F.gaussian_nll_loss(x, x.flip(0), var, full=True, reduction="none"),
        F.gaussian_nll_loss(x, x.flip(0), var[:, :1], eps=0.3),
        F.gaussian_nll_loss(x, x.flip(0), var[:, 0]),
    )


def make_losses(rows):
    generator = torch.Generator().manual_seed(rows)
    return (
        make_log_probs(seed=rows),
        torch.randn(rows, 3, generator=generator),
        torch.rand(rows, 3, generator=generator),
    )


def test_losses_compiled_and_exported(tmp_path):
    module = clika_compile(find_losses, tracing_inputs=[make_losses(4), make_losses(5)])
    for found, expected in zip(module(*make_losses(2)), find_losses(*make_losses(2)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    module.clika_export(tmp_path / "model.onnx")  # compares the file with the module
    module.train()
    given, same = ([t.requires_grad_() for t in make_losses(2)] for _ in range(2))
    for results in (module(*given), find_losses(*same)):
        torch.stack([t.sum() for t in results]).sum().backward()
    for found, expected in zip(given, same, strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_chunked_loss_form_equals_kernel(reduction):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((6, 3), (5, 3), (5,)))
    target, classes = torch.tensor([0, 4, 2, -100, 1, 1]), torch.rand(5, generator=generator)
    packet = torch.ops.torch_nn
    overloads = packet._linear_cross_entropy_batch_chunked, packet._linear_cross_entropy_batch_chunked_no_reduction
    scheme = (2, "compact", torch.float32)
    if reduction == "none":
        overload, args = overloads[1].default, (x, weight, target, bias, classes, -100, *scheme)
        found, expected = CHUNKED_LOSS_FORMS[overload](*args), overload(*args)
    else:
        overload = overloads[0].default
        args = (x, weight, target, bias, classes, reduction, -100, 0.0, *scheme, False, False, False, False)
        found, expected = CHUNKED_LOSS_FORMS[overload](*args)[0], overload(*args)[0]
    torch.testing.assert_close(found, expected)
