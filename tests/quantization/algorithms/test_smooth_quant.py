"""SmoothQuant: equal float results, a smaller error with outlier channels, and factors in the range table."""

from functools import partial

import pytest
import torch
from seeded_tensors import draw_batches, randn
from small_schemes import OPERATORS, make_scheme
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.algorithms.awq import LowBitWeightEvaluator
from clika_ref.quantization.algorithms.smooth_quant import (
    QuantizedInputEvaluator,
    SmoothingOptions,
    apply_smoothing,
    search_smoothing_factors,
)
from clika_ref.quantization.calibration.range_table import RangeTable

SCHEME = make_scheme(QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True))


class Outlying(nn.Module):
    """A residual around two linear layers whose input has one channel that is forty times the others."""

    def __init__(self, outlier=40.0):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.one, self.two = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(32, 64)
        self.back = nn.Linear(64, 32)
        self.norm.weight.data[3] = outlier
        for layer in (self.one, self.two):
            layer.weight.data[:, 3] /= outlier

    def forward(self, x):
        x = self.norm(x)
        return x + self.back(torch.tanh(self.one(x)) * torch.sigmoid(self.two(x)))


def make_data(batches=3):
    return draw_batches(batches, 64, 32)


def trace_graph(model):
    return clika_compile(model.eval(), tracing_inputs=make_data(1)).graph.clone()


def search_factors(graph, inputs):
    return search_smoothing_factors(graph, SCHEME.layers, inputs, partial(QuantizedInputEvaluator, scheme=SCHEME))


def test_apply_smoothing_keeps_float_outputs():
    """SmoothQuant keeps the float outputs, and only linear layers read the scaled activation."""
    graph, (x,) = trace_graph(Outlying()), make_data(1)
    factors = search_factors(graph, [x])
    (name,) = [name for name, factor in factors.items() if float(factor[3]) > 4]
    before = interpret(graph, [x])[0][0]
    apply_smoothing(graph, factors, OPERATORS)
    torch.testing.assert_close(interpret(graph, [x])[0][0], before, rtol=1e-5, atol=1e-4)
    (value,) = [v for node in graph.nodes for v in node.outputs if v.name == name]
    assert sorted(use.user.op_type for use in value.uses) == ["add", "mul"]


def test_search_smoothing_factors_needs_enough_elements():
    """Too few elements give no factors."""
    graph, (x,) = trace_graph(Outlying()), make_data(1)
    assert search_factors(graph, [x])
    assert not search_factors(graph, [x[:-1]])
    few = partial(QuantizedInputEvaluator, scheme=SCHEME)
    assert search_smoothing_factors(graph, SCHEME.layers, [x[:-1]], few, SmoothingOptions(min_elements=0))


def test_search_smoothing_factors_at_least_one_for_outliers():
    """Factors are at least 1, and exist only if a channel has outliers."""
    factors = search_factors(trace_graph(Outlying()), make_data(1))
    assert all(bool((factor >= 1).all()) for factor in factors.values())
    plain = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    torch.manual_seed(0)
    assert not search_factors(trace_graph(plain), [torch.rand(64, 32) * 2 - 1])


def test_search_smoothing_factors_ignore_default_device():
    """Factors are computed on the device of the data, with any default device."""
    graph, inputs = trace_graph(Outlying()), make_data(1)
    wanted = search_factors(graph, inputs)
    with torch.device("meta"):  # which cannot be mixed with any other
        found = search_factors(graph, inputs)
    assert wanted
    assert all(torch.equal(found[name], factor) for name, factor in wanted.items())


class Normalized(nn.Module):
    """A linear layer after a normalization; one channel is forty times as large as the others."""

    def __init__(self, kind=nn.LayerNorm):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.one = kind(32), nn.Linear(32, 16)
        self.norm.weight.data[3] = 40.0
        self.one.weight.data[:, 3] /= 40.0

    def forward(self, x):
        return self.one(self.norm(x))


class Chain(nn.Module):
    """Consecutive convolutions, the second one depthwise."""

    def __init__(self, between=nn.ReLU, groups=8):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.between = nn.Conv2d(3, 8, 3), between()
        self.two = nn.Conv2d(8, 16, 3, groups=groups)
        self.one.weight.data[5] *= 40.0
        self.two.weight.data[10:12] /= 40.0

    def forward(self, x):
        return self.two(self.between(self.one(x)))


IMAGES = [randn(4, 3, 9, 9) for _ in range(3)]


