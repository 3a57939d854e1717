"""Functions that insert a fault into a graph: another constant or reader, or a missing or additional Q/DQ pair."""

from onnx import TensorProto as Kind
from onnx import helper
from sketches import convolution, filled, node, perceptron, selection


def find(model, name):
    return next(one for one in model.graph.node if one.name == name)


def drop(model, *names):
    for items in (model.graph.initializer, model.graph.input, model.graph.node):
        kept = [item for item in items if item.name not in names]
        del items[:]
        items.extend(kept)


def given(model, name, values, kind=Kind.FLOAT, shape=()):
    """A constant gets another value, type or shape."""
    drop(model, name)
    model.graph.initializer.append(filled(name, kind, shape, values))
    return model


def fed(model, name, kind, shape=()):
    """A constant becomes an input, or an input changes its type or shape."""
    drop(model, name)
    model.graph.input.insert(0, helper.make_tensor_value_info(name, kind, shape))
    return model


def computed(model, *nodes):
    """Nodes that come first compute what was a constant or an input."""
    drop(model, *(one.name for one in nodes))
    for place, one in enumerate(nodes):
        model.graph.node.insert(place, one)
    return model


def along(model, name, axis):
    find(model, name).attribute[0].i = axis
    return model


def reading(model, name, inputs):
    find(model, name).input[:] = inputs.split()
    return model


def paired(model, tensor, consumer="", scale=0.05):
    """Insert another pair, ``extra_Q`` and ``extra_DQ``, between a tensor and a consumer, or the graph's output."""
    model = given(given(model, "extra_scale", scale), "extra_zero", 0, Kind.INT8)
    place = len(model.graph.node)
    if consumer:
        reader = find(model, consumer)
        place = list(model.graph.node).index(reader)
        reader.input[:] = ["extra_DQ" if name == tensor else name for name in reader.input]
    else:
        model.graph.output[0].name = "extra_DQ"
    model.graph.node.insert(place, node("DequantizeLinear", "extra_Q extra_scale extra_zero", "extra_DQ"))
    model.graph.node.insert(place, node("QuantizeLinear", f"{tensor} extra_scale extra_zero", "extra_Q"))
    return model


def bypassed(model, tensor, consumer):
    """The pair behind a tensor is gone, and its consumer reads the float."""
    reader = find(model, consumer)
    reader.input[:] = [tensor if name == f"{tensor}_DQ" else name for name in reader.input]
    drop(model, f"{tensor}_Q", f"{tensor}_DQ")
    return model


def foreign(operator, inputs, domain="", outputs="odd"):
    """The perceptron with one more result, computed by an operator that TensorRT does not import."""
    model = also_returning(perceptron(), "end", Kind.FLOAT)
    model.graph.node.append(node(operator, inputs, outputs, domain=domain))
    model.graph.node.append(node("Cast", "odd", "end", to=Kind.FLOAT))
    model.opset_import.extend([helper.make_opsetid(domain, 1)] if domain else [])
    return model


def also_returning(model, name, kind):
    model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return model


def constant_nodes():
    """The convolution with a Constant as its scale, and a Cast of a Constant as its zero point."""
    scale, zero = filled("", Kind.FLOAT, [], 0.05), filled("", Kind.INT32, [], 0)
    first = node("Constant", "", "x_scale", value=scale), node("Constant", "", "wide", value=zero)
    return computed(computed(convolution(), node("Cast", "wide", "x_zero", to=Kind.INT8)), *first)


def between(model, tensor, consumer, operator):
    """Insert a unary operator between a tensor and a consumer."""
    reader = find(model, consumer)
    place = list(model.graph.node).index(reader)
    reader.input[:] = ["moved" if name == tensor else name for name in reader.input]
    model.graph.node.insert(place, node(operator, tensor, "moved"))
    return model


def oldest_selection(k):
    """A TopK as opset 9 has it."""
    model = selection()
    one = find(model, "out")
    del one.input[1:]
    one.attribute.append(helper.make_attribute("k", k))
    drop(model, "k")
    model.opset_import[0].version = 9
    return model
