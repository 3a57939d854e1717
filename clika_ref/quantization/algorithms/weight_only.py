"""Weight-only quantization: find the smallest bit width and block size of each layer that is accurate enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.quantization_scheme import WeightOnlyScheme
from clika_ref.core.traits import LOOKUP
from clika_ref.quantization.algorithms.gptq import find_gptq_factor, round_with_feedback, sum_squared_error
from clika_ref.quantization.algorithms.gradient_tape import record_gradients
from clika_ref.quantization.algorithms.sensitivity import sensitivity_reason, variance_share
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.weight_clipping import find_clipped_scales
from clika_ref.quantization.graph_runs import visit_activations
from clika_ref.quantization.layer_settings import NodeSettings
from clika_ref.quantization.qdq.insertion import Plan, weight_as_table
from clika_ref.quantization.qdq.layer_weights import data_of, is_unchanged_constant, weight_of, weight_position_of
from clika_ref.quantization.qdq.packed_weights import (
    PackedWeight,
    StoredOrder,
    choose_stored_order,
    has_output_rows,
    round_in_blocks,
    weight_rows,
)
from clika_ref.quantization.qdq.placement import COMPUTE_TRAIT
from clika_ref.quantization.qdq.qparams import compute_weight_scales
from clika_ref.settings.compile_options import ClikaCompileOptions
from clika_ref.settings.quantization import INT8_BITS, QuantizationSettings

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that can be quantized; dequantized weights keep the dtype."""

MAX_GPTQ_BATCHES = 4
"""Maximum number of batches that rounding is fitted to; the last batch is for evaluation."""


@dataclass
class WeightOnlyResult:
    """The result for each layer."""

    packed: dict[Node, PackedWeight] = field(default_factory=dict[Node, PackedWeight])
    """Low-bit weight of each quantized layer."""
    floats: dict[Node, str] = field(default_factory=dict[Node, str])
    """Layers that keep their weights, with the reason."""
    sensitivities: dict[Node, float] = field(default_factory=dict[Node, float])
    """Sensitivity of each layer in its chosen form, or in its best one if it keeps its weight."""
    evaluated: dict[Node, PackedWeight] = field(default_factory=dict[Node, PackedWeight])
    """The form that has this sensitivity."""
    notes: dict[Node, str] = field(default_factory=dict[Node, str])
    """Layers that cannot take the smallest requested width, with the reason."""
    variance_share: float = 0.0
    """See `variance_share`."""
    shared: set[Node] = field(default_factory=set[Node])
    """Lookups in the weight of a layer, whose integers they read."""


MAX_PART_ELEMENTS = 2**21
"""Number of elements of a weight that are quantized at a time."""

MIN_BLOCK_SIZE = 16
"""Smallest block that replaces a requested one; runtimes know no smaller ones."""

FLOAT_WEIGHT_REASON = "the target computes {} with float weights"

SMALLER_BLOCK_NOTE = "in blocks of {}, as no requested size divides its rows"

MIN_TABLE_BYTES = 2**16
"""Size of a table below which low bits save nothing worth the nodes of a lookup."""


def quantize_weights_only(
    calibration: Calibration,
    kind: WeightOnlyScheme,
    chosen: Mapping[Node, NodeSettings],
    settings: QuantizationSettings,
    skipped: Mapping[Node, str],
    *,
    forced: Collection[Node] = (),
    find_options: Callable[[], ClikaCompileOptions] = ClikaCompileOptions,
    dynamic: Operator | None = None,
    input_block: int = 0,
) -> WeightOnlyResult:
    """Quantize the weight of each layer to the fewest bytes at which it is not too sensitive.

    Args:
        calibration: of the lowered graph.
        kind: weight-only support of the target.
        chosen: settings with the widths that each node can take.
        settings: those of the model.
        skipped: nodes that stay unchanged, with the reason.
        forced: nodes that are quantized regardless of their sensitivity.
        find_options: returns the options of the rounding; called for each layer, since there may be a time limit.
        dynamic: the operator that layers become if it rounds their inputs at run time; None if these stay in float, or
            the runtime rounds them.
        input_block: number of elements that share a scale if the runtime rounds the inputs of layers; 0 if it does not.

    Raises:
        ModelError: a width or block size is requested that the target does not support.
    """
    search = _OptionSearch(calibration, kind, settings, forced, find_options, dynamic, input_block)
    for node, options in list_layer_options(calibration.graph, kind, chosen, settings, skipped).items():
        if isinstance(options, str):
            search.found.floats[node] = options
        elif node.op.trait is LOOKUP:
            search.tables[node] = options
        else:
            search.waiting[node] = iter(options)
            if reason := _find_row_reason(node, min(chosen[node].weights_num_bits), kind):
                search.found.notes[node] = reason
            elif not {block for _, block in options} & {*as_list(settings.weights_only_quantization_block_size)}:
                search.found.notes[node] = SMALLER_BLOCK_NOTE.format(max(block for _, block in options))
    search.run(search.found.packed.get)
    return search.found


