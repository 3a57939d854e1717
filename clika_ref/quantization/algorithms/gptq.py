"""GPTQ: round weights to the integers with the least error of a layer's outputs on data, not of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.graph_runs import visit_activations
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.layer_weights import data_of, groups_of, run_with_weight, weight_of

MAX_ROW_LENGTH = 8192
"""Maximum length of a row: the products of all pairs of its elements are kept in memory."""

DEFAULT_ROW_LENGTHS = range(64, 641)
"""Lengths of rows for which rounding is tried by default.

Shorter ones leave little choice, and longer ones take longer than calibration. On resnet18 these are half of the
layers, and give 1.8 of the 2.2 dB that all of them give.
"""

MIN_ROWS_PER_INPUT = 4
"""Minimum ratio of data rows to the length of a weight row, by default: with fewer, rounding overfits."""

GRAM_DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal: few samples leave directions without data."""

GPTQ_BLOCK_COLUMNS = 128
"""Number of columns with errors that are applied to all later columns at once."""


@dataclass(frozen=True)
class RoundedWeight:
    """How the weight of a layer is rounded."""

    offsets: Tensor
    """Offset of its integers from the nearest ones, ``int8`` of its shape."""
    left: float
    """Error of products with data, as a share of that of the nearest integers."""


@torch.no_grad()
def round_weights(
    graph: Graph, plan: Plan, batches: Sequence[Sequence[Tensor]], *, only_cheap: bool
) -> dict[str, RoundedWeight]:
    """Return weights rounded to fit the inputs of their layers, by layer name.

    Layers without a weight row for each output, or with too long rows, are omitted.

    Args:
        graph: lowered.
        plan: with the scales of the weights.
        batches: inputs of the graph to fit the rounding to.
        only_cheap: whether to omit layers that take long, or read too little data to fit.
    """
    lengths = DEFAULT_ROW_LENGTHS if only_cheap else range(1, MAX_ROW_LENGTH + 1)
    selected = [node for node in graph.nodes if node.name in plan.weights and _row_length(node) in lengths]
    min_rows = MIN_ROWS_PER_INPUT if only_cheap else 0
    grams: dict[Node, Tensor] = {}
    tensors: dict[Value, Tensor] = {}
    read = {node.inputs[0] for node in selected}

    def hold(value: Value, x: Tensor) -> None:
        if value in read:
            tensors[value] = x

    for inputs in batches:
        visit_activations(graph, inputs, hold)
        for node in selected:
            columns = _unfold_input(node, tensors[node.inputs[0]])
            if len(columns) >= min_rows * columns.shape[-1]:
                gram = torch.einsum("rgi,rgj->gij", columns, columns)
                grams[node] = grams[node] + gram if node in grams else gram
    kind = plan.scheme.weights
    return {node.name: _round_weight(node, plan.weights[node.name], kind, gram) for node, gram in grams.items()}


def _row_length(node: Node) -> int:
    """Return the length of the rows of a weight; 0 if it has no row for each output."""
    weight = data_of(weight_of(node))
    return weight[0].numel() if node.op.trait.axis == 0 and len(weight) else 0


def _unfold_input(node: Node, x: Tensor) -> Tensor:
    """Return the elements that are multiplied with each element of a row, ``[rows, groups, inputs]``.

    The operator itself computes them: a layer with the rows of the identity as weight returns its input.
    """
    inputs, groups = _row_length(node), groups_of(node)
    kernel_shape = tuple(map(int, weight_of(node).type.shape[1:]))
    identity = torch.eye(inputs, dtype=x.dtype, device=x.device).repeat(groups, 1).reshape(-1, *kernel_shape)
    columns = run_with_weight(node, identity, x)
    return columns.movedim(node.op.trait.channel or 0, -1).reshape(-1, groups, inputs)


