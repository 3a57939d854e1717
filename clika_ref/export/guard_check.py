"""Run a graph where a guard does not hold, and reject a file that would return the result of another branch there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import sympy
import torch
from torch import Tensor

from clika_ref.capture.violating_sizes import MAX_COST, evaluate_shape, find_violating_sizes, is_cheap
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError, ModelError
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import Guard, Symbol
from clika_ref.core.types import TensorType
from clika_ref.export.unchecked_guards import find_unchecked_guards
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.reporting.log import CompilationLog

MAX_SHOWN_GUARDS = 5
"""Maximum number of guards in a message."""

RUNS_PER_GUARD = 2
"""Number of sizes at which the graph runs for each guard."""

MAX_RUNS = 6
"""Maximum number of these runs for all guards; further guards are a warning."""


def check_guards(
    graph: Graph,
    artifact: Artifact,
    examples: Sequence[Sequence[Tensor]],
    log: CompilationLog,
    *,
    allow_unchecked: bool,
) -> None:
    """Reject a file that returns a result where the model takes another branch, and warn about all other guards.

    Some guards come from branches of the model's own Python code, others from PyTorch's operators. The graph runs where
    a guard does not hold, within the sizes that the file declares. If it fails (fewer rows than ``topk`` takes), or if
    the guard is harmless (`Guard.is_harmless`), it is a warning. Runtimes are not run: some read beyond the end of a
    tensor.

    Args:
        graph: the graph of the file.
        artifact: the file. ``facts["sizes"]`` contains the range of each symbol if the target limits them.
        examples: inputs of the graph; the smallest is resized.
        log: receives the guards that the file does not check.
        allow_unchecked: whether to warn in place of raising an error.

    Raises:
        ModelError: the file returns a result where the model takes another branch, and ``allow_unchecked`` is False.
    """
    guards = find_unchecked_guards(graph)
    example = min(examples, key=_count_elements, default=None)
    if guards and example is not None and not allow_unchecked:
        branches = _find_branches(guards, graph, artifact, example)
        if branches:
            raise ModelError(_describe_refusal(graph, branches))
    _warn_of_unchecked(guards, graph, log)


def _find_branches(
    guards: Sequence[Guard], graph: Graph, artifact: Artifact, example: Sequence[Tensor]
) -> dict[Guard, list[Tensor]]:
    """Return the first guard for which the graph returns a result where it does not hold, with such inputs."""
    symbols, base = _list_changeable_symbols(graph, artifact), read_sizes(graph, example)
    runs = 0
    for guard in guards:
        if not guard.is_harmless and not _states_sign(guard) and runs < MAX_RUNS:
            calls = _resize_calls(graph, example, find_violating_sizes(guard, base, symbols))
            for inputs in islice(calls, RUNS_PER_GUARD):
                runs += 1
                if _returns_result(graph, inputs):
                    return {guard: inputs}
    return {}


def _states_sign(guard: Guard) -> bool:
    """Whether a guard only states that a number, such as a count of positions, is not negative."""
    return isinstance(guard.relation, sympy.Ge) and guard.relation.lhs.is_Symbol and guard.relation.rhs == 0


def _list_changeable_symbols(graph: Graph, artifact: Artifact) -> dict[str, Symbol]:
    """Return the symbols of inputs, with the ranges that the file declares."""
    inputs = {value.name for value in graph.inputs}
    ranges: Mapping[str, tuple[int, int]] = artifact.facts.get("sizes", {})
    found: dict[str, Symbol] = {}
    for name, symbol in graph.symbols.items():
        if symbol.source.name in inputs:
            low, high = ranges.get(name, (None, None))
            found[name] = replace(symbol, low=low, high=high)
    return found


def _resize_calls(
    graph: Graph, example: Sequence[Tensor], choices: Iterator[Mapping[str, int]]
) -> Iterator[list[Tensor]]:
    """Yield inputs of each choice of sizes: those of an example, repeated or cut."""
    numbers = {s.source.name: name for name, s in graph.symbols.items() if s.source.dim is None}
    for sizes in choices:
        shapes = [evaluate_shape(value.type.shape, sizes) for value in graph.inputs]
        inputs: list[Tensor] = []
        for value, tensor, shape in zip(graph.inputs, example, shapes, strict=True):
            if value.name in numbers:
                inputs.append(torch.full_like(tensor, sizes[numbers[value.name]]))
            elif shape is not None and math.prod(shape) <= max(MAX_COST, tensor.numel()):
                inputs.append(_resize(tensor, shape))
        if len(inputs) == len(shapes) and is_cheap(inputs, example):
            yield inputs


def _resize(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape, with its elements repeated or cut along each dim; zeros if there are none."""
    if not tensor.numel():
        return tensor.new_zeros(shape)
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor


