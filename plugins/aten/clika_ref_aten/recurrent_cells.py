"""Cells of recurrent networks: single steps of LSTM, GRU and RNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.operators import Operator, operator
from clika_ref.core.types import TensorType
from clika_ref_aten.families import name_reference
from clika_ref_aten.float_layers import float_layer

aten = torch.ops.aten


def _gates(op, x, weight, bias, count) -> Any:
    """Return ``x @ weight.T + bias``, split into its gates."""
    product, width = op.Gemm(x, weight, bias, transB=1), op.result.shape[-1]
    return op.Split(product, op.ints([width] * count), axis=1, outputs=count) if count > 1 else (product,)


def _samples(gates, states):
    def sample(draw, s):
        batch, width, hidden = (draw(s.integers(1, 4)) for _ in range(3))
        rows, small = gates * hidden, {"low": -1, "high": 1}
        x = draw(s.tensor(shape=(batch, width)))
        initial = [draw(s.tensor(shape=(batch, hidden), **small)) for _ in range(states)]
        shapes = [(rows, width), (rows, hidden), *([(rows,)] * 2 if draw(s.choice(True, False)) else [])]
        return s.call(x, *initial, *(draw(s.tensor(shape=shape, **small)) for shape in shapes))

    return sample


@operator(error=COMPOSE, quant=float_layer(matrices=3))
def lstm_cell(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of `lstm` from ``x[b, i]`` and the states ``h[b, h]`` and ``c[b, h]`` to the next two states."""
    return torch.lstm_cell(x, (h, c), w_ih, w_hh, b_ih, b_hh)


@lstm_cell.from_torch(aten.lstm_cell.default)
def _(x, hx, *params):
    return lstm_cell.call(x, *hx, *params)


@lstm_cell.types
def _(x, h, c, *_):
    dtype = torch.promote_types(x.dtype, c.dtype)
    return TensorType(dtype, h.shape), TensorType(dtype, c.shape)


@lstm_cell.onnx
def _(op, x, h, c, w_ih, w_hh, b_ih=None, b_hh=None):
    pairs = zip(_gates(op, x, w_ih, b_ih, 4), _gates(op, h, w_hh, b_hh, 4), strict=True)
    enter, forget, cell, leave = (op.Add(a, b) for a, b in pairs)
    entering = op.Mul(op.Sigmoid(enter), op.Tanh(cell))
    forget, c, entering, leave = op.promote(op.Sigmoid(forget), c, entering, op.Sigmoid(leave))
    new = op.Add(op.Mul(forget, c), entering)
    return op.Mul(leave, op.Tanh(new)), new


@lstm_cell.samples
def _(draw, s):
    call = _samples(4, 2)(draw, s)
    x, h, c, *params = call.operands
    if draw(s.choice(False, True)):
        c = draw(s.tensor(shape=c.shape, low=-1, high=1, dtype=torch.int32))
    return s.call(x, h, c, *params)


@operator(aten.gru_cell.default, error=COMPOSE, quant=float_layer(matrices=2))
def gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """One step of `gru` from ``x[b, i]`` and the state ``h[b, h]`` to the next state."""
    return torch.gru_cell(x, h, w_ih, w_hh, b_ih, b_hh)


@gru_cell.types
def _(x, h, *_):
    return h


@gru_cell.onnx
def _(op, x, h, w_ih, w_hh, b_ih=None, b_hh=None):
    x_reset, x_update, x_new = _gates(op, x, w_ih, b_ih, 3)
    h_reset, h_update, h_new = _gates(op, h, w_hh, b_hh, 3)
    reset, update = op.Sigmoid(op.Add(x_reset, h_reset)), op.Sigmoid(op.Add(x_update, h_update))
    new = op.Tanh(op.Add(x_new, op.Mul(reset, h_new)))
    return op.Add(new, op.Mul(update, op.Sub(h, new)))


gru_cell.samples(_samples(3, 1))


def _declare_simple_cell(name: str, doc: str, activation: str) -> Operator:
    """Declare one step of a network without gates."""
    run = getattr(torch, name)

    @operator(getattr(aten, name).default, error=COMPOSE, quant=float_layer(matrices=2))
    @name_reference(name, doc)
    def cell(
        x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Tensor:
        return run(x, h, w_ih, w_hh, b_ih, b_hh)

    @cell.onnx
    def _(op, x, h, w_ih, w_hh, b_ih=None, b_hh=None):
        return op.node(activation, op.Add(*_gates(op, x, w_ih, b_ih, 1), *_gates(op, h, w_hh, b_hh, 1)))

    cell.samples(_samples(1, 1))
    return cell


rnn_tanh_cell = _declare_simple_cell(
    "rnn_tanh_cell", "``tanh(x[b, i] @ w_ih.T + b_ih + h[b, h] @ w_hh.T + b_hh)``.", "Tanh"
)
rnn_relu_cell = _declare_simple_cell(
    "rnn_relu_cell", "``max(0, x[b, i] @ w_ih.T + b_ih + h[b, h] @ w_hh.T + b_hh)``.", "Relu"
)
