"""Layers with 8-bit weights, whose inputs are rounded to 8 bits at run time, in the range that they have in a call."""

from __future__ import annotations

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.operators import operator
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.traits import QuantizationTrait
from clika_ref.core.types import TensorType
from clika_ref_aten.recurrent import LSTM_GATES, concat_rows, lower_network, make_type_rule, reorder_gates
from clika_ref_aten.reduction import is_nonempty

MICROSOFT_DOMAIN = "com.microsoft"
"""The domain of operators that only ONNX Runtime has."""

GATES = len(LSTM_GATES)

MATRIX_POSITIONS = (0, 2)
"""Positions of the two matrices among the parameters of a direction; each is followed by its scales."""

SMALL = {"low": -1, "high": 1, "domain": (-1, 1), "nan": False}
"""Elements of samples: an infinite one leaves no range to round in."""

EXACT_MACS = 2**24 // (2**8 * 2**7)
"""Number of products of 8-bit integers whose sum float32 represents exactly."""


@operator(error=COMPOSE, quant=QuantizationTrait("float-layer", matrices=1))
def dynamic_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight`` with ``x`` rounded to 8 bits, and ``weight`` ``int8[in, out]`` with a scale for each column.

    Source: ONNX's operators ``DynamicQuantizeLinear`` and ``MatMulInteger``.
    """
    result = _multiply_rounded(x, weight.T, scales)
    return result if bias is None else (result + bias).to(x.dtype)


@dynamic_linear.types
def _(x, weight, scales, bias):
    return TensorType(x.dtype, (*x.shape[:-1], weight.shape[1]))


@dynamic_linear.onnx
def _(op, x, weight, scales, bias=None):
    integers, scale, zero_point = op.node("DynamicQuantizeLinear", x, outputs=3)
    for value, dtype in ((integers, torch.uint8), (scale, torch.float32), (zero_point, torch.uint8)):
        op.declare(value, dtype)
    product = op.declare(op.MatMulInteger(integers, weight, zero_point), torch.int32)
    result = op.Mul(op.cast(product, torch.float32), op.Mul(scale, scales))
    terms = op.shape(weight)[0]
    if op.sizes.may_be_zero(terms):  # ONNX Runtime 1.31 leaves a fused empty product uninitialized
        result = op.Where(is_nonempty(op, terms), result, op.like(result, 0))
    return result if bias is None else op.Add(result, bias)


@dynamic_linear.samples
def _(draw, s):
    inputs, outputs = draw(s.integers(1, 9)), draw(s.integers(1, 5))
    x = draw(s.tensor(shape=(*draw(s.tensor(rank=(1, 3))).shape, inputs), **SMALL))
    weight = draw(s.tensor(shape=(inputs, outputs), dtype=torch.int8, low=-127, high=127))
    scales = draw(s.tensor(shape=(outputs,), low=0.001, high=0.01, domain=(0.001, 0.01)))
    bias = draw(s.tensor(shape=(outputs,), **SMALL)) if draw(s.booleans()) else None
    return s.call(x, weight, scales, bias)


@operator(error=COMPOSE, quant=QuantizationTrait("float-layer", matrices=3))
def dynamic_lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    *params: Tensor,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lstm` with 8-bit weights; ``x`` and the state of each step are rounded to 8 bits, each in its own range.

    ``params`` holds the input weight ``int8[4 * h, i]`` and its scales ``[4 * h]``, the same of the hidden weight
    ``int8[4 * h, h]``, and, with ``has_biases``, two biases per layer and direction.

    Source: ONNX Runtime's operator ``DynamicQuantizeLSTM``.
    """
    per_direction, directions = 6 if has_biases else 4, 2 if bidirectional else 1
    rows, finals = (x.transpose(0, 1) if batch_first else x), []
    for layer in range(num_layers):
        found = []
        for position in range(layer * directions, (layer + 1) * directions):
            own = params[position * per_direction : (position + 1) * per_direction]
            is_reverse = position % directions == 1
            states, *final = _run_direction(rows.flip(0) if is_reverse else rows, h[position], c[position], own)
            finals.append(final)
            found.append(states.flip(0) if is_reverse else states)
        rows = torch.cat(found, -1)
    h, c = (torch.stack(parts) for parts in zip(*finals, strict=True))
    return rows.transpose(0, 1) if batch_first else rows, h, c


