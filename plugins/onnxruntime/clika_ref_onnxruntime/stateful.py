"""Sessions that keep results for the next call: values stay in the runtime, and static ones are updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref_onnxruntime.tensors import from_onnxruntime, to_onnxruntime

IN_PLACE_OPERATORS = frozenset({"ScatterElements", "ScatterND"})
"""Operators that copy nothing if their result is in the memory of their first operand."""


class OnnxRuntimeStatefulRunner:
    """A session, with values that each call replaces."""

    def __init__(self, session: Any, artifact: Artifact, state: Mapping[str, str]) -> None:
        """Keep the output of each input in ``state`` for the next call."""
        self._session, self._artifact, self._names = session, artifact, state
        self._inputs = [name for name in artifact.input_names if name not in state]
        self._outputs = [name for name in artifact.output_names if name not in state.values()]
        self.in_place = _find_updated_in_place(artifact, state)
        """Inputs whose memory the outputs overwrite."""
        self._state: dict[str, Any] = {}

    def start(self, state: Sequence[torch.Tensor]) -> None:
        """Replace the state."""
        given = dict(zip(self._names, state, strict=True))
        self._state = {name: to_onnxruntime(x.clone() if name in self.in_place else x) for name, x in given.items()}

    def __call__(self, inputs: Sequence[torch.Tensor], rows: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Run the session on the other inputs, and return the other outputs.

        Raises:
            TargetError: the runtime fails.
        """
        if rows is not None:
            self._state = {name: _select_rows(value, rows) for name, value in self._state.items()}
        given = {**self._state, **dict(zip(self._inputs, map(to_onnxruntime, inputs), strict=True))}
        binding = self._session.io_binding()
        for name, value in given.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name)
        for name, output in self._names.items():
            if name in self.in_place:
                binding.bind_ortvalue_output(output, given[name])
            else:
                binding.bind_output(output)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise TargetError(f"ONNX Runtime failed on {self._artifact.path.name}: {error}") from error
        values = iter(binding.get_outputs())
        results = [from_onnxruntime(next(values)) for _ in self._outputs]
        # A value in place keeps its wrapper: this alone keeps the memory of its first elements.
        self._state = {n: given[n] if n in self.in_place else v for n, v in zip(self._names, values, strict=True)}
        return results


def _select_rows(value: Any, rows: torch.Tensor) -> Any:
    tensor = from_onnxruntime(value)
    return to_onnxruntime(tensor.index_select(0, rows)) if tensor.ndim else value


def _find_updated_in_place(artifact: Artifact, state: Mapping[str, str]) -> set[str]:
    """Return the inputs whose output overwrites some elements, and that nothing else reads.

    The runtime may then write the output to the memory of the input.
    """
    found: set[str] = set()
    for value in ir.load(artifact.path).graph.inputs:
        uses = [*value.uses()] if value.name in state else []
        if len(uses) == 1 and uses[0].idx == 0 and uses[0].node.op_type in IN_PLACE_OPERATORS:
            name = value.name or ""
            if uses[0].node.outputs[0].name == state[name]:
                found.add(name)
    return found
