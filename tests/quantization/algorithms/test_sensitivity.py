"""Sensitivity by probes equals quantizing each layer alone; layers without effect on an output have none."""

import math
from dataclasses import replace

import pytest
import torch
from seeded_tensors import randn
from small_schemes import OPERATORS, WithLargeOutput, make_scheme
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.core.symbols import is_symbolic
from clika_ref.quantization.algorithms.sensitivity import estimate_sensitivities, sum_layer_errors, variance_share
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.qdq.fused_pairs import quantize_dequantize
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph
from clika_ref.quantization.qdq.placement import choose_placement
from clika_ref.quantization.qdq.planning import Planner

SCHEME = make_scheme(QuantizedType(bits=6, is_signed=True, is_symmetric=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 8, 3), nn.Linear(8 * 16, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.two(torch.tanh(self.one(torch.relu(self.conv(x)).flatten(1))))


def estimate(module, x, scheme=SCHEME, tracing_inputs=None):
    torch.manual_seed(0)
    graph = clika_compile(module().eval(), tracing_inputs=tracing_inputs or [x]).graph
    calibration = Calibration(graph)
    calibration.add([x])
    table = calibration.table
    placement = choose_placement(graph, scheme, lambda v: v.name in table.values, {})
    return graph, placement, Planner(table, scheme, clips=False).plan(placement, "min-max")


def test_sum_layer_errors_shared_activation_counted_once():
    """An activation that two layers read is counted once."""
    x = randn(16, 4)
    graph, placement, plan = estimate(Both, x)
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x], probes=64)
    one, two = found.parts.values()
    assert [*one.values] == [*two.values] == [graph.inputs[0].name]
    assert sum_layer_errors([one, two], {}) == pytest.approx(one.own + two.own + one.values[graph.inputs[0].name])
    assert sum_layer_errors([one], {}) == one.whole < sum_layer_errors([one, two], {}) < one.whole + two.whole


def test_estimate_sensitivities_rival_plans_match_own_run():
    """The shares of a rival plan equal those of an estimate for that plan."""
    x = randn(4, 3, 6, 6)
    graph, placement, plan = estimate(Summed, x, replace(SCHEME, elementwise=frozenset({"add"})))
    rival = replace(plan, activations={n: replace(s, scale=s.scale / 3) for n, s in plan.activations.items()})
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x], rivals=[rival])
    alone = estimate_sensitivities(graph, placement, rival, OPERATORS, [x])
    (shares,) = found.rivals
    assert shares == alone.shares != found.shares
    assert found.shares.keys() == plan.activations.keys()
    assert found.joints, "a value that several layers round together is among them"
    other = found.with_shares(shares)
    assert (other.shares, other.of.keys()) == (shares, found.of.keys())
    assert [part.own for part in other.parts.values()] == [part.own for part in found.parts.values()]


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x):
        y = self.one(x)
        return (torch.tanh(self.three(self.two(y) + y)).flatten(1),)


def test_sum_layer_errors_joint_term_counted_with_both_layers():
    """A sum that is quantized only with both operands counts with both layers, and with neither alone."""
    scheme = replace(SCHEME, elementwise=frozenset({"add"}))
    x = randn(16, 3, 4, 4)
    graph, placement, plan = estimate(Summed, x, scheme)
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x], probes=64)
    ((name, joint),) = found.joints.items()
    assert name == next(node.name for node in graph.nodes if node.op_type == "add")
    one, two, _ = found.parts.values()
    assert joint.operands == {*one.values, *two.values} - {graph.inputs[0].name}
    assert name not in {*one.values, *two.values}
    assert joint.share > 0
    assert sum_layer_errors([one, two], found.joints) == pytest.approx(sum_layer_errors([one, two], {}) + joint.share)
    assert sum_layer_errors([one], found.joints) == sum_layer_errors([one], {})


def test_estimate_sensitivities_scaled_by_other_batches():
    """The error of an activation is scaled to all calibration batches."""
    x = randn(16, 4)
    graph, placement, plan = estimate(Both, x)
    everything = Calibration(graph)
    for batch in (x, 2 * x, x):
        everything.add([batch])
    (name,) = (value.name for value in graph.inputs)
    plain, rare = (
        estimate_sensitivities(graph, placement, plan, OPERATORS, [x], seen=seen)
        for seen in (None, everything.table.values)
    )
    scale, kind = plan.activations[name], SCHEME.activations
    missed = [
        float((quantize_dequantize(b, scale.scale, scale.zero_point, low=kind.low, high=kind.high) - b).square().mean())
        for b in (x, 2 * x)
    ]
    times = (2 * missed[0] + missed[1]) / 3 / missed[0]
    assert times > 2
    for before, after in zip(plain.parts.values(), rare.parts.values(), strict=True):
        assert after.own == before.own
        assert after.values[name] == pytest.approx(before.values[name] * times, rel=0.2)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.one(x)) + self.two(x)


