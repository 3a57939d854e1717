"""Distillation from a teacher."""

import re

import pytest
import torch
from seeded_tensors import randn
from torch.nn import functional

from clika_ref import ModelError, distillation_loss


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_distillation_loss_matches_scaled_kl_divergence(temperature):
    """The loss is the KL divergence at a temperature, times its square."""
    student, teacher = randn(6, 5), randn(7, 5)[1:]
    p, q = (functional.softmax(x.double() / temperature, -1) for x in (teacher, student))
    wanted = (p * (p / q).log()).sum(-1).mean() * temperature**2
    assert abs(float(distillation_loss(student, teacher, temperature=temperature)) - float(wanted)) < 1e-5
    rows = distillation_loss(student.reshape(2, 3, 5), teacher.reshape(2, 3, 5), temperature=temperature)
    assert torch.allclose(rows, distillation_loss(student, teacher, temperature=temperature))


def test_distillation_loss_gradients_for_student_only():
    """Only the student gets gradients, and they vanish if it agrees."""
    student, teacher = randn(6, 5).requires_grad_(), randn(7, 5)[1:].requires_grad_()
    distillation_loss(student, teacher, temperature=2).backward()
    assert student.grad.any()
    assert teacher.grad is None
    same = teacher.detach().clone().requires_grad_()
    distillation_loss(same, teacher, temperature=2).backward()
    assert same.grad.abs().max() < 1e-7


def test_distillation_loss_ignores_masked_classes():
    """Masked classes add nothing to the loss or the gradients."""
    student, teacher = randn(6, 5), randn(7, 5)[1:]
    wanted = distillation_loss(student[:, 1:], teacher[:, 1:], temperature=2)
    student, teacher = student.requires_grad_(), teacher.clone()
    teacher[:, 0] = -float("inf")
    masked = student.masked_fill(torch.eye(5)[0].bool(), -float("inf"))
    found = distillation_loss(masked, teacher, temperature=2)
    assert torch.allclose(found, wanted)
    found.backward()
    assert student.grad.isfinite().all()
    assert distillation_loss(student, teacher, temperature=2).isfinite(), "where the teacher alone excludes"


def test_distillation_loss_bfloat16_summed_in_float32():
    """BF16 logits are summed in float32."""
    student, teacher = (x.bfloat16() for x in (randn(6, 5), randn(7, 5)[1:]))
    assert torch.equal(distillation_loss(student, teacher), distillation_loss(student.float(), teacher.float()))


def test_distillation_loss_empty_batch_raises():
    """Batches without rows raise an error."""
    with pytest.raises(ModelError, match=r"but the logits \[0, 5\] have none. Omit empty batches."):
        distillation_loss(randn(0, 5), randn(0, 5))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan"), True, "2", None])
def test_distillation_loss_invalid_temperature_raises(temperature):
    """An invalid temperature raises an error."""
    with pytest.raises(ModelError, match=r"temperature is .*. It must be a number above 0; 1 has no effect."):
        distillation_loss(randn(2, 3), randn(2, 3), temperature=temperature)


class Outputs:
    """Outputs with logits, as models of transformers return them."""

    logits = randn(2, 3)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (Outputs(), "Outputs. Give {name}.logits"),
        ({"logits": randn(2, 3)}, "dict. Give {name}['logits']"),
        ((randn(2, 3),), "tuple. Give the tensor of its logits, in floating point"),
        (None, "NoneType. Give the tensor of its logits, in floating point"),
        ("logits", "str. Give the tensor of its logits, in floating point"),
        (
            torch.ones(2, 3, dtype=torch.int64),
            "Tensor of torch.int64. Give the tensor of its logits, in floating point",
        ),
    ],
)
def test_distillation_loss_wrong_outputs_type_raises(outputs, message):
    """Outputs that are no floating-point tensor raise an error with the remedy."""
    for name, given in (
        ("student_outputs", (outputs, randn(2, 3))),
        ("teacher_outputs", (randn(2, 3), outputs)),
    ):
        with pytest.raises(ModelError, match=re.escape(f"{name} is a {message.format(name=name)}")):
            distillation_loss(*given)


@pytest.mark.parametrize(("one", "other"), [((2, 3), (2, 4)), ((), ())])
def test_distillation_loss_different_shapes_raise(one, other):
    """Logits of different or empty shapes raise an error."""
    with pytest.raises(
        ModelError, match=r"distillation_loss: the shapes \[.*\] and \[.*\] of the logits differ. Give the same output"
    ):
        distillation_loss(randn(*one), randn(*other))
