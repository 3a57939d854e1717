"""The sizes for which an engine is built, as they were seen together or are chosen, and the command that builds it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph, Node
from clika_ref.core.symbols import Guard, Symbol, evaluate, is_symbolic
from clika_ref.core.types import Dim
from clika_ref.input_checks import is_met
from clika_ref.sizes_seen import Sizes

SEPARATORS = frozenset(",:")
"""What ``trtexec`` puts between inputs and their sizes."""

PARTS = ("minShapes", "optShapes", "maxShapes")
"""The flags of ``trtexec`` for the three sizes of a profile."""

LEAST, USUAL, LARGEST = range(3)
"""Their places, in `PARTS` and in what is chosen for a side."""

TYPED = "--stronglyTyped"
"""Types as the file has them: TensorRT 10 must be told so, and 11, which knows nothing else, takes the flag, too.

Source: NVIDIA's guide to the migration from weak to strong typing.
"""

CUTTING = frozenset({"slice", "slice_scatter", "roll"})
"""Operators whose numbers are operands of a Slice: an engine must know their range even where no side has them."""

Chosen = Mapping[str, tuple[int, int, int]]
"""Least, usual and largest size by the names of symbols, in place of what was seen."""


@dataclass(frozen=True)
class Profile:
    """Sizes of all dynamic sides together, by the names of symbols: the least, the usual and the largest."""

    least: Mapping[str, int]
    usual: Mapping[str, int]
    largest: Mapping[str, int]
    left_out: str = ""
    """What was seen and lies outside, and why; nothing where all of it lies within."""


def profile_of(graph: Graph, observed: Mapping[Sizes, int], chosen: Chosen) -> Profile:
    """Return the sizes for which an engine is built.

    The usual ones were seen together more often than others. The least are the least of each side, and the largest the
    largest; where a guard forbids these together, those of the smallest and the largest call that may be.

    Args:
        graph: that is in the file.
        observed: how often the model was traced or calibrated with which sizes.
        chosen: in place of what was observed.

    Raises:
        TargetError: a range is chosen for no symbol of the graph, lies outside what was traced, or contradicts a guard.
    """
    symbols = _symbols(graph)
    _refuse_unknown(graph, symbols, chosen)
    for name, sizes in chosen.items():
        _refuse_untraced(symbols[name], sizes)
    limits, calls = _Limits(graph.guards, _profiled(graph)), _calls(symbols, observed, chosen)
    usual = _together(_most_frequent(calls), chosen, USUAL)
    if fault := limits.fault(usual, usual, USUAL):
        raise _refused(fault)
    (least, why), (largest, why_not) = (_end(limits, calls, usual, chosen, part) for part in (LEAST, LARGEST))
    return Profile(least, usual, largest, _left_out(calls, least, largest, why or why_not))


def command(graph: Graph, file: Path, profile: Profile) -> str:
    """Return the command line of ``trtexec`` for the file of a graph.

    Raises:
        TargetError: the name of an input cannot be written.
    """
    profiled = _profiled(graph)
    odd = [name for name in profiled if SEPARATORS & {*name}]
    if odd:
        msg = f"trtexec separates by ',' and ':', which the input {odd[0]!r} has in its name; give other input_names"
        raise TargetError(msg)
    shapes = [
        f"--{flag}="
        + ",".join(f"{name}:{'x'.join(str(evaluate(s, part)) for s in of)}" for name, of in profiled.items())
        for flag, part in zip(PARTS, (profile.least, profile.usual, profile.largest), strict=True)
    ]
    files = [f"--onnx={file.name}", f"--saveEngine={beside(file, '.engine').name}"]
    return shlex.join(["trtexec", *files, TYPED, *(shapes if profiled else [])])


def script_of(line: str, profile: Profile) -> str:
    """Return a script that runs a command line beside the file that it is for, and says what its engine leaves out."""
    note = f"# {' '.join(profile.left_out.split())}\n" if profile.left_out else ""
    return f'#!/bin/sh\n{note}cd "$(dirname "$0")" || exit\n{line}\n'


def beside(file: Path, suffix: str) -> Path:
    """Return the path of what belongs to an ONNX file, of another one for each file."""
    return file.with_name(f"{file.name}{suffix}")


def _symbols(graph: Graph) -> dict[str, Symbol]:
    """Return the symbols that are read from inputs: others follow from data, and no profile speaks of them."""
    inputs = {value.name for value in graph.inputs}
    return {name: symbol for name, symbol in graph.symbols.items() if symbol.side.name in inputs}


def _profiled(graph: Graph) -> dict[str, tuple[Dim, ...]]:
    """Return the sides of inputs that have dynamic ones.

    Of an input whose element is a length of something, or says where something begins or ends, ``trtexec`` takes the
    value where others have sides.
    """
    lengths = {name for node in graph.nodes for name in _lengths(node, graph)}
    numbers = [s for s in _symbols(graph).values() if s.side.dim is None and s.name in lengths]
    dynamic = {v.name: v.type.shape for v in graph.inputs if not v.type.is_static}
    return dynamic | {symbol.side.name: (symbol.expr,) for symbol in numbers}


def _lengths(node: Node, graph: Graph) -> set[str]:
    """Return the symbols that the sides of what a node makes have, or follow from."""
    made = {name for value in node.outputs for name in _names(value.type.shape)}
    outputs = {value.name for value in node.outputs}
    makes_own = any(graph.symbols[name].side.name in outputs for name in made & graph.symbols.keys())
    return made | _names((*node.inputs, *node.attrs.values())) if makes_own or node.kind in CUTTING else made


def _names(item: Any) -> set[str]:
    """Return the names of symbols in a side or a number, or in several."""
    if isinstance(item, tuple):
        return {name for part in item for name in _names(part)}
    return {str(symbol) for symbol in item.free_symbols} if is_symbolic(item) else set()


def _refuse_unknown(graph: Graph, symbols: Mapping[str, Symbol], chosen: Chosen) -> None:
    """Refuse names of sides that the inputs of the graph do not have."""
    for name in chosen:
        if name not in symbols:
            known = ", ".join(map(repr, symbols)) or "none"
            msg = f"shapes: {name!r} is no dynamic side of {graph.name}, which has {known}"
            raise TargetError(msg)


def _refuse_untraced(symbol: Symbol, sizes: tuple[int, int, int]) -> None:
    low, _, high = sizes
    if (symbol.low is not None and low < symbol.low) or (symbol.high is not None and high > symbol.high):
        msg = (
            f"shapes: {symbol.name!r} is to be from {low} to {high}, but the model was traced for "
            f"{symbol.low}..{'' if symbol.high is None else symbol.high}"
        )
        raise TargetError(msg)


def _calls(symbols: Mapping[str, Symbol], observed: Mapping[Sizes, int], chosen: Chosen) -> Counter[Sizes]:
    """Return how often which sizes were seen together, of sides that are not chosen; legal ones where none were."""
    legal = {s.name: s.example or max(s.low or 1, 1) for s in symbols.values()}
    found = Counter[Sizes]()
    for sizes, count in (observed or {(): 1}).items():
        known = legal | dict(sizes)
        found[tuple((name, known[name]) for name in sorted(symbols) if name not in chosen)] += count
    return found


def _most_frequent(calls: Counter[Sizes]) -> Sizes:
    """Return the sizes that were seen together most often: of several, those that are frequent by themselves, too."""
    alone = Counter[tuple[str, int]]()
    for call, count in calls.items():
        alone.update(dict.fromkeys(call, count))
    return max(sorted(calls), key=lambda call: (calls[call], sum(alone[side] for side in call)))


def _together(call: Sizes, chosen: Chosen, part: int) -> dict[str, int]:
    return dict(call) | {name: sizes[part] for name, sizes in chosen.items()}


@dataclass(frozen=True)
class _Limits:
    """What the sizes of a profile must keep: the guards of a graph, and that the sides of its inputs rise with them."""

    guards: Sequence[Guard]
    profiled: Mapping[str, Sequence[Dim]]

    def fault(self, sizes: Mapping[str, int], usual: Mapping[str, int], part: int) -> str:
        """Say why sizes cannot be a part of a profile; nothing where they can."""
        for guard in self.guards:
            is_known = all(str(symbol) in sizes for symbol in guard.relation.free_symbols)
            if is_known and not is_met(guard, sizes):
                return f"{dict(sizes)} contradict {guard}, for which the model was traced"
        for name, side in ((name, side) for name, sides in self.profiled.items() for side in sides):
            length, wanted = (_length(side, of) for of in (sizes, usual))
            is_impossible = length < 0 and not getattr(side, "is_Symbol", False)  # a number counts from the end, too
            if is_impossible or (part == LEAST and length > wanted) or (part == LARGEST and length < wanted):
                return f"with {dict(sizes)} a side {side} of {name!r} is {length}, and usually {wanted}"
        return ""


def _end(
    limits: _Limits, calls: Counter[Sizes], usual: Mapping[str, int], chosen: Chosen, part: int
) -> tuple[Mapping[str, int], str]:
    """Return the least or the largest sizes, and why they are not those of each side.

    Of all sides where these may be together, of one call otherwise.

    Raises:
        TargetError: none of them go with what is chosen.
    """
    by_size = sorted(calls, key=lambda call: (math.prod(size for _, size in call), call), reverse=part == LARGEST)
    first = ""
    for call in (_corner([*calls], part), *by_size):
        sizes = _together(call, chosen, part)
        fault = limits.fault(sizes, usual, part)
        if not fault:
            return sizes, first
        first = first or fault
    raise _refused(first)


def _corner(calls: Sequence[Sizes], part: int) -> Sizes:
    """Return the least or the largest size of each side, whichever were seen together."""
    return tuple(min(sides) if part == LEAST else max(sides) for sides in zip(*calls, strict=True))


def _length(side: Dim, sizes: Mapping[str, int]) -> int:
    try:
        return int(evaluate(side, sizes))
    except ArithmeticError:
        return -1  # as no side is that long


def _refused(fault: str) -> TargetError:
    return TargetError(f"shapes: {fault}; choose others")


def _left_out(calls: Counter[Sizes], least: Mapping[str, int], largest: Mapping[str, int], fault: str) -> str:
    """Say what of that which was seen lies outside of a profile, and why."""
    if not fault:
        return ""
    missed = sum(n for call, n in calls.items() if any(not least[s] <= size <= largest[s] for s, size in call))
    return (
        f"the engine is built for {dict(least)} to {dict(largest)}, outside of which lie {missed} of {calls.total()} "
        f"calls that were seen: {fault}; choose `shapes` for an engine of others"
    )
