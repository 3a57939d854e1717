"""Recurrent networks (LSTM, GRU and RNN) and their cells, which compute single steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.errors import ModelError
from clika_ref.core.operators import Operator, operator
from clika_ref.core.types import TensorType
from clika_ref_aten.control_flow import scan_rows
from clika_ref_aten.families import name_reference
from clika_ref_aten.float_layers import float_layer

aten = torch.ops.aten

LSTM_GATES = (0, 3, 1, 2)
"""PyTorch's gates (input, forget, cell, output) in ONNX's order (input, output, forget, cell)."""

GRU_GATES = (1, 0, 2)
"""PyTorch's gates (reset, update, new) in ONNX's order (update, reset, hidden)."""


def _make_converter(op):
    """Return the conversion of ATen's call of a network, which passes states and parameters as lists.

    Dropout between layers is rejected.
    """

    def convert(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        if dropout and train and num_layers > 1:
            raise ModelError(
                f"{op.name}(dropout={dropout}, train=True): dropout between layers is not supported, since it cannot "
                "be deployed. Call model.eval()."
            )
        states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        return op.call(
            x,
            *states,
            *params,
            has_biases=has_biases,
            num_layers=num_layers,
            bidirectional=bidirectional,
            batch_first=batch_first,
        )

    return convert


def make_type_rule(states):
    """Return the type rule of a network, since types from fake tensors would unroll it over a static length."""

    def rule(x, *operands, batch_first, bidirectional, **_):
        *sequence, _ = x.shape
        hidden = operands[0].shape[-1]
        output = TensorType(x.dtype, (*sequence, hidden * (2 if bidirectional else 1)))
        return (output, *operands[:states])

    return rule


def _make_lowering(op_type, gates, **attrs):
    """Return the lowering of a network to one ONNX node per layer, including both directions."""
    states = 2 if op_type == "LSTM" else 1

    def lower(op, x, *operands, has_biases, **options):
        initial, params = operands[:states], operands[states:]
        hidden = op.shape(params[1])[-1]

        def lower_layer(x, own, layer_states, direction):
            stacked = _stack_parameters(op, own, gates)
            inputs = (x, *stacked, None, *layer_states)  # None: all sequences are of full length
            return op.node(op_type, *inputs, outputs=1 + states, hidden_size=hidden, direction=direction, **attrs)

        return lower_network(op, x, initial, params, lower_layer, **options)

    return lower


def lower_network(op, x, initial, params, lower_layer, *, num_layers, bidirectional, batch_first):
    """Lower the layers of a network, one after the other; return its output and its final states.

    ``lower_layer(x, own, states, direction)`` returns the results of the ONNX node of a layer; ``own`` holds the
    parameters of each direction.
    """
    directions = 2 if bidirectional else 1
    direction = "bidirectional" if bidirectional else "forward"
    per_direction = len(params) // (num_layers * directions)
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    split_states = [_split_layers(op, state, num_layers, directions) for state in initial]
    finals = []
    for layer, layer_states in enumerate(zip(*split_states, strict=True)):
        first = layer * directions
        own = [params[i * per_direction : (i + 1) * per_direction] for i in range(first, first + directions)]
        y, *last = lower_layer(x, own, layer_states, direction)
        x = _merge_directions(op, y, directions)
        finals.append(last)
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    return (x, *(parts[0] if num_layers == 1 else op.Concat(*parts, axis=0) for parts in zip(*finals, strict=True)))


def _split_layers(op, state, count, size):
    """Split ``state[count * size, b, h]`` into ``count`` tensors, one per layer."""
    if count == 1:
        return (state,)
    return op.Split(state, op.ints([size] * count), axis=0, outputs=count)


def _merge_directions(op, y, directions):
    """Convert ONNX's ``y[t, directions, b, h]`` to ``[t, b, directions * h]``."""
    if directions == 1:
        return op.Squeeze(y, op.ints([1]))
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.ints([0, 0, -1]))


