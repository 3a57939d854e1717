"""Mixed precision: layers with a large share of the error and a small share of the cost stay float."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from log_files import read_logs
from seeded_tensors import draw_batches
from small_schemes import OPERATORS, make_scheme
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

SCHEME = make_scheme(QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True))


class Chain(nn.Module):
    """Linear layers of 64 x 64, and one of few weights at the end."""

    def __init__(self, last=2):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(64, last)

    def forward(self, x):
        return self.head(self.body(x))


def trace_graph(net) -> Graph:
    return clika_compile(net.eval(), tracing_inputs=[torch.randn(8, 64)]).graph.clone()


def make_sensitivities(graph, errors, macs, joints=None, values=None):
    """Return sensitivities of a graph's linear layers, in order; rounding their inputs causes no error."""
    nodes = [node for node in graph.nodes if node.op_type == "linear"]
    parts = {
        n: LayerErrorTerms(e, {n.inputs[0].name: 0.0} if values is None else values[i])
        for i, (n, e) in enumerate(zip(nodes, errors, strict=True))
    }
    found = Sensitivities(parts, joints or {}, [], macs=dict(zip(nodes, macs, strict=True)))
    return found, {n: n.output.name for n in nodes}


def scopes_of(found):
    return [node.origin.scope for node in found]


def test_select_float_layers_cheap_layer_with_large_error():
    """A layer with a large share of the error and a small cost stays in float."""
    found = select_float_layers(
        *make_sensitivities(trace_graph(Chain()), [0.1, 0.1, 0.3, 0.1, 0.4], [64, 64, 64, 64, 2])
    )
    assert scopes_of(found) == ["head"]
    (reason,) = found.values()
    assert reason == "40 % of the error for 0.8 % of the cost"


def test_select_float_layers_cost_larger_of_macs_and_bytes():
    """The cost is the larger of the shares of MACs and of bytes."""
    products_alone = [64, 64, 64, 64, 0.02]
    assert not select_float_layers(*make_sensitivities(trace_graph(Chain(last=8)), [0.225] * 4 + [0.1], products_alone))
    assert select_float_layers(*make_sensitivities(trace_graph(Chain(last=2)), [0.225] * 4 + [0.1], products_alone))
    assert not select_float_layers(*make_sensitivities(trace_graph(Chain(last=2)), [0.225] * 4 + [0.1], [64] * 5))


def test_select_float_layers_within_cost_budget_best_first():
    """The selected layers stay within the cost budget, by the best ratio of error to cost."""
    sides = [64, 1000, 1000, 1000, 1000, 1000, 30]
    layers = [nn.Sequential(nn.Linear(*pair, bias=False), nn.Tanh()) for pair in pairwise(sides)]
    graph, errors = trace_graph(nn.Sequential(*layers)), [0.5, 0, 0, 0, 0, 0.45]
    middle = [1000] * 4
    assert scopes_of(select_float_layers(*make_sensitivities(graph, errors, [64, *middle, 30]))) == ["5.0", "0.0"]
    shares = 140 / 4200, 60 / 4200
    assert sum(shares) > MAX_FLOAT_COST_SHARE > max(shares)
    assert scopes_of(select_float_layers(*make_sensitivities(graph, errors, [140, *middle, 60]))) == ["5.0"]


def test_select_float_layers_output_quantized_for_others_skipped():
    """A layer whose output other layers read in INT8 is not selected."""
    graph = trace_graph(Chain())
    nodes = [node for node in graph.nodes if node.op_type == "linear"]
    result = nodes[-1].output.name
    reads = [{n.inputs[0].name: 0.0} for n in nodes]
    errors, macs = [0.1, 0.1, 0.3, 0.1, 0.4], [64, 64, 64, 64, 2]
    closed = [*reads[:-1], {**reads[-1], result: 0.0}]
    assert select_float_layers(*make_sensitivities(graph, errors, macs, values=closed))
    read_too = [{**reads[0], result: 0.0}, *reads[1:]]
    assert not select_float_layers(*make_sensitivities(graph, errors, macs, values=read_too))
    summed = {"sum": JointErrorTerm(frozenset({result}), 0.0)}
    assert not select_float_layers(*make_sensitivities(graph, errors, macs, joints=summed))


def test_select_float_layers_shared_input_error_ignored():
    """The rounding error of an input that two layers share counts for neither."""
    graph = trace_graph(Chain())
    nodes = [node for node in graph.nodes if node.op_type == "linear"]
    own = [{n.inputs[0].name: 0.1} for n in nodes]
    assert scopes_of(select_float_layers(*make_sensitivities(graph, [0.0] * 5, [64, 64, 64, 64, 2], values=own))) == [
        "head"
    ]
    shared = [{nodes[-1].inputs[0].name: 0.1}, *own[1:]]
    assert not select_float_layers(*make_sensitivities(graph, [0.0] * 5, [64, 64, 64, 64, 2], values=shared))


def test_select_float_layers_without_error_selects_none():
    """Without an error, no layer is selected."""
    assert not select_float_layers(*make_sensitivities(trace_graph(Chain()), [0.0] * 5, [0] * 5))


def make_pipeline(settings=None, **options):
    calibration = Calibration(trace_graph(Chain()))
    for x in draw_batches(4, 32, 64):
        calibration.add([x])
    settings = settings or QuantizationSettings(quantization_sensitivity_threshold=1.0)
    chosen = resolve_node_settings(calibration.graph, settings, {})
    return QuantizationPipeline(calibration, SCHEME, chosen, settings, OPERATORS, ClikaCompileOptions(**options))


def float_scopes(found):
    return [layer.scope for layer in found.layers if layer.reason]