@torch.no_grad()
def layer_error(graph, node, tail, plan, x):
    """Return ``||Q - F||^2 / ||F||^2`` with one quantized layer."""
    own = {node.inputs[0].name, tail.name}
    part = Plan(SCHEME, {n: s for n, s in plan.activations.items() if n in own}, {node.name: plan.weights[node.name]})
    twin = graph.clone()
    quantize_graph(twin, part, OPERATORS)
    (found,), _ = interpret(twin, [x])
    (wanted,), _ = interpret(graph, [x])
    return float((found - wanted).square().sum() / wanted.square().sum())


def test_estimate_sensitivities_matches_single_layer_error():
    """The estimate is close to the error of quantizing a layer alone."""
    x = randn(16, 3, 6, 6)
    graph, placement, plan = estimate(Net, x)
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x], probes=64).of
    assert [node.op_type for node in found] == ["conv2d", "linear", "linear"]
    for node, tail in placement.layers.items():
        assert found[node] == pytest.approx(layer_error(graph, node, tail, plan, x), rel=0.3)


class Reshaped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, (5, 1)), nn.Linear(8 * 20, 6)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x[:, None, :, None])).flatten(1))


def test_estimate_sensitivities_first_layer_without_input_gradient(monkeypatch):
    """The error of the data that the first layer reads needs no gradient of this layer."""
    x, differentiated = randn(16, 24), list[str]()
    graph, placement, plan = estimate(Reshaped, x)
    conv, head = placement.layers

    def find_gradients(outputs, inputs, *args, **options):
        waiting = [output.grad_fn for output in outputs]
        while waiting:
            function = waiting.pop()
            differentiated.append(function.name())
            waiting.extend(following for following, _ in function.next_functions if following is not None)
        return torch_grad(outputs, inputs, *args, **options)

    torch_grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", find_gradients)
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x], probes=64)
    assert any("Addmm" in name for name in differentiated)
    assert not any("Convolution" in name for name in differentiated)
    assert found.of[conv] == pytest.approx(layer_error(graph, conv, placement.layers[conv], plan, x), rel=0.3)
    assert all(share > 0 for share in found.parts[conv].values.values())
    assert head in found.of


class ReshapedToImages(Reshaped):
    """Rounded before a reshape with the batch size among its attributes."""

    def forward(self, x):
        images = x.reshape(x.shape[0], 1, x.shape[1], 1)
        return self.head(torch.relu(self.conv(images)).flatten(1))


def test_estimate_sensitivities_sizes_before_first_layer():
    """The error of the data passes a reshape to a dynamic batch before the first layer."""
    x = randn(16, 24)
    scheme = replace(SCHEME, quantizes_before_moves=True, data_movement=frozenset({"reshape"}))
    graph, placement, plan = estimate(ReshapedToImages, x, scheme, tracing_inputs=[x, x[:5]])
    (reshape, *_) = graph.nodes
    assert any(is_symbolic(attr) for attr in reshape.attrs.values())
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x], probes=64)
    conv, _ = placement.layers
    assert found.parts[conv].values[graph.inputs[0].name] > 0
    assert found.of[conv] == pytest.approx(layer_error(graph, conv, placement.layers[conv], plan, x), rel=0.3)


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.kept(x), self.idle(torch.tanh(x)) * 0


def test_estimate_sensitivities_unused_layer_zero():
    """A layer without an effect on the outputs has no sensitivity."""
    x = randn(8, 4)
    graph, placement, plan = estimate(Unread, x)
    kept, idle = estimate_sensitivities(graph, placement, plan, OPERATORS, [x]).of.values()
    assert kept > 0
    assert idle == 0


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * 0


def test_estimate_sensitivities_zero_output_gives_zero():
    """A zero output gives a sensitivity of zero."""
    x = torch.ones(2, 4)
    graph, placement, plan = estimate(Nothing, x)
    assert [*estimate_sensitivities(graph, placement, plan, OPERATORS, [x]).of.values()] == [0.0]


class Rooted(nn.Module):
    """A square root at 0, where the gradient is infinite, of elements that rounding does not change."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.two(torch.sqrt(torch.relu(self.one(x))))


def test_estimate_sensitivities_infinite_gradient_stays_finite():
    """An infinite gradient gives a finite sensitivity."""
    x = randn(16, 4)
    graph, placement, plan = estimate(Rooted, x)
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x])
    assert all(math.isfinite(sensitivity) for sensitivity in found.of.values())
    assert next(iter(found.of.values())) > 0


def test_estimate_sensitivities_large_output_keeps_small_visible():
    """A large output does not hide the effect on a small one."""
    x = randn(16, 4)
    graph, placement, plan = estimate(
        lambda: WithLargeOutput(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))), x
    )
    found = estimate_sensitivities(graph, placement, plan, OPERATORS, [x], probes=16)
    assert min(found.of.values()) > 1e-6


@pytest.mark.parametrize(
    ("shape", "share"), [((1, 10), 1.0), ((1, 50, 10), 0.5), ((40, 10), 0.5)], ids=["vector", "positions", "samples"]
)
def test_variance_share_of_one_sample(shape, share):
    """A single sample is no constant output: its positions are compared, or all of it counts."""
    outputs = torch.ones(shape) + randn(*shape)
    assert variance_share([outputs]) == pytest.approx(share, abs=0.1)
    assert variance_share([torch.ones(4, 3)]) == 0