def _stack_parameters(op, directions, gates):
    """Return ONNX's W, R and B, each ``[directions, ...]``, from the parameters of each direction; B may be None."""
    columns = [
        [op.Unsqueeze(reorder_gates(op, p, gates), op.ints([0])) for p in c] for c in zip(*directions, strict=True)
    ]
    weights = [concat_rows(op, column) for column in columns[:2]]
    if len(columns) == 2:  # no biases
        return (*weights, None)
    return (*weights, concat_rows(op, [op.Concat(w, r, axis=1) for w, r in zip(*columns[2:], strict=True)]))


def reorder_gates(op, value, gates):
    """Return a parameter, whose rows are those of one gate after the other, with another order of gates."""
    if gates is None:
        return value
    parts = op.Split(value, axis=0, num_outputs=len(gates), outputs=len(gates))
    return op.Concat(*(parts[i] for i in gates), axis=0)


def concat_rows(op, values):
    """Concatenate values along their first dim; add no node for a single one."""
    return values[0] if len(values) == 1 else op.Concat(*values, axis=0)


def _lower_projected_lstm(op, x, h, c, params, *, num_layers, bidirectional, batch_first):
    """Lower an LSTM with projections, for which ONNX has no node: one ``Scan`` for each layer and direction."""
    directions = 2 if bidirectional else 1
    count = num_layers * directions
    per_direction, dtype = len(params) // count, op.dtype(x)
    batch, length = op.shape(x)[:2] if batch_first else op.shape(x)[1::-1]
    width, hidden = op.shape(params[per_direction - 1])
    types = [TensorType(dtype, shape) for shape in ((batch, width), (batch, hidden), (length, batch, width))]
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    initial = [[op.Squeeze(row, op.ints([0])) for row in _split_layers(op, state, count, 1)] for state in (h, c)]
    finals = []
    for layer in range(num_layers):
        found = []
        for position in range(layer * directions, (layer + 1) * directions):
            own = params[position * per_direction : (position + 1) * per_direction]
            is_reverse = position % directions == 1
            *last, rows = _scan_projected(op, x, initial[0][position], initial[1][position], own, types, is_reverse)
            finals.append([op.Unsqueeze(state, op.ints([0])) for state in last])
            found.append(rows)
        x = found[0] if directions == 1 else op.Concat(*found, axis=2)
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    return (x, *(parts[0] if count == 1 else op.Concat(*parts, axis=0) for parts in zip(*finals, strict=True)))


def _scan_projected(op, x, h, c, params, types, is_reverse):
    """Return both final states and all projected states, of the given types, of one direction over ``x[t, b, i]``."""
    w_ih, w_hh, *biases, projection = params
    gates = op.MatMul(x, op.Transpose(w_ih, perm=[1, 0]))
    for bias in biases:
        gates = op.Add(gates, bias)
    if is_reverse:
        gates = _reverse_rows(op, gates)
    *states, all_states = types
    dtype, (batch, hidden) = states[1].dtype, states[1].shape
    row = TensorType(dtype, (batch, 4 * hidden))
    # OpenVINO's Scan reads only constants from outside, so other weights become state.
    weights, kept = [w_hh, projection], [w for w in (w_hh, projection) if not op.is_constant(w)]
    kept_types = [TensorType(dtype, tuple(op.shape(w))) for w in kept]
    with op.subgraph(is_closed=True) as step:
        inner = [step.add_input(t.dtype, t.shape) for t in kept_types]
        before_h, before_c, gate_row = (step.add_input(t.dtype, t.shape) for t in (*states, row))
        recurrent, projected = (inner[kept.index(w)] if w in kept else w for w in weights)
        added = op.Add(gate_row, op.Gemm(before_h, recurrent, transB=1))
        enter, forget, cell, output = op.Split(added, op.ints([hidden] * 4), axis=1, outputs=4)
        enter, forget, output = map(op.Sigmoid, (enter, forget, output))
        next_c = op.Add(op.Mul(forget, before_c), op.Mul(enter, op.Tanh(cell)))
        next_h = op.Gemm(op.Mul(output, op.Tanh(next_c)), projected, transB=1)
        graph = step.finish([*inner, next_h, next_c, next_h], [*kept_types, *states, states[0]])
    given, results = [*kept, h, c, gates], [*kept_types, *types]
    found: Any = scan_rows(op, given, graph, 1, results, all_states.shape[0])
    return found[-3], found[-2], _reverse_rows(op, found[-1]) if is_reverse else found[-1]