@pytest.mark.parametrize(
    ("model", "x", "channel"),
    [
        (Normalized(), make_data(1)[0], 3),
        (Normalized(nn.RMSNorm), make_data(1)[0], 3),
        (Chain(), IMAGES[0], 5),
        (Chain(nn.LeakyReLU), IMAGES[0], 5),
        (Chain(nn.Identity, groups=2), IMAGES[0], 5),
    ],
    ids=["layer norm", "rms norm", "relu, depthwise", "leaky relu, depthwise", "two groups"],
)
def test_apply_smoothing_absorbed_by_previous_layer(model, x, channel):
    """Factors that the previous layer absorbs add no node and keep the outputs."""
    graph = clika_compile(model.eval(), tracing_inputs=[x]).graph.clone()
    factors = search_factors(graph, [x])
    ((name, factor),) = factors.items()
    assert float(factor[channel]) > 4
    before, kinds = interpret(graph, [x])[0][0], [node.op_type for node in graph.nodes]
    apply_smoothing(graph, factors, OPERATORS)
    assert [node.op_type for node in graph.nodes] == kinds
    torch.testing.assert_close(interpret(graph, [x])[0][0], before, rtol=1e-5, atol=1e-4)
    held = {}
    interpret(graph, [x], lambda node, made: held.update({node.output.name: made[0]}))
    divided = held[name].abs().movedim(1 if held[name].ndim == 4 else -1, -1).flatten(0, -2).amax(0)
    assert float(divided[channel]) < 8 * float(divided.median())


def quantize_weights(model, **options):
    return clika_compile(
        model.eval(),
        calibration_inputs=make_data(),
        quantization_settings=WEIGHTS,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        clika_compile_options=ClikaCompileOptions(**options),
    ).eval()


def test_smoothing_int4_weights_reduce_error(tmp_path):
    """SmoothQuant reduces the error of INT4 weights."""

    def output_error(**options):
        model = Normalized()
        module = quantize_weights(model, **options)
        module.clika_export(tmp_path / "few.onnx")
        with torch.no_grad():
            return float((module(make_data()[0]) - model(make_data()[0])).square().sum())

    assert output_error() < output_error(smooth_quant="off") / 2


def test_smoothing_int4_weights_never_add_nodes():
    """For INT4 weights, no division is added, and no factor without a gain."""
    try_on = partial(LowBitWeightEvaluator, bits=4, blocks=[0], options=ClikaCompileOptions())
    graph = trace_graph(Outlying())
    assert search_smoothing_factors(graph, SCHEME.layers, make_data(1), try_on)
    assert not search_smoothing_factors(
        graph, SCHEME.layers, make_data(1), try_on, SmoothingOptions(with_node_share=None)
    )
    assert not quantize_weights(Outlying()).clika_state.quantized.plan.smoothing
    even = Normalized()
    even.norm.weight.data[3] = 1.0
    even.one.weight.data[:, 3] *= 40.0
    assert not quantize_weights(even).clika_state.quantized.plan.smoothing


def test_equalization_skips_nonlinear_or_shared_activation():
    """Factors are not applied through tanh, or if an activation has other users."""
    graph = clika_compile(Chain(nn.Tanh).eval(), tracing_inputs=IMAGES[:1]).graph
    assert not search_factors(graph, IMAGES[:1])

    class Shared(Chain):
        def forward(self, x):
            inner = self.between(self.one(x))
            return self.two(inner), inner

    graph = clika_compile(Shared().eval(), tracing_inputs=IMAGES[:1]).graph
    assert not search_factors(graph, IMAGES[:1])


@pytest.mark.slow
def test_equalization_reduces_error_of_depthwise_chain(tmp_path):
    """Equalization reduces the error of a depthwise chain, and can be switched off."""

    def output_error(**options):
        model = Chain()
        module = clika_compile(
            model.eval(),
            calibration_inputs=IMAGES,
            quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            clika_compile_options=ClikaCompileOptions(**options),
        ).eval()
        module.clika_export(tmp_path / "chain.onnx")
        with torch.no_grad():
            return float((module(IMAGES[0]) - model(IMAGES[0])).square().sum())

    assert output_error() < output_error(equalization="off") / 4
    assert output_error(smooth_quant="off") == output_error()


def quantize_activations(model, **options):
    return clika_compile(
        model.eval(),
        calibration_inputs=make_data(),
        quantization_settings=VALUES,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        clika_compile_options=ClikaCompileOptions(**options),
    ).eval()