def _run_direction(x, h, c, params):
    """Return all states, and the last two, of one direction over ``x[t, b, i]``."""
    weight, scales, hidden_weight, hidden_scales, *biases = params
    gates = (_multiply_rounded(x, weight, scales) + sum(biases)).to(x.dtype)
    states = []
    for row in gates:
        enter, forget, cell, output = (row + _multiply_rounded(h, hidden_weight, hidden_scales)).chunk(GATES, -1)
        c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
        h = output.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states) if states else gates[..., : h.shape[-1]], h, c


def _multiply_rounded(x, weight, scales):
    """Return ``x @ weight.T`` with ``x`` rounded to 8 bits in its own range, which includes 0, and scaled weights."""
    if not x.numel():
        return x.new_zeros((*x.shape[:-1], len(weight)))
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero_point = (-low / scale).round().clamp(0, 255)
    steps = ((x / scale).round() + zero_point).clamp(0, 255) - zero_point
    exact = x.dtype if weight.shape[1] <= EXACT_MACS else torch.float64
    return torch.nn.functional.linear(steps.to(exact), weight.to(exact)).to(x.dtype) * (scale * scales.to(x.dtype))


dynamic_lstm.types(make_type_rule(2))


@dynamic_lstm.onnx
def _(op, x, h, c, *params, has_biases, **options):
    hidden = op.shape(h)[-1]

    def lower_layer(x, own, states, direction):
        weight, scales, hidden_weight, hidden_scales, *biases = _stack_columns(op, own)
        bias = op.Concat(*biases, axis=1) if biases else None
        count = 0 if is_symbolic(hidden) else GATES * hidden  # the node rejects a symbolic number of states
        zeros = op.constant([[0] * count] * len(own), torch.int8)
        quantized = None, scales, zeros, hidden_scales, zeros  # no peepholes
        inputs = x, weight, hidden_weight, bias, None, *states, *quantized  # None: all sequences are of full length
        attrs = {"hidden_size": hidden, "direction": direction}
        return op.node("DynamicQuantizeLSTM", *inputs, outputs=3, domain=MICROSOFT_DOMAIN, **attrs)

    return lower_network(op, x, (h, c), params, lower_layer, **options)


def _stack_columns(op, directions):
    """Return each parameter as ``[directions, ...]``, with ONNX's order of gates; matrices are transposed."""
    columns = []
    for position, column in enumerate(zip(*directions, strict=True)):
        values = [reorder_gates(op, value, LSTM_GATES) for value in column]
        if position in MATRIX_POSITIONS:
            values = [op.Transpose(value, perm=[1, 0]) for value in values]
        columns.append(concat_rows(op, [op.Unsqueeze(value, op.ints([0])) for value in values]))
    return columns


@dynamic_lstm.samples
def _(draw, s):
    layers, directions = draw(s.choice(1, 2)), draw(s.choice(1, 2))
    batch_first, has_biases = draw(s.booleans()), draw(s.choice(True, False))
    length, batch, width, hidden = (draw(s.integers(1, 4)) for _ in range(4))
    params = []
    for layer in range(layers):
        for _ in range(directions):
            for inner in (hidden * directions if layer else width, hidden):
                params.append(draw(s.tensor(shape=(GATES * hidden, inner), dtype=torch.int8, low=-127, high=127)))
                params.append(draw(s.tensor(shape=(GATES * hidden,), low=0.001, high=0.01, domain=(0.001, 0.01))))
            params += [draw(s.tensor(shape=(GATES * hidden,), **SMALL)) for _ in range(2 * has_biases)]
    initial = [draw(s.tensor(shape=(layers * directions, batch, hidden), **SMALL)) for _ in range(2)]
    x = draw(s.tensor(shape=(batch, length, width) if batch_first else (length, batch, width), **SMALL))
    options = {"has_biases": has_biases, "num_layers": layers, "bidirectional": directions == 2}
    return s.call(x, *initial, *params, batch_first=batch_first, **options)
