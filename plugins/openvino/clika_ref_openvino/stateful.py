"""Files whose state OpenVINO keeps: each input of the state becomes a variable, which its output assigns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref_openvino.core import core
from clika_ref_openvino.runtime_properties import DEVICE, session_options
from clika_ref_openvino.tensors import from_openvino, run_request, to_openvino

ROWS = "state_rows"
"""Name of the input with the sample of the state that each sample continues."""


class OpenVinoStatefulRunner:
    """A compiled model with variables."""

    def __init__(self, artifact: Artifact, state: Mapping[str, str], ov: Any) -> None:
        """Load an artifact; ``state`` names the output that each input of the state takes next."""
        from openvino import passes  # noqa: PLC0415 - heavy, and the plugin must load without it

        self._ov, self._artifact, self._names = ov, artifact, [*state]
        self._inputs = [name for name in artifact.input_names if name not in state]
        self._outputs = [name for name in artifact.output_names if name not in state.values()]
        try:
            model = core().read_model(str(artifact.path))
            options = session_options(model)
            _select_rows(model, state, ov)
            manager = passes.Manager()
            manager.register_pass(passes.MakeStateful(dict(state)))
            manager.run_passes(model)
            self.model = core().compile_model(model, DEVICE, options)
        except RuntimeError as error:
            raise TargetError(f"OpenVINO {ov.__version__} cannot load {artifact.path}: {error}") from error
        self._has_one_thread = options["INFERENCE_NUM_THREADS"] == 1
        self.request = self.model.create_infer_request()
        found = {variable.name: variable for variable in self.request.query_state()}
        self._variables = [found[name + output] for name, output in state.items()]
        self._batch = 0

    def start(self, state: Sequence[torch.Tensor]) -> None:
        """Replace the state."""
        for variable, tensor in zip(self._variables, state, strict=True):
            variable.state = self._ov.Tensor(to_openvino(tensor, self._ov))
        self._batch = next((len(tensor) for tensor in state if tensor.ndim), 1)

    def __call__(self, inputs: Sequence[torch.Tensor], rows: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Run the model on the other inputs, and return the other outputs.

        Raises:
            TargetError: the runtime fails.
        """
        rows = torch.arange(self._batch) if rows is None else rows
        feed = {name: to_openvino(tensor, self._ov) for name, tensor in zip(self._inputs, inputs, strict=True)}
        try:
            results = run_request(self.request, {**feed, ROWS: rows.numpy()}, has_one_thread=self._has_one_thread)
        except RuntimeError as error:
            raise TargetError(f"OpenVINO failed on {self._artifact.path.name}: {error}") from error
        self._batch = len(rows)
        return [from_openvino(self.model.output(name), results[name], self._ov) for name in self._outputs]


def _select_rows(model: Any, state: Mapping[str, str], ov: Any) -> None:
    """Make the samples of each input of the state an input."""
    rows = ov.opset13.parameter(ov.PartialShape([-1]), ov.Type.i64, name=ROWS)
    rows.output(0).get_tensor().set_names({ROWS})
    model.add_parameters([rows])
    axis = ov.opset13.constant(0, ov.Type.i64)
    for name in state:
        source = model.input(name)
        if source.get_partial_shape().rank.get_length() == 0:
            continue
        readers = source.get_target_inputs()
        selected = ov.opset13.gather(source.get_node(), rows, axis)
        for reader in readers:
            reader.replace_source_output(selected.output(0))
    model.validate_nodes_and_infer_types()