def _round_weight(node: Node, scales: Tensor, quantized_type: QuantizedType, gram: Tensor) -> RoundedWeight:
    weight = data_of(weight_of(node)).float()
    rows, groups = weight.flatten(1), len(gram)
    own = scales.expand(len(rows)).unsqueeze(1)
    near = (rows / own).round().clamp(quantized_type.low, quantized_type.high)
    parts = zip(rows.chunk(groups), own.chunk(groups), near.chunk(groups), gram, strict=True)
    before, after, steps = 0.0, 0.0, list[Tensor]()
    for part, scale, nearest, of in parts:
        found = quantize_with_gptq(part, scale, quantized_type, of)
        steps.append(nearest if found is None else found)
        before += sum_squared_error(nearest * scale - part, of)
        after += sum_squared_error(steps[-1] * scale - part, of)
    offsets = (torch.cat(steps) - near).to(torch.int8).reshape(weight.shape)
    return RoundedWeight(offsets, after / before if before else 1.0)


def sum_squared_error(error: Tensor, gram: Tensor) -> float:
    """Return the squared error of products with the data of a Gram matrix, summed, given the error of the weight."""
    return float(((error @ gram) * error).sum())


@torch.no_grad()
def quantize_with_gptq(rows: Tensor, scales: Tensor, quantized_type: QuantizedType, gram: Tensor) -> Tensor | None:
    """Return the quantized weight with the least error of the layer's outputs on data, not of its elements.

    Zeros stay 0, such as those of a pruning mask.

    Args:
        rows: ``float32[outputs, inputs]``.
        scales: ``float32[outputs, blocks]``.
        quantized_type: the quantized type.
        gram: ``x.T @ x`` of the layer's input, ``float32[inputs, inputs]``.

    Returns:
        ``int8[outputs, inputs]``, or None if the data is not finite or its Gram matrix cannot be inverted.

    Source: Frantar et al., GPTQ (2023), in the order of the columns.
    """
    factor = find_gptq_factor(gram)
    return None if factor is None else round_with_feedback(rows, scales, quantized_type, factor)


@torch.no_grad()
def round_with_feedback(rows: Tensor, scales: Tensor, quantized_type: QuantizedType, factor: Tensor) -> Tensor:
    """Return the quantized rows of `quantize_with_gptq`, ``int8[outputs, inputs]``, given its factor.

    The rows of a weight are independent of each other.

    Args:
        rows: ``float32[outputs, inputs]``.
        scales: ``float32[outputs, blocks]``.
        quantized_type: the quantized type.
        factor: of `find_gptq_factor`, ``float32[inputs, inputs]``.
    """
    left = rows.T.clone(memory_format=torch.contiguous_format)  # its rows are the columns, each in one place
    steps, of_columns = torch.empty_like(left, dtype=torch.int8), scales.T.contiguous()
    kept = left != 0 if bool((left == 0).any()) else None
    inputs = len(left)
    block = inputs // len(of_columns)
    for start in range(0, inputs, GPTQ_BLOCK_COLUMNS):
        end = min(start + GPTQ_BLOCK_COLUMNS, inputs)
        residuals = left.new_zeros(end - start, left.shape[1])
        for at in range(start, end):
            scale = of_columns[at // block]
            whole = (left[at] / scale).round_().clamp_(quantized_type.low, quantized_type.high)
            if kept is not None:
                whole.mul_(kept[at])
            steps[at] = whole
            torch.sub(left[at], whole.mul_(scale), out=residuals[at - start]).div_(factor[at, at])
            left[at + 1 : end].addr_(factor[at, at + 1 : end], residuals[at - start], alpha=-1)
        left[end:].addmm_(factor[start:end, end:].T, residuals, alpha=-1)
    return steps.T.contiguous()


def find_gptq_factor(gram: Tensor) -> Tensor | None:
    """Return the upper Cholesky factor of the inverse of a Gram matrix ``float32[inputs, inputs]``, or None."""
    if not bool(gram.isfinite().all()):
        return None
    wide = gram.double()
    mean = wide.diagonal().mean()
    if not mean > 0:
        return None
    wide = wide + torch.eye(len(wide), dtype=wide.dtype, device=wide.device) * GRAM_DAMPING * mean
    factor, failed = torch.linalg.cholesky_ex(wide)
    if failed:
        return None
    inverse = torch.cholesky_inverse(factor)
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if failed else upper.float()
