"""The target ``onnxruntime``: files that it writes, loads, runs and rejects, and its messages."""

import pytest
import torch
from clika_ref_onnxruntime import target as target_module
from clika_ref_onnxruntime.explaining import ALL_OPTIMIZATIONS, NO_OPTIMIZATIONS
from clika_ref_onnxruntime.plugin import clika_ref_targets
from clika_ref_onnxruntime.target import OnnxRuntime

from clika_ref.compiled.lowering import check_supported
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, make_symbol
from clika_ref.core.targets import Target
from clika_ref.core.types import TensorType

OPERATORS = load_registry().operators


def build_graph(kind="identity", dtype=torch.float32, **attrs):
    """Return one operator on x[n, 3]."""
    g = Graph("one")
    x = g.add_input(TensorType(dtype, (make_symbol("n"), 3)), "x")
    g.symbols["n"] = Symbol("n", 0, None, SymbolSource("x", 0))
    g.add_output(Builder(g, OPERATORS)(kind, x, **attrs))
    return g


def test_plugin_provides_onnxruntime_target():
    """The plugin provides a target."""
    (offered,) = clika_ref_targets()
    assert isinstance(offered, Target)
    assert offered.name == "onnxruntime"
    assert offered.unavailable_reason() is None


@pytest.mark.parametrize("level", [ALL_OPTIMIZATIONS, NO_OPTIMIZATIONS])
def test_load_dynamic_artifact_runs_at_each_size(tmp_path, level):
    """An artifact runs at every size."""
    target = OnnxRuntime(optimization_level=level)
    artifact = target.compile(build_graph("softmax", dim=1), tmp_path / "m.onnx")
    runner = target.load(artifact)
    for n in (1, 4):
        x = torch.randn(n, 3)
        (found,) = runner([x])
        torch.testing.assert_close(found, x.softmax(1), rtol=0, atol=4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_load_identity_round_trips_each_dtype(tmp_path, dtype):
    """Each dtype is accepted and returned."""
    x = torch.tensor([[0, 1, 1]]).to(dtype)
    (found,) = OnnxRuntime().load(OnnxRuntime().compile(build_graph(dtype=dtype), tmp_path / "m.onnx"))([x])
    assert found.dtype == dtype
    assert torch.equal(found, x)


def test_load_noncontiguous_input_read_by_index(tmp_path):
    """A tensor that is not contiguous is read by its indices."""
    runner = OnnxRuntime().load(OnnxRuntime().compile(build_graph(), tmp_path / "m.onnx"))
    x = torch.arange(6.0).reshape(3, 2).T
    assert torch.equal(runner([x])[0], x)


def test_compile_artifact_states_names_and_facts(tmp_path):
    """The artifact states names, size, nodes and guards."""
    g = build_graph("relu")
    g.guards = [Guard(make_symbol("n") <= 8, "model.py:3")]
    artifact = OnnxRuntime().compile(g, tmp_path / "m.onnx")
    assert (artifact.input_names, artifact.output_names) == (("x",), ("relu",))
    assert artifact.facts["bytes"] == (tmp_path / "m.onnx").stat().st_size
    assert artifact.facts["nodes"] == 1
    assert artifact.facts["guards"] == ("n <= 8 (from model.py:3)",)


def test_explain_returns_precision_of_each_node(tmp_path):
    """Each node is explained."""
    artifact = OnnxRuntime().compile(build_graph("relu"), tmp_path / "m.onnx")
    assert OnnxRuntime().explain(artifact) == {"relu": "float"}


def test_unsupported_reason_complex_tensor_named():
    """Complex tensors are unsupported."""
    g = build_graph("relu")
    (node,) = g.nodes
    assert OnnxRuntime().unsupported_reason(node) is None
    node.outputs[0].type = TensorType(torch.complex64, (2,))
    assert "complex numbers, which ONNX does not support" in OnnxRuntime().unsupported_reason(node)


def test_unsupported_reason_bfloat16_math_but_not_moves():
    """Arithmetic in bfloat16 is unsupported; moving it is supported."""
    (node,) = build_graph("relu", torch.bfloat16).nodes
    assert (
        "computes in bfloat16, which ONNX Runtime does not support on CPUs. Compile"
        in OnnxRuntime().unsupported_reason(node)
    )
    (node,) = build_graph("permute", torch.bfloat16, dims=(1, 0)).nodes
    assert OnnxRuntime().unsupported_reason(node) is None


def build_quantized_product(kind, axis, *, activation=True):
    """Return a product of x[2, 4] and w[4, 4], with scales along a dim of w."""
    g = Graph("product")
    build = Builder(g, OPERATORS)
    x = g.add_input(TensorType(torch.float32, (2, 4)), "x")
    if activation:
        x = build("dequantize", build("quantize", x, 0.5, 3, dtype=torch.uint8), 0.5, 3)
    w = g.add_constant(torch.arange(16, dtype=torch.int8).reshape(4, 4), "w")
    scale = g.add_constant(torch.tensor([0.5, 1.0, 2.0, 4.0]), "scale")
    g.add_output(build(kind, x, build("dequantize", w, scale, axis=axis)))
    return g


@pytest.mark.parametrize(("kind", "wrong", "right"), [("matmul", 0, -1), ("linear", 1, 0), ("linear", -1, -2)])
def test_unsupported_reason_scales_along_inner_dim_named(kind, wrong, right):
    """Scales along the inner dim of a matrix product are unsupported."""
    *_, node = build_quantized_product(kind, wrong).nodes
    assert f"scales of its weight are on axis {wrong}, but ONNX Runtime" in OnnxRuntime().unsupported_reason(node)
    assert OnnxRuntime(optimization_level=NO_OPTIMIZATIONS).unsupported_reason(node) is None
    *_, node = build_quantized_product(kind, right).nodes
    assert OnnxRuntime().unsupported_reason(node) is None
    *_, node = build_quantized_product(kind, wrong, activation=False).nodes
    assert OnnxRuntime().unsupported_reason(node) is None


def test_unsupported_reason_scales_of_stacked_matrices_named():
    """Scales along a dim of stacked matrices are unsupported."""
    g = Graph("stack")
    build = Builder(g, OPERATORS)
    x = g.add_input(TensorType(torch.float32, (2, 3, 4)), "x")
    x = build("dequantize", build("quantize", x, 0.5, 3, dtype=torch.uint8), 0.5, 3)
    w = g.add_constant(torch.ones(2, 4, 5, dtype=torch.int8), "w")
    several = build("dequantize", w, g.add_constant(torch.ones(5), "scales"), axis=2)
    one = build("dequantize", w, 0.5)
    column = g.add_constant(torch.ones(2, 4, 1, dtype=torch.int8), "column")
    single = build("dequantize", column, g.add_constant(torch.ones(1), "scale"), axis=2)
    assert "its weight has 3 dims and per-channel scales," in OnnxRuntime().unsupported_reason(
        build("matmul", x, several).producer
    )
    for taken in (one, single):
        assert OnnxRuntime().unsupported_reason(build("matmul", x, taken).producer) is None


def test_check_supported_message_states_if_float_helps(monkeypatch):
    """The error states if keeping the node in float helps."""
    graph = build_quantized_product("matmul", 0)
    with pytest.raises(TargetError, match=r"on axis 0.*; in float it would run: LayerQuantizationSettings\(skip"):
        check_supported(graph, OnnxRuntime())
    monkeypatch.setattr(OPERATORS["matmul"], "lowering", None)
    with pytest.raises(TargetError, match=r"has no ONNX lowering.*; it would not run in float either"):
        check_supported(graph, OnnxRuntime())


def test_load_invalid_file_raises(tmp_path):
    """A file that is no model raises with its path."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(TargetError, match=r"ONNX Runtime .* cannot load .*broken\.onnx"):
        OnnxRuntime().load(Artifact(path, "onnxruntime", ("x",), ("y",)))


def test_runner_wrong_input_shape_raises_target_error(tmp_path):
    """Inputs with a wrong shape raise a TargetError."""
    runner = OnnxRuntime().load(OnnxRuntime().compile(build_graph(), tmp_path / "m.onnx"))
    with pytest.raises(TargetError, match=r"ONNX Runtime failed on m\.onnx"):
        runner([torch.zeros(2, 4)])


def test_load_missing_runtime_raises(tmp_path, monkeypatch):
    """A missing runtime is named with the command to install it."""
    artifact = OnnxRuntime().compile(build_graph(), tmp_path / "m.onnx")
    monkeypatch.setattr(target_module, "find_spec", lambda _: None)
    with pytest.raises(TargetError, match="onnxruntime is not installed; pip install onnxruntime"):
        OnnxRuntime().load(artifact)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_scalar_runs_despite_fusion(tmp_path, approximate):
    """A gelu of a scalar runs although the runtime fuses it."""
    g = Graph("number")
    build = Builder(g, OPERATORS)
    x = g.add_input(TensorType(torch.float32, ()), "x")
    g.add_output(build("neg", build("gelu", x, approximate=approximate)))  # the fusion needs a reader
    number = torch.tensor(0.7)
    (found,) = OnnxRuntime().load(OnnxRuntime().compile(g, tmp_path / "m.onnx"))([number])
    expected = -torch.nn.functional.gelu(number, approximate=approximate)
    torch.testing.assert_close(found, expected, rtol=0, atol=8 * torch.finfo(torch.float32).eps)  # 8 ulp of 1


@pytest.mark.parametrize("order", [("none", "tanh"), ("tanh", "none")])
def test_gelu_both_forms_of_one_tensor_run(tmp_path, order):
    """Both forms of gelu of one tensor run, although the runtime fuses them."""
    g = Graph("both")
    x = g.add_input(TensorType(torch.float32, (3,)), "x")
    results = {form: Builder(g, OPERATORS)("gelu", x, approximate=form) for form in order}
    g.add_output(results["none"])
    runner = OnnxRuntime().load(OnnxRuntime().compile(g, tmp_path / "m.onnx"))
    inputs = torch.tensor([-1.0, 0.5, 3.0])
    found = runner([inputs])[0]
    torch.testing.assert_close(found, torch.nn.functional.gelu(inputs), rtol=0, atol=4 * torch.finfo(found.dtype).eps)


def test_eq_float16_rounds_number_before_comparison(tmp_path):
    """A number is rounded to FP16 before the comparison; the runtime would compare in float32."""
    g = Graph("compared")
    x = g.add_input(TensorType(torch.float16, (2,)), "x")
    number = g.add_input(TensorType(torch.float32, ()), "number")
    g.add_output(Builder(g, OPERATORS)("eq", x, number))
    runner = OnnxRuntime().load(OnnxRuntime().compile(g, tmp_path / "m.onnx"))
    number = torch.tensor(50.013)
    x = torch.stack([number.half(), torch.tensor(49.0).half()])
    assert runner([x, number])[0].tolist() == torch.eq(x, number).tolist() == [True, False]
