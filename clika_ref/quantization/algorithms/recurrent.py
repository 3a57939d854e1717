"""Quantize the weights of recurrent layers to 8 bits, where that is faster or smaller, and accurate enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.quantization.algorithms.gradient_tape import GradientRecorder, record_gradients
from clika_ref.quantization.algorithms.sensitivity import sensitivity_reason
from clika_ref.quantization.algorithms.weight_only import (
    quantize_low_bit,
    quantize_to_nearest,
    split_batches,
    sum_gram_matrices,
)
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.qdq.layer_weights import data_of, is_unchanged_constant, matrices_of
from clika_ref.quantization.qdq.packed_weights import PackedWeight
from clika_ref.quantization.qdq.recurrent_layers import DYNAMIC_PREFIX
from clika_ref.settings.compile_options import ClikaCompileOptions
from clika_ref.settings.quantization import QuantizationSettings

SMALL_REASON = "INT8 is not faster for {} states; the least number is {}"

PROJECTED_REASON = "the target computes projected states in float"

MATRICES = 2
"""Number of matrices of each layer and direction: one for the input, one for the state."""


@dataclass
class RecurrentResult:
    """The result for each recurrent layer that the target can quantize."""

    quantized: dict[Node, bool] = field(default_factory=dict[Node, bool])
    """Whether a quantized layer also rounds its inputs at run time."""
    matrices: dict[str, PackedWeight] = field(default_factory=dict[str, PackedWeight])
    """Low-bit form of each matrix of these layers, by its name."""
    floats: dict[Node, str] = field(default_factory=dict[Node, str])
    """Layers that stay in float, with the reason."""
    sensitivities: dict[Node, float] = field(default_factory=dict[Node, float])
    """Sensitivity of each layer that could be quantized."""

    def replace_floats(self, floats: Mapping[Node, str]) -> dict[Node, str]:
        """Return the layers in float and their reasons, with this result in place of those for recurrent layers."""
        return {node: self.floats.get(node, reason) for node, reason in floats.items() if node not in self.quantized}


def quantize_recurrent_layers(  # noqa: PLR0917 - what decides about the layers
    calibration: Calibration,
    forms: Mapping[str, int | None],
    bits: int,
    settings: QuantizationSettings,
    skipped: Mapping[Node, str],
    operators: Mapping[str, Operator],
    find_options: Callable[[], ClikaCompileOptions] = ClikaCompileOptions,
) -> RecurrentResult:
    """Decide which recurrent layers get 8-bit weights, by their sensitivity on a batch that rounding is not fitted to.

    Args:
        calibration: of the lowered graph.
        forms: as in `QuantizationScheme.dynamic`.
        bits: of the weights.
        settings: those of the model.
        skipped: nodes that stay in float, with the reason.
        operators: those of the registry.
        find_options: returns the options of the rounding; called for each layer, since there may be a time limit.
    """
    graph, found = calibration.graph, RecurrentResult()
    waiting: list[Node] = []
    for node in graph.nodes:
        if node.op_type in forms and node.op.trait.matrices is not None:
            reason = skipped.get(node) or _find_float_reason(graph, node, forms[node.op_type])
            if reason:
                found.floats[node] = reason
            else:
                waiting.append(node)
    if not waiting:
        return found
    results = {(node, i): v for node in waiting for i, v in enumerate(node.outputs) if v.uses}
    read = {v for node in waiting for v in (*node.inputs, *node.outputs) if isinstance(v, Value) and not v.is_constant}
    fitted, judged = split_batches(calibration.reservoir.batches)
    recorder = record_gradients(graph, results, judged[0], kept=read)
    rounded = {v for node in waiting for v in (node.first_tensor, node.outputs[0])}
    grams = [sum_gram_matrices(graph, rounded, some) for some in (fitted, judged)]
    errors: dict[Any, Tensor] = {}
    matrices: dict[Node, dict[Value, PackedWeight]] = {}
    for node in waiting:
        matrices[node] = _quantize_matrices(node, grams, bits, find_options())
        is_dynamic = forms[node.op_type] is not None
        changed = _run_quantized(node, matrices[node], recorder, operators, is_dynamic=is_dynamic)
        errors |= {(node, i): changed[i] - recorder.tensors[v].detach() for (n, i), v in results.items() if n is node}
    effects = recorder.estimate_effects(errors)
    limit = settings.quantization_sensitivity_threshold if settings.automatic_skip_quantization else None
    for node in waiting:
        found.sensitivities[node] = sum(share for (n, _), share in effects.items() if n is node)
        if limit is not None and found.sensitivities[node] > limit:
            found.floats[node] = sensitivity_reason(found.sensitivities[node], limit)
        else:
            found.quantized[node] = forms[node.op_type] is not None
            found.matrices |= {value.name: packed for value, packed in matrices[node].items()}
    return found


def _find_float_reason(graph: Graph, node: Node, least: int | None) -> str:
    """Return the reason to keep a layer in float, empty if there is none."""
    matrices = matrices_of(node)
    if not all(is_unchanged_constant(graph, v) for v in node.inputs[node.op.trait.matrices or 0 :]):
        return "its weights are computed"
    if any(v.type.dtype != torch.float32 for v in matrices):
        return f"its weights are {matrices[0].type.dtype}"
    if least is None:
        return ""
    if len(matrices) != MATRICES * _directions_of(node) * node.attrs["num_layers"]:
        return PROJECTED_REASON
    states = int(matrices[1].type.shape[1])
    return SMALL_REASON.format(states, least) if states < least else ""


def _directions_of(node: Node) -> int:
    return 2 if node.attrs["bidirectional"] else 1


def _quantize_matrices(
    node: Node, grams: Sequence[Mapping[Value, Tensor]], bits: int, options: ClikaCompileOptions
) -> dict[Value, PackedWeight]:
    """Return the low-bit form of each matrix of a layer, rounded for its inputs and states.

    Args:
        node: the layer.
        grams: ``x.T @ x`` of its input and its output, over the data to fit and that for evaluation.
        bits: of the weights.
        options: of the rounding.
    """
    found: dict[Value, PackedWeight] = {}
    matrices, directions = matrices_of(node), _directions_of(node)
    is_known = len(matrices) == MATRICES * directions  # one layer without projections
    for position, matrix in enumerate(matrices):
        weight, direction = data_of(matrix).float(), position // MATRICES
        if not is_known:
            found[matrix] = quantize_to_nearest(weight, bits, 0, options)
            continue
        part = slice(direction * weight.shape[1], (direction + 1) * weight.shape[1])  # the states of a direction
        value, part = (node.outputs[0], part) if position % MATRICES else (node.first_tensor, slice(None))
        fitted, judged = (gram[value][part, part] for gram in grams)
        found[matrix] = quantize_low_bit(weight, bits, 0, fitted, judged, options)
    return found


@torch.no_grad()
def _run_quantized(
    node: Node,
    matrices: Mapping[Value, PackedWeight],
    recorder: GradientRecorder,
    operators: Mapping[str, Operator],
    *,
    is_dynamic: bool,
) -> tuple[Tensor, ...]:
    """Return the results of the quantized form of a layer, for its recorded inputs."""
    operands: list[Any] = []
    for operand in node.inputs:
        if not isinstance(operand, Value):
            operands.append(operand)
        elif operand not in matrices:
            operands.append(data_of(operand) if operand.is_constant else recorder.tensors[operand].detach())
        elif is_dynamic:
            operands += [matrices[operand].steps(data_of(operand)), matrices[operand].scales[:, 0]]
        else:
            operands.append(matrices[operand].dequantize(data_of(operand)))
    return (operators[DYNAMIC_PREFIX + node.op_type] if is_dynamic else node.op)(*operands, **node.attrs)
