"""Predict which nodes TensorRT runs in INT8, from its rules on the file, since no TensorRT is available to ask."""

from __future__ import annotations

from pathlib import Path

import onnx

from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION
from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.own_operators import DEQUANTIZE, QUANTIZE
from clika_ref_tensorrt.rule_book import (
    FUSED_OPERATORS,
    LAYER_OPERATORS,
    TYPES,
    WEIGHTED_OPERATORS,
    factors_of,
    type_name,
)
from clika_ref_tensorrt.rules import find_violations


def predict_precisions(path: Path, *, has_weight_only: bool = False) -> dict[str, str]:
    """Return the predicted precision of each graph node; names of file nodes begin with those of graph nodes."""
    model = onnx.load(str(path), load_external_data=False)
    found_broken = find_violations(model, folder=path.parent, has_weight_only=has_weight_only)
    file = OnnxFile(model, folder=path.parent, has_weight_only=has_weight_only)
    broken = {v.node: v.message for v in found_broken}
    found, layers = dict[str, str](), set[str]()
    for node in file.nodes:
        owner, is_layer = node.name.rpartition("/")[0], node.op_type in LAYER_OPERATORS
        if node.op_type in (QUANTIZE, DEQUANTIZE, "Constant") or (owner in layers and not is_layer):
            continue  # a product determines the precision, not the operators that move its operands
        precision = _precision(file, node, broken.get(node.name, ""))
        if is_layer and owner not in layers:
            found[owner] = precision
            layers.add(owner)
        # A layer is INT8 if all of its nodes are, other nodes if any is.
        elif owner not in found or (found[owner] == INT8_PRECISION) == is_layer:
            found[owner] = precision
    return found


def _precision(file: OnnxFile, node: onnx.NodeProto, broken: str) -> str:
    pairs = [file.dequantizer(name) for name in factors_of(node) if name]
    if node.op_type in LAYER_OPERATORS:
        if len(pairs) == 2 and pairs[0] is None and pairs[1] is not None:
            kind = file.integer_type(pairs[1])
            if kind == TYPES.INT4 or file.has_weight_only:
                return f"{type_name(kind).lower()} weights"
        if all(pair is not None for pair in pairs) and not broken:
            return INT8_PRECISION
        return f"{FLOAT_PRECISION}: {broken}" if broken else FLOAT_PRECISION
    if file.is_moving(node) and pairs and pairs[0] is not None:
        return INT8_PRECISION
    made = file.producers.get(node.input[0]) if node.input else None
    is_after_layer = made is not None and made.op_type in (*WEIGHTED_OPERATORS, "Add", *FUSED_OPERATORS)
    return FUSED_PRECISION if node.op_type in (*FUSED_OPERATORS, "Add") and is_after_layer else FLOAT_PRECISION