def quantize_tables(
    calibration: Calibration,
    plan: Plan,
    settings: QuantizationSettings,
    skipped: Mapping[Node, str],
    find_options: Callable[[], ClikaCompileOptions],
) -> WeightOnlyResult:
    """Quantize the tables of lookups to 8 bits, with a scale for each row, next to layers that compute in INT8.

    A table that a quantized layer reads as its weight takes the integers of this layer, which are stored once.

    Args:
        calibration: of the lowered graph.
        plan: of its layers.
        settings: those of the model.
        skipped: nodes that stay unchanged, with the reason.
        find_options: returns the options of the rounding.
    """
    kind = plan.scheme.weights_only or WeightOnlyScheme()
    search = _OptionSearch(calibration, kind, settings, (), find_options)
    for node in calibration.graph.nodes:
        if node.op.trait is LOOKUP:
            reason = skipped.get(node) or _find_float_reason(calibration.graph, node, kind)
            if reason:
                search.found.floats[node] = reason
            else:
                search.tables[node] = [(INT8_BITS, 0)]
    search.run(lambda layer: weight_as_table(layer, plan) if layer.name in plan.weights else None)
    return search.found


def _find_tied_layers(node: Node) -> list[Node]:
    """Return the nodes, other than lookups, that read the table of a lookup."""
    users = [use.user for use in weight_of(node).uses if isinstance(use.user, Node)]
    return [user for user in users if user.op.trait is not LOOKUP]


def list_layer_options(
    graph: Graph,
    kind: WeightOnlyScheme,
    chosen: Mapping[Node, NodeSettings],
    settings: QuantizationSettings,
    skipped: Mapping[Node, str],
) -> dict[Node, str | list[tuple[int, int]]]:
    """Return the widths and block sizes that each layer can take, fewest bytes first, or the reason that it cannot.

    Raises:
        ModelError: a width or block size is requested that the target does not support.
    """
    found: dict[Node, str | list[tuple[int, int]]] = {}
    blocks = as_list(settings.weights_only_quantization_block_size)
    for node in graph.nodes:
        if node.op.trait.matrices is not None:
            found[node] = skipped.get(node, FLOAT_WEIGHT_REASON.format(node.op_type))
        elif node.op.trait.kind == COMPUTE_TRAIT or node.op.trait is LOOKUP:
            _reject_widths(node, chosen[node].weights_num_bits, kind)
            reason = skipped.get(node) or _find_float_reason(graph, node, kind)
            found[node] = reason or _list_options(node, chosen[node].weights_num_bits, blocks, kind)
    return found


def _list_options(
    node: Node, widths: Sequence[int], blocks: Sequence[int], kind: WeightOnlyScheme
) -> str | list[tuple[int, int]]:
    taken = _select_supported_options(node, widths, blocks, kind)
    inputs = int(weight_of(node).type.shape[1 if has_output_rows(node) else 0])
    whole = [(bits, block) for bits, block in taken if not _find_row_reason(node, bits, kind)]
    if not whole:
        return _find_row_reason(node, taken[0][0], kind)
    fitted = {(bits, _fit_block(block, inputs, kind.blocks.get(bits))) for bits, block in whole}
    options = sorted(((bits, block) for bits, block in fitted if block is not None), key=_bits_per_element)
    return options or (
        f"its {inputs} inputs are not a multiple of a block size in {sorted({block for _, block in taken})}, nor of a "
        f"smaller power of two from {MIN_BLOCK_SIZE} on"
    )


def _fit_block(block: int, inputs: int, allowed: Collection[int] | None) -> int | None:
    """Return a block size, or the largest smaller power of two that divides the rows; None if there is none.

    Args:
        block: the requested size; 0 for whole rows.
        inputs: length of a row.
        allowed: the sizes that the target supports; None for any.
    """
    if not block or inputs % block == 0:
        return block
    smaller = (2**power for power in range(block.bit_length() - 1, -1, -1))
    found = (size for size in smaller if size < block and inputs % size == 0 and (allowed is None or size in allowed))
    return next((size for size in found if size >= MIN_BLOCK_SIZE), None)