def _count_elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _returns_result(graph: Graph, inputs: Sequence[Tensor]) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            compute_outputs(graph, inputs)
    except ClikaError:
        return False
    return True


def _describe_refusal(graph: Graph, unchecked: Mapping[Guard, Sequence[Tensor]]) -> str:
    """Return the message for guards that the artifact does not check."""
    guard, inputs = next(iter(unchecked.items()))
    shown = ", ".join(f"{value.name}: {TensorType.of(x)}" for value, x in zip(graph.inputs, inputs, strict=True))
    return (
        f"cannot export {graph.name}: the artifact does not check {_list_guards([*unchecked])}. It returns a result "
        f"for {shown}, which violates {guard.relation}, and this result may be wrong. "
        f"{''.join(_describe_computed_sizes(graph, [*unchecked]))}"
        "The file was not moved into place. Fix such dims with dynamic_axes, compile with inputs that take this "
        "branch, or check inputs before each call and export with export_configuration(allow_unchecked_guards=True)."
    )


def _list_guards(guards: Sequence[Guard], where: str = "") -> str:
    """Return the first guards as text, and the number of others."""
    more = f"; and {len(guards) - MAX_SHOWN_GUARDS} more{where}" if len(guards) > MAX_SHOWN_GUARDS else ""
    noun = "guard" if len(guards) == 1 else "guards"
    return f"the {noun} {'; '.join(map(str, guards[:MAX_SHOWN_GUARDS]))}{more}"


def _warn_of_unchecked(guards: Sequence[Guard], graph: Graph, log: CompilationLog) -> None:
    """Warn about guards that the artifact does not check; a long list is written to the log file."""
    if guards:
        where = ", listed in the log" if log.path else "; logs_dir writes a log of all"
        log.warning(
            f"the artifact does not check {_list_guards(guards, where)}. "
            f"{''.join(_describe_computed_sizes(graph, guards[:MAX_SHOWN_GUARDS]))}"
            "Inputs that violate them may fail or give wrong results. Check them before each call."
        )
    if len(guards) > MAX_SHOWN_GUARDS:
        shown = "\n".join(f"+ {guard}" for guard in guards)
        log.detail(f"The artifact does not check these guards:\n{shown}")


def _describe_computed_sizes(graph: Graph, guards: Sequence[Guard]) -> Iterator[str]:
    """Yield a sentence for each size or number in guards that is not one of an input, but depends on values."""
    used = {symbol for guard in guards for symbol in guard.relation.free_symbols}
    inputs = {value.name for value in graph.inputs}
    results = {value.name: node for node in graph.nodes for value in node.outputs}
    for symbol in graph.symbols.values():
        if symbol.expr in used and symbol.source.name not in inputs:
            part = "the value" if symbol.source.dim is None else f"dim {symbol.source.dim}"
            node = results.get(symbol.source.name)
            line = f" at {node.origin.line}" if node and node.origin.line else ""
            yield f"{symbol.name} is {part} of a result of {node.op_type if node else 'the model'}{line}. "
