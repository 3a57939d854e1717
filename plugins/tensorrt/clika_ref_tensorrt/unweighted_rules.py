"""TensorRT rules on pairs around operators without weights, which run in INT8 only between quantized values."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import onnx

from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.own_operators import QUANTIZE
from clika_ref_tensorrt.placement_rules import is_read_by_layers, layer_of
from clika_ref_tensorrt.rule_book import FUSED_OPERATORS, LAYER_OPERATORS, Violations, rule

CONCAT_OPERATOR = "Concat"
UNARY_OPERATORS = ("Resize", "AveragePool", "GlobalAveragePool", "ReduceMean")
BINARY_OPERATORS = ("Add", "Mul")
FLOAT_ONLY_OPERATORS = frozenset(
    {
        "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "GroupNormalization",
        "InstanceNormalization", "LpNormalization", "MeanVarianceNormalization",
    }
)  # fmt: skip
"""Operators that always compute in float."""


MAX_REPORTED_SCALES = 8
"""Maximum number of scales in a message."""


@dataclass
class ConcatOperands:
    """The accumulated operands of chained Concat nodes."""

    scales: set[float] = field(default_factory=set[float])
    """The smallest scales, as many as are reported."""
    is_rounded: bool = False
    """Whether any of them is computed and quantized."""
    floats: list[str] = field(default_factory=list[str])
    """Operands that are float, or a Concat of such."""
    is_served: bool = True
    """Whether layers read all quantized operands."""

    def add(self, name: str, other: ConcatOperands) -> None:
        """Add the operands of another Concat, or a single one, under a name."""
        self.scales = {*sorted(self.scales | other.scales)[:MAX_REPORTED_SCALES]}
        self.is_rounded |= other.is_rounded
        self.floats += [name] if other.floats else []
        self.is_served &= other.is_served


def _collect_concats(file: OnnxFile) -> MutableMapping[str, ConcatOperands]:
    """Return the operands of each Concat by its output; a nested Concat is processed once."""
    found = file.extend_enclosing({}, _collect_concats)
    for node in file.nodes_of_type(CONCAT_OPERATOR):
        whole = ConcatOperands()
        for name in node.input:
            source = file.source(name)
            whole.add(name, found.get(source.output[0] if source is not None else "") or _concat_operand(file, name))
        found[node.output[0]] = whole
    return found


def _concat_operand(file: OnnxFile, name: str) -> ConcatOperands:
    """Return the facts about one operand of a Concat."""
    made = file.dequantizer(name)
    if made is None:
        return ConcatOperands(floats=[name])
    scale = file.constant(made.input[1])
    scales = {float(scale.flat[0])} if scale is not None and scale.size else set[float]()
    is_rounded = not file.is_weight(made)
    return ConcatOperands(scales, is_rounded, is_served=not is_rounded or is_read_by_layers(file, made))


@rule("concat-scales")
def _(file: OnnxFile) -> Violations:
    for node in _outermost_concats(file):
        scales = file.compute_once(_collect_concats)[node.output[0]].scales
        if len(scales) > 1:
            yield (
                node,
                f"joins tensors of the scales {', '.join(f'{s:.3g}' for s in sorted(scales))}. Use one scale for all.",
            )


@rule("all-operands")
def _(file: OnnxFile) -> Violations:
    rounded = file.compute_once(_find_quantized_values)
    for node in _outermost_concats(file):
        joined = file.compute_once(_collect_concats)[node.output[0]]
        if not joined.is_served or (joined.is_rounded and joined.floats):
            yield from _report_float(node, node.input, joined.floats, rounded)
    for node in file.nodes_of_type(*UNARY_OPERATORS, *BINARY_OPERATORS):
        data = node.input[:1] if node.op_type in UNARY_OPERATORS else node.input
        pairs = [m for name in data if (m := file.dequantizer(name)) is not None and not file.is_weight(m)]
        floats = [name for name in data if file.dequantizer(name) is None]
        if all(is_read_by_layers(file, made) for made in pairs):
            continue  # their purpose
        if node.op_type == "Add" and any(layer_of(file, file.source(name)) for name in floats):
            continue  # the layer itself adds the quantized operand
        yield from _report_float(node, data, floats, rounded)


def _report_float(
    node: onnx.NodeProto, data: Sequence[str], floats: Sequence[str], rounded: MutableMapping[str, bool]
) -> Violations:
    """Yield the reason why a node does not run in INT8: float operands, or a float result."""
    if floats:
        lacking = f"only {len(data) - len(floats)} of its {len(data)} operands are quantized"
        yield node, f"{lacking}: it runs in float. Quantize all, or none."
    elif node.output[0] not in rounded:
        yield node, "its operands are quantized, but its output is not: it runs in float. Quantize all, or none."


def _outermost_concats(file: OnnxFile) -> Iterator[onnx.NodeProto]:
    """Yield the outermost Concat nodes; those that only a Concat reads are reported as part of it."""
    for node in file.nodes_of_type(CONCAT_OPERATOR):
        if {reader.op_type for reader in file.sinks(node.output[0])} != {CONCAT_OPERATOR}:
            yield node


def _find_quantized_values(file: OnnxFile) -> MutableMapping[str, bool]:
    """Return the values that are quantized: directly, after moves, or after operators on such values."""
    found = file.extend_enclosing({}, _find_quantized_values)
    waiting = [name for n in file.all_nodes if n.op_type == QUANTIZE for name in n.input[:1]]
    while waiting:
        name = waiting.pop()
        node = file.producers.get(name)
        if node is None or name in found:
            continue
        found[name] = True
        if node.op_type in (*BINARY_OPERATORS, CONCAT_OPERATOR):
            waiting += node.input
        elif node.op_type in (*UNARY_OPERATORS, *FUSED_OPERATORS) or file.is_moving(node):
            waiting.append(node.input[0])
    return found


@rule("isolated")
def _(file: OnnxFile) -> Violations:
    rounded = file.compute_once(_find_quantized_values)
    for node in file.nodes_of_type(QUANTIZE):
        is_read = file.readers.get(node.output[0]) or node.output[0] in file.outputs
        if not is_read and not file.is_weight(node):
            yield node, "has no readers: the pair costs time and accuracy without a benefit"
        readers = file.readers_after_pairs(node.output[0])
        if file.dequantizers_of(node.output[0]) and not any(
            _is_useful_reader(file, reader, rounded) for reader in readers
        ):
            kinds = ", ".join(sorted({reader.op_type for reader in readers})) or "an output"
            yield node, f"is read only by {kinds}, in float: the pair costs time and accuracy without a benefit"


def _is_useful_reader(file: OnnxFile, reader: onnx.NodeProto, rounded: MutableMapping[str, bool]) -> bool:
    """Whether a node runs in INT8 between quantized values, or another rule reports the obstacle."""
    if reader.op_type in (*LAYER_OPERATORS, *UNARY_OPERATORS, *BINARY_OPERATORS, CONCAT_OPERATOR, QUANTIZE):
        return True
    computed = [name for name in reader.input if name and name not in file.constants]
    is_between = all(file.dequantizer(name) is not None for name in computed) and any(
        name in rounded for name in reader.output
    )
    return reader.op_type not in FLOAT_ONLY_OPERATORS and is_between
