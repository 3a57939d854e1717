"""Faults and similar correct graphs that a review of the checker found, in the form of `planted.py`."""

from functools import partial

from onnx import TensorProto as Kind
from sketches import IMAGE, Sketch


def build_operator_of_type(kind, operator="Add", opset=17, operands=2):
    """An operator on inputs of a type."""
    sketch = Sketch(kind)
    x = sketch.input("x", 4, 32)
    return sketch.model(sketch.node(operator, "out", *[x] * operands), opset)


def build_uint8_middle():
    """Floats that are rounded to uint8 and become floats again."""
    sketch = Sketch()
    rounded = sketch.node("Cast", "rounded", sketch.input("x", 4, 32), to=Kind.UINT8)
    return sketch.model(sketch.node("Cast", "out", rounded, to=Kind.FLOAT))


def build_uint8_inputs_and_outputs():
    """An image in uint8 whose batch is read, and one that is returned."""
    sketch = Sketch()
    x = sketch.input("x", "n", 3, 8, 8, kind=Kind.UINT8)
    sizes = sketch.node("Gather", "batch", sketch.node("Shape", "sizes", x), sketch.constant("at", [1], 0, Kind.INT64))
    sizes = sketch.node("Concat", "shape", sizes, sketch.constant("rest", [1], -1, Kind.INT64), axis=0)
    flat = sketch.node("Reshape", "flat", sketch.node("Cast", "floats", x, to=Kind.FLOAT), sizes)
    sketch.kind = Kind.UINT8
    return sketch.model(sketch.node("Identity", "out", sketch.node("Cast", "rounded", flat, to=Kind.UINT8)))


def build_float64_output():
    sketch = Sketch(Kind.DOUBLE)
    return sketch.model(sketch.node("RandomUniform", "out", dtype=Kind.DOUBLE, shape=[4, 32]))


def build_squeeze(*sides, axes=None):
    sketch = Sketch()
    axes = [] if axes is None else [sketch.constant("axes", [1], axes, Kind.INT64)]
    return sketch.model(
        sketch.node("Relu", "out", sketch.node("Squeeze", "squeezed", sketch.input("x", *sides), *axes))
    )


def build_data_dependent_reshape(what):
    """A reshape with one dim for each element above 0, or to the shape of their indices."""
    sketch = Sketch()
    x = sketch.input("x", 4, 32)
    places = sketch.node("NonZero", "places", x)
    row = sketch.node("Gather", "row", places, sketch.constant("first", [], 0, Kind.INT64), axis=0)
    sizes = row if what == "row" else sketch.node("Shape", "sizes", places)
    return sketch.model(sketch.node("ConstantOfShape", "out", sizes))


def build_activated_convolution(*activation, quantized=("y",)):
    """A convolution ``y``, its activation, each node a name, an operator and operands, and another convolution.

    The users of each tensor in ``quantized`` read its pair.
    """
    sketch = Sketch()
    pairs = dict[str, str]()

    def add(name, operator, *operands, **attributes):
        sketch.node(operator, name, *(pairs.get(one, one) for one in operands), **attributes)
        if name in quantized:
            pairs[name] = sketch.quantize(name)

    sketch.constant("half", [], 0.5)
    add("y", "Conv", sketch.quantize(sketch.input("x", *IMAGE)), sketch.weight("w", 16, 16, 1, 1))
    for name, operator, *operands in activation:
        add(name, operator, *operands)
    last = activation[-1][0]
    end = pairs.get(last) or sketch.quantize(last)
    return sketch.model(sketch.node("Conv", "out", end, sketch.weight("v", 16, 16, 1, 1)), 18)


SILU = ("gate", "Sigmoid", "y"), ("z", "Mul", "y", "gate")
GELU = ("a", "Mul", "y", "half"), ("b", "Erf", "a"), ("c", "Add", "b", "half"), ("z", "Mul", "y", "c")


def build_excited_convolution():
    """A convolution that is multiplied by a gate, which a layer computes from its result."""
    sketch = Sketch()
    w, v, u = (sketch.weight(name, 16, 16, 1, 1) for name in "wvu")
    y = sketch.quantize(sketch.node("Conv", "y", sketch.quantize(sketch.input("x", *IMAGE)), w))
    gate = sketch.node("Sigmoid", "gate", sketch.node("Conv", "squeezed", y, v))
    return sketch.model(sketch.node("Conv", "out", sketch.quantize(sketch.node("Mul", "z", y, gate)), u))


