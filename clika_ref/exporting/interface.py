"""The interface of an artifact: the names of inputs and outputs, and which sides stay dynamic."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.execution import read_sizes
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import Operator
from clika_ref.core.symbols import Symbol, evaluate, named
from clika_ref.core.types import TensorType
from clika_ref.input_checks import check_inputs


def name_interface(
    graph: Graph, operators: Mapping[str, Operator], input_names: Sequence[str], output_names: Sequence[str]
) -> None:
    """Give the inputs and outputs of a graph their names, in order; each output becomes a value of its own.

    Args:
        graph: changed in place.
        operators: of which ``identity`` stands between an input, a constant or another output and its second name.
        input_names: one for each input, or none to keep them.
        output_names: one for each output, or none to keep them.

    """
    inputs = input_names or [v.name for v in graph.inputs]
    build = Builder(graph, operators)
    seen: set[Value] = set()
    for position, value in enumerate(graph.outputs):
        if value.producer is None or value in seen:
            graph.set_output(position, build("identity", value, types=(value.type,)))
        seen.add(graph.outputs[position])
    interface = [*graph.inputs, *graph.outputs]
    names = [*inputs, *(output_names or [v.name for v in graph.outputs])]
    taken = set(names)
    for value in [*graph.constants.values(), *(v for n in graph.nodes for v in n.outputs)]:
        if value.name in taken and value not in interface:
            _rename(graph, value, graph.fresh_name(value.name))
    for value, name in zip(interface, names, strict=True):
        _rename(graph, value, name)


def require_names(what: str, names: Sequence[str], defaults: Sequence[str], taken: Sequence[str] = ()) -> None:
    """Check names that the user gave for inputs or outputs.

    Raises:
        ModelError: their number is wrong, or a name occurs twice, or is taken.
    """
    count = len(defaults)
    if names and (len(names) != count or len(set(names)) != count):
        msg = f"{what}={list(names)} must be {count} different names; by default they are {list(defaults)}"
        raise ModelError(msg)
    both = set(names) & set(taken)
    if both:
        msg = f"{what} {sorted(both)} are names of inputs already"
        raise ModelError(msg)


def _rename(graph: Graph, value: Value, name: str) -> None:
    for key, symbol in graph.symbols.items():
        if symbol.side.name == value.name:
            side = type(symbol.side)(name, symbol.side.dim)
            graph.symbols[key] = Symbol(symbol.name, symbol.low, symbol.high, side, symbol.example)
    value.name = name


def restrict_dynamic_sides(
    graph: Graph,
    dynamic_axes: Mapping[str, Any] | None,
    examples: Sequence[Sequence[torch.Tensor]],
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
) -> None:
    """Fix the sides that ``dynamic_axes`` does not list to their length in the first example; name the others.

    The keys are names that the artifact will have, as in torch.onnx.export, or of the graph. Those of outputs decide
    nothing: the sides of outputs follow from those of inputs.

    Raises:
        ModelError: an input or an axis is unknown, the axis is static in the graph, or two sides get one name.
    """
    if dynamic_axes is None:
        return
    if not isinstance(dynamic_axes, Mapping):
        msg = f"dynamic_axes is {dynamic_axes!r}; give {{input: [axis, ...]}} or {{input: {{axis: name}}}}"
        raise ModelError(msg)
    inputs = {v.name: v for v in graph.inputs}
    known = {**inputs, **(dict(zip(input_names, graph.inputs, strict=True)) if input_names else {})}
    kept: dict[str, str] = {}
    for name, axes in dynamic_axes.items():
        if name not in known and name not in output_names:
            msg = f"dynamic_axes names {name!r}; the inputs are {list(known)}, the outputs {list(output_names)}"
            raise ModelError(msg)
        if name in known:
            named_axes = axes if isinstance(axes, Mapping) else dict.fromkeys(axes, "")
            kept.update(_kept(known[name], named_axes))
    _require_different([label or symbol for symbol, label in kept.items()])
    sizes = read_sizes(graph, examples[0]) if examples else {s.name: s.example for s in graph.symbols.values()}
    mapping: dict[sympy.Symbol, Any] = {}
    for key, symbol in list(graph.symbols.items()):
        if symbol.side.name not in inputs:
            continue
        if key not in kept:
            mapping[symbol.expr] = sympy.Integer(sizes[key])
            del graph.symbols[key]
        elif kept[key]:
            mapping[symbol.expr] = named(kept[key])
            del graph.symbols[key]
            graph.symbols[kept[key]] = Symbol(kept[key], symbol.low, symbol.high, symbol.side, symbol.example)
    _substitute(graph, mapping)


def _require_different(labels: list[str]) -> None:
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        msg = (
            f"dynamic_axes calls different sides {twice}: they may differ at run time, so each needs a name of its own"
        )
        raise ModelError(msg)


def fitting(graph: Graph, examples: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
    """Return the examples that a graph takes: sides that were fixed leave out those of other lengths."""
    found: list[Sequence[torch.Tensor]] = []
    for inputs in examples:
        with contextlib.suppress(ModelError):
            check_inputs(graph, inputs)
            found.append(inputs)
    return found


def _kept(value: Value, axes: Mapping[Any, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for axis, label in axes.items():
        rank = value.type.rank
        if not -rank <= int(axis) < rank:
            msg = f"dynamic_axes names axis {axis} of {value.name!r}, which has {rank} sides"
            raise ModelError(msg)
        dim = value.type.shape[int(axis)]
        if isinstance(dim, int):
            msg = (
                f"dynamic_axes names axis {axis} of {value.name!r}, but the graph was made for {value.type}; "
                "compile with tracing inputs that differ in that side"
            )
            raise ModelError(msg)
        found.update({str(s): str(label) for s in dim.free_symbols})
    return found


def _substitute(graph: Graph, mapping: dict[sympy.Symbol, Any]) -> None:
    def replaced(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(map(replaced, item))
        if not isinstance(item, sympy.Basic):
            return item
        result = item.xreplace(mapping)
        return evaluate(result, {}) if not result.free_symbols else result

    for value in graph.inputs:
        value.type = TensorType(value.type.dtype, replaced(value.type.shape))
    for node in graph.nodes:
        node.attrs = {k: replaced(v) for k, v in node.attrs.items()}
        for position, operand in enumerate(node.inputs):
            if isinstance(operand, sympy.Basic):
                graph.set_input(node, position, replaced(operand))
        for value in node.outputs:
            value.type = TensorType(value.type.dtype, replaced(value.type.shape))
    guards = [type(g)(replaced(g.relation), g.line) for g in graph.guards]
    graph.guards = [g for g in guards if isinstance(g.relation, sympy.Basic)]
    graph.revision += 1
