"""Graphs as ONNX models: names, scopes, symbolic dims, constants, and errors of lowerings."""

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from clika_ref.core.errors import ModelError, PluginError, TargetError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, make_symbol
from clika_ref.core.types import Origin, TensorType
from clika_ref.onnx_export.builder import NewerOpsetError, OnnxBuilder
from clika_ref.onnx_export.emission import GUARDS_KEY, SCOPE_KEY, SOURCE_KEY, emit, emit_node

OPERATORS = load_registry().operators


def build_chain(*kinds):
    """Return a chain of unary operators on x."""
    g = Graph("chain")
    value = g.add_input(TensorType(torch.float32, (make_symbol("n"), 4)), "x")
    g.symbols["n"] = Symbol("n", 0, None, SymbolSource("x", 0))
    for kind in kinds:
        value = Builder(g, OPERATORS, None, Origin(("encoder", "encoder.act"), ("model.py:7",)))(kind, value)
    g.add_output(value)
    return g


def test_emit_keeps_value_names_scope_and_source_line():
    """Values keep their names; nodes keep their scope and source line."""
    proto = ir.to_proto(emit(build_chain("relu", "sigmoid")))
    assert [n.output[0] for n in proto.graph.node] == ["relu", "sigmoid"]
    properties = {p.key: p.value for p in proto.graph.node[0].metadata_props}
    assert properties == {SCOPE_KEY: "encoder.act", SOURCE_KEY: "model.py:7"}


def test_emit_node_sizes_become_inputs():
    """A single node is emitted with its sizes as an input, and the graph stays unchanged."""
    g = Graph("two")
    n, m = make_symbol("n"), make_symbol("m")
    x = g.add_input(TensorType(torch.float32, (n, m)), "x")
    g.symbols = {"n": Symbol("n", 0, None, SymbolSource("x", 0)), "m": Symbol("m", 0, None, SymbolSource("x", 1))}
    build = Builder(g, OPERATORS)
    g.add_output(build("mul", build("reshape", x, shape=(n * m, 1)), n))
    before = str(g)
    reshape, mul = (ir.to_proto(emit_node(node)).graph for node in g.nodes)
    onnx.checker.check_model(onnx.helper.make_model(reshape, opset_imports=[onnx.helper.make_opsetid("", 18)]))
    assert reshape.node[-1].op_type == "Reshape"
    assert [i.name for i in mul.input] == ["sizes", "operand"]
    assert mul.node[-1].op_type == "Mul"
    assert str(g) == before


def test_emit_symbolic_dims_named_in_inputs_and_outputs():
    """Symbolic dims have their names in the inputs and outputs."""
    proto = ir.to_proto(emit(build_chain("relu")))
    for value in (proto.graph.input[0], proto.graph.output[0]):
        first, second = value.type.tensor_type.shape.dim
        assert (first.dim_param, second.dim_value) == ("n", 4)


def test_emit_records_guards_in_metadata():
    """The metadata records the guards, with their source lines."""
    g = build_chain("relu")
    assert not ir.to_proto(emit(g)).metadata_props
    g.guards = [Guard(make_symbol("n") <= 8, "model.py:3"), Guard(make_symbol("n") > 1, "")]
    (recorded,) = ir.to_proto(emit(g)).metadata_props
    assert (recorded.key, recorded.value) == (GUARDS_KEY, "n <= 8 (from model.py:3)\nn > 1")


def test_emit_lowering_returning_operand_adds_identity():
    """A lowering that returns its operand gets an Identity node."""
    proto = ir.to_proto(emit(build_chain("identity")))
    onnx.checker.check_model(proto)
    assert [(n.op_type, list(n.input), list(n.output)) for n in proto.graph.node] == [("Identity", ["x"], ["identity"])]


def test_emit_equal_constants_stored_once():
    """Equal constants are stored once."""
    g = Graph("twice")
    x = g.add_input(TensorType(torch.float32, (2,)), "x")
    build = Builder(g, OPERATORS)
    g.add_output(build("add", build("mul", x, 0.5), 0.5))
    assert len(emit(g).graph.initializers) == 1


