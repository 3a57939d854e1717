"""The command that builds an engine: with the least, the usual and the largest sizes of inputs, as they were traced."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import evaluate

PARTS = ("minShapes", "optShapes", "maxShapes")
"""The flags of ``trtexec`` for the three sizes of a profile."""


def command(
    graph: Graph, file: Path, observed: Sequence[Mapping[str, int]], chosen: Mapping[str, tuple[int, int, int]]
) -> str:
    """Return the command line of ``trtexec`` for a file.

    Args:
        graph: that is in the file.
        file: its name.
        observed: the sizes of each input that the model was traced or calibrated with, by the names of symbols.
        chosen: least, usual and largest size by the names of symbols, in place of what was observed.

    Raises:
        TargetError: a range is chosen for no symbol of the graph, is in no order, or lies outside what was traced.
    """
    sizes = [dict[str, int]() for _ in PARTS]
    unknown = sorted(chosen.keys() - graph.symbols.keys())
    if unknown:
        known = ", ".join(map(repr, graph.symbols)) or "none"
        msg = f"shapes: {unknown[0]!r} is no dynamic side of {graph.name}, which has {known}"
        raise TargetError(msg)
    for name in graph.symbols:
        for part, size in zip(sizes, _range(graph, name, observed, chosen.get(name)), strict=True):
            part[name] = size
    dynamic = [value for value in graph.inputs if not value.type.is_static]
    shapes = [
        f"--{flag}=" + ",".join(f"{v.name}:{'x'.join(str(evaluate(s, part)) for s in v.type.shape)}" for v in dynamic)
        for flag, part in zip(PARTS, sizes, strict=True)
    ]
    return " ".join(
        ["trtexec", f"--onnx={file.name}", f"--saveEngine={file.stem}.engine", *(shapes if dynamic else [])]
    )


def _range(
    graph: Graph, name: str, observed: Sequence[Mapping[str, int]], chosen: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    symbol = graph.symbols[name]
    if chosen is None:
        seen = sorted(sizes[name] for sizes in observed if name in sizes)
        example = symbol.example or max(symbol.low or 1, 1)
        return (seen[0], statistics.mode(seen), seen[-1]) if seen else (example, example, example)
    low, usual, high = chosen
    if not low <= usual <= high:
        msg = f"shapes: {name!r} is to be {low}, {usual}, {high}; give the least, the usual and the largest"
        raise TargetError(msg)
    if (symbol.low is not None and low < symbol.low) or (symbol.high is not None and high > symbol.high):
        msg = (
            f"shapes: {name!r} is to be from {low} to {high}, but the model was traced for "
            f"{symbol.low}..{'' if symbol.high is None else symbol.high}"
        )
        raise TargetError(msg)
    return low, usual, high