def build_int8_scalar():
    """A scalar in INT8."""
    sketch = Sketch()
    factor = sketch.add_stored_weight("factor", [], [])
    return sketch.model(sketch.node("Mul", "out", sketch.input("x", 4, 32), factor))


def build_experts(axis, kind=Kind.INT8, block=0):
    """A product with one of several weights in one tensor; an input selects it."""
    sketch = Sketch()
    shape = [2, 128, 128]
    scales = [side // block if at == axis else side for at, side in enumerate(shape)] if block else shape[axis]
    blocks = {"block_size": block} if block else {}
    w = sketch.add_stored_weight("w", shape, scales if block else [scales], kind, axis=axis, **blocks)
    x, place = sketch.input("x", 4, 128), sketch.input("place", kind=Kind.INT64)
    w = sketch.node("Gather", "picked", w, place, axis=0)
    x = x if block else sketch.quantize(x)
    return sketch.model(sketch.node("MatMul", "out", x, w), 21)


def build_int4_per_channel():
    sketch = Sketch()
    w = sketch.add_stored_weight("w", [128, 128], [128], Kind.INT4, axis=1)
    return sketch.model(sketch.node("MatMul", "out", sketch.input("x", 4, 128), w), 21)


REVIEWED = {
    "Add of bytes": (partial(build_operator_of_type, Kind.UINT8), "data-type", "out"),
    "Transpose of bytes": (partial(build_operator_of_type, Kind.UINT8, "Transpose", operands=1), "data-type", "out"),
    "Add of int16": (partial(build_operator_of_type, Kind.INT16), "data-type", "out"),
    "Mul of uint64": (partial(build_operator_of_type, Kind.UINT64, "Mul"), "data-type", "out"),
    "Identity of strings": (partial(build_operator_of_type, Kind.STRING, "Identity", operands=1), "data-type", "out"),
    "Add of int8": (partial(build_operator_of_type, Kind.INT8), "data-type", "out"),
    "bytes between floats": (build_uint8_middle, "data-type", "rounded"),
    "float64 that is returned": (build_float64_output, "data-type", "out"),
    "Squeeze of what may be 1": (partial(build_squeeze, "n", 1, 32), "static-rank", "squeezed"),
    "rank of what is found": (partial(build_data_dependent_reshape, "row"), "static-rank", "out"),
    **{
        f"pair between Conv and {operator}": (
            partial(build_activated_convolution, ("z", operator, "y")),
            "before-fusion",
            "y_Q",
        )
        for operator in ("LeakyRelu", "HardSwish", "Sigmoid")
    },
    "pair between Conv and SiLU": (partial(build_activated_convolution, *SILU), "all-operands before-fusion", "y_Q z"),
    "pairs within SiLU": (
        partial(build_activated_convolution, *SILU, quantized=("y", "gate", "z")),
        "before-fusion",
        "y_Q",
    ),
    "pair between Conv and GELU": (
        partial(build_activated_convolution, *GELU),
        "all-operands before-fusion",
        "y_Q a z",
    ),
    "scalar in int8": (build_int8_scalar, "scalar", "factor_DQ"),
    "experts of axis 1": (partial(build_experts, 1), "weight-axis", "w_DQ"),
    "experts with a scale each": (partial(build_experts, 0), "weight-axis", "w_DQ"),
    "int4 without blocks": (build_int4_per_channel, "blocks", "w_DQ"),
}

NEAR_REVIEWED = {
    "bytes as input and output": build_uint8_inputs_and_outputs,
    "Squeeze of what is 1": partial(build_squeeze, 4, 1, 32),
    "Squeeze of axes": partial(build_squeeze, "n", 1, 32, axes=1),
    "shape of what is found": partial(build_data_dependent_reshape, "shape"),
    "pair after LeakyRelu": partial(build_activated_convolution, ("z", "LeakyRelu", "y"), quantized=()),
    "pair after SiLU": partial(build_activated_convolution, *SILU, quantized=()),
    "pair after GELU": partial(build_activated_convolution, *GELU, quantized=()),
    "gate of a layer": build_excited_convolution,
    "experts": partial(build_experts, 2),
    "experts in int4": partial(build_experts, 1, Kind.INT4, 64),
}
