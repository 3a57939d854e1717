"""Lowerings of generic operators, taken from onnxscript's torchlib.

Only this file uses torchlib and torch.onnx's recorder for it. Both are private, so torch and onnxscript are pinned
together. They take 1.5 s to import, so this file is imported at the first such call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass
from onnxscript import evaluator, values

from clika_ref.core.errors import TargetError
from clika_ref.core.symbols import is_symbolic
from clika_ref.onnx_export.builder import OPSET, OnnxBuilder
from clika_ref.onnx_export.dtypes import to_onnx
from clika_ref.torch_internals.operators import OpOverload, get_schema
from clika_ref.torch_internals.torchlib import ONNXRegistry, OpRecorder, SymbolicTensor


@lru_cache(maxsize=1)
def _load_torchlib() -> ONNXRegistry:
    return ONNXRegistry.from_torchlib(opset_version=OPSET)


def has_lowering(overload: OpOverload) -> bool:
    """Whether torchlib lowers an overload to values; lists of tensors become ONNX sequences, which do not count."""
    is_list = any(isinstance(returned.type, torch.ListType) for returned in get_schema(overload).returns)
    return not is_list and bool(_load_torchlib().get_decomps(overload))


def lower(
    overload: OpOverload,
    op: OnnxBuilder,
    operands: Sequence[Any],
    bind_arguments: Callable[[Sequence[Any]], dict[str, Any]],
) -> Any:
    """Record torchlib's function on placeholders for the operands, then add its nodes on the real operands.

    Args:
        overload: the ATen call.
        op: the builder that nodes are added to.
        operands: tensors of the call.
        bind_arguments: returns all arguments of the call by name, with the given values in place of its tensors.
    """
    opset = values.Opset("", OPSET)
    recorder = OpRecorder(opset, {})
    stand_ins = [_make_placeholder(op, opset, value, i) for i, value in enumerate(operands)]
    given = {name: _to_onnx_argument(value) for name, value in bind_arguments(stand_ins).items()}
    function = _load_torchlib().get_decomps(overload)[0].onnx_function
    positional, named = _split_arguments(overload, given)
    with evaluator.default_as(recorder):
        results = function(*positional, **named)
    found: list[Any] = (
        list(results) if isinstance(results, Sequence) and not isinstance(results, ir.Value) else [results]
    )
    nodes, found = _inline_functions(recorder, stand_ins, found)
    for stand_in, value in zip(stand_ins, operands, strict=True):
        ir.convenience.replace_all_uses_with(stand_in, value)
        found = [value if r is stand_in else r for r in found]
    op.adopt(nodes)
    return tuple(found[: len(op.results)])


def _inline_functions(
    recorder: OpRecorder, inputs: list[ir.Value], outputs: list[ir.Value]
) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the recorded nodes and ``outputs`` with torchlib's local functions inlined."""
    if not recorder.functions:
        return recorder.nodes, outputs
    functions = [f if isinstance(f, ir.Function) else f.function_ir for f in recorder.functions.values()]
    domains = {"": OPSET, **{f.domain: 1 for f in functions}}
    graph = ir.Graph(inputs, outputs, nodes=recorder.nodes, opset_imports=domains, name="torchlib")
    model = ir.Model(graph, ir_version=10, functions=functions)
    InlinePass()(model)
    nodes, found = list(model.graph), list(model.graph.outputs)
    model.graph.outputs.clear()
    model.graph.inputs.clear()
    model.graph.remove(nodes)
    return nodes, found


def _split_arguments(overload: OpOverload, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split arguments as in ATen's schema: positional ones, and keyword-only ones by name."""
    named = {a.name: given.pop(a.name) for a in get_schema(overload).arguments if a.kwarg_only and a.name in given}
    positional: list[Any] = []
    for a in get_schema(overload).arguments:
        if not given:
            break
        positional.append(given.pop(a.name) if a.name in given else a.default_value)
    return positional, named


def _make_placeholder(op: OnnxBuilder, opset: values.Opset, value: ir.Value, index: int) -> ir.Value:
    shape = ir.Shape([d if isinstance(d, int) else str(d) for d in op.shape(value)])
    dtype = ir.TensorType(to_onnx(op.dtype(value)))
    return SymbolicTensor(opset, name=f"operand_{index}", shape=shape, type=dtype)


def _to_onnx_argument(value: Any) -> Any:
    if is_symbolic(value):
        raise TargetError(
            f"torchlib's lowerings do not support size expressions ({value}). Declare the operator in a plugin."
        )
    return int(to_onnx(value)) if isinstance(value, torch.dtype) else value
