"""Optimization profiles of engines, from observed or chosen sizes, and the command that builds an engine."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clika_ref.core.errors import TargetError
from clika_ref.core.guards import is_met
from clika_ref.core.ir import Graph, Node
from clika_ref.core.symbols import Guard, Symbol, evaluate
from clika_ref.core.types import Dim
from clika_ref.onnx_export.emission import symbols_in
from clika_ref.targets.file_suffixes import companion_path
from clika_ref.targets.size_statistics import SymbolSizes

TRTEXEC_SEPARATORS = frozenset(",:")
"""Separators of ``trtexec`` between inputs and their sizes."""

SHAPE_FLAGS = ("minShapes", "optShapes", "maxShapes")
"""The ``trtexec`` flags for the three sizes of a profile."""

MIN_PART, USUAL_PART, MAX_PART = range(3)
"""Indices into `SHAPE_FLAGS` and into the chosen sizes of a dim."""

STRONGLY_TYPED_FLAG = "--stronglyTyped"
"""Use the types of the file: required by TensorRT 10; TensorRT 11 always does and accepts the flag.

Source: NVIDIA's guide to the migration from weak to strong typing.
"""

SLICING_OPERATORS = frozenset({"slice", "slice_scatter", "roll"})
"""Operators with numbers that become operands of a Slice. The engine needs their range even if no dim uses them."""

ChosenSizes = Mapping[str, tuple[int, int, int]]
"""Minimum, optimum and maximum size by symbol name; they override observed sizes."""


@dataclass(frozen=True)
class OptimizationProfile:
    """Sizes of all dynamic dims by symbol name: minimum, optimum (the usual sizes) and maximum."""

    smallest: Mapping[str, int]
    usual: Mapping[str, int]
    largest: Mapping[str, int]
    left_out: str = ""
    """Observed sizes outside the profile, with the reason; empty if there are none."""


def choose_profile(graph: Graph, observed: Mapping[SymbolSizes, int], chosen: ChosenSizes) -> OptimizationProfile:
    """Return the profile of an engine.

    The usual sizes are the most frequent combination. The minimum is that of each dim, and the maximum likewise. If a
    guard forbids such a combination, the smallest or largest allowed call is used.

    Args:
        graph: the graph of the file.
        observed: number of traced or calibrated calls by sizes.
        chosen: sizes that override the observed ones.

    Raises:
        TargetError: a chosen range is for an unknown symbol, outside the traced range, or contradicts a guard.
    """
    symbols = _input_symbols(graph)
    _check_known(graph, symbols, chosen)
    for name, sizes in chosen.items():
        _check_traced(symbols[name], sizes)
    limits, calls = (
        _ProfileConstraints(graph.guards, _dynamic_input_shapes(graph)),
        _count_calls(symbols, observed, chosen),
    )
    usual = _merge_sizes(_most_frequent(calls), chosen, USUAL_PART)
    if fault := limits.fault(usual, usual, USUAL_PART):
        raise _shapes_error(fault)
    (smallest, why), (largest, why_not) = (
        _limit_sizes(limits, calls, usual, chosen, part) for part in (MIN_PART, MAX_PART)
    )
    return OptimizationProfile(smallest, usual, largest, _describe_omissions(calls, smallest, largest, why or why_not))


def trtexec_command(graph: Graph, file: Path, profile: OptimizationProfile) -> str:
    """Return the ``trtexec`` command line for the file of a graph.

    Raises:
        TargetError: the name of an input contains a separator.
    """
    profiled = _dynamic_input_shapes(graph)
    odd = [name for name in profiled if TRTEXEC_SEPARATORS & {*name}]
    if odd:
        raise TargetError(
            f"the name of the input {odd[0]!r} contains ',' or ':', which separate arguments of trtexec. Give other "
            "input_names."
        )
    shapes = [
        f"--{flag}="
        + ",".join(f"{name}:{'x'.join(str(evaluate(s, part)) for s in of)}" for name, of in profiled.items())
        for flag, part in zip(SHAPE_FLAGS, (profile.smallest, profile.usual, profile.largest), strict=True)
    ]
    files = [f"--onnx={file.name}", f"--saveEngine={companion_path(file, '.engine').name}"]
    return shlex.join(["trtexec", *files, STRONGLY_TYPED_FLAG, *(shapes if profiled else [])])


def build_script(line: str, profile: OptimizationProfile) -> str:
    """Return a script that runs a command line in its own folder, with a comment on sizes that the engine omits."""
    note = f"# {' '.join(profile.left_out.split())}\n" if profile.left_out else ""
    return f'#!/bin/sh\n{note}cd "$(dirname "$0")" || exit\n{line}\n'


def _input_symbols(graph: Graph) -> dict[str, Symbol]:
    """Return the symbols defined by inputs; others depend on data and are not part of a profile."""
    inputs = {value.name for value in graph.inputs}
    return {name: symbol for name, symbol in graph.symbols.items() if symbol.source.name in inputs}


def _dynamic_input_shapes(graph: Graph) -> dict[str, tuple[Dim, ...]]:
    """Return the shapes of inputs with dynamic dims.

    For an input with an element that is a length or a slice bound, ``trtexec`` takes its value in place of a shape.
    """
    lengths = {name for node in graph.nodes for name in _length_symbols(node, graph)}
    numbers = [s for s in _input_symbols(graph).values() if s.source.dim is None and s.name in lengths]
    dynamic = {v.name: v.type.shape for v in graph.inputs if not v.type.is_static}
    return dynamic | {symbol.source.name: (symbol.expr,) for symbol in numbers}


def _length_symbols(node: Node, graph: Graph) -> set[str]:
    """Return the symbols that the output shapes of a node contain or depend on."""
    made = {name for value in node.outputs for name in symbols_in(value.type.shape)}
    outputs = {value.name for value in node.outputs}
    makes_own = any(graph.symbols[name].source.name in outputs for name in made & graph.symbols.keys())
    return (
        made | symbols_in((*node.inputs, *node.attrs.values()))
        if makes_own or node.op_type in SLICING_OPERATORS
        else made
    )


def _check_known(graph: Graph, symbols: Mapping[str, Symbol], chosen: ChosenSizes) -> None:
    """Reject chosen sizes for symbols that the inputs of the graph lack."""
    for name in chosen:
        if name not in symbols:
            known = ", ".join(map(repr, symbols)) or "none"
            raise TargetError(f"shapes: {name!r} is not a dynamic dim of {graph.name}, which has {known}.")


def _check_traced(symbol: Symbol, sizes: tuple[int, int, int]) -> None:
    low, _, high = sizes
    if (symbol.low is not None and low < symbol.low) or (symbol.high is not None and high > symbol.high):
        raise TargetError(
            f"shapes: {symbol.name!r} from {low} to {high} is outside "
            f"{symbol.low}..{'' if symbol.high is None else symbol.high}, for which the model was traced"
        )


def _count_calls(
    symbols: Mapping[str, Symbol], observed: Mapping[SymbolSizes, int], chosen: ChosenSizes
) -> Counter[SymbolSizes]:
    """Return the number of calls by their sizes, without chosen dims; one call of legal sizes if none were observed."""
    legal = {s.name: s.example or max(s.low or 1, 1) for s in symbols.values()}
    found = Counter[SymbolSizes]()
    for sizes, count in (observed or {(): 1}).items():
        known = legal | dict(sizes)
        found[tuple((name, known[name]) for name in sorted(symbols) if name not in chosen)] += count
    return found


def _most_frequent(calls: Counter[SymbolSizes]) -> SymbolSizes:
    """Return the most frequent combination of sizes; ties are broken by the frequency of each size."""
    by_size = Counter[tuple[str, int]]()
    for call, count in calls.items():
        by_size.update(dict.fromkeys(call, count))
    return max(sorted(calls), key=lambda call: (calls[call], sum(by_size[dim] for dim in call)))


def _merge_sizes(call: SymbolSizes, chosen: ChosenSizes, part: int) -> dict[str, int]:
    return dict(call) | {name: sizes[part] for name, sizes in chosen.items()}


@dataclass(frozen=True)
class _ProfileConstraints:
    """Constraints on the sizes of a profile: the guards of a graph, and input dims that grow with the sizes."""

    guards: Sequence[Guard]
    profiled: Mapping[str, Sequence[Dim]]

    def fault(self, sizes: Mapping[str, int], usual: Mapping[str, int], part: int) -> str:
        """Return why sizes cannot be part of a profile; empty if they can."""
        for guard in self.guards:
            is_known = all(str(symbol) in sizes for symbol in guard.relation.free_symbols)
            if is_known and not is_met(guard, sizes):
                return f"{dict(sizes)} violates {guard}, for which the model was traced"
        for name, dim in ((name, dim) for name, dims in self.profiled.items() for dim in dims):
            length, usual_length = (_length(dim, of) for of in (sizes, usual))
            is_impossible = length < 0 and not getattr(dim, "is_Symbol", False)  # numbers may be negative
            if (
                is_impossible
                or (part == MIN_PART and length > usual_length)
                or (part == MAX_PART and length < usual_length)
            ):
                return f"with {dict(sizes)}, a dim {dim} of {name!r} is {length}, but is usually {usual_length}"
        return ""


def _limit_sizes(
    limits: _ProfileConstraints, calls: Counter[SymbolSizes], usual: Mapping[str, int], chosen: ChosenSizes, part: int
) -> tuple[Mapping[str, int], str]:
    """Return the minimum or maximum sizes, and why they are not those of each dim by itself.

    Uses the minimum or maximum of each dim if this combination is allowed, otherwise the smallest or largest call.

    Raises:
        TargetError: no call is compatible with the chosen sizes.
    """
    by_size = sorted(calls, key=lambda call: (math.prod(size for _, size in call), call), reverse=part == MAX_PART)
    first = ""
    for call in (_limit_of_each_dim([*calls], part), *by_size):
        sizes = _merge_sizes(call, chosen, part)
        fault = limits.fault(sizes, usual, part)
        if not fault:
            return sizes, first
        first = first or fault
    raise _shapes_error(first)


def _limit_of_each_dim(calls: Sequence[SymbolSizes], part: int) -> SymbolSizes:
    """Return the minimum or maximum size of each dim, regardless of their combination."""
    return tuple(min(dims) if part == MIN_PART else max(dims) for dims in zip(*calls, strict=True))


def _length(dim: Dim, sizes: Mapping[str, int]) -> int:
    try:
        return int(evaluate(dim, sizes))
    except ArithmeticError:
        return -1  # no dim has this size


def _shapes_error(fault: str) -> TargetError:
    return TargetError(f"shapes: {fault}. Choose others.")


def _describe_omissions(
    calls: Counter[SymbolSizes], smallest: Mapping[str, int], largest: Mapping[str, int], fault: str
) -> str:
    """Return the observed sizes outside a profile, with the reason, as text."""
    if not fault:
        return ""
    outside = sum(n for call, n in calls.items() if any(not smallest[s] <= size <= largest[s] for s, size in call))
    return (
        f"the engine is built for {dict(smallest)} to {dict(largest)}, which excludes {outside} of {calls.total()} "
        f"seen calls: {fault}. Choose other `shapes` to include them."
    )
