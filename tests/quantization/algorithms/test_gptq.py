"""GPTQ: a smaller error on other data, for every kind of layer with a declared weight."""

from dataclasses import replace

import pytest
import torch
from seeded_tensors import randn
from small_schemes import OPERATORS, make_scheme
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.algorithms.gptq import DEFAULT_ROW_LENGTHS, MIN_ROWS_PER_INPUT, _unfold_input, round_weights
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.qdq.insertion import quantize_graph, quantize_weight
from clika_ref.quantization.qdq.placement import choose_placement
from clika_ref.quantization.qdq.planning import Planner

SCHEME = make_scheme(QuantizedType(bits=4, is_signed=True, is_symmetric=True, is_narrow=True))
"""With coarse weights, so that their rounding outweighs that of values."""

torch.manual_seed(0)
LAYERS = {
    "linear": (nn.Linear(64, 16), (64,)),
    "conv": (nn.Conv2d(8, 6, 3, padding=1), (8, 6, 6)),
    "strided": (nn.Conv2d(8, 6, 3, stride=2, dilation=2), (8, 9, 9)),
    "groups": (nn.Conv2d(16, 8, 3, groups=2), (16, 6, 6)),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8, padding="same"), (8, 6, 6)),
}


def make_correlated_data(shape, samples, seed):
    """Return data near few directions, as the inputs of layers are."""
    spread = torch.Generator().manual_seed(seed)
    few = randn(5, *shape, seed=99)
    mixed = torch.einsum("nd,d...->n...", torch.randn(samples, 5, generator=spread), few)
    return mixed + 0.1 * torch.randn(samples, *shape, generator=spread)


def make_plan(layer, shape):
    calibration = Calibration(
        clika_compile(layer.eval(), tracing_inputs=[make_correlated_data(shape, 8, 0)]).graph.clone()
    )
    calibration.add([make_correlated_data(shape, 8, 0)])
    placement = choose_placement(calibration.graph, SCHEME, lambda _: True, {})
    return calibration.graph, Planner(calibration.table, SCHEME).plan(placement, "min-max")


def output_error(graph, plan, x):
    twin = graph.clone()
    quantize_graph(twin, plan, OPERATORS)
    with torch.no_grad():
        return float((interpret(twin, [x])[0][0] - interpret(graph, [x])[0][0]).square().sum())


@pytest.mark.parametrize("kind", LAYERS)
def test_round_weights_reduces_error_on_other_data(kind):
    """GPTQ reduces the output error on other data, for each layer type."""
    layer, shape = LAYERS[kind]
    graph, plan = make_plan(layer, shape)
    found = round_weights(
        graph, plan, [[make_correlated_data(shape, 64, 1)], [make_correlated_data(shape, 64, 2)]], only_cheap=False
    )
    (node,) = (n for n in graph.nodes if n.name in plan.weights)
    moved = found[node.name].offsets
    assert moved.dtype == torch.int8
    assert moved.shape == layer.weight.shape
    assert moved.any()
    assert 0 < found[node.name].left < 1
    other = make_correlated_data(shape, 64, 3)
    assert output_error(graph, replace(plan, offsets={node.name: moved}), other) < output_error(graph, plan, other)


@pytest.mark.parametrize("kind", LAYERS)
def test_unfold_input_rows_times_weight_equal_layer_output(kind):
    """The unfolded input times the rows of the weight equals the output of the layer."""
    layer, shape = LAYERS[kind]
    graph, _ = make_plan(layer, shape)
    (node,) = (n for n in graph.nodes if n.op.trait.weight is not None)
    x = make_correlated_data(shape, 4, 1)
    read = _unfold_input(node, x)
    rows = layer.weight.detach().flatten(1).reshape(read.shape[1], -1, read.shape[2])
    sums = torch.einsum("rgi,goi->rgo", read, rows).flatten(1)
    wanted = layer(x).detach().movedim(node.op.trait.channel, -1).reshape(len(sums), -1) - layer.bias.detach()
    # 1e-4: sums of up to 144 products in another order.
    torch.testing.assert_close(sums, wanted, rtol=1e-4, atol=1e-4)


def test_round_weights_only_cheap_needs_enough_rows():
    """By default, only layers with a cheap row length and enough data are rounded."""
    graph, plan = make_plan(nn.Linear(64, 16), (64,))
    enough = MIN_ROWS_PER_INPUT * 64
    for samples, length, is_rounded in ((enough, 64, True), (enough - 1, 64, False), (enough, 63, False)):
        short = nn.Linear(length, 16)
        graph, plan = make_plan(short, (length,))
        found = round_weights(graph, plan, [[make_correlated_data((length,), samples, 1)]], only_cheap=True)
        assert bool(found) is is_rounded
    assert 63 not in DEFAULT_ROW_LENGTHS


def test_quantize_graph_shifted_weights_clamped():
    """Moved weights stay within the range of their type."""
    graph, plan = make_plan(nn.Linear(64, 16), (64,))
    (name,) = plan.weights
    plan = replace(plan, offsets={name: torch.full((16, 64), 7, dtype=torch.int8)})
    twin = graph.clone()
    quantize_graph(twin, plan, OPERATORS)
    weight = next(v for v in graph.constants.values() if v.type.rank == 2)
    steps = next(v.data for v in twin.constants.values() if v.name.endswith("_integers") and v.type.rank == 2)
    nearest = quantize_weight(weight, plan.weights[name], 0, SCHEME.weights, OPERATORS["quantize"])
    assert torch.equal(steps, (nearest + 7).clamp(SCHEME.weights.low, SCHEME.weights.high))


@pytest.mark.parametrize("kind", ["linear", "groups"])
def test_round_weights_ignores_default_device(kind):
    """GPTQ runs on the device of the data, with any default device."""
    layer, shape = LAYERS[kind]
    graph, plan = make_plan(layer, shape)
    batches = [[make_correlated_data(shape, 64, 1)]]
    wanted = round_weights(graph, plan, batches, only_cheap=False)
    with torch.device("meta"):  # which cannot be mixed with any other
        found = round_weights(graph, plan, batches, only_cheap=False)
    for name, rounded in wanted.items():
        assert torch.equal(found[name].offsets, rounded.offsets)