def _find_row_reason(node: Node, bits: int, kind: WeightOnlyScheme) -> str:
    """Return the reason why rows of a weight cannot have a width, empty if there is none."""
    length = int(weight_of(node).type.shape[-1])
    if not kind.needs_whole_bytes or length * bits % 8 == 0:
        return ""
    return f"its rows of {length} elements do not fill whole bytes with {bits} bits"


def as_list(given: int | list[int]) -> list[int]:
    """Return a single choice as a list."""
    return [given] if isinstance(given, int) else [*given]


def _reject_widths(node: Node, widths: Sequence[int], kind: WeightOnlyScheme) -> None:
    lacking = [bits for bits in widths if bits not in kind.bits]
    if len(lacking) == len(widths):
        has = " or ".join(map(str, sorted(kind.bits)))
        raise ModelError(
            f"weights_num_bits: {lacking[0]} bits are requested for {node.name} in {node.origin}, but the target "
            f"supports {has}. Add one of these to weights_num_bits; each target uses those that it supports."
        )


def _find_float_reason(graph: Graph, node: Node, kind: WeightOnlyScheme) -> str:
    """Return the reason to keep the weight of a layer unchanged, empty if there is none."""
    if node.op_type not in kind.layers | kind.lookups.keys():
        return FLOAT_WEIGHT_REASON.format(node.op_type)
    weight = node.inputs[weight_position_of(node)]
    if not is_unchanged_constant(graph, weight):
        return "its table is computed" if node.op.trait is LOOKUP else "both operands are computed"
    if weight.type.dtype not in WEIGHT_DTYPES or weight.type.rank != 2:
        return f"its weight is {weight.type}"
    size = weight.type.element_count * weight.type.dtype.itemsize
    if node.op.trait is LOOKUP and size < MIN_TABLE_BYTES:
        return f"its table takes only {size} bytes"
    return ""


def _select_supported_options(
    node: Node, widths: Sequence[int], blocks: Sequence[int], kind: WeightOnlyScheme
) -> list[tuple[int, int]]:
    """Return the widths and block sizes of the settings that the target supports.

    Raises:
        ModelError: there are none.
    """
    packed = [bits for bits in widths if bits in kind.bits]
    taken = [(bits, block) for bits in packed for block in blocks if block in kind.blocks.get(bits, [block])]
    if not taken:
        has = " or ".join(map(str, sorted(kind.blocks[packed[0]])))
        raise ModelError(
            f"weights_only_quantization_block_size: {packed[0]}-bit weights in blocks of "
            f"{' or '.join(map(str, blocks))} are requested for {node.name} in {node.origin}, but the target supports "
            f"blocks of {has} (0: a whole row). Add one of these to weights_only_quantization_block_size."
        )
    return taken


def _bits_per_element(option: tuple[int, int]) -> float:
    """Return the bits of an element, its part of a scale included."""
    bits, block = option
    return bits + (32 / block if block else 0)


