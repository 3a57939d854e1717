"""Compile a graph for a short time, and run an artifact in its runtime, with inputs on any device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from clika_ref.core.artifacts import Artifact, Runner
from clika_ref.core.ir import Graph, Value
from clika_ref.core.targets import Target


@contextmanager
def compile_temporarily(written: Graph, target: Target) -> Iterator[Artifact]:
    """Write a graph to a temporary file, which can be queried within the block.

    Args:
        written: the graph as lowered for the target.
        target: the target that runs it.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield target.compile(written, Path(folder) / "model.onnx")


def load_runner(target: Target, artifact: Artifact) -> Runner:
    """Load an artifact; the runner returns its outputs on the device of its inputs, as the module does.

    Runtimes themselves take and return CPU tensors.

    Args:
        target: the target that wrote it.
        artifact: the artifact to load.
    """
    runner = target.load(artifact)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found = runner(to_cpu(inputs))
        return [x.to(inputs[0].device) for x in found] if inputs else found

    return run


def run_with_outputs(
    probe: Graph, values: Iterable[Value], target: Target, inputs: Sequence[Tensor]
) -> dict[Value, Tensor]:
    """Make values of a graph outputs as well, and return the results of all outputs in the runtime.

    Further outputs may change the fusions of the runtime.

    Args:
        probe: the graph as lowered for the target; its outputs change.
        values: the values to add.
        target: the target that runs it.
        inputs: one tensor for each input of the graph.
    """
    outputs = set(probe.outputs)
    for value in values:
        if value not in outputs:
            probe.add_output(value)
    with compile_temporarily(probe, target) as artifact:
        return dict(zip(probe.outputs, load_runner(target, artifact)(inputs), strict=True))


def to_cpu(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors to the CPU for a runtime; CPU tensors are returned unchanged."""
    return [x.cpu() for x in inputs]
