"""INT4 constants with block scales: the written file, and the values that the runtime reads."""

import onnx
import pytest
import torch
from seeded_tensors import randn

from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
TARGET = REGISTRY.targets["onnxruntime"]
X = randn(3, 32)


def build_product(*, bits, block_size, sampled=False):
    """Return x[3, 32] times a low-bit weight, on request followed by a grid sampler."""
    g = Graph("few")
    build = Builder(g, REGISTRY.operators)
    x = g.add_input(TensorType(torch.float32, (3, 32)), "x")
    reach = 8 if bits == 4 else 128
    steps = torch.randint(-reach, reach, (32, 5), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    shape = (32 // block_size, 5) if block_size else (5,)
    scale = build.constant(torch.rand(shape, generator=torch.Generator().manual_seed(2)), "scale")
    axis = 0 if block_size else 1
    held = build("dequantize", build.constant(steps, "w"), scale, axis=axis, block_size=block_size, bits=bits)
    y = build("matmul", x, held)
    if sampled:
        image, points = build("reshape", y, shape=(1, 1, 3, 5)), build("reshape", y, shape=(1, 3, 5, 1))
        points = build("cat", points, points, dim=3)
        attrs = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False}
        y = build("grid_sampler", image, points, **attrs)
    g.add_output(y)
    return g


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_int4_constant_runtime_matches_interpreter(tmp_path, bits, block_size, sampled):
    """The runtime computes the same as the interpreter, for INT4 and INT8 weights, with and without blocks."""
    g = build_product(bits=bits, block_size=block_size, sampled=sampled)
    (wanted,), _ = interpret(g, [X])
    (found,) = TARGET.load(TARGET.compile(g, tmp_path / "m.onnx"))([X])
    rounded = X.abs().amax() / 127 / 2  # the runtime rounds what it multiplies to 8 bits, by block
    assert (found - wanted).abs().max() <= rounded * 32 * 128 if not sampled else found.isfinite().all()


def test_int4_constant_stored_in_half_a_byte_per_element(tmp_path):
    """An INT4 constant takes half a byte per element."""
    TARGET.compile(build_product(bits=4, block_size=16), tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    (stored,) = (t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT4)
    assert (list(stored.dims), len(stored.raw_data)) == ([32, 5], 80)
    assert not any(t.name == "w" for t in model.graph.initializer)


def test_int4_constant_odd_element_count_padded(tmp_path):
    """An odd number of INT4 elements is padded to a whole byte."""
    g = Graph("odd")
    build = Builder(g, REGISTRY.operators)
    x = g.add_input(TensorType(torch.float32, (3,)), "x")
    held = build("dequantize", build.constant(torch.tensor([-8, 7, 3], dtype=torch.int8), "w"), 0.5, bits=4)
    g.add_output(build("mul", x, held))
    (found,) = TARGET.load(TARGET.compile(g, tmp_path / "m.onnx"))([torch.ones(3)])
    assert found.tolist() == [-4.0, 3.5, 1.5]


@pytest.mark.parametrize(("bits", "block_size", "opset"), [(8, None, 18), (8, 16, 21), (4, None, 21)])
def test_compile_int4_or_blocks_use_opset_21(tmp_path, bits, block_size, opset):
    """Opset 21 is used only for INT4 weights or blocks."""
    TARGET.compile(build_product(bits=bits, block_size=block_size), tmp_path / "m.onnx")
    (imported,) = onnx.load(tmp_path / "m.onnx").opset_import
    assert imported.version == opset


def test_int4_computed_tensor_stored_as_int8(tmp_path):
    """A computed INT4 tensor stays in INT8."""
    g = Graph("computed")
    build = Builder(g, REGISTRY.operators)
    x = g.add_input(TensorType(torch.float32, (4, 4)), "x")
    steps = build("quantize", x, 0.5, 0, quant_min=-8, quant_max=7)
    g.add_output(build("dequantize", steps, 0.5, bits=4))
    (wanted,), _ = interpret(g, [X[:, :4].repeat(2, 1)[:4]])
    (found,) = TARGET.load(TARGET.compile(g, tmp_path / "m.onnx"))([X[:, :4].repeat(2, 1)[:4]])
    assert torch.equal(found, wanted)