@dataclass
class _OptionSearch:
    """Evaluates one option of each layer at a time, all layers in one backward pass, until each is decided."""

    calibration: Calibration
    kind: WeightOnlyScheme
    settings: QuantizationSettings
    forced: Collection[Node]
    find_options: Callable[[], ClikaCompileOptions]
    dynamic: Operator | None = None
    """The operator that layers become if it rounds their inputs at run time."""
    input_block: int = 0
    """Number of elements that share a scale if the runtime rounds the inputs of layers."""
    tables: dict[Node, list[tuple[int, int]]] = field(default_factory=dict[Node, list[tuple[int, int]]])
    """The options of lookups, which are decided after the layers: a table may be the weight of one."""
    forms: dict[Node, PackedWeight] = field(default_factory=dict[Node, PackedWeight])
    """Forms of tied layers that lookups try first."""
    waiting: dict[Node, Iterator[tuple[int, int]]] = field(default_factory=dict[Node, Iterator[tuple[int, int]]])
    found: WeightOnlyResult = field(default_factory=WeightOnlyResult)

    def run(self, find_form: Callable[[Node], PackedWeight | None]) -> None:
        """Decide on all layers, and then on all lookups; ``find_form`` returns the form of a quantized layer."""
        if not self.waiting and not self.tables:
            return
        graph, batches = self.calibration.graph, self.calibration.reservoir.batches
        fitted, judged = split_batches(batches)
        read = {node.first_tensor for node in self.waiting if node.op.trait is not LOOKUP}
        self.fitted, self.judged = (sum_gram_matrices(graph, read, some) for some in (fitted, judged))
        keys = {node: node.output for node in (*self.waiting, *self.tables)}
        self.recorder = record_gradients(graph, keys, batches[0], kept=[node.inputs[1] for node in self.tables])
        self._decide()
        for node, options in self.tables.items():
            self._add_table(node, options, find_form)
        self._decide()

    def _add_table(
        self, node: Node, options: list[tuple[int, int]], find_form: Callable[[Node], PackedWeight | None]
    ) -> None:
        """Let a lookup wait for a decision: it first tries the form of a layer with the same weight, stored once."""
        for layer in _find_tied_layers(node):
            form = find_form(layer)
            if form is None:
                self.found.floats[node] = f"its table is also an operand of {layer.name}, which stays in float"
                return
            self.forms[node] = form
        if node in self.forms:
            first = self.forms[node].bits, self.forms[node].block_size
            options = [first, *(option for option in options if option[0] > first[0])]
        self.waiting[node] = iter(options)

    def _decide(self) -> None:
        while self.waiting:
            evaluated: dict[Node, PackedWeight] = {}
            for node, options in [*self.waiting.items()]:
                option = next(options, None)
                if option is None:
                    del self.waiting[node]
                    self._give_up(node)
                else:
                    evaluated[node] = self._quantize_weight(node, *option)
            self._evaluate(evaluated)

    def _evaluate(self, evaluated: Mapping[Node, PackedWeight]) -> None:
        effects = self.recorder.estimate_effects(
            {node: self._error(node, packed) for node, packed in evaluated.items()}
        )
        self.found.variance_share = self.found.variance_share or variance_share(self.recorder.float_outputs)
        limit = self.settings.quantization_sensitivity_threshold if self.settings.automatic_skip_quantization else None
        for node, sensitivity in effects.items():
            if sensitivity <= self.found.sensitivities.get(node, float("inf")):
                self.found.sensitivities[node], self.found.evaluated[node] = sensitivity, evaluated[node]
                if self.forms.get(node) is evaluated[node] and self._reads_stored_rows(node, evaluated[node].bits):
                    self.found.shared.add(node)
                else:
                    self.found.shared.discard(node)
            if limit and sensitivity <= limit:
                self.found.packed[node] = evaluated[node]
                del self.waiting[node]

    def _reads_stored_rows(self, node: Node, bits: int) -> bool:
        """Whether a lookup reads the rows of a weight in the form that a layer with the same weight stores."""
        order = choose_stored_order(bits, is_fused=self.kind.lookups[node.op_type])
        return self.dynamic is None and order is not StoredOrder.COLUMNS

    def _give_up(self, node: Node) -> None:
        """Keep the weight, or take the least sensitive option if the user quantizes all layers."""
        if not self.settings.automatic_skip_quantization or node in self.forced:
            self.found.packed[node] = self.found.evaluated[node]
        else:
            limit = self.settings.quantization_sensitivity_threshold
            self.found.floats[node] = sensitivity_reason(self.found.sensitivities[node], limit)

    @torch.no_grad()
    def _error(self, node: Node, packed: PackedWeight) -> Tensor:
        """Return the change of a layer's output."""
        rows = _weight_rows(node)
        if node.op.trait is LOOKUP:
            indices = self.recorder.tensors[node.inputs[1]].flatten()
            used = packed.select_rows(indices)
            changed = used.dequantize(rows[indices]) - rows[indices]
            return changed.reshape(self.recorder.tensors[node.output].shape).to(
                self.recorder.tensors[node.output].dtype
            )
        x = self.recorder.tensors[node.first_tensor].float()
        if self.dynamic is not None:
            error = self.dynamic(x, packed.steps(rows).T, packed.scales[:, 0], None) - x @ rows.T
        elif self.input_block:
            error = round_in_blocks(x, self.input_block) @ packed.dequantize(rows).T - x @ rows.T
        else:
            error = x @ (packed.dequantize(rows) - rows).T
        return error.to(self.recorder.tensors[node.output].dtype)

    def _quantize_weight(self, node: Node, bits: int, block_size: int) -> PackedWeight:
        if node.op.trait is LOOKUP:
            form = self.forms.get(node)
            if form is not None and (form.bits, form.block_size) == (bits, block_size):
                return form
            return quantize_to_nearest(_weight_rows(node), bits, block_size, self.find_options())
        read = node.first_tensor
        return quantize_low_bit(
            _weight_rows(node), bits, block_size, self.fitted[read], self.judged[read], self.find_options()
        )


