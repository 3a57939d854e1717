"""The target ``onnxruntime``: what it writes, loads, runs and refuses, and what it says where it cannot."""

import pytest
import torch
from clika_ref_onnxruntime import target as target_module
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


def graph_of(kind="identity", dtype=torch.float32, **attrs):
    """Return one operator on x[n, 3]."""
    g = Graph("one")
    x = g.add_input(TensorType(dtype, (make_symbol("n"), 3)), "x")
    g.symbols["n"] = Symbol("n", 0, None, SymbolSource("x", 0))
    g.add_output(Builder(g, OPERATORS)(kind, x, **attrs))
    return g


def test_the_plugin_offers_a_target():
    (offered,) = clika_ref_targets()
    assert isinstance(offered, Target)
    assert offered.name == "onnxruntime"
    assert offered.unavailable_reason() is None


@pytest.mark.parametrize("optimize", [True, False])
def test_an_artifact_runs_at_every_size(tmp_path, optimize):
    target = OnnxRuntime(optimize=optimize)
    artifact = target.compile(graph_of("softmax", dim=1), tmp_path / "m.onnx")
    runner = target.load(artifact)
    for n in (1, 4):
        x = torch.randn(n, 3)
        (found,) = runner([x])
        torch.testing.assert_close(found, x.softmax(1), rtol=0, atol=4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype_goes_in_and_comes_out(tmp_path, dtype):
    x = torch.tensor([[0, 1, 1]]).to(dtype)
    (found,) = OnnxRuntime().load(OnnxRuntime().compile(graph_of(dtype=dtype), tmp_path / "m.onnx"))([x])
    assert found.dtype == dtype
    assert torch.equal(found, x)


def test_a_tensor_that_is_not_contiguous_is_read_as_it_is_indexed(tmp_path):
    runner = OnnxRuntime().load(OnnxRuntime().compile(graph_of(), tmp_path / "m.onnx"))
    x = torch.arange(6.0).reshape(3, 2).T
    assert torch.equal(runner([x])[0], x)


def test_the_artifact_states_names_size_nodes_and_guards(tmp_path):
    g = graph_of("relu")
    g.guards = [Guard(make_symbol("n") <= 8, "model.py:3")]
    artifact = OnnxRuntime().compile(g, tmp_path / "m.onnx")
    assert (artifact.input_names, artifact.output_names) == (("x",), ("relu",))
    assert artifact.facts["bytes"] == (tmp_path / "m.onnx").stat().st_size
    assert artifact.facts["nodes"] == 1
    assert artifact.facts["guards"] == ("n <= 8 (from model.py:3)",)


def test_each_node_is_explained(tmp_path):
    artifact = OnnxRuntime().compile(graph_of("relu"), tmp_path / "m.onnx")
    assert OnnxRuntime().explain(artifact) == {"relu": "float"}


def test_nodes_without_a_lowering_and_complex_values_are_refused():
    g = graph_of("relu")
    (node,) = g.nodes
    assert OnnxRuntime().unsupported_reason(node) is None
    node.outputs[0].type = TensorType(torch.complex64, (2,))
    assert "complex numbers, which ONNX does not support" in OnnxRuntime().unsupported_reason(node)


def test_arithmetic_in_bfloat16_is_refused_and_moving_it_is_not():
    (node,) = graph_of("relu", torch.bfloat16).nodes
    assert (
        "computes in bfloat16, which ONNX Runtime does not support on CPUs. Compile"
        in OnnxRuntime().unsupported_reason(node)
    )
    (node,) = graph_of("permute", torch.bfloat16, dims=(1, 0)).nodes
    assert OnnxRuntime().unsupported_reason(node) is None


def quantized_product(kind, axis, *, activation=True):
    """Return a product of x[2, 4] and w[4, 4], whose scales lie along a side of it."""
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
def test_scales_along_the_inner_side_of_a_product_are_refused(kind, wrong, right):
    *_, node = quantized_product(kind, wrong).nodes
    assert f"scales of its weight are on axis {wrong}, but ONNX Runtime" in OnnxRuntime().unsupported_reason(node)
    assert OnnxRuntime(optimize=False).unsupported_reason(node) is None
    *_, node = quantized_product(kind, right).nodes
    assert OnnxRuntime().unsupported_reason(node) is None
    *_, node = quantized_product(kind, wrong, activation=False).nodes
    assert OnnxRuntime().unsupported_reason(node) is None


def test_scales_along_a_side_of_a_stack_of_matrices_are_refused():
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


def test_a_refusal_says_whether_keeping_a_node_float_helps(monkeypatch):
    graph = quantized_product("matmul", 0)
    with pytest.raises(TargetError, match=r"on axis 0.*; kept float it would run: LayerQuantizationSettings\(skip"):
        check_supported(graph, OnnxRuntime())
    monkeypatch.setattr(OPERATORS["matmul"], "lowering", None)
    with pytest.raises(TargetError, match=r"has no ONNX lowering.*; keeping it float does not help"):
        check_supported(graph, OnnxRuntime())


def test_a_file_that_is_no_model_is_an_error_with_its_path(tmp_path):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(TargetError, match=r"ONNX Runtime .* cannot load .*broken\.onnx"):
        OnnxRuntime().load(Artifact(path, "onnxruntime", ("x",), ("y",)))


def test_inputs_that_do_not_fit_are_the_runtimes_error_under_our_name(tmp_path):
    runner = OnnxRuntime().load(OnnxRuntime().compile(graph_of(), tmp_path / "m.onnx"))
    with pytest.raises(TargetError, match=r"ONNX Runtime failed on m\.onnx"):
        runner([torch.zeros(2, 4)])


def test_a_missing_runtime_is_named_with_its_remedy(tmp_path, monkeypatch):
    artifact = OnnxRuntime().compile(graph_of(), tmp_path / "m.onnx")
    monkeypatch.setattr(target_module, "find_spec", lambda _: None)
    with pytest.raises(TargetError, match="onnxruntime is not installed; pip install onnxruntime"):
        OnnxRuntime().load(artifact)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_of_a_number_runs_although_the_runtime_fuses_it(tmp_path, approximate):
    g = Graph("number")
    build = Builder(g, OPERATORS)
    x = g.add_input(TensorType(torch.float32, ()), "x")
    g.add_output(build("neg", build("gelu", x, approximate=approximate)))  # the fusion needs a reader
    number = torch.tensor(0.7)
    (found,) = OnnxRuntime().load(OnnxRuntime().compile(g, tmp_path / "m.onnx"))([number])
    expected = -torch.nn.functional.gelu(number, approximate=approximate)
    torch.testing.assert_close(found, expected, rtol=0, atol=8 * torch.finfo(torch.float32).eps)  # 8 ulp of 1


@pytest.mark.parametrize("order", [("none", "tanh"), ("tanh", "none")])
def test_both_forms_of_gelu_of_one_tensor_run_although_the_runtime_fuses_them(tmp_path, order):
    """It shared the half of both, and fused it away under one: the file did not load."""
    g = Graph("both")
    x = g.add_input(TensorType(torch.float32, (3,)), "x")
    results = {form: Builder(g, OPERATORS)("gelu", x, approximate=form) for form in order}
    g.add_output(results["none"])
    runner = OnnxRuntime().load(OnnxRuntime().compile(g, tmp_path / "m.onnx"))
    inputs = torch.tensor([-1.0, 0.5, 3.0])
    found = runner([inputs])[0]
    torch.testing.assert_close(found, torch.nn.functional.gelu(inputs), rtol=0, atol=4 * torch.finfo(found.dtype).eps)


def test_a_number_is_rounded_to_half_precision_before_it_is_compared(tmp_path):
    """The runtime compares in float32, and leaves out a cast that another follows."""
    g = Graph("compared")
    x = g.add_input(TensorType(torch.float16, (2,)), "x")
    number = g.add_input(TensorType(torch.float32, ()), "number")
    g.add_output(Builder(g, OPERATORS)("eq", x, number))
    runner = OnnxRuntime().load(OnnxRuntime().compile(g, tmp_path / "m.onnx"))
    number = torch.tensor(50.013)
    x = torch.stack([number.half(), torch.tensor(49.0).half()])
    assert runner([x, number])[0].tolist() == torch.eq(x, number).tolist() == [True, False]
