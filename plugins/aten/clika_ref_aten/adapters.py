"""Low-rank adapters (LoRA): branches added to the output of a linear or convolution layer.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), section 4.1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.inference import infer_types
from clika_ref.core.operators import operator
from clika_ref.core.types import TensorType
from clika_ref_aten import convolution, dropout, linear
from clika_ref_aten.size_arithmetic import same_type
from clika_ref_aten.spatial import expand_per_dim

CONVOLUTIONS = {3: convolution.conv1d, 4: convolution.conv2d, 5: convolution.conv3d}
"""Convolution operators by the rank of the weight."""


def _lower_operator(op, of, *operands, **attrs):
    """Lower a call of the operator ``of`` and return its result with a declared type."""
    assert of.lowering is not None
    call = of.call(*operands, **attrs)
    types = [None if v is None else TensorType(op.dtype(v), op.shape(v)) for v in call.operands]
    (kind,) = infer_types(of, types, call.attrs)
    return op.declare(of.lowering(op, *call.operands, **call.attrs), kind)


def _apply_scale(op, reduced, scale):
    """Return ``reduced``, the output of the down projection, times ``scale``."""
    return op.declare(linear.multiply_unfused(op, reduced, scale), TensorType(op.dtype(reduced), op.shape(reduced)))


def _draw_adapter_attributes(draw, s):
    """Draw the attributes that all adapters share."""
    return {
        "alpha": draw(s.choice(1.0, 2.0, 0.5)),
        "dropout_rate": draw(s.choice(0.0, 0.5)),
        "training": draw(s.booleans()),
        "merging": draw(s.choice("auto", "on", "off")),
    }


@operator(random="training")
def lora_linear(
    returned: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    *,
    alpha: float = 1.0,
    dropout_rate: float = 0.0,
    training: bool = False,
    merging: str = "auto",
) -> Tensor:
    """``returned[..., n] + alpha / r * x[..., k] @ down[r, k].T @ up[n, r].T``, for a linear layer with input ``x``.

    ``training`` applies dropout to ``x`` first. ``merging`` selects how the adapter is exported: see
    ``clika_ref.LoraSettings``.
    """
    read = dropout.dropout(x, p=dropout_rate, train=training)
    return returned + F.linear(F.linear(read, down) * (alpha / down.shape[0]), up)


@lora_linear.onnx
def _(op, returned, x, down, up, *, alpha, dropout_rate, training, merging):
    read = _lower_operator(op, dropout.dropout, x, p=dropout_rate, train=training)
    reduced = _apply_scale(op, _lower_operator(op, linear.linear, read, down), alpha / op.shape(down)[0])
    return op.Add(returned, _lower_operator(op, linear.linear, reduced, up))


lora_linear.types(same_type)


@lora_linear.samples
def _(draw, s):
    x = draw(s.tensor(rank=(2, 4), dtype=linear.FLOATS))  # ONNX Runtime 1.31 cannot multiply a vector into 0 outputs
    outputs, rank = draw(s.integers(1, 5)), draw(s.integers(1, 3))
    shapes = ((*x.shape[:-1], outputs), (rank, x.shape[-1]), (outputs, rank))
    returned, down, up = (draw(s.tensor(shape=shape, dtype=x.dtype)) for shape in shapes)
    return s.call(returned, x, down, up, **_draw_adapter_attributes(draw, s))


@operator(random="training")
def lora_convolution(
    returned: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    *,
    stride: tuple[int, ...] = (1,),
    padding: tuple[int, ...] | str = (0,),
    dilation: tuple[int, ...] = (1,),
    groups: int = 1,
    alpha: float = 1.0,
    dropout_rate: float = 0.0,
    training: bool = False,
    merging: str = "auto",
) -> Tensor:
    """Add a low-rank branch, a convolution followed by a pointwise one (1 x 1), to ``returned[n, k, ...]``.

    The first, ``down[groups * r, c / groups, i, ...]``, has the kernel size and attributes of the adapted convolution.
    The second is ``up[k, r, 1, ...]``. The scale ``alpha / r`` applies between them. The rest is as in `lora_linear`.
    """
    convolve, read = CONVOLUTIONS[down.ndim], dropout.dropout(x, p=dropout_rate, train=training)
    reduced = convolve(read, down, None, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return returned + convolve(reduced * (alpha * groups / down.shape[0]), up, None, groups=groups)


@lora_convolution.onnx
def _(op, returned, x, down, up, *, stride, padding, dilation, groups, alpha, dropout_rate, training, merging):
    convolve, read = (
        CONVOLUTIONS[op.rank(down)],
        _lower_operator(op, dropout.dropout, x, p=dropout_rate, train=training),
    )
    reduced = _lower_operator(
        op, convolve, read, down, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    scaled = _apply_scale(op, reduced, alpha * groups / op.shape(down)[0])
    return op.Add(returned, _lower_operator(op, convolve, scaled, up, groups=groups))


lora_convolution.types(same_type)


@lora_convolution.samples
def _(draw, s):
    dims, groups, rank = draw(s.choice(2, 1, 3)), draw(s.choice(1, 2)), draw(s.integers(1, 2))
    channels, outputs = draw(s.integers(1, 3)), draw(s.integers(1, 3))
    lengths, kernel = ([draw(s.integers(*bounds)) for _ in range(dims)] for bounds in ((5, 7), (1, 3)))
    stride, pad, dilation = draw(s.choice(1, 2)), draw(s.choice(0, 1)), draw(s.choice(1, 1, 2))
    batch = (draw(s.integers(1, 2)),) if draw(s.choice(True, True, False)) else ()
    reaches = [dilation * (k - 1) + 1 for k in kernel]
    made = [max(0, (n + 2 * pad - r) // stride + 1) for n, r in zip(lengths, reaches, strict=True)]
    shapes = (
        (*batch, groups * outputs, *made),
        (*batch, groups * channels, *lengths),
        (groups * rank, channels, *kernel),
        (groups * outputs, rank, *[1] * dims),
    )
    attrs = {
        "stride": expand_per_dim(stride, dims),
        "padding": expand_per_dim(pad, dims),
        "dilation": expand_per_dim(dilation, dims),
    }
    tensors = [draw(s.tensor(shape=shape)) for shape in shapes]
    return s.call(*tensors, **attrs, groups=groups, **_draw_adapter_attributes(draw, s))