@torch.no_grad()
def quantize_to_nearest(rows: Tensor, bits: int, block_size: int, options: ClikaCompileOptions) -> PackedWeight:
    """Quantize a table ``float32[rows, elements]`` to low bits, with each element rounded to nearest.

    ``weight_clipping`` of the options lets scales clip the largest elements.
    """
    scales = [_find_block_scales(part, bits, block_size, None, options) for part in _split_rows(rows)]
    return PackedWeight(bits, block_size, torch.cat(scales))


@torch.no_grad()
def quantize_low_bit(  # noqa: PLR0917 - these arguments describe one weight
    rows: Tensor, bits: int, block_size: int, fitted: Tensor, judged: Tensor, options: ClikaCompileOptions
) -> PackedWeight:
    """Quantize a weight to low bits, with rounding to nearest or GPTQ, whichever has the lower error.

    Rows are independent of each other. Parts of them take less memory than all.

    Args:
        rows: ``float32[outputs, inputs]``.
        bits: of its integers.
        block_size: number of neighbors that share a scale, 0 for a whole row.
        fitted: ``x.T @ x`` of the data to fit, ``float32[inputs, inputs]``.
        judged: the same of the data for evaluation.
        options: ``weight_clipping`` lets scales clip the largest elements, and ``gptq`` decides whether GPTQ is used.
    """
    factor = None if options.gptq == "off" else find_gptq_factor(fitted)
    importance, kind = fitted.diagonal(), PackedWeight(bits, block_size, rows.new_empty(0)).quantized_type
    scales, offsets, errors = list[Tensor](), list[Tensor](), [0.0, 0.0]
    for part in _split_rows(rows):
        nearest = PackedWeight(bits, block_size, _find_block_scales(part, bits, block_size, importance, options))
        scales.append(nearest.scales)
        if factor is not None:
            steps = round_with_feedback(part, nearest.scales, kind, factor)
            offsets.append(steps.sub_(nearest.steps(part)))
            fed_back = replace(nearest, offsets=offsets[-1])
            errors = [
                e + sum_squared_product_error(part, p, judged) for e, p in zip(errors, (nearest, fed_back), strict=True)
            ]
    found = PackedWeight(bits, block_size, torch.cat(scales))
    is_better = factor is not None and (options.gptq == "on" or errors[1] < errors[0])
    return replace(found, offsets=torch.cat(offsets)) if is_better else found


def _split_rows(rows: Tensor) -> Sequence[Tensor]:
    return rows.split(max(1, MAX_PART_ELEMENTS // rows.shape[1]))


def _find_block_scales(
    rows: Tensor, bits: int, block_size: int, importance: Tensor | None, options: ClikaCompileOptions
) -> Tensor:
    """Return the scales of rows, ``float32[outputs, blocks]``; ``importance`` has a factor for each column."""
    blocks = rows.shape[1] // block_size if block_size else 1
    kind = PackedWeight(bits, block_size, rows.new_empty(0)).quantized_type
    parts = rows.reshape(len(rows) * blocks, -1)
    if options.weight_clipping == "off":
        return compute_weight_scales(parts, 0, kind).reshape(len(rows), blocks)
    weights = None if importance is None else importance.expand_as(rows).reshape(parts.shape)
    return find_clipped_scales(parts, 0, kind, weights).reshape(len(rows), blocks)


def sum_squared_product_error(rows: Tensor, packed: PackedWeight, gram: Tensor) -> float:
    """Return the squared error of products with the data of a Gram matrix, summed."""
    return sum_squared_error(packed.dequantize(rows) - rows, gram)


def _weight_rows(node: Node) -> Tensor:
    return weight_rows(node, data_of(weight_of(node)))


def split_batches(batches: Sequence[Sequence[Tensor]]) -> tuple[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]]:
    """Return the batches that rounding is fitted to, and those that it is judged on."""
    return (batches[:-1][:MAX_GPTQ_BATCHES], batches[-1:]) if len(batches) > 1 else (batches, batches)


@torch.no_grad()
def sum_gram_matrices(graph: Graph, values: set[Value], batches: Sequence[Sequence[Tensor]]) -> dict[Value, Tensor]:
    """Return ``x.T @ x`` of some values over batches, ``float32[inputs, inputs]``; not finite for infinite data."""
    found: dict[Value, Tensor] = {}

    def add_gram(value: Value, x: Tensor) -> None:
        if value in values:
            rows = x.reshape(-1, x.shape[-1]).float()
            found[value] = found.get(value, 0) + rows.T @ rows

    for inputs in batches:
        visit_activations(graph, inputs, add_gram)
    return found
