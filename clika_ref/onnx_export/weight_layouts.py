"""Store weights in the layout that ONNX operators read: other tools quantize only weights that no node computes."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from clika_ref.onnx_export.dtypes import TO_TORCH


def _transpose(node: ir.Node, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [operands[0].permute(*node.attributes["perm"].as_ints())]


def _concat(node: ir.Node, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([*operands], node.attributes["axis"].as_int())]


def _split(node: ir.Node, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    data, *lengths = operands
    dim = node.attributes["axis"].as_int()
    return [*(data.split(lengths[0].tolist(), dim) if lengths else data.chunk(len(node.outputs), dim))]


def _unsqueeze(_: ir.Node, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    data, dims = operands
    for dim in sorted(dim % (data.ndim + len(dims)) for dim in dims.tolist()):
        data = data.unsqueeze(dim)
    return [data]


LAYOUTS: Mapping[str, Callable[[ir.Node, Sequence[torch.Tensor]], list[torch.Tensor]]] = {
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Unsqueeze": _unsqueeze,
}
"""Operators that move the elements of weights: permuted matrices of linear layers, and reordered gates."""

WEIGHT_DTYPES = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8}
)
"""Dtypes of weights; others are indices and sizes."""


def fold_layouts(
    nodes: Sequence[ir.Node], initializers: dict[str, ir.Value], outputs: Container[ir.Value] = ()
) -> list[ir.Node]:
    """Replace nodes that only move weights by moved weights, computed while they are written; return the other nodes.

    A weight that another node reads as well stays, as the table of a tied head does: a copy would make the file larger.

    Args:
        nodes: those of the model, without those of subgraphs, in order.
        initializers: by name; a moved weight keeps the name of the first weight that it is made of.
        outputs: of the model, which keep their nodes.
    """
    kept: list[ir.Node] = []
    names: dict[ir.Value, str] = {}
    for node in nodes:
        if not _moves_weights(node, initializers) or any(value in outputs for value in node.outputs):
            kept.append(node)
            continue
        inputs = [value for value in node.inputs if value is not None]
        moved = [_make_weight(node, inputs, index) for index in range(len(node.outputs))]
        for position in range(len(node.inputs)):
            node.replace_input_with(position, None)
        for value in inputs:
            if not value.uses():
                del initializers[value.name or ""]
        first = names.get(inputs[0], inputs[0].name or "")
        for old, new in zip(node.outputs, moved, strict=True):
            old.replace_all_uses_with(new)
            names[new] = first
            new.name = (old.name or "") if first in initializers else first
            initializers[new.name] = new
    return kept


def _moves_weights(node: ir.Node, initializers: Mapping[str, ir.Value]) -> bool:
    """Whether a node moves the elements of weights that nothing else reads."""
    if node.op_type not in LAYOUTS or node.domain:
        return False
    inputs = [value for value in node.inputs if value is not None]
    stored = tensor_adapters.TorchTensor | ir.LazyTensor
    if not inputs or not all(isinstance(value.const_value, stored) and value.name in initializers for value in inputs):
        return False
    moved = inputs if node.op_type == "Concat" else inputs[:1]
    if node.op_type == "Split" and len(inputs) == 1 and not _has_equal_parts(node, inputs[0].const_value):
        return False
    return all(value.dtype in WEIGHT_DTYPES and len(value.uses()) == 1 for value in moved)


def _has_equal_parts(split: ir.Node, tensor: Any) -> bool:
    return tensor.shape.numpy()[split.attributes["axis"].as_int()] % len(split.outputs) == 0


def _make_weight(node: ir.Node, inputs: Sequence[ir.Value], index: int) -> ir.Value:
    """Return an output of a node as a weight; its elements are computed while they are written."""
    name, compute = node.outputs[index].name, LAYOUTS[node.op_type]
    tensors = [value.const_value for value in inputs]

    def make() -> tensor_adapters.TorchTensor:
        found = compute(node, [_read(tensor) for tensor in tensors])
        return tensor_adapters.TorchTensor(found[index].contiguous(), name=name)

    shape = ir.Shape(compute(node, [_read_shape(tensor) for tensor in tensors])[index].shape)
    dtype = inputs[0].dtype
    assert dtype is not None
    tensor = ir.LazyTensor(make, dtype=dtype, shape=shape, name=name)
    return ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)


def _read(tensor: Any) -> torch.Tensor:
    return (tensor.raw() if isinstance(tensor, ir.LazyTensor) else tensor).raw


def _read_shape(tensor: Any) -> torch.Tensor:
    """Return a tensor of floats without elements in memory; integers, which are operands of nodes, have theirs."""
    if tensor.dtype not in WEIGHT_DTYPES:
        return _read(tensor)
    return torch.empty(tensor.shape.numpy(), dtype=TO_TORCH[tensor.dtype], device="meta")
