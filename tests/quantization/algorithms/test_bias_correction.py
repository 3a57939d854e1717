"""Bias correction removes the mean error of rounding, including earlier layers, and ignores random error."""

import pytest
import torch
from small_schemes import OPERATORS, make_scheme
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.algorithms.bias_correction import BiasShifts
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.qdq.insertion import quantize_graph
from clika_ref.quantization.qdq.placement import choose_placement
from clika_ref.quantization.qdq.planning import Planner

SCHEME = make_scheme(QuantizedType(bits=4, is_signed=True, is_symmetric=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False)
        self.head = nn.Linear(8 * 16, 10, bias=False)

    def forward(self, x):
        return self.head(torch.relu(self.two(torch.relu(self.one(x)))).flatten(1))


def make_images(seed):
    return torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def calibrate_net():
    graph = clika_compile(Net().eval(), tracing_inputs=[make_images(0)]).graph.clone()
    calibration = Calibration(graph)
    for seed in (0, 2, 3, 4):
        calibration.add([make_images(seed)])
    placement = choose_placement(graph, SCHEME, lambda v: v.name in calibration.table.values, {})
    return calibration, Planner(calibration.table, SCHEME).plan(placement, "min-max")


def compute_corrections(calibration, plan, *batches):
    """Return the corrections by some batches of the reservoir."""
    shifts = BiasShifts(calibration.graph, plan, OPERATORS)
    for number in batches:
        shifts.add(calibration.reservoir.batches[number], calibration.batch_means(number))
    return shifts.corrections()


@torch.no_grad()
def run(graph, plan, x, node=None):
    """Return the output of a quantized graph, or the result of a node."""
    twin, seen = graph.clone(), []
    quantize_graph(twin, plan, OPERATORS)
    (result,), _ = interpret(twin, [x], lambda n, r: seen.append(r[0]) if n.name == node else None)
    return seen[0] if node else result


def test_bias_shifts_restore_channel_means():
    """Corrected layers have the channel means of the float graph; missing biases are added."""
    calibration, plan = calibrate_net()
    graph = calibration.graph
    plan.corrections = compute_corrections(calibration, plan, 0)
    assert plan.corrections.keys() == plan.weights.keys()
    means = {}
    with torch.no_grad():
        interpret(graph, [make_images(0)], lambda n, r: means.update({n.name: r[0]}))
    for name in plan.weights:
        wanted, found = (
            x.movedim(1, -1).flatten(0, -2).mean(0) for x in (means[name], run(graph, plan, make_images(0), name))
        )
        raw = run(graph, type(plan)(SCHEME, plan.activations, plan.weights), make_images(0), name)
        before = (raw.movedim(1, -1).flatten(0, -2).mean(0) - wanted).norm()
        assert (found - wanted).norm() < before / 5


def test_bias_shifts_reduce_output_error_on_other_data():
    """Corrections reduce the output error on other data, and more batches reduce it further."""
    calibration, plan = calibrate_net()
    graph = calibration.graph
    with torch.no_grad():
        (wanted,), _ = interpret(graph, [make_images(1)])

    def compute_error():
        return float((run(graph, plan, make_images(1)) - wanted).square().sum())

    before = compute_error()
    plan.corrections = compute_corrections(calibration, plan, 0)
    by_one = compute_error()
    plan.corrections = {}
    plan.corrections = compute_corrections(calibration, plan, 0, 1, 2, 3)
    assert by_one < before / 2
    assert compute_error() < by_one


def test_batch_means_recorded_or_recomputed_equal():
    """Channel means are recorded during calibration or recomputed, with the same result."""
    calibration, _ = calibrate_net()
    noted = calibration.batch_means(1)
    anew = calibration.of(calibration.graph, "the same weights").batch_means(1)
    assert noted.keys() == anew.keys() == {node.name for node in calibration.graph.nodes if node.op.trait.weight}
    for name, means in noted.items():
        torch.testing.assert_close(means, anew[name], rtol=0, atol=0)
    with torch.no_grad():
        first = next(node for node in calibration.graph.nodes if node.name in noted)
        seen = []
        interpret(calibration.graph, [make_images(2)], lambda n, r: seen.append(r[0]) if n is first else None)
    torch.testing.assert_close(noted[first.name], seen[0].mean((2, 3)), rtol=1e-4, atol=1e-5)


def test_bias_shifts_zero_without_rounding_error():
    """Without a rounding error, the corrections are zero."""
    x = torch.eye(4).repeat(4, 1)
    torch.manual_seed(0)
    layer = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[7.0, 3.0, -7.0, 0.0], [1.0, -2.0, 7.0, 5.0]]))
    graph = clika_compile(layer, tracing_inputs=[x]).graph.clone()
    calibration = Calibration(graph)
    calibration.add([x])
    placement = choose_placement(graph, SCHEME, lambda v: v.name in calibration.table.values, {})
    plan = Planner(calibration.table, SCHEME, clips=False).plan(placement, "min-max")
    (found,) = compute_corrections(calibration, plan, 0).values()
    assert found.tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
