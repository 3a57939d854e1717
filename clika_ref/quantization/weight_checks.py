"""Checks for weights that cannot be quantized: NaN anywhere, and infinities in weights of layers and normalizations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from clika_ref.core.accuracy import NORM
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node
from clika_ref.quantization.qdq.layer_weights import data_of, is_unchanged_constant, weight_position_of
from clika_ref.quantization.qdq.placement import COMPUTE_TRAIT

UNOWNED_PREFIX = "clika."
"""Prefix of constants that no module owns. Those of rank 0 are numbers in code, as in ``torch.where(mask, nan, x)``."""


def reject_nonfinite_weights(model: Graph) -> None:
    """Reject NaN in constants that are read, and infinities in weights.

    An infinite weight times 0 is NaN; in other constants, infinities are masks.

    Args:
        model: the graph with the names of the user's parameters.

    Raises:
        ModelError: there are such weights; the message names all of them.
    """
    read = {name: v.data for name, v in model.constants.items() if v.uses and name not in model.state}
    tensors = {name: data for name, data in read.items() if data is not None}
    operands = [node.inputs[position] for node in model.nodes if (position := _find_weight_position(node)) is not None]
    weights = {weight.name: data_of(weight) for weight in operands if is_unchanged_constant(model, weight)}
    invalid = [f"NaN in {name!r}" for name in _float_tensor_names(tensors) if has_nan(tensors[name])]
    invalid += [f"infinity in {name!r}" for name in _float_tensor_names(weights) if _has_infinity(weights[name])]
    if invalid:
        raise ModelError(f"cannot quantize the weights: {', '.join(invalid)}. Fix these weights first.")


def _find_weight_position(node: Node) -> int | None:
    """Return the position of the weight of a layer or a normalization; None if there is none."""
    if node.op.trait.kind == COMPUTE_TRAIT:
        return weight_position_of(node)
    names = [operand.name for operand in node.op.operands] if node.op.error is NORM else []
    position = names.index("weight") if "weight" in names else len(node.inputs)
    return position if position < len(node.inputs) else None  # trailing operands may be omitted


def _float_tensor_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, data in tensors.items() if data.is_floating_point() and not _is_number(name, data)]


def _is_number(name: str, data: torch.Tensor) -> bool:
    return data.dim() == 0 and name.startswith(UNOWNED_PREFIX)


def nan_warning(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return a warning that names the tensors with NaN, which a float model may have; None if there are none."""
    invalid = [name for name in _float_tensor_names(tensors) if has_nan(tensors[name])]
    return f"NaN in the weights {', '.join(invalid)}: all results that depend on them are NaN." if invalid else None


def has_nan(tensor: torch.Tensor) -> bool:
    """Return whether any element is NaN; for most tensors a sum rules it out in a tenth of the time."""
    return bool(tensor.sum(dtype=torch.float32).isnan()) and bool(tensor.isnan().any())


def _has_infinity(tensor: torch.Tensor) -> bool:
    return not bool(tensor.sum(dtype=torch.float32).isfinite()) and bool(tensor.isinf().any())
