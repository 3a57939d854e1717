"""Select and name the dynamic dims of an artifact: ``dynamic_axes`` as in ``torch.onnx.export``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch

from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.execution import read_sizes
from clika_ref.core.guards import check_inputs
from clika_ref.core.ir import Graph, Value
from clika_ref.core.symbols import Symbol
from clika_ref.export.symbol_substitution import substitute_symbols


def restrict_dynamic_dims(
    graph: Graph,
    dynamic_axes: Mapping[str, Any] | None,
    examples: Sequence[Sequence[torch.Tensor]],
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
) -> dict[str, str | int]:
    """Fix the dims that ``dynamic_axes`` does not list to their length in an example; name the others.

    The keys are input and output names of the artifact, as in torch.onnx.export, or of the graph. Entries of outputs
    have no effect: the dims of outputs follow from those of inputs. Dims that get the same name become one dim; the
    example is the first one where they are equal. Integers among the inputs stay inputs.

    Returns:
        For each symbol, its new name, or its fixed length.

    Raises:
        ModelError: the form is invalid, an input or an axis is unknown, the axis is static in the graph, or dims that
            get the same name differ in every example.
    """
    if dynamic_axes is None:
        return {key: key for key in graph.symbols}
    labels = _labels(graph, dynamic_axes, input_names, output_names)
    sizes = _choose_sizes(graph, labels, examples)
    inputs = {v.name for v in graph.inputs}
    free = [k for k, s in graph.symbols.items() if s.source.name not in inputs or s.source.dim is None or k in labels]
    names = _unique_names(free, labels, graph.symbols)
    mapping: dict[sympy.Symbol, Any] = {}
    kept: dict[str, Symbol] = {}
    for key, symbol in graph.symbols.items():
        if key not in names:
            mapping[symbol.expr] = sympy.Integer(sizes[key])
            continue
        kept[names[key]] = _merge_symbols(
            names[key], kept.get(names[key], symbol), symbol, sizes.get(key, symbol.example)
        )
        mapping[symbol.expr] = kept[names[key]].expr
    became = {key: names[key] if key in names else sizes[key] for key in graph.symbols}
    graph.symbols = kept
    substitute_symbols(graph, {old: new for old, new in mapping.items() if old != new})
    return became


def filter_examples(graph: Graph, examples: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
    """Return the examples that a graph accepts after fixing or merging dims."""
    found: list[Sequence[torch.Tensor]] = []
    for inputs in examples:
        with contextlib.suppress(ModelError):
            check_inputs(graph, inputs)
            found.append(inputs)
    return found


def _labels(graph: Graph, dynamic_axes: Any, input_names: Sequence[str], output_names: Sequence[str]) -> dict[str, str]:
    """Return the symbols that stay dynamic, with the user's names for them, or "" without a name."""
    if not isinstance(dynamic_axes, Mapping):
        raise ModelError(f"dynamic_axes is {dynamic_axes!r}. Give {{input: [axis, ...]}} or {{input: {{axis: name}}}}.")
    given = dict(zip(input_names, graph.inputs, strict=True)) if input_names else {}
    known = {**{v.name: v for v in graph.inputs}, **given}
    labels: dict[str, str] = {}
    for name, axes in dynamic_axes.items():
        if name not in known and name not in output_names:
            raise ModelError(
                f"dynamic_axes contains {name!r}, but the inputs are {list(known)}, the outputs "
                f"{list(output_names)}. Use one of these names."
            )
        labelled = _parse_axes(name, axes)
        if name in known:
            for key, label in _label_symbols(known[name], labelled).items():
                labels[key] = labels.get(key) or label
    return labels


def _parse_axes(name: str, axes: Any) -> dict[int, str]:
    pairs: list[tuple[Any, Any]] | None = None
    if isinstance(axes, Mapping):
        pairs = [(axis, label or None) for axis, label in axes.items()]
    elif isinstance(axes, Collection) and not isinstance(axes, str):
        pairs = [(axis, "") for axis in axes]
    if pairs is None or not all(type(axis) is int and isinstance(label, str) for axis, label in pairs):
        raise ModelError(
            f"dynamic_axes[{name!r}] is {axes!r}. Give [axis, ...] or {{axis: name, ...}}, such as [0] or "
            f"{{0: 'batch'}}."
        )
    return dict(pairs)


def _label_symbols(value: Value, axes: Mapping[int, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for axis, label in axes.items():
        rank = value.type.rank
        if not -rank <= axis < rank:
            raise ModelError(
                f"dynamic_axes contains axis {axis} of {value.name!r}, which has {format_count(rank, 'dim')}. "
                f"Give an axis below {rank}."
            )
        dim = value.type.shape[axis]
        if isinstance(dim, int):
            raise ModelError(
                f"dynamic_axes contains axis {axis} of {value.name!r}, but the graph was traced for {value.type}. "
                "Compile with tracing inputs that differ in this dim."
            )
        # The name of a computed dim, such as 2*n, is not the name of n.
        found.update({str(s): label if s is dim else "" for s in dim.free_symbols})
    return found


def _choose_sizes(
    graph: Graph, labels: Mapping[str, str], examples: Sequence[Sequence[torch.Tensor]]
) -> dict[str, int]:
    """Return the sizes of the first example where the dims that get the same name are equal."""
    choices = [read_sizes(graph, inputs) for inputs in examples]
    choices = choices or [{s.name: s.example for s in graph.symbols.values() if s.example is not None}]
    alike: dict[str, list[str]] = {}
    for key, label in labels.items():
        if label:
            alike.setdefault(label, []).append(key)
    for sizes in choices:
        if all(len({sizes[k] for k in keys}) == 1 for keys in alike.values()):
            return sizes
    different = {label: keys for label, keys in alike.items() if len({choices[0][k] for k in keys}) > 1}
    different = different or {label: keys for label, keys in alike.items() if len(keys) > 1}
    label, keys = next(iter(different.items()))
    shown = ", ".join(f"{graph.symbols[k].source} is {choices[0][k]}" for k in keys)
    raise ModelError(
        f"dynamic_axes gives several dims the name {label!r}, but they differ in every example ({shown}). Give "
        "each its own name, or example_inputs in which they are equal."
    )


def _unique_names(free: Sequence[str], labels: Mapping[str, str], symbols: Collection[str]) -> dict[str, str]:
    """Return the new name of each symbol; a symbol without a user's name is renamed if it collides with one."""
    given = {label for label in labels.values() if label}
    taken = {*given, *symbols}
    names: dict[str, str] = {}
    for key in free:
        name = labels.get(key) or key
        if not labels.get(key) and key in given:
            name = next(n for i in itertools.count(1) if (n := f"{key}_{i}") not in taken)
            taken.add(name)
        names[key] = name
    return names


def _merge_symbols(name: str, one: Symbol, other: Symbol, example: int | None) -> Symbol:
    """Return a symbol for two merged dims, read from the first."""
    lows = [s.low for s in (one, other) if s.low is not None]
    highs = [s.high for s in (one, other) if s.high is not None]
    return Symbol(name, max(lows, default=None), min(highs, default=None), one.source, example)
