"""The distillation loss: a student learns from the outputs of a teacher, in addition to labels or instead of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.nn import functional

from clika_ref.core.errors import ModelError


def distillation_loss(
    student_outputs: torch.Tensor, teacher_outputs: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the distillation loss of a student with respect to its teacher, a 0-d tensor.

    ``temperature ** 2 * KL(softmax(teacher / temperature) || softmax(student / temperature))``, the mean over all rows.
    The teacher gets no gradients. A quantized module can learn from its float model to recover accuracy. The loss is
    computed in float32, or in float64 for float64 logits. Classes that the teacher excludes, with logits of -inf, add
    nothing.

    Args:
        student_outputs: logits ``[..., classes]``.
        teacher_outputs: the same of the teacher.
        temperature: above 0; larger values increase the weight of classes that the teacher considers unlikely.

    Raises:
        ModelError: the outputs are no tensors of logits, have different shapes, or are empty; or the temperature is
            invalid.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network (2015), section 2.
    """
    _check_logits("student_outputs", student_outputs)
    _check_logits("teacher_outputs", teacher_outputs)
    shapes = [tuple(outputs.shape) for outputs in (student_outputs, teacher_outputs)]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise ModelError(
            f"distillation_loss: the shapes {list(shapes[0])} and {list(shapes[1])} of the logits differ. Give the "
            "same output of student and teacher, [..., classes]."
        )
    if not student_outputs.numel():
        rows = f"the logits {list(shapes[0])} have none"
        raise ModelError(f"distillation_loss: it averages over rows, but {rows}. Omit empty batches.")
    if isinstance(temperature, bool) or not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise ModelError(f"temperature is {temperature!r}. It must be a number above 0; 1 has no effect.")
    student, teacher = (
        functional.log_softmax(outputs.to(torch.promote_types(outputs.dtype, torch.float32)) / temperature, -1)
        for outputs in (student_outputs, teacher_outputs.detach())
    )
    apart = (teacher - student).masked_fill(teacher == -math.inf, 0)  # classes that the teacher excludes
    rows = student.numel() // shapes[0][-1]
    return (teacher.exp() * apart).sum() / rows * temperature**2


def _check_logits(name: str, outputs: Any) -> None:
    if isinstance(outputs, torch.Tensor) and outputs.is_floating_point():
        return
    expected = "the tensor of its logits, in floating point"
    if hasattr(outputs, "logits"):
        expected = f"{name}.logits"
    elif isinstance(outputs, Mapping) and "logits" in outputs:
        expected = f"{name}['logits']"
    of = f" of {outputs.dtype}" if isinstance(outputs, torch.Tensor) else ""
    raise ModelError(f"distillation_loss: {name} is a {type(outputs).__name__}{of}. Give {expected}.")
