"""Functions that insert a fault into a graph: another constant or reader, or a missing or additional Q/DQ pair."""

from onnx import TensorProto as Kind
from onnx import helper
from sketches import build_convolution, build_perceptron, build_topk, make_filled_tensor, make_node


def find(model, name):
    return next(one for one in model.graph.node if one.name == name)


def drop(model, *names):
    for items in (model.graph.initializer, model.graph.input, model.graph.node):
        kept = [item for item in items if item.name not in names]
        del items[:]
        items.extend(kept)


def set_constant(model, name, values, kind=Kind.FLOAT, shape=()):
    """Give a constant another value, type or shape."""
    drop(model, name)
    model.graph.initializer.append(make_filled_tensor(name, kind, shape, values))
    return model


def make_input(model, name, kind, shape=()):
    """Turn a constant into an input, or change the type or shape of an input."""
    drop(model, name)
    model.graph.input.insert(0, helper.make_tensor_value_info(name, kind, shape))
    return model


def prepend_nodes(model, *nodes):
    """Compute a former constant or input by nodes at the start."""
    drop(model, *(one.name for one in nodes))
    for place, one in enumerate(nodes):
        model.graph.node.insert(place, one)
    return model


def set_axis(model, name, axis):
    find(model, name).attribute[0].i = axis
    return model


def set_node_inputs(model, name, inputs):
    find(model, name).input[:] = inputs.split()
    return model


def insert_qdq_pair(model, tensor, consumer="", scale=0.05):
    """Insert another pair, ``extra_Q`` and ``extra_DQ``, between a tensor and a consumer, or the graph's output."""
    model = set_constant(set_constant(model, "extra_scale", scale), "extra_zero", 0, Kind.INT8)
    place = len(model.graph.node)
    if consumer:
        reader = find(model, consumer)
        place = list(model.graph.node).index(reader)
        reader.input[:] = ["extra_DQ" if name == tensor else name for name in reader.input]
    else:
        model.graph.output[0].name = "extra_DQ"
    model.graph.node.insert(place, make_node("DequantizeLinear", "extra_Q extra_scale extra_zero", "extra_DQ"))
    model.graph.node.insert(place, make_node("QuantizeLinear", f"{tensor} extra_scale extra_zero", "extra_Q"))
    return model


def bypass_qdq_pair(model, tensor, consumer):
    """Remove the pair after a tensor, so that its consumer reads the float."""
    reader = find(model, consumer)
    reader.input[:] = [tensor if name == f"{tensor}_DQ" else name for name in reader.input]
    drop(model, f"{tensor}_Q", f"{tensor}_DQ")
    return model


def build_with_unsupported_operator(operator, inputs, domain="", outputs="odd"):
    """The perceptron with one more result, of an operator that TensorRT does not import."""
    model = add_output(build_perceptron(), "end", Kind.FLOAT)
    model.graph.node.append(make_node(operator, inputs, outputs, domain=domain))
    model.graph.node.append(make_node("Cast", "odd", "end", to=Kind.FLOAT))
    model.opset_import.extend([helper.make_opsetid(domain, 1)] if domain else [])
    return model


def add_output(model, name, kind):
    model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return model


def build_convolution_with_constant_nodes():
    """The convolution with a Constant as its scale, and a Cast of a Constant as its zero point."""
    scale, zero = make_filled_tensor("", Kind.FLOAT, [], 0.05), make_filled_tensor("", Kind.INT32, [], 0)
    first = make_node("Constant", "", "x_scale", value=scale), make_node("Constant", "", "wide", value=zero)
    return prepend_nodes(prepend_nodes(build_convolution(), make_node("Cast", "wide", "x_zero", to=Kind.INT8)), *first)


def insert_operator(model, tensor, consumer, operator):
    """Insert a unary operator between a tensor and a consumer."""
    reader = find(model, consumer)
    place = list(model.graph.node).index(reader)
    reader.input[:] = ["moved" if name == tensor else name for name in reader.input]
    model.graph.node.insert(place, make_node(operator, tensor, "moved"))
    return model


def build_topk_opset9(k):
    """A TopK as opset 9 has it."""
    model = build_topk()
    one = find(model, "out")
    del one.input[1:]
    one.attribute.append(helper.make_attribute("k", k))
    drop(model, "k")
    model.opset_import[0].version = 9
    return model