def _reverse_rows(op, x):
    return op.Slice(x, op.ints([-1]), op.ints([torch.iinfo(torch.int64).min]), op.ints([0]), op.ints([-1]))


def _make_sampler(gates, states):
    def sample(draw, s):
        layers, directions = draw(s.choice(1, 2)), draw(s.choice(1, 2))
        batch_first, has_biases = draw(s.booleans()), draw(s.choice(True, False))
        length, batch, width, hidden = (draw(s.integers(1, 4)) for _ in range(4))
        params = []
        for layer in range(layers):
            for _ in range(directions):
                inner = hidden * directions if layer else width
                shapes = [(gates * hidden, inner), (gates * hidden, hidden), *[(gates * hidden,)] * 2]
                params += [draw(s.tensor(shape=shape, low=-1, high=1)) for shape in shapes[: 4 if has_biases else 2]]
        initial = [draw(s.tensor(shape=(layers * directions, batch, hidden), low=-1, high=1)) for _ in range(states)]
        x = draw(s.tensor(shape=(batch, length, width) if batch_first else (length, batch, width)))
        return s.call(
            x,
            *initial,
            *params,
            has_biases=has_biases,
            num_layers=layers,
            bidirectional=directions == 2,
            batch_first=batch_first,
        )

    return sample


@operator(error=COMPOSE, quant=float_layer(matrices=3))
def lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    *params: Tensor,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """LSTM over ``x[t, b, i]`` from the states ``h`` and ``c``; returns the outputs and both final states.

    ``params`` holds the input weight, the hidden weight and, with ``has_biases``, two biases per layer and direction.
    """
    return torch.lstm(x, (h, c), params, has_biases, num_layers, 0.0, False, bidirectional, batch_first)


lstm.from_torch(aten.lstm.input)(_make_converter(lstm))
lstm.types(make_type_rule(2))


@lstm.onnx
def _(op, x, h, c, *params, has_biases, **options):
    if len(params) == options["num_layers"] * (2 if options["bidirectional"] else 1) * (4 if has_biases else 2):
        return _make_lowering("LSTM", LSTM_GATES)(op, x, h, c, *params, has_biases=has_biases, **options)
    return _lower_projected_lstm(op, x, h, c, params, **options)


lstm.samples(_make_sampler(4, 2))


