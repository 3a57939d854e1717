"""The whole quantization pipeline: float layers with reasons, reports, and the accuracy of predictions."""

import math
import re
from dataclasses import replace

import pytest
import torch
from seeded_tensors import draw_batches
from small_schemes import OPERATORS, make_scheme
from torch import nn

from clika_ref import LayerQuantizationSettings as Layer
from clika_ref import ModelError, QuantizationSettings, clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizedType, WeightOnlyScheme
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.decision import ratio_in_decibels
from clika_ref.quantization.layer_settings import resolve_node_settings
from clika_ref.quantization.pipeline import SKIP_TAIL_REASON, QuantizationPipeline, tail_layers
from clika_ref.quantization.qdq.insertion import quantize_graph
from clika_ref.settings.compile_options import ClikaCompileOptions

SCHEME = make_scheme(QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.body, self.head, self.side = nn.Linear(8 * 16, 32), nn.Linear(32, 10), nn.Linear(32, 2)

    def forward(self, x):
        x = torch.tanh(self.body(self.stem(x).flatten(1)))
        return self.head(x), torch.sigmoid(self.side(x))


def calibrate(net=None, *shape):
    data = draw_batches(4, 8, *(shape or (3, 8, 8)))
    graph = clika_compile((net or Net()).eval(), tracing_inputs=data[:1]).graph.clone()
    found = Calibration(graph)
    for x in data:
        found.add([x])
    return found


def quantize(settings=None, layers=None, scheme=SCHEME, net=None, shape=(), **options):
    settings, calibration = settings or QuantizationSettings(), calibrate(net, *shape)
    chosen = resolve_node_settings(calibration.graph, settings, layers or {})
    stages = QuantizationPipeline(calibration, scheme, chosen, settings, OPERATORS, ClikaCompileOptions(**options))
    return calibration, stages.decide()


def test_pipeline_default_quantizes_all_layers():
    """All layers are quantized by default, with a quarter of the bytes."""
    _, found = quantize()
    assert [(layer.scope, layer.operator, layer.reason) for layer in found.layers] == [
        ("stem.0", "conv2d", ""),
        ("stem.2", "conv2d", ""),
        ("body", "linear", ""),
        ("head", "linear", ""),
        ("side", "linear", ""),
    ]
    assert all(layer.bytes_after * 4 == layer.bytes_before for layer in found.layers)
    assert all(0 < layer.sensitivity < 0.005 for layer in found.layers)
    assert found.plan.corrections.keys() == found.plan.weights.keys()


def test_pipeline_threshold_zero_keeps_graph():
    """A threshold of zero keeps the graph."""
    calibration, found = quantize(QuantizationSettings(quantization_sensitivity_threshold=0))
    before = str(calibration.graph)
    quantize_graph(calibration.graph, found.plan, OPERATORS)
    assert str(calibration.graph) == before
    assert {layer.reason.partition(":")[0] for layer in found.layers} == {"quantization_sensitivity_threshold=0"}


@pytest.mark.slow
def test_pipeline_threshold_keeps_sensitive_layers_float():
    """Layers above the threshold stay in float, with their sensitivity."""
    _, whole = quantize()
    ranked = sorted(layer.sensitivity for layer in whole.layers)
    limit = math.sqrt(ranked[2] * ranked[3])
    _, found = quantize(QuantizationSettings(quantization_sensitivity_threshold=limit), mixed_precision="off")
    floats = [layer for layer in found.layers if layer.reason]
    assert sorted(layer.sensitivity for layer in floats) == ranked[3:]
    assert all(layer.reason.startswith("too sensitive: ") for layer in floats)
    _, forced = quantize(
        QuantizationSettings(quantization_sensitivity_threshold=limit, automatic_skip_quantization=False)
    )
    assert not any(layer.reason for layer in forced.layers)


def test_tail_layers_precede_outputs():
    """The tail consists of the last layers before the outputs."""
    assert [node.origin.scope for node in tail_layers(calibrate().graph)] == ["head", "side"]
    _, found = quantize(QuantizationSettings(skip_tail_quantization=True))
    assert {layer.scope: layer.reason for layer in found.layers if layer.reason} == {
        "head": SKIP_TAIL_REASON,
        "side": SKIP_TAIL_REASON,
    }


@pytest.mark.slow
def test_pipeline_skip_tail_false_quantizes_sensitive_tail():
    """`skip_tail_quantization=False` quantizes the tail at any sensitivity, except with threshold 0."""
    strict = QuantizationSettings(quantization_sensitivity_threshold=1e-9, skip_tail_quantization=False)
    _, found = quantize(strict)
    assert [layer.scope for layer in found.layers if not layer.reason] == ["head", "side"]
    strict.quantization_sensitivity_threshold = 0
    assert all(layer.reason for layer in quantize(strict)[1].layers)
    strict.quantization_sensitivity_threshold = 1e-9
    calibration = calibrate()
    stages = QuantizationPipeline(
        calibration, SCHEME, resolve_node_settings(calibration.graph, strict, {}), strict, OPERATORS
    )
    assert all(layer.reason for layer in stages.decide(1e-9).layers), "a search for thresholds searches all of them"


def test_pipeline_skipped_layer_has_no_sensitivity():
    """The sensitivity of skipped layers is not estimated."""
    _, found = quantize(layers={"stem": Layer(skip_quantization=True)})
    skipped = [layer for layer in found.layers if layer.reason]
    assert [(layer.scope, layer.sensitivity, layer.reason) for layer in skipped] == [
        ("stem.0", None, "skip_quantization of 'stem'"),
        ("stem.2", None, "skip_quantization of 'stem'"),
    ]


@pytest.mark.parametrize("settings", [{"weights_num_bits": [4, 5]}, {"activations_num_bits": 16}])
def test_pipeline_unsupported_bits_raise(settings):
    """A bit width that the target does not support raises an error."""
    bits = {4, 16} & {n for v in settings.values() for n in (v if isinstance(v, list) else [v])}
    message = (
        re.escape(f"{next(iter(settings))}: {bits.pop()} bits are requested for ")
        + r".* in stem\.0.*, but the target supports 8"
    )
    with pytest.raises(ModelError, match=message):
        quantize(QuantizationSettings(**settings))


def test_pipeline_reduced_range_still_counts_as_8_bits():
    """A target that uses 7 of 8 bits still has a bit width of 8."""
    scheme = replace(SCHEME, weights=replace(SCHEME.weights, bits=7))
    with pytest.raises(ModelError, match=r"the target supports 8 \(of which it uses 7 here\)"):
        quantize(QuantizationSettings(weights_num_bits=4), scheme=scheme)


def test_pipeline_several_bits_select_supported():
    """Of several bit widths, a supported one is selected."""
    _, found = quantize(QuantizationSettings(weights_num_bits=[8, 4], automatic_skip_quantization=False))
    assert {layer.bits[0] for layer in found.layers} == {8}


@pytest.mark.parametrize("bits", [8, 6])
def test_pipeline_predictions_match_result(bits):
    """The predictions for thresholds match the quantized graph."""
    scheme = replace(SCHEME, weights=replace(SCHEME.weights, bits=bits))
    settings = QuantizationSettings(automatic_skip_quantization=False)
    calibration, found = quantize(settings, scheme=scheme, observer="min-max")  # chosen on the same samples otherwise
    thresholds = [row.threshold for row in found.what_if]
    assert thresholds == sorted(thresholds)
    assert [row.layers for row in found.what_if] == [1, 2, 3, 4, 5]
    biases = 4 * (8 + 8 + 32 + 10 + 2)
    assert found.what_if[-1].bytes == sum(layer.bytes_after for layer in found.layers) + biases
    twin = calibration.graph.clone()
    quantize_graph(twin, found.plan, OPERATORS)
    batches = calibration.reservoir.batches
    with torch.no_grad():
        wanted, made = ([interpret(graph, x)[0] for x in batches] for graph in (calibration.graph, twin))
    whole, other = (list(map(torch.cat, zip(*batches, strict=True))) for batches in (wanted, made))
    signal = sum(float((w - w.mean(0)).square().sum()) for w in whole)
    noise = sum(float((m - w).square().sum()) for m, w in zip(other, whole, strict=True))
    assert found.what_if[-1].sqnr == pytest.approx(ratio_in_decibels(signal, noise), abs=1.0)


def test_ratio_in_decibels_of_zero():
    """A ratio to zero is infinite, and a ratio of zero is minus infinite."""
    assert ratio_in_decibels(1.0, 0.0) == math.inf
    assert ratio_in_decibels(0.0, 1.0) == -math.inf
    assert ratio_in_decibels(100.0, 1.0) == pytest.approx(20.0)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.read(x)[0])


@pytest.mark.parametrize("only_weights", [False, True])
def test_pipeline_recurrent_layer_stays_float_with_reason(only_weights):
    """A recurrent layer is in the report and stays in float, with the reason."""
    settings = QuantizationSettings(prefer_weights_only_quantization=only_weights)
    scheme = replace(SCHEME, weights_only=WeightOnlyScheme(frozenset({"linear"})))
    _, found = quantize(settings, scheme=scheme, net=Tagger(), shape=(5, 8))
    rows = {row.scope: row for row in found.layers}
    assert rows["read"].reason.startswith("the target computes lstm ")
    assert rows["read"].bytes_before == rows["read"].bytes_after == 4 * 4 * 16 * (8 + 16)
    assert rows["head"].reason == ""
