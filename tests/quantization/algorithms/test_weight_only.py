"""Weight-only quantization: storage, rounding, the choice of bits, and the results of module and artifact."""

import io
from dataclasses import replace

import onnx
import onnxruntime as ort
import pytest
import torch
from loaded_copies import load_copy
from seeded_tensors import randn
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    ModelError,
    QuantizationSettings,
    TargetError,
    clika_compile,
)
from clika_ref import LayerQuantizationSettings as Layer
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.core.registry import load_registry
from clika_ref.quantization.algorithms import weight_only
from clika_ref.quantization.algorithms.gptq import quantize_with_gptq
from clika_ref.quantization.algorithms.weight_only import quantize_low_bit
from clika_ref.quantization.qdq.packed_weights import PackedWeight, round_in_blocks

FOUR = QuantizedType(4, is_signed=True, is_symmetric=True)


def make_correlated_data(samples, inputs):
    """Return data with similar neighbouring elements."""
    return randn(samples, 4, seed=1) @ randn(4, inputs, seed=2) + 0.1 * randn(samples, inputs, seed=3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.table = nn.Linear(64, 96), nn.Linear(96, 10, bias=False), nn.Conv1d(1, 1, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) + self.table(x[:, :1])[..., :10]


DATA = [randn(4, 5, 64, seed=i) for i in range(3)]


def compile_net(layers=None, options=None, logs_dir=None, **settings):
    return clika_compile(
        Net().eval(),
        calibration_inputs=DATA,
        quantization_settings=QuantizationSettings(prefer_weights_only_quantization=True, **settings),
        layer_quantization_settings=layers,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        logs_dir=logs_dir,
        clika_compile_options=ClikaCompileOptions(**(options or {})),
    )


def packed_weights_by_name(module):
    return {name: (c.bits, c.block_size) for name, c in module.clika_state.quantized.plan.packed_weights.items()}


@pytest.mark.parametrize(("block_size", "blocks"), [(0, 1), (16, 4)])
def test_packed_weight_steps_nearest_per_block(block_size, blocks):
    """Packed weights are the nearest INT4 values per block; moved ones are clamped."""
    rows = randn(3, 64)
    scales = rows.reshape(3, blocks, -1).abs().amax(-1) / 7
    held = PackedWeight(4, block_size, scales)
    steps = held.steps(rows)
    assert (steps.dtype, int(steps.min()) >= -8, int(steps.max()) <= 7) == (torch.int8, True, True)
    missed = (held.dequantize(rows) - rows).reshape(3, blocks, -1).abs()
    assert (missed <= scales[..., None] / 2 * (1 + 1e-5)).all()
    moved = replace(held, offsets=torch.ones_like(steps))
    assert torch.equal(moved.steps(rows), (steps + 1).clamp(max=7))


def test_packed_weight_bytes_of_int4_and_scales():
    """INT4 weights take half a byte each, and scales four bytes."""
    assert PackedWeight(4, 16, torch.ones(3, 4)).bytes_of(3 * 64) == 3 * 64 // 2 + 3 * 4 * 4


def test_quantize_with_gptq_reduces_error_on_similar_data():
    """GPTQ reduces the error on similar data."""
    rows, seen, other = randn(16, 64), make_correlated_data(512, 64), make_correlated_data(256, 64)[:128]
    scales = (rows.abs().amax(1) / 7)[:, None]
    steps = quantize_with_gptq(rows, scales, FOUR, seen.T @ seen)
    assert steps is not None
    missed = [
        ((other @ (held - rows).T) ** 2).sum() for held in (steps.float() * scales, round_to_nearest(rows, scales))
    ]
    assert missed[0] < missed[1] / 2


def test_quantize_with_gptq_keeps_masked_zeros():
    """GPTQ keeps the zeros of a mask."""
    rows, seen = randn(16, 64), make_correlated_data(512, 64)
    rows[:, 1::2] = 0
    steps = quantize_with_gptq(rows, (rows.abs().amax(1) / 7)[:, None], FOUR, seen.T @ seen)
    assert steps is not None
    assert not steps[:, 1::2].any()
    assert steps[:, ::2].any()


def test_quantize_with_gptq_uncorrelated_data_rounds_to_nearest():
    """Uncorrelated data gives rounding to the nearest."""
    rows = randn(4, 8)
    scales = (rows.abs().amax(1) / 7)[:, None]
    steps = quantize_with_gptq(rows, scales, FOUR, torch.eye(8))
    assert steps is not None
    assert torch.equal(steps.float() * scales, round_to_nearest(rows, scales))


@pytest.mark.parametrize("gram", [torch.full((8, 8), torch.nan), torch.zeros(8, 8)])
def test_quantize_with_gptq_invalid_gram_returns_none(gram):
    """A Gram matrix of zeros or NaN gives no result."""
    assert quantize_with_gptq(randn(4, 8), torch.ones(4, 1), FOUR, gram) is None


@pytest.mark.parametrize("count", [1, 3])
def test_quantize_with_gptq_leaves_weight_unchanged(count):
    """The weight itself stays as it is, also one with a single row."""
    rows, seen = randn(count, 8), make_correlated_data(64, 8)
    before = rows.clone()
    assert quantize_with_gptq(rows, (rows.abs().amax(1) / 7)[:, None], FOUR, seen.T @ seen) is not None
    assert torch.equal(rows, before)


def test_quantize_low_bit_parts_equal_whole(monkeypatch):
    """A weight that is quantized in parts has the integers and scales of one quantized at once."""
    rows, seen = randn(16, 64), make_correlated_data(512, 64)
    gram, options = seen.T @ seen, ClikaCompileOptions(gptq="on")
    whole = quantize_low_bit(rows, 4, 16, gram, gram, options)
    monkeypatch.setattr(weight_only, "MAX_PART_ELEMENTS", 5 * 64)
    parts = quantize_low_bit(rows, 4, 16, gram, gram, options)
    assert torch.equal(parts.scales, whole.scales)
    assert torch.equal(parts.steps(rows), whole.steps(rows))


def round_to_nearest(rows, scales):
    return (rows / scales).round().clamp(-8, 7) * scales


def test_weight_only_selects_smallest_bits_within_threshold():
    """Each layer gets the smallest bit width within the threshold."""
    assert packed_weights_by_name(compile_net(weights_num_bits=[4, 8], quantization_sensitivity_threshold=1.0)) == {
        "linear": (4, 0),
        "linear_1": (4, 0),
    }
    finer = packed_weights_by_name(compile_net(weights_num_bits=[4, 8], quantization_sensitivity_threshold=0.0003))
    assert finer == {"linear": (8, 0), "linear_1": (4, 0)}


def test_weight_only_indivisible_block_size_replaced():
    """A block size that does not divide a row is replaced by a smaller one, with a note."""
    held = packed_weights_by_name(compile_net(weights_num_bits=4, weights_only_quantization_block_size=[64, 32]))
    module = compile_net(weights_num_bits=4, weights_only_quantization_block_size=64)
    assert set(held.values()) <= {(4, 64), (4, 32)}
    assert packed_weights_by_name(module) == {"linear": (4, 64), "linear_1": (4, 32)}
    notes = [layer.note for layer in module.clika_summary().layers if layer.scope == "second"]
    assert notes == ["in blocks of 32, as no requested size divides its rows"]


def test_weight_only_short_rows_without_block_stay_float():
    """Rows that no block divides keep their weight in float, with the reason."""
    module = clika_compile(
        nn.Linear(7, 4),
        calibration_inputs=[randn(3, 7)],
        quantization_settings=QuantizationSettings(
            prefer_weights_only_quantization=True, weights_only_quantization_block_size=32
        ),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    (reason,) = module.clika_state.quantized.plan.floats.values()
    assert reason.startswith("its 7 inputs are not a multiple of a block size in [32], nor of a smaller power of two")


def test_weight_only_sensitive_layer_stays_float_unless_forced():
    """A layer above the threshold keeps its float weight, unless the user quantizes everything."""
    kept = compile_net(weights_num_bits=4, quantization_sensitivity_threshold=1e-9)
    assert packed_weights_by_name(kept) == {}
    reasons = kept.clika_state.quantized.plan.floats
    assert "too sensitive" in reasons["linear"]
    assert reasons["conv1d"] == "the target computes conv1d with float weights"
    forced = compile_net(weights_num_bits=[4, 8], automatic_skip_quantization=False)
    assert {bits for bits, _ in packed_weights_by_name(forced).values()} == {8}


def test_weight_only_layer_settings_bits_and_skip():
    """Layers can have their own bit width or be skipped."""
    module = compile_net({"first": Layer(skip_quantization=True), "second": Layer(weights_num_bits=4)})
    assert packed_weights_by_name(module)["linear_1"][0] == 4
    assert "skip_quantization" in module.clika_state.quantized.plan.floats["linear"]


FORCED = {"weights_num_bits": 4, "weights_only_quantization_block_size": 0, "automatic_skip_quantization": False}


def packed_weights(**options):
    return compile_net(options=options, **FORCED).clika_state.quantized.plan.packed_weights.values()


@pytest.mark.slow
def test_weight_only_rounding_and_clipping_switches(monkeypatch):
    """Rounding and clipping are switched as for INT8 layers."""
    assert all(held.offsets is not None for held in packed_weights(gptq="on"))
    assert all(held.offsets is None for held in packed_weights(gptq="off"))
    assert any(held.offsets is not None for held in packed_weights())
    assert all(held.offsets is None for held in packed_weights(algorithm_seconds=1e-9))
    assert all(held.offsets is not None for held in packed_weights(algorithm_seconds=1e-9, gptq="on"))
    whole, clipped = packed_weights(weight_clipping="off"), packed_weights()
    assert all((a.scales >= b.scales).all() for a, b in zip(whole, clipped, strict=True))
    assert any((a.scales > b.scales).any() for a, b in zip(whole, clipped, strict=True))


@pytest.mark.parametrize(("feedback", "has_offsets"), [("auto", False), ("on", True), ("off", False)])
def test_quantize_low_bit_gptq_kept_if_better_or_on(feedback, has_offsets):
    """GPTQ is kept only if it helps on other data, or if it is on."""
    rows, seen, other = randn(16, 64), make_correlated_data(512, 64), randn(256, 64, seed=5)
    held = quantize_low_bit(rows, 4, 0, seen.T @ seen, other.T @ other, ClikaCompileOptions(gptq=feedback))
    assert (held.offsets is not None) is has_offsets


def test_packed_weight_shifted_steps_start_from_clamped():
    """Moved steps start from the clamped value."""
    held = PackedWeight(4, 0, torch.ones(1, 1), torch.tensor([[-1, 1, -1, 0]], dtype=torch.int8))
    assert held.steps(torch.tensor([[9.0, -20.0, 3.0, 9.0]])).tolist() == [[6, -7, 2, 7]]


@pytest.mark.slow
def test_weight_only_skip_tail_false_quantizes_tail():
    """`skip_tail_quantization=False` quantizes the tail at any sensitivity."""
    strict = {"weights_num_bits": [4, 8], "quantization_sensitivity_threshold": 1e-9}
    assert packed_weights_by_name(compile_net(skip_tail_quantization=False, **strict)) == {"linear_1": (8, 0)}
    assert packed_weights_by_name(compile_net(**strict)) == {}
    assert packed_weights_by_name(compile_net(skip_tail_quantization=False, quantization_sensitivity_threshold=0)) == {}


def test_weight_only_idle_options_warn(tmp_path):
    """Options without an effect on weight-only quantization are logged as a warning."""
    compile_net(options={"observer": "min-max", "bias_correction": "on", "equalization": "off"}, logs_dir=tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert "observer='min-max', bias_correction='on' has no effect with weight-only quantization" in log


def test_weight_only_activation_bits_raise():
    """A bit width for float activations raises an error."""
    with pytest.raises(ModelError, match=r"keeps activations in float, but activations_num_bits of 'first' quantizes"):
        compile_net({"first": Layer(activations_num_bits=8)})


def test_weight_only_unsupported_bits_raise():
    """A bit width that the target does not support raises an error."""
    with pytest.raises(
        ModelError, match=r"weights_num_bits: 3 bits are requested for linear.*the target supports 4 or 8"
    ):
        compile_net(weights_num_bits=3)


def test_weight_only_unsupported_target_raises(monkeypatch):
    """A target without weight-only quantization raises an error."""
    target = load_registry().targets["onnxruntime"]
    without = replace(target, scheme=replace(target.scheme, weights_only=None))
    monkeypatch.setattr(type(target), "configure", lambda *_: without)
    with pytest.raises(TargetError, match="does not support weight-only quantization"):
        compile_net()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [0, 32])
def test_weight_only_artifact_matches_module(tmp_path, bits, block_size):
    """The artifact has INT4 or INT8 weights and matches the module."""
    module = compile_net(
        weights_num_bits=bits,
        weights_only_quantization_block_size=block_size,
        quantization_sensitivity_threshold=1.0,
    ).eval()
    module.clika_export(tmp_path / "m.onnx")  # compared with the module, which rounds as the runtime does
    layers = [n for n in module.clika_explain().nodes if n.operator == "matmul"]
    assert [(n.planned, n.runs) for n in layers] == [(f"int{bits} weights",) * 2] * 2
    kinds = {t.data_type for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert (onnx.TensorProto.INT4 if bits == 4 else onnx.TensorProto.INT8) in kinds


def test_weight_only_saved_module_matches():
    """A saved module has the same outputs, also in train mode."""
    module = compile_net(weights_num_bits=4, quantization_sensitivity_threshold=1.0).eval()
    again = load_copy(module)
    assert torch.equal(again.eval()(DATA[0]), module(DATA[0]))
    assert packed_weights_by_name(again) == packed_weights_by_name(module)
    torch.testing.assert_close(module(DATA[0]), module.train()(DATA[0]))


def test_weight_only_report_contains_sensitivity_and_bytes():
    """The report contains the sensitivity and the bytes of each layer."""
    module = compile_net()
    found = module.clika_initialize_algorithms(
        QuantizationSettings(prefer_weights_only_quantization=True, weights_num_bits=4)
    )
    first = next(layer for layer in found.layers if layer.scope == "first")
    assert first.sensitivity is not None
    assert first.bytes_before == 4 * 64 * 96
    assert first.bytes_quantized < first.bytes_before / 6
    assert [row.layers for row in found.what_if] == [1, 2]


def test_round_in_blocks_scales_by_largest_element():
    """Each block is rounded by its largest element."""
    x = torch.tensor([[127.0, 0.4, 1.27, 0.004]])
    assert torch.allclose(round_in_blocks(x, 2), torch.tensor([[127.0, 0.0, 1.27, 0.0]]))
    assert torch.allclose(round_in_blocks(x[:, :3], 2), torch.tensor([[127.0, 0.0, 1.27]]))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "block_size"), [(4, 0), (4, 32), (8, 0), (8, 32)])
def test_torch_onnx_export_keeps_low_bit_weights(bits, block_size, tmp_path):
    """`torch.onnx.export` keeps the INT4 and INT8 weights."""
    module = compile_net(
        weights_num_bits=bits, weights_only_quantization_block_size=block_size, quantization_sensitivity_threshold=1.0
    ).eval()
    program = torch.onnx.export(module, (DATA[0],), dynamo=True, verbose=False, opset_version=21)
    program.save(tmp_path / "net.onnx")
    kinds = {
        t.data_type for t in onnx.load(tmp_path / "net.onnx").graph.initializer if len(t.dims) == 2 and t.dims[0] > 9
    }
    options = ort.SessionOptions()  # optimized, it rounds the activations of INT8 layers
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(tmp_path / "net.onnx", options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: DATA[0].numpy()})
    assert torch.allclose(torch.from_numpy(found), module(DATA[0]), atol=1e-5)
    small = onnx.TensorProto.INT4 if bits == 4 else onnx.TensorProto.INT8
    assert small in kinds
    assert (tmp_path / "net.onnx").stat().st_size < 4 * 64 * 96, "or its weights are float"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torch_onnx_export_dynamo_false_warns():
    """`torch.onnx.export(dynamo=False)` warns that it exports the float model."""
    module = compile_net(weights_num_bits=8, quantization_sensitivity_threshold=1.0).eval()
    with pytest.warns(UserWarning, match=r"dynamo=False.* Net is exported in float\. Export with dynamo=True"):
        torch.onnx.export(module, (DATA[0],), io.BytesIO(), dynamo=False, verbose=False)
