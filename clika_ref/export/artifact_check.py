"""Compare an artifact in its runtime with the module that it was compiled from; a mismatch names the first node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from clika_ref.capture.detections import has_same_detections
from clika_ref.compiled.runners import load_runner, run_with_outputs
from clika_ref.core.artifacts import Artifact
from clika_ref.core.comparison import describe_differences
from clika_ref.core.errors import ClikaError, DisagreementError, format_count
from clika_ref.core.ir import Graph, Node, Value, walk, walk_graphs
from clika_ref.core.targets import Target
from clika_ref.export.element_order import agrees_in_own_order
from clika_ref.quantization.graph_runs import compute_outputs

ROUNDING_TOLERANCE = 1024.0
"""Difference that a runtime may show, in roundings of the largest element, before a closer check.

Its kernels add in another order, and the differences accumulate with depth: the worst of 254 architectures showed 47
(docs/coverage.md); TF32 inputs start at 8192.
"""

MAX_EAGER_ERROR_RATIO = 20.0
"""Maximum error of a runtime beyond `ROUNDING_TOLERANCE`, as a multiple of eager's error; both against float64.

Correct float32 runtimes reach 19.9. The smallest loss of precision, TF32 inputs, starts at 82 (measured over 2,640
comparisons).
"""


def compare_artifact(
    artifact: Artifact,
    target: Target,
    graph: Graph,
    examples: Sequence[Sequence[torch.Tensor]],
    expected: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> str:
    """Compare the results of an artifact and of its module on every example; return a sentence for the log.

    Args:
        artifact: the artifact.
        target: the target that runs it.
        graph: the graph that it was compiled from, to find the first node that differs.
        examples: inputs of the graph, one tensor for each input.
        expected: computes the reference outputs, such as the module.

    Raises:
        DisagreementError: the results differ beyond rounding; the message names the first node that differs.
    """
    problem = target.unavailable_reason()
    if problem is not None:
        return f"not compared: {problem}"
    if any(node.is_random for node in walk(graph)):
        return "not compared: the model draws random numbers"
    runner, element_count = load_runner(target, artifact), 0
    for number, inputs in enumerate(examples, 1):
        reference = expected(inputs)
        found = runner(inputs)
        element_count += sum(x.numel() for x in reference)
        differences = describe_differences(reference, found, ROUNDING_TOLERANCE)
        if differences and not _agrees_beyond_rounding(target, graph, inputs, reference, found):
            try:
                first_difference = find_first_difference(target, graph, inputs)
            except ClikaError as error:  # with all values as outputs, the runtime fails: report the mismatch anyway
                first_difference = f"The first node that differs is unknown: {error}"
            shown = "; ".join(f"output {artifact.output_names[i]!r} is {text}" for i, text in differences.items())
            raise DisagreementError(
                f"cannot verify the artifact: {target.describe_runtime()} returns other results than the module "
                f"for input {number}: {shown}. {first_difference}. The file was not moved into place. Compile with "
                "compare_after_export=False to inspect it."
            )
    if not element_count:
        return "not compared: the outputs for these inputs are empty"
    counted = format_count(len(examples), "input")
    return f"equal to the module within float rounding on {counted} in {target.describe_runtime()}"


def _agrees_beyond_rounding(
    target: Target,
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
) -> bool:
    """Whether results that differ by more than `ROUNDING_TOLERANCE` may be right.

    Their error is close to eager's, they are the same detections, or almost equal elements have another order.
    """
    return (
        is_within_rounding(graph, inputs, reference, found)
        or has_same_detections(graph, reference, found)
        or agrees_in_own_order(target, graph, inputs, found, ROUNDING_TOLERANCE)
    )


def is_within_rounding(
    graph: Graph, inputs: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> bool:
    """Return whether the runtime's error is close enough to eager's, both against the graph computed in float64."""
    for eager, own, exact in zip(reference, found, compute_in_float64(graph, inputs), strict=True):
        if exact.shape != own.shape:  # another number of detections
            return False
        if eager.dtype != own.dtype or eager.shape != own.shape or not eager.is_floating_point():
            if not torch.equal(eager, own):
                return False
        elif not bool(_has_allowed_error(eager.double(), own.double(), exact.double()).all()):
            return False
    return True


def _has_allowed_error(reference: torch.Tensor, found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return for each element whether it equals eager's, or its error is within `MAX_EAGER_ERROR_RATIO`."""
    errors = (reference - exact).abs()
    finite = errors.isfinite()
    eager_error = float(errors[finite].max()) if bool(finite.any()) else 0.0
    same = (found == reference) | (found == exact) | (found.isnan() & (reference.isnan() | exact.isnan()))
    return same | ((found - exact).abs() <= MAX_EAGER_ERROR_RATIO * eager_error)


def compute_in_float64(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute a graph in float64, which also removes the rounding of its explicit casts to floats."""
    wide = graph.clone()
    for value in (value for part in walk_graphs(wide) for value in part.constants.values()):
        if value.data is not None and value.data.is_floating_point():
            value.data = value.data.double()
    for node in walk(wide):
        dtype = node.attrs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            node.attrs = {**node.attrs, "dtype": torch.float64}
    return compute_outputs(wide, _widen(inputs), lambda _, results: _widen(results))


def _widen(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors with floats in float64; integers plus a Python float are float32 in PyTorch."""
    return tuple(t.double() if t.is_floating_point() else t for t in tensors)


def find_first_difference(target: Target, graph: Graph, inputs: Sequence[torch.Tensor]) -> str:
    """Find the first node that the runtime computes differently, by making every value an output.

    Further outputs may change the fusions of the runtime, so it is possible that no single node differs.
    """
    probe = graph.clone()
    nodes: list[tuple[Node, Value]] = [(n, v) for n in probe.nodes for v in n.outputs]
    results: dict[Value, torch.Tensor] = {}

    def store_results(node: Node, tensors: tuple[torch.Tensor, ...]) -> None:
        results.update(zip(node.outputs, tensors, strict=True))

    compute_outputs(probe, inputs, store_results)
    found = run_with_outputs(probe, (value for _, value in nodes), target, inputs)
    for node, value in nodes:
        text = describe_differences([results[value]], [found[value]], ROUNDING_TOLERANCE).get(0)
        if text is not None:
            return f"The first node that differs is {node.op.name} ({value.name}) in {node.origin}: {text}"
    return "No node differs if each result is an output: a fusion of the runtime differs"
