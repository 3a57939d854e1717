"""Drawings of graphs: texts, modules, colors, and Q/DQ pairs."""

import pytest
import torch
from clika_ref_visualize.pictures.drawing import Role
from clika_ref_visualize.pictures.graph_drawing import build_drawing
from clika_ref_visualize.pictures.svg import write_svg
from read_pictures import Page
from small_graphs import TYPE, add_weight, append_node, build_residual_graph, concat, layer, plus, split

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.core.registry import load_registry
from clika_ref.export.explanation import Explanation, NodeFacts
from clika_ref.quantization.qdq.insertion import Plan

SCHEME = QuantizationScheme(
    activations=QuantizedType(),
    weights=QuantizedType(is_signed=True, is_symmetric=True),
    layers=frozenset({"layer"}),
    fused={"plus": {"alpha": 1.0}},
)


@pytest.fixture(scope="module")
def operators():
    return {**load_registry().operators, "layer": layer, "plus": plus}


def boxes_by_key(drawing):
    return {box.key: box for box in drawing.root.boxes()}


def make_quantized_graph(operators, *, axis=0):
    """Return ``plus(plus(layer(quantized x, quantized weight), 2), x)``."""
    graph = Graph("Quantized")
    x = graph.add_input(TYPE, "x")
    build = Builder(graph, operators)
    integers = graph.add_constant(torch.zeros(4, 8, dtype=torch.int8), "weight_integers")
    scales = graph.add_constant(torch.ones(4), "weight_scale")
    weight = build("dequantize", integers, scales, axis=axis)
    quantized_x = build("dequantize", build("quantize", x, 0.25, 3, dtype=torch.uint8), 0.25, 3)
    y = append_node(graph, layer, quantized_x, weight)
    graph.add_output(append_node(graph, plus, append_node(graph, plus, y, 2.0), x))
    return graph


def test_build_drawing_box_shows_name_types_and_attributes():
    """A box shows the op type, name, types, weight and attributes."""
    page = Page(write_svg(build_drawing(build_residual_graph())))
    assert page.texts("node layer_1").splitlines() == [
        "layer",
        "namebody.0.first",
        "infloat32[2, 8]",
        "weightfloat32[4, 8]",
        "outfloat32[2, 8]",
        "stride (1, 1)",
    ]


def test_build_drawing_tooltip_names_module_and_inputs():
    """A tooltip shows all facts, with the names of the inputs."""
    lines = Page(write_svg(build_drawing(build_residual_graph()))).tooltip("node layer_1").splitlines()
    assert lines[0] == "layer"
    for line in ("name: layer_1", "module: body.0.first", "x: layer: float32[2, 8]", "attribute: stride (1, 1)"):
        assert line in lines
    assert "weight: body.0.first.weight: float32[4, 8]" in lines


def test_build_drawing_modules_become_groups():
    """Modules become groups; a module of a single node names that node."""
    drawing = build_drawing(build_residual_graph())
    (body,) = [member for member in drawing.root.members if hasattr(member, "members")]
    assert body.title == "body"
    assert [member.title for member in body.members] == ["body.0", "body.1"]
    assert [dict(box.rows)["name"] for box in body.members[0].members] == ["body.0.first", "body.0.second", "plus"]
    others = [dict(box.rows)["name"] for box in drawing.root.members if box is not body]
    assert others == ["x", "stem", "head", "layer_5"]


def test_build_drawing_without_plan_has_no_int8():
    """A graph without a plan has no INT8 roles or badges."""
    drawing = build_drawing(build_residual_graph())
    assert drawing.roles == [Role.INTERFACE, Role.FLOAT]
    assert not drawing.has_quantized_edges
    assert not any(box.badge for box in drawing.root.boxes())


def test_build_drawing_qdq_pairs_become_edges_and_rows(operators):
    """Q/DQ pairs become INT8 edges and rows of a box."""
    drawing = build_drawing(make_quantized_graph(operators), Plan(SCHEME))
    found = boxes_by_key(drawing)
    assert [box.kind for box in found.values()] == ["input", "layer", "plus", "plus", "output"]
    assert found["node layer"].rows[1:3] == [("in", "uint8[2, 8]"), ("weight", "int8[4, 8] per channel")]
    edges = {(e.source, e.target): e for e in drawing.edges}
    assert edges["input x", "node layer"].is_quantized
    assert edges["input x", "node layer"].text == "uint8[2, 8], scale 0.25, zero point 3"
    assert not edges["input x", "node plus_1"].is_quantized
    assert drawing.has_quantized_edges
    assert drawing.subtitle == "3 nodes"


def test_build_drawing_int8_readers_and_fused_nodes_marked(operators):
    """Nodes that read INT8 are marked, and nodes that the runtime fuses with them."""
    found = boxes_by_key(build_drawing(make_quantized_graph(operators), Plan(SCHEME)))
    roles = {key: (box.role, box.badge) for key, box in found.items() if key.startswith("node")}
    assert roles == {
        "node layer": (Role.QUANTIZED, "int8"),
        "node plus": (Role.QUANTIZED, "int8"),
        "node plus_1": (Role.FLOAT, "float"),
    }
    assert "fused into: layer" in found["node plus"].tooltip


