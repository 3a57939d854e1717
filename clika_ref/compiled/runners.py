"""Run an artifact in its runtime, with inputs on any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from clika_ref.core.artifacts import Artifact, Runner
from clika_ref.core.targets import Target


def load_runner(target: Target, artifact: Artifact) -> Runner:
    """Load an artifact; the runner returns its outputs on the device of its inputs, as the module does.

    Runtimes themselves take and return CPU tensors.
    """
    runner = target.load(artifact)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found = runner(to_cpu(inputs))
        return [x.to(inputs[0].device) for x in found] if inputs else found

    return run


def to_cpu(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors to the CPU for a runtime; CPU tensors are returned unchanged."""
    return [x.cpu() for x in inputs]
