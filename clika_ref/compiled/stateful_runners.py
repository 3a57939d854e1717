"""Run an artifact whose state, such as a cache, stays in the runtime from one call to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from clika_ref.core.artifacts import Artifact, Runner, StatefulRunner
from clika_ref.core.targets import Target

NEXT_SUFFIX = ".next"
"""Suffix of the output with the value of a buffer after the call."""

CACHE_PREFIX, NEXT_CACHE_PREFIX = "past_key_values.", "present."
"""Prefixes of the inputs and outputs with the tensors of a cache."""


def find_state(artifact: Artifact) -> dict[str, str]:
    """Return the output that each input of the state takes in the next call, by their names."""
    outputs = {name.removesuffix(NEXT_SUFFIX): name for name in artifact.output_names if name.endswith(NEXT_SUFFIX)}
    outputs |= {
        CACHE_PREFIX + name.removeprefix(NEXT_CACHE_PREFIX): name
        for name in artifact.output_names
        if name.startswith(NEXT_CACHE_PREFIX)
    }
    return {name: outputs[name] for name in artifact.input_names if name in outputs}


def load_stateful_runner(target: Target, artifact: Artifact) -> StatefulRunner:
    """Load an artifact; the runner keeps its state, and takes and returns the other inputs and outputs.

    Give the first state to its method ``start``: one CPU tensor for each name in `find_state`, in order.

    Args:
        target: the target that wrote it.
        artifact: the artifact to load.
    """
    state = find_state(artifact)
    return target.load_with_state(artifact, state) or PassedState(target.load(artifact), artifact, state)


class PassedState:
    """A runner that passes the state on, for runtimes that keep none."""

    def __init__(self, runner: Runner, artifact: Artifact, state: Mapping[str, str]) -> None:
        self._runner, self._artifact, self._names = runner, artifact, state
        self._state: dict[str, Tensor] = {}

    def start(self, state: Sequence[Tensor]) -> None:
        """Replace the state."""
        self._state = dict(zip(self._names, state, strict=True))

    def __call__(self, inputs: Sequence[Tensor], rows: Tensor | None = None) -> list[Tensor]:
        """Run the artifact on the other inputs, and return the other outputs."""
        artifact, others = self._artifact, iter(inputs)
        state = {name: _select_rows(tensor, rows) for name, tensor in self._state.items()}
        given = [state[name] if name in state else next(others) for name in artifact.input_names]
        results = dict(zip(artifact.output_names, self._runner(given), strict=True))
        self._state = {name: results.pop(output) for name, output in self._names.items()}
        return [*results.values()]


def _select_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None or not tensor.ndim else tensor.index_select(0, rows)