def test_build_drawing_int4_weight_layer_computes_in_float(operators):
    """A layer with an INT4 weight shows the weight and computes in float."""
    graph = Graph("Four")
    build = Builder(graph, operators)
    integers = graph.add_constant(torch.zeros(32, 4, dtype=torch.int8), "w")
    scales = graph.add_constant(torch.ones(2, 4), "s")
    weight = build("dequantize", integers, scales, axis=0, block_size=16, bits=4)
    graph.add_output(append_node(graph, layer, graph.add_input(TYPE, "x"), weight))
    box = boxes_by_key(build_drawing(graph, Plan(SCHEME)))["node layer"]
    assert (box.role, box.badge) == (Role.WEIGHT_ONLY, "int4 weights")
    assert ("weight", "int4[32, 4] in blocks of 16") in box.rows


def test_build_drawing_float_layer_shows_reason():
    """A layer that is kept in float shows the reason."""
    plan = Plan(SCHEME, floats={"layer_1": "too sensitive: 0.4"})
    box = boxes_by_key(build_drawing(build_residual_graph(), plan))["node layer_1"]
    assert box.role is Role.KEPT_IN_FLOAT
    assert "reason for float: too sensitive: 0.4" in box.tooltip


def test_build_drawing_runtime_facts_override_plan(operators):
    """The facts of a runtime replace the planned precision."""
    facts = [
        NodeFacts("layer", "", "layer", 64, "int8", "float", "no kernel for it"),
        NodeFacts("plus", "", "plus", 0, "float", "fused", ""),
        NodeFacts("plus_1", "", "plus", 0, "float", "int8", ""),
    ]
    explained = Explanation("somewhere", facts)
    found = boxes_by_key(build_drawing(make_quantized_graph(operators), Plan(SCHEME), explained))
    assert (found["node layer"].role, found["node layer"].badge) == (Role.NOT_QUANTIZED, "float")
    assert "reason: no kernel for it" in found["node layer"].tooltip
    assert "precision in somewhere: float" in found["node layer"].tooltip
    assert (found["node plus_1"].role, found["node plus_1"].badge) == (Role.QUANTIZED, "int8")
    assert "precision in somewhere: fused" in found["node plus"].tooltip


def test_build_drawing_unpaired_quantize_drawn_as_box(operators):
    """A quantize node whose result is an output is drawn as a box."""
    graph = Graph("Half")
    integers = Builder(graph, operators)("quantize", graph.add_input(TYPE, "x"), 0.25, 0, dtype=torch.uint8)
    graph.add_output(integers)
    assert [box.kind for box in build_drawing(graph).root.boxes()] == ["input", "quantize", "output"]


def test_build_drawing_overwritten_buffer_drawn_as_output():
    """A buffer that a call overwrites is drawn as an output."""
    graph = build_residual_graph()
    graph.set_state("stem.weight", graph.outputs[0])
    box = boxes_by_key(build_drawing(graph))["state stem.weight"]
    assert (box.kind, dict(box.rows)["name"], box.role) == ("state", "stem.weight", Role.INTERFACE)


def test_build_drawing_multiple_outputs_have_row_and_edge():
    """A node with several outputs has a row and an edge for each."""
    graph = Graph("Parts")
    first = append_node(graph, split, graph.add_input(TYPE, "x"), count=2)
    second = first.producer.outputs[1]
    graph.add_output(append_node(graph, plus, first, second))
    drawing = build_drawing(graph)
    box = boxes_by_key(drawing)["node split"]
    assert [label for label, _ in box.rows].count("out") == 2
    assert [edge.tensor for edge in drawing.edges] == ["x", "split", "split_1", "plus"]


def test_build_drawing_many_inputs_abbreviated():
    """A node with many inputs shows a few of them and the number of the others."""
    graph = Graph("Many")
    x = graph.add_input(TYPE, "x")
    graph.add_output(append_node(graph, concat, *(append_node(graph, plus, x, float(i)) for i in range(30))))
    rows = boxes_by_key(build_drawing(graph))["node concat"].rows
    assert ("", "and 26 more inputs") in rows
    assert len(rows) < 10


def test_build_drawing_long_names_shortened_special_kept():
    """Long names are shortened in the middle; special characters are kept."""
    graph = Graph('<"odd" & more>')
    value = append_node(graph, plus, graph.add_input(TYPE, "a<b>&'c'\""), 1.0, scope="x" * 80)
    graph.add_output(value)
    page = Page(write_svg(build_drawing(graph)))
    assert page.texts("input a<b>&'c'\"") == "input\nnamea<b>&'c'\"\ntypefloat32[2, 8]"
    assert "x" * 22 + "…" + "x" * 22 in page.texts("node plus")
    assert "x" * 80 in page.tooltip("node plus")


def test_build_drawing_foreign_constant_named():
    """A constant that is no parameter of the module is shown by its full name."""
    graph = Graph("Named")
    token = add_weight(graph, "token")
    graph.add_output(append_node(graph, plus, graph.add_input(TYPE, "x"), token, scope="embedding"))
    assert ("other", "float32[4, 8] token.weight") in boxes_by_key(build_drawing(graph))["node plus"].rows