def layer_error(module, model):
    (x,) = make_data(1)
    with torch.no_grad():
        inner = model.norm(x)
        return float(((module(x) - inner) - (model(x) - inner)).square().sum())


def test_smoothing_reduces_error_exports_and_saves(tmp_path):
    """SmoothQuant reduces the error, and the module exports, saves and loads."""
    model = Outlying()
    module = quantize_activations(model)
    module.clika_export(tmp_path / "model.onnx")  # compared with the module
    copy = quantize_activations(Outlying())
    copy.load_state_dict(module.state_dict())
    assert torch.equal(copy(make_data()[0]), module(make_data()[0]))
    assert layer_error(module, model) < layer_error(quantize_activations(model, smooth_quant="off"), model) / 8


def test_ranges_file_stores_smoothing(tmp_path):
    """A ranges file contains the SmoothQuant factors of its ranges."""
    file = str(tmp_path / "ranges.safetensors")
    first = quantize_activations(Outlying(), ranges_file=file)
    kept = RangeTable.load(file).smoothing
    assert kept
    again = quantize_activations(Outlying(), ranges_file=file)
    assert torch.equal(first(make_data()[0]), again(make_data()[0]))
    RangeTable().save(file)
    assert RangeTable.load(file).smoothing is None


def test_ranges_file_other_smoothing_raises(tmp_path):
    """A ranges file with other SmoothQuant factors raises an error."""
    file = str(tmp_path / "ranges.safetensors")
    quantize_activations(Outlying(), ranges_file=file)
    message = r"its SmoothQuant factors are for activations \(smooth_quant='auto', equalization='auto'\), not for off"
    with pytest.raises(ModelError, match=message):
        quantize_activations(Outlying(), ranges_file=file, smooth_quant="off", equalization="off")


VALUES = QuantizationSettings(automatic_skip_quantization=False)
WEIGHTS = QuantizationSettings(
    prefer_weights_only_quantization=True,
    weights_num_bits=4,
    weights_only_quantization_block_size=0,
    automatic_skip_quantization=False,
)


@pytest.mark.parametrize(("first", "then"), [(VALUES, WEIGHTS), (WEIGHTS, VALUES)], ids=["weights then", "values then"])
def test_clika_initialize_algorithms_recomputes_smooth_quant_ranges(tmp_path, first, then):
    """Ranges that were smoothed for other settings are recomputed from the kept batches."""

    def compile_normalized(settings):
        return clika_compile(
            Normalized().eval(),
            calibration_inputs=make_data(),
            quantization_settings=settings,
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            logs_dir=tmp_path,
        ).eval()

    module, fresh = compile_normalized(first), compile_normalized(then)
    module.clika_initialize_algorithms(then)
    assert torch.equal(module(make_data()[0]), fresh(make_data()[0]))
    assert module.clika_state.calibration.table.batches == 3
    del module.clika_state.calibration.reservoir.batches[1:]
    module.clika_initialize_algorithms(first)
    assert "calibration runs again on 1 stored batch. Pass" in "".join(
        log.read_text() for log in tmp_path.glob("*.log")
    )


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_smoothing_other_threshold_needs_no_data(threshold):
    """Another threshold needs no data, and SmoothQuant does not change a float module."""
    module = quantize_activations(Outlying())
    before = module(make_data()[0])
    found = module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=threshold))
    assert bool(found.plan.smoothing) == bool(threshold)
    if threshold:
        assert torch.equal(module(make_data()[0]), before)


def test_search_smoothing_factors_fp16_or_empty_batch_none():
    """FP16 models and empty batches give no factors."""
    half = Outlying().half()
    graph = clika_compile(half.eval(), tracing_inputs=[make_data(1)[0].half()]).graph.clone()
    assert not search_factors(graph, [make_data(1)[0].half()])
    graph = clika_compile(Outlying().eval(), tracing_inputs=[make_data(1)[0], make_data(1)[0][:3]]).graph.clone()
    assert not search_factors(graph, [torch.empty(0, 32)])


def test_smoothing_ignores_rejected_batch():
    """A rejected batch does not influence the SmoothQuant factors."""
    module = clika_compile(Outlying().eval(), tracing_inputs=make_data(1))
    with pytest.raises(ModelError, match="contains NaN"):
        module.clika_initialize_algorithms(calibration_inputs=[torch.full((64, 32), torch.nan)])
    found = module.clika_initialize_algorithms(calibration_inputs=make_data())
    assert found.plan.smoothing