def test_emit_missing_lowerings_listed_together():
    """All nodes without a lowering are listed in one error."""

    @operator()
    def pass_through(x: Tensor) -> Tensor:
        """Return x."""
        return x

    g = Graph("two")
    x = g.add_input(TensorType(torch.float32, (2,)), "x")
    build = Builder(g, OPERATORS, None, Origin(("head",), ("net.py:3",)))
    g.add_output(build(pass_through, build(pass_through, x)))
    with pytest.raises(
        TargetError,
        match=r"cannot export 2 nodes to ONNX:\n  pass_through in head at net\.py:3\n(.*\n)*.*@<operator>\.onnx",
    ):
        emit(g)


@pytest.mark.parametrize(
    ("lowering", "message"),
    [
        (lambda op, x: op.Relu(3), r"op\.Relu: operand 3 is a int\. Use op\.like"),
        (lambda op, x: (x, x), r"returned 2 values. It must return 1 result of `op` for"),
        (lambda op, x: None, r"returned None. It must return 1 result of `op` for"),
        (lambda op, x: op.relu(x), r"`op` has no method 'relu'"),
        (lambda op, x: 1 / 0, r"the ONNX lowering of identity_op failed on .*ZeroDivisionError"),
    ],
)
def test_emit_broken_lowering_names_operator_and_node(lowering, message):
    """A broken lowering raises an error that names its node."""

    @operator()
    def identity_op(x: Tensor) -> Tensor:
        """Return x."""
        return x

    identity_op.onnx(lowering)
    g = Graph("one")
    g.add_output(Builder(g, OPERATORS)(identity_op, g.add_input(TensorType(torch.float32, (2,)), "x")))
    with pytest.raises(PluginError, match=message):
        emit(g)


def test_emit_complex32_raises():
    """A dtype without an ONNX element type raises an error."""
    with pytest.raises(ModelError, match=r"ONNX has no element type for torch\.complex32"):
        emit(build_graph_of_dtype(torch.complex32))


def build_graph_of_dtype(dtype):
    g = Graph("odd")
    value = g.add_input(TensorType(dtype, (2,)), "x")
    g.add_output(Builder(g, OPERATORS)("identity", value, types=(value.type,)))
    return g


@pytest.mark.parametrize(
    ("dtype", "kinds", "opset"),
    [
        (torch.bfloat16, ("relu", "sigmoid"), 18),
        (torch.bfloat16, ("relu", "sin"), 22),
        (torch.bfloat16, ("hardswish",), 22),
        (torch.float16, ("hardswish", "sin"), 18),
    ],
)
def test_emit_bfloat16_selects_newer_opset_if_needed(dtype, kinds, opset):
    """A newer opset is used only if operators need it for bfloat16."""
    g = Graph("chain")
    value = g.add_input(TensorType(dtype, (2, 4)), "x")
    for kind in kinds:
        value = Builder(g, OPERATORS)(kind, value)
    g.add_output(value)
    proto = ir.to_proto(emit(g))
    onnx.checker.check_model(proto, full_check=True)
    assert proto.opset_import[0].version == opset


def test_emit_bfloat16_scales_and_operators_use_opset_22():
    """BF16 scales and BF16 operators together select the newest required opset."""
    g = Graph("scaled")
    build = Builder(g, OPERATORS)
    x = g.add_input(TensorType(torch.bfloat16, (2, 4)), "x")
    scale = build.constant(torch.tensor(0.5, dtype=torch.bfloat16), "scale")
    integers = build("quantize", x, scale, 0)
    g.add_output(build("hardswish", build("dequantize", integers, scale, dtype=torch.bfloat16)))
    proto = ir.to_proto(emit(g))
    onnx.checker.check_model(proto, full_check=True)
    assert proto.opset_import[0].version == 22


def test_adopt_bfloat16_node_requires_newer_opset():
    """Adopted nodes that need a newer opset for bfloat16 raise NewerOpsetError."""
    op = OnnxBuilder()
    op.results = (TensorType(torch.bfloat16, (2,)),)
    x = op.declare(ir.Value(name="x"), op.result)
    op.adopt([ir.Node("", "Relu", [x])])
    with pytest.raises(NewerOpsetError, match="22"):
        op.adopt([ir.Node("", "Sin", [x])])