@pytest.mark.parametrize("switch", ["auto", "on"])
def test_mixed_precision_float_layer_has_reason(switch):
    """A selected layer has its reason and is in no prediction for thresholds."""
    found = make_pipeline(mixed_precision=switch).decide()
    assert float_scopes(found) == ["head"]
    assert "of the error" in found.layers[-1].reason
    assert [row.layers for row in found.what_if] == [1, 2, 3, 4]
    assert set(found.plan.weights) == {layer.name for layer in found.layers[:-1]}
    error = make_pipeline(mixed_precision="off").decide().what_if[-1].sqnr
    assert found.what_if[-1].sqnr > error


def test_mixed_precision_off_or_everything_quantized():
    """The selection is skipped if it is off, or if the user quantizes everything or the tail."""
    assert not float_scopes(make_pipeline(mixed_precision="off").decide())
    everything = QuantizationSettings(automatic_skip_quantization=False)
    assert not float_scopes(make_pipeline(everything).decide())
    tail = QuantizationSettings(quantization_sensitivity_threshold=1.0, skip_tail_quantization=False)
    assert not float_scopes(make_pipeline(tail).decide())


def test_mixed_precision_auto_needs_gain_on_other_batch(monkeypatch):
    """On 'auto', the selection is kept only if the error on another batch falls."""
    made = make_pipeline()
    plans = []

    def return_small_error(plan):
        plans.append(plan)
        return 1e-3

    monkeypatch.setattr(type(made.evaluation), "error", lambda _, plan: return_small_error(plan))
    assert not float_scopes(made.decide())
    assert any(len(plan.weights) == 4 for plan in plans)


def test_mixed_precision_excludes_too_sensitive_layers(monkeypatch):
    """Layers above the threshold do not count in the shares of the error."""

    def estimate_with_sensitive_layer(*arguments, **options):
        found = estimate_sensitivities(*arguments, **options)
        first = next(iter(found.parts))
        return replace(found, parts={**found.parts, first: LayerErrorTerms(5.0)})

    monkeypatch.setattr(stages_of_quantization, "estimate_sensitivities", estimate_with_sensitive_layer)
    found = make_pipeline(mixed_precision="on").decide()
    reasons = {layer.scope: layer.reason for layer in found.layers if layer.reason}
    assert reasons["body.0.0"] == "too sensitive: 5 is above quantization_sensitivity_threshold=1"
    assert reasons["head"].endswith(" % of the cost")  # which it is not where 5.0 is counted among the errors
    assert found.kept_in_float == ["head"]
    assert len(reasons) == 2


def test_mixed_precision_on_with_everything_quantized_raises():
    """'on' contradicts `automatic_skip_quantization=False`."""
    for switch, is_automatic in (("auto", False), ("on", True)):
        make_request(switch, is_automatic)
    with pytest.raises(
        ModelError,
        match=r"mixed_precision='on' keeps layers in float, but automatic_skip_quantization=False keeps none",
    ):
        make_request("on", is_automatic=False)


def make_request(switch, is_automatic):
    settings = QuantizationSettings(automatic_skip_quantization=is_automatic)
    target = target_for(DeploymentSettings_ONNXRuntime_ONNX(), load_registry())
    return QuantizationRequest(target, settings, {}, ClikaCompileOptions(mixed_precision=switch))


def test_clika_quantize_to_goal_and_log_name_float_layers(tmp_path):
    """The search by a goal and the log name the selected layers."""
    data = draw_batches(4, 32, 64)
    module = clika_compile(Chain().eval(), tracing_inputs=data[:2], calibration_inputs=data, logs_dir=tmp_path)
    search = module.clika_quantize_to_goal(
        lambda _: 1.0, 0.5, deployment_settings=DeploymentSettings_ONNXRuntime_ONNX()
    )
    assert search.best.layers == 4
    assert search.reason == "mixed_precision keeps head in float. Set mixed_precision='off' to quantize them"
    module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=1.0))
    told = read_logs(tmp_path)
    assert "Not in this table: head. mixed_precision='off' quantizes them as well." in told


class Distances(nn.Module):
    """A convolution, and the mean of a distribution of 16 distances, as in a YOLO head."""

    def __init__(self, channels=1):
        super().__init__()
        self.first, self.mean = nn.Conv2d(3, 64, 1), nn.Conv2d(16, channels, 1, bias=False)

    def forward(self, x):
        bins = self.first(x).flatten(2).unflatten(1, (4, 16)).transpose(1, 2)
        return self.mean(bins.softmax(1))


def list_float_layers(model, shape=(3, 8, 8), **settings):
    """Return the reasons of the layers of a model that stay in float in ONNX Runtime, by module."""
    torch.manual_seed(0)
    batches = [torch.randn(4, *shape) for _ in range(4)]
    module = clika_compile(
        model.eval(),
        tracing_inputs=[batches[0][:1], batches[0]],
        calibration_inputs=batches,
        quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=1e9, **settings),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        mixed_precision="off",
    )
    return {layer.scope: layer.reason for layer in module.clika_summary().layers if layer.reason}


@pytest.mark.slow
def test_layer_with_one_mac_per_element_stays_float():
    """A layer that rounds as many elements as it has MACs gains nothing in INT8, unless it must be quantized."""
    assert list_float_layers(Distances()) == {
        "mean": "16,384 MACs for 16,384 elements of its input: rounding them takes as long"
    }
    assert not list_float_layers(Distances(2))
    for setting in ("automatic_skip_quantization", "skip_tail_quantization"):
        assert not list_float_layers(Distances(), **{setting: False})


def test_layer_with_one_mac_reading_quantized_result_runs_in_int8():
    """The result of a convolution is in INT8 anyway, and so is the input of a layer that reads it."""
    assert not list_float_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 1)))
