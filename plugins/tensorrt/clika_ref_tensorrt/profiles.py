"""The command that builds an engine: with the least, the usual and the largest sizes of inputs, as they were traced."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import evaluate
from clika_ref.core.types import Dim
from clika_ref.input_checks import is_met

SEPARATORS = frozenset(",:")
"""What ``trtexec`` puts between inputs and their sizes."""

PARTS = ("minShapes", "optShapes", "maxShapes")
"""The flags of ``trtexec`` for the three sizes of a profile."""


def command(
    graph: Graph, file: Path, observed: Mapping[str, Counter[int]], chosen: Mapping[str, tuple[int, int, int]]
) -> str:
    """Return the command line of ``trtexec`` for a file.

    Args:
        graph: that is in the file.
        file: its name.
        observed: how often the model was traced or calibrated with which size, by the names of symbols.
        chosen: least, usual and largest size by the names of symbols, in place of what was observed.

    Raises:
        TargetError: a range is chosen for no symbol of the graph, or lies outside what was traced; the name of an input
            cannot be written.
    """
    _refuse_unknown(graph, chosen)
    sizes = [dict[str, int]() for _ in PARTS]
    for name in graph.symbols:
        for part, size in zip(sizes, _range(graph, name, observed, chosen.get(name)), strict=True):
            part[name] = size
    for part in sizes:
        _refuse_guarded(graph, part, chosen)
    profiled = {v.name: v.type.shape for v in graph.inputs if not v.type.is_static} | _shape_tensors(graph)
    odd = [name for name in profiled if SEPARATORS & {*name}]
    if odd:
        msg = f"trtexec separates by ',' and ':', which the input {odd[0]!r} has in its name; give other input_names"
        raise TargetError(msg)
    shapes = [
        f"--{flag}="
        + ",".join(f"{name}:{'x'.join(str(evaluate(s, part)) for s in of)}" for name, of in profiled.items())
        for flag, part in zip(PARTS, sizes, strict=True)
    ]
    files = [f"--onnx={file.name}", f"--saveEngine={beside(file, '.engine').name}"]
    return shlex.join(["trtexec", *files, *(shapes if profiled else [])])


def beside(file: Path, suffix: str) -> Path:
    """Return the path of what belongs to an ONNX file, of another one for each file."""
    return file.with_name(f"{file.name}{suffix}")


def _shape_tensors(graph: Graph) -> dict[str, tuple[Dim, ...]]:
    """Return the inputs whose element is a length of something: ``trtexec`` takes its value where others have sides."""
    sides = (side for node in graph.nodes for value in node.outputs for side in value.type.shape)
    lengths = {str(symbol) for side in sides if not isinstance(side, int) for symbol in side.free_symbols}
    return {s.side.name: (s.expr,) for s in graph.symbols.values() if s.side.dim is None and s.name in lengths}


def _refuse_unknown(graph: Graph, chosen: Mapping[str, Any]) -> None:
    """Refuse names of sides that the graph does not have."""
    for name in chosen:
        if name not in graph.symbols:
            known = ", ".join(map(repr, graph.symbols)) or "none"
            msg = f"shapes: {name!r} is no dynamic side of {graph.name}, which has {known}"
            raise TargetError(msg)


def _refuse_guarded(graph: Graph, sizes: Mapping[str, int], chosen: Mapping[str, Any]) -> None:
    """Refuse sizes that the graph was not traced for, where any of them is chosen."""
    for guard in graph.guards:
        is_asked = any(str(symbol) in chosen for symbol in guard.relation.free_symbols)
        if is_asked and not is_met(guard, sizes):
            msg = f"shapes: {sizes} contradict {guard}, for which the model was traced; choose others"
            raise TargetError(msg)


def _range(
    graph: Graph, name: str, observed: Mapping[str, Counter[int]], chosen: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    symbol = graph.symbols[name]
    if chosen is None:
        seen = observed.get(name) or {symbol.example or max(symbol.low or 1, 1): 1}
        return min(seen), max(sorted(seen), key=lambda size: seen[size]), max(seen)  # the least of the most frequent
    low, usual, high = chosen
    if (symbol.low is not None and low < symbol.low) or (symbol.high is not None and high > symbol.high):
        msg = (
            f"shapes: {name!r} is to be from {low} to {high}, but the model was traced for "
            f"{symbol.low}..{'' if symbol.high is None else symbol.high}"
        )
        raise TargetError(msg)
    return low, usual, high
