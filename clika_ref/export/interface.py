"""The names of the inputs and outputs of an artifact."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clika_ref.core.errors import ModelError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Value, walk_graphs, walk_values
from clika_ref.core.operators import Operator


def name_interface(
    graph: Graph, operators: Mapping[str, Operator], input_names: Sequence[str], output_names: Sequence[str]
) -> None:
    """Name the inputs and outputs of a graph, in order; each output becomes a separate value.

    Args:
        graph: changed in place.
        operators: the operators; ``identity`` is inserted if an output is an input, a constant or another output.
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
    new_names, taken = dict(zip(interface, names, strict=True)), set(names)
    for value in [*graph.constants.values(), *walk_values(graph)]:
        if value.name in taken and value not in new_names:
            new_names[value] = _free_name(graph, value.name, taken)
    _rename(graph, new_names)


def _free_name(graph: Graph, hint: str, taken: Collection[str]) -> str:
    while (name := graph.fresh_name(hint)) in taken:
        continue
    return name


def _rename(graph: Graph, new_names: Mapping[Value, str]) -> None:
    """Rename values, all at once: the new name of one may be the old name of another."""
    new = {value.name: name for value, name in new_names.items()}
    for part in walk_graphs(graph):
        for key, symbol in part.symbols.items():
            source = symbol.source
            part.symbols[key] = replace(symbol, source=replace(source, name=new.get(source.name, source.name)))
    constants = {new.get(name, name): value for name, value in graph.constants.items()}
    graph.constants.clear()
    graph.constants.update(constants)
    for value, name in new_names.items():
        value.name = name


def resolve_names(argument: str, names: Any, defaults: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the user's names for inputs or outputs, or the defaults if none are given.

    Raises:
        ModelError: they are no list of names, their number is wrong, or a name occurs twice, is taken, or starts with a
            slash.
    """
    if names is None or (isinstance(names, list | tuple) and not names):
        return tuple(defaults)
    fit = isinstance(names, list | tuple) and all(isinstance(n, str) and n for n in names)
    if not fit or len(names) != len(defaults) or len(set(names)) != len(defaults):
        raise ModelError(
            f"{argument} is {names!r}. Give {len(defaults)} distinct names; the defaults are {list(defaults)}."
        )
    inner = [n for n in names if n.startswith("/")]
    if inner:
        raise ModelError(
            f"{argument} contains {inner}, which start with '/', as internal tensors do. Choose other names."
        )
    both = set(names) & set(taken)
    if both:
        raise ModelError(f"{argument} contains {sorted(both)}, which are names of inputs. Choose other names.")
    return tuple(names)
