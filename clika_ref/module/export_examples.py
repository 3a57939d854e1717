"""Check that a module can be exported, and choose the inputs to compare its artifact on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from clika_ref.capture.inputs import pack_arguments
from clika_ref.core.errors import ModelError
from clika_ref.core.guards import check_inputs
from clika_ref.export.example_inputs import choose_example, dummy_inputs
from clika_ref.export.quantized_check import MIN_MARGIN_SAMPLES
from clika_ref.module.adapted_module import AdaptedModule
from clika_ref.module.weights import device_of_weights, weight_dtype_error


def require_exportable(module: AdaptedModule) -> None:
    """Reject a module without outputs, or with weights of another dtype than its graph.

    Raises:
        ModelError: it returns no tensor, or a weight has changed its dtype.
    """
    graph = module.graph
    if not graph.outputs:
        msg = f"{graph.name} returns no tensor, so there is nothing to export"
        raise ModelError(msg)
    moved = [(v, v.data.dtype) for v in graph.constants.values() if v.data is not None and v.data.dtype != v.type.dtype]
    if moved:
        value, dtype = moved[0]
        raise weight_dtype_error(value.name, dtype, value.type.dtype)


def list_examples(module: AdaptedModule, given: Any = None) -> list[list[torch.Tensor]]:
    """Return examples, each with one tensor for each input of the graph.

    Args:
        module: the module.
        given: the user's example; by default calibration inputs, the inputs that the module was compiled with, or
            random inputs of the traced shapes.

    Raises:
        ModelError: the user's example does not fit the module.
    """
    if given is None and module._clika_calibration is not None:
        return module._clika_calibration.reservoir.samples(MIN_MARGIN_SAMPLES)
    if given is None and module._clika_examples:
        return module._clika_examples
    if given is None:
        dummy = _as_graph_inputs(module, (), generate_dummy_inputs(module))
        return [list(choose_example(module.graph, dummy))]
    call = pack_arguments(module._clika_signature.parameters, given)
    return [_as_graph_inputs(module, call.args, call.kwargs)]


def generate_dummy_inputs(module: AdaptedModule) -> dict[str, Any]:
    """Return inputs of the traced shapes by argument, on the device of the weights.

    Raises:
        ModelError: the module is empty.
    """
    return dummy_inputs(module._require_graph(), module._clika_signature, device_of_weights(module))


def _as_graph_inputs(module: AdaptedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    signature = module._clika_signature
    inputs = signature.graph_inputs(signature.flatten(args, kwargs))
    check_inputs(module._clika_graph, inputs)
    return inputs