def _declare_single_state_network(name: str, doc: str, gates: int, lowering: Callable[..., Any]) -> Operator:
    """Declare a network with a single state, unlike `lstm` with two."""
    run = getattr(torch, name)

    @operator(error=COMPOSE, quant=float_layer(matrices=2))
    @name_reference(name, doc)
    def network(
        x: Tensor, h: Tensor, *params: Tensor, has_biases: bool, num_layers: int, bidirectional: bool, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        return run(x, h, params, has_biases, num_layers, 0.0, False, bidirectional, batch_first)

    network.from_torch(getattr(aten, name).input)(_make_converter(network))
    network.types(make_type_rule(1))
    network.onnx(lowering)
    network.samples(_make_sampler(gates, 1))
    return network


def _lower_relu_network(op, *operands, bidirectional, **attrs):
    lower = _make_lowering("RNN", None, activations=["Relu"] * (2 if bidirectional else 1))
    return lower(op, *operands, bidirectional=bidirectional, **attrs)


STEP_DOC = "``h = {activation}(x[t] @ w.T + h @ r.T + b)`` over ``x[t, b, i]``; returns all states and the final one."

gru = _declare_single_state_network(
    "gru",
    "GRU over ``x[t, b, i]`` from the state ``h``; returns the outputs and the final state. See `lstm`.",
    3,
    _make_lowering("GRU", GRU_GATES, linear_before_reset=1),
)
rnn_tanh = _declare_single_state_network("rnn_tanh", STEP_DOC.format(activation="tanh"), 1, _make_lowering("RNN", None))
rnn_relu = _declare_single_state_network("rnn_relu", STEP_DOC.format(activation="relu"), 1, _lower_relu_network)


# Cells: single steps


def _lower_gates(op, x, weight, bias, count) -> Any:
    """Return ``x @ weight.T + bias``, split into its gates."""
    product, width = op.Gemm(x, weight, bias, transB=1), op.result.shape[-1]
    return op.Split(product, op.ints([width] * count), axis=1, outputs=count) if count > 1 else (product,)


def _make_cell_sampler(gates, states):
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
    pairs = zip(_lower_gates(op, x, w_ih, b_ih, 4), _lower_gates(op, h, w_hh, b_hh, 4), strict=True)
    input_gate, forget_gate, cell_gate, output_gate = (op.Add(a, b) for a, b in pairs)
    added = op.Mul(op.Sigmoid(input_gate), op.Tanh(cell_gate))
    forget, c, added, output = op.promote(op.Sigmoid(forget_gate), c, added, op.Sigmoid(output_gate))
    new_c = op.Add(op.Mul(forget, c), added)
    return op.Mul(output, op.Tanh(new_c)), new_c


@lstm_cell.samples
def _(draw, s):
    call = _make_cell_sampler(4, 2)(draw, s)
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
    x_reset, x_update, x_new = _lower_gates(op, x, w_ih, b_ih, 3)
    h_reset, h_update, h_new = _lower_gates(op, h, w_hh, b_hh, 3)
    reset, update = op.Sigmoid(op.Add(x_reset, h_reset)), op.Sigmoid(op.Add(x_update, h_update))
    new = op.Tanh(op.Add(x_new, op.Mul(reset, h_new)))
    return op.Add(new, op.Mul(update, op.Sub(h, new)))


gru_cell.samples(_make_cell_sampler(3, 1))


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
        return op.node(activation, op.Add(*_lower_gates(op, x, w_ih, b_ih, 1), *_lower_gates(op, h, w_hh, b_hh, 1)))

    cell.samples(_make_cell_sampler(1, 1))
    return cell


rnn_tanh_cell = _declare_simple_cell(
    "rnn_tanh_cell", "``tanh(x[b, i] @ w_ih.T + b_ih + h[b, h] @ w_hh.T + b_hh)``.", "Tanh"
)
rnn_relu_cell = _declare_simple_cell(
    "rnn_relu_cell", "``max(0, x[b, i] @ w_ih.T + b_ih + h[b, h] @ w_hh.T + b_hh)``.", "Relu"
)


# Linear recurrences


@operator(error=COMPOSE)
def linear_recurrence(factor: Tensor, term: Tensor, h: Tensor) -> Tensor:
    """``h[t] = factor[t] * h[t - 1] + term[t]`` over ``term[t, ...]`` from the state ``h[...]``; return all states.

    ``factor`` broadcasts to ``term``.
    """
    states: list[Tensor] = []
    for a, b in zip(factor.expand_as(term), term, strict=True):
        h = a * h + b
        states.append(h)
    return torch.stack(states) if states else term.clone()


@linear_recurrence.types
def _(factor, term, h):
    return term


@linear_recurrence.onnx
def _(op, factor, term, h):
    shape = op.shape(term)
    factor = op.Expand(factor, op.ints(shape)) if tuple(op.shape(factor)) != tuple(shape) else factor
    row = TensorType(op.result.dtype, tuple(shape[1:]))
    with op.subgraph(is_closed=True) as step:
        state, a, b = (step.add_input(row.dtype, row.shape) for _ in range(3))
        following = op.Add(op.Mul(a, state), b)
        graph = step.finish([following, following], [row, row])
    *_, states = scan_rows(op, [h, factor, term], graph, 2, [row, op.result])
    return states


@linear_recurrence.samples
def _(draw, s):
    length, *shape = (draw(s.integers(1, 5)) for _ in range(3))
    factor = draw(s.tensor(shape=draw(s.choice((length, *shape), (length, *shape[:1], 1), (1, 1, 1))), low=-1, high=1))
    return s.call(factor, draw(s.tensor(shape=(length, *shape))), draw(s.tensor(shape=tuple(shape))))
