"""An artifact in its runtime, for inputs that lie on any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from clika_ref.core.targets import Artifact, Runner, Target


def runner_of(target: Target, artifact: Artifact) -> Runner:
    """Load an artifact; what runs it returns its outputs where its inputs lie, as the module does.

    Runtimes themselves take tensors of the CPU, and return such.
    """
    runner = target.load(artifact)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found = runner(on_cpu(inputs))
        return [x.to(inputs[0].device) for x in found] if inputs else found

    return run


def on_cpu(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as runtimes take them; those of the CPU as they are."""
    return [x.cpu() for x in inputs]
