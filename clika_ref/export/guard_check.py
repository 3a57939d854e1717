"""Run an artifact where a guard does not hold, and refuse it if it returns a result there, which may be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from clika_ref.capture.violating_sizes import evaluate_shape, find_violating_sizes
from clika_ref.compiled.runners import load_runner
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError
from clika_ref.core.execution import read_sizes
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import Guard, Symbol
from clika_ref.core.targets import Target
from clika_ref.core.types import TensorType
from clika_ref.export.unchecked_guards import find_unchecked_guards
from clika_ref.quantization.graph_runs import compute_outputs
from clika_ref.reporting.log import CompilationLog

MAX_SHOWN_GUARDS = 5
"""Maximum number of guards in a message."""

RUNS_PER_GUARD = 2
"""Number of sizes at which the artifact runs for each guard."""

MAX_RUN_ELEMENTS = 2**24
"""Maximum number of elements of the inputs of such a run."""


@dataclass
class GuardFindings:
    """What an artifact does where a guard does not hold."""

    unchecked: dict[Guard, list[Tensor]] = field(default_factory=dict[Guard, list[Tensor]])
    """Guards for which it returns a result, each with the inputs."""
    checked: list[Guard] = field(default_factory=list[Guard])
    """Guards for which it fails, so that no wrong result is returned."""
    untested: list[Guard] = field(default_factory=list[Guard])
    """Guards on values, and those that no size in reach violates."""


def check_guards(
    graph: Graph,
    artifact: Artifact,
    target: Target,
    examples: Sequence[Sequence[Tensor]],
    log: CompilationLog,
    *,
    allow_unchecked: bool,
) -> None:
    """Run an artifact where a guard does not hold, within the sizes that it declares.

    Some guards come from branches of the model's own Python code, others from PyTorch's operators. Where a guard does
    not hold, the artifact may fail (fewer rows than ``topk`` takes), or return a result: that of another branch, or one
    for inputs that the model rejects. The first is an error, the second a warning.

    Args:
        graph: the graph of the artifact.
        artifact: the file. ``facts["sizes"]`` contains the range of each symbol if the target limits them.
        target: runs the artifact. The graph runs in its place where the runtime is not available.
        examples: inputs of the graph; the smallest is resized.
        log: receives what the artifact does not check.
        allow_unchecked: whether to warn in place of raising an error.

    Raises:
        ModelError: the artifact returns a result where the model takes another branch, and ``allow_unchecked`` is False.
    """
    guards = find_unchecked_guards(graph)
    if not guards:
        return
    is_runnable = target.unavailable_reason() is None
    run = load_runner(target, artifact) if is_runnable else partial(compute_outputs, graph)
    found = _run_violations(guards, graph, artifact, examples, run)
    branches = {guard: inputs for guard, inputs in found.unchecked.items() if not guard.is_limit}
    if branches and not allow_unchecked:
        raise ModelError(_describe_refusal(graph, branches))
    _warn_of_unchecked([*found.unchecked, *found.untested], graph, log)
    if found.checked:
        shown = "\n".join(f"+ {guard}" for guard in found.checked)
        log.detail(f"The artifact fails for inputs that violate these guards:\n{shown}")


def _run_violations(
    guards: Sequence[Guard],
    graph: Graph,
    artifact: Artifact,
    examples: Sequence[Sequence[Tensor]],
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
) -> GuardFindings:
    """Run the artifact at sizes that violate each guard."""
    found = GuardFindings()
    example = min(examples, key=_count_elements, default=None)
    symbols = _list_changeable_symbols(graph, artifact)
    base = {} if example is None else read_sizes(graph, example)
    failed: list[Mapping[str, int]] = []
    for guard in guards:
        calls = () if example is None else _resize_calls(graph, example, find_violating_sizes(guard, base, symbols))
        tested = False
        for sizes, inputs in islice(calls, RUNS_PER_GUARD):
            tested = True
            if sizes not in failed and _returns_result(run, inputs):
                found.unchecked[guard] = inputs
                break
            failed.append(sizes)
        else:
            (found.checked if tested else found.untested).append(guard)
    return found


def _list_changeable_symbols(graph: Graph, artifact: Artifact) -> dict[str, Symbol]:
    """Return the symbols of inputs, with the ranges that the artifact declares."""
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
) -> Iterator[tuple[Mapping[str, int], list[Tensor]]]:
    """Yield inputs of each choice of sizes: those of an example, repeated or cut."""
    numbers = {s.source.name: name for name, s in graph.symbols.items() if s.source.dim is None}
    for sizes in choices:
        shapes = [evaluate_shape(value.type.shape, sizes) for value in graph.inputs]
        inputs: list[Tensor] = []
        for value, tensor, shape in zip(graph.inputs, example, shapes, strict=True):
            if value.name in numbers:
                inputs.append(torch.full_like(tensor, sizes[numbers[value.name]]))
            elif shape is not None and math.prod(shape) <= MAX_RUN_ELEMENTS:
                inputs.append(_resize(tensor, shape))
        if len(inputs) == len(shapes):
            yield sizes, inputs


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


def _returns_result(run: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]) -> bool:
    try:
        run(inputs)
    except Exception:  # noqa: BLE001 - a runtime may raise anything
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
