"""Layers stay float that cost little there and make much of the error, where no other layer has to pay for it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from small_schemes import OPERATORS, scheme_with
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, ModelError, QuantizationSettings, clika_compile
from clika_ref.compiled.lowering import target_for
from clika_ref.core.ir import Graph
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.core.registry import load_registry
from clika_ref.quantization import pipeline as stages_of_quantization
from clika_ref.quantization.algorithms.mixed_precision import MAX_FLOAT_COST_SHARE, select_float_layers
from clika_ref.quantization.algorithms.sensitivity import (
    JointErrorTerm,
    LayerErrorTerms,
    Sensitivities,
    estimate_sensitivities,
)
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.layer_settings import resolve_node_settings
from clika_ref.quantization.pipeline import QuantizationPipeline
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.settings.compile_options import ClikaCompileOptions

SCHEME = scheme_with(QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True))


class Chain(nn.Module):
    """Linear layers of 64 x 64, and one of few weights at the end."""

    def __init__(self, last=2):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(64, last)

    def forward(self, x):
        return self.head(self.body(x))


def graph_of(net) -> Graph:
    return clika_compile(net.eval(), tracing_inputs=[torch.randn(8, 64)]).graph.clone()


def weighed(graph, errors, products, joints=None, values=None):
    """Return sensitivities of the linear layers of a graph, in order; each rounds what it reads, without an error."""
    nodes = [node for node in graph.nodes if node.op_type == "linear"]
    parts = {
        n: LayerErrorTerms(e, {n.inputs[0].name: 0.0} if values is None else values[i])
        for i, (n, e) in enumerate(zip(nodes, errors, strict=True))
    }
    found = Sensitivities(parts, joints or {}, [], products=dict(zip(nodes, products, strict=True)))
    return found, {n: n.output.name for n in nodes}


def names(found):
    return [node.origin.scope for node in found]


def test_of_layers_that_spoil_much_those_are_spared_that_cost_little():
    found = select_float_layers(*weighed(graph_of(Chain()), [0.1, 0.1, 0.3, 0.1, 0.4], [64, 64, 64, 64, 2]))
    assert names(found) == ["head"]
    (reason,) = found.values()
    assert reason == "40 % of the error for 0.8 % of the cost"


def test_the_cost_is_of_time_or_of_room_whichever_is_larger():
    products_alone = [64, 64, 64, 64, 0.02]
    assert not select_float_layers(*weighed(graph_of(Chain(last=8)), [0.225] * 4 + [0.1], products_alone))
    assert select_float_layers(*weighed(graph_of(Chain(last=2)), [0.225] * 4 + [0.1], products_alone))
    assert not select_float_layers(*weighed(graph_of(Chain(last=2)), [0.225] * 4 + [0.1], [64] * 5))


def test_no_more_is_spared_than_the_budget_and_the_best_bargains_come_first():
    sides = [64, 1000, 1000, 1000, 1000, 1000, 30]
    layers = [nn.Sequential(nn.Linear(*pair, bias=False), nn.Tanh()) for pair in pairwise(sides)]
    graph, errors = graph_of(nn.Sequential(*layers)), [0.5, 0, 0, 0, 0, 0.45]
    middle = [1000] * 4
    assert names(select_float_layers(*weighed(graph, errors, [64, *middle, 30]))) == ["5.0", "0.0"]
    shares = 140 / 4200, 60 / 4200
    assert sum(shares) > MAX_FLOAT_COST_SHARE > max(shares)
    assert names(select_float_layers(*weighed(graph, errors, [140, *middle, 60]))) == ["5.0"]


def test_a_result_that_others_read_as_integers_keeps_its_layer_among_them():
    graph = graph_of(Chain())
    nodes = [node for node in graph.nodes if node.op_type == "linear"]
    result = nodes[-1].output.name
    reads = [{n.inputs[0].name: 0.0} for n in nodes]
    errors, products = [0.1, 0.1, 0.3, 0.1, 0.4], [64, 64, 64, 64, 2]
    closed = [*reads[:-1], {**reads[-1], result: 0.0}]
    assert select_float_layers(*weighed(graph, errors, products, values=closed))
    read_too = [{**reads[0], result: 0.0}, *reads[1:]]
    assert not select_float_layers(*weighed(graph, errors, products, values=read_too))
    summed = {"sum": JointErrorTerm(frozenset({result}), 0.0)}
    assert not select_float_layers(*weighed(graph, errors, products, joints=summed))


def test_what_two_layers_round_goes_with_neither_of_them():
    graph = graph_of(Chain())
    nodes = [node for node in graph.nodes if node.op_type == "linear"]
    own = [{n.inputs[0].name: 0.1} for n in nodes]
    assert names(select_float_layers(*weighed(graph, [0.0] * 5, [64, 64, 64, 64, 2], values=own))) == ["head"]
    shared = [{nodes[-1].inputs[0].name: 0.1}, *own[1:]]
    assert not select_float_layers(*weighed(graph, [0.0] * 5, [64, 64, 64, 64, 2], values=shared))


def test_where_nothing_is_spoiled_nothing_is_spared():
    assert not select_float_layers(*weighed(graph_of(Chain()), [0.0] * 5, [0] * 5))


def stages(settings=None, **options):
    spread = torch.Generator().manual_seed(0)
    calibration = Calibration(graph_of(Chain()))
    for _ in range(4):
        calibration.add([torch.randn(32, 64, generator=spread)])
    settings = settings or QuantizationSettings(quantization_sensitivity_threshold=1.0)
    chosen = resolve_node_settings(calibration.graph, settings, {})
    return QuantizationPipeline(calibration, SCHEME, chosen, settings, OPERATORS, ClikaCompileOptions(**options))


def floats(found):
    return [layer.scope for layer in found.layers if layer.reason]


@pytest.mark.parametrize("switch", ["auto", "on"])
def test_a_spared_layer_is_told_with_its_reason_and_is_in_no_row_of_thresholds(switch):
    found = stages(sparing=switch).decided()
    assert floats(found) == ["head"]
    assert "of the error" in found.layers[-1].reason
    assert [row.layers for row in found.what_if] == [1, 2, 3, 4]
    assert set(found.plan.weights) == {layer.name for layer in found.layers[:-1]}
    error = stages(sparing="off").decided().what_if[-1].sqnr
    assert found.what_if[-1].sqnr > error


def test_it_is_switched_off_and_left_out_where_the_user_quantizes_everything_or_the_tail():
    assert not floats(stages(sparing="off").decided())
    everything = QuantizationSettings(automatic_skip_quantization=False)
    assert not floats(stages(everything).decided())
    tail = QuantizationSettings(quantization_sensitivity_threshold=1.0, skip_tail_quantization=False)
    assert not floats(stages(tail).decided())


def test_on_auto_it_is_kept_only_where_another_batch_comes_nearer(monkeypatch):
    made = stages()
    plans = []

    def no_better(plan):
        plans.append(plan)
        return 1e-3

    monkeypatch.setattr(type(made.evaluation), "error", lambda _, plan: no_better(plan))
    assert not floats(made.decided())
    assert any(len(plan.weights) == 4 for plan in plans)


def test_what_is_too_sensitive_is_not_counted_among_what_is_spared(monkeypatch):
    def with_one_too_sensitive(*arguments, **options):
        found = estimate_sensitivities(*arguments, **options)
        first = next(iter(found.parts))
        return replace(found, parts={**found.parts, first: LayerErrorTerms(5.0)})

    monkeypatch.setattr(stages_of_quantization, "estimate_sensitivities", with_one_too_sensitive)
    found = stages(sparing="on").decided()
    reasons = {layer.scope: layer.reason for layer in found.layers if layer.reason}
    assert reasons["body.0.0"] == "too sensitive: 5 is above quantization_sensitivity_threshold=1"
    assert reasons["head"].endswith(" % of the cost")  # which it is not where 5.0 is counted among the errors
    assert found.spared == ["head"]
    assert len(reasons) == 2


def test_what_leaves_layers_float_contradicts_what_leaves_none():
    for switch, is_automatic in (("auto", False), ("on", True)):
        wanted_with(switch, is_automatic)
    with pytest.raises(
        ModelError,
        match=r"sparing='on' keeps layers in float, but automatic_skip_quantization=False keeps none. Choose one.",
    ):
        wanted_with("on", is_automatic=False)


def wanted_with(switch, is_automatic):
    settings = QuantizationSettings(automatic_skip_quantization=is_automatic)
    target = target_for(DeploymentSettings_ONNXRuntime_ONNX(), load_registry())
    return QuantizationRequest(target, settings, {}, ClikaCompileOptions(sparing=switch))


def test_a_search_by_a_goal_and_the_log_name_what_is_spared(tmp_path):
    spread = torch.Generator().manual_seed(0)
    data = [torch.randn(32, 64, generator=spread) for _ in range(4)]
    module = clika_compile(Chain().eval(), tracing_inputs=data[:2], calibration_inputs=data, logs_dir=tmp_path)
    search = module.clika_quantize_to_goal(
        lambda _: 1.0, 0.5, deployment_settings=DeploymentSettings_ONNXRuntime_ONNX()
    )
    assert search.best.layers == 4
    assert search.reason == "head stay in float unless sparing is 'off'"
    module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=1.0))
    told = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert "Not in this table: head. sparing='off' quantizes them as well." in told
