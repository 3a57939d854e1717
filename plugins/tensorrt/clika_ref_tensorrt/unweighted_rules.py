"""TensorRT rules on pairs around operators without weights, which run in INT8 only between quantized values."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import onnx

from clika_ref_tensorrt.onnx_file import OnnxFile
from clika_ref_tensorrt.own_operators import QUANTIZE
from clika_ref_tensorrt.placement_rules import layer_of, serves_layers
from clika_ref_tensorrt.rule_book import FUSED_BEHIND, LAYERS, Found, rule

JOINING = "Concat"
OF_ONE = ("Resize", "AveragePool", "GlobalAveragePool", "ReduceMean")
OF_SEVERAL = ("Add", "Mul")
IN_FLOAT = frozenset(
    {
        "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "GroupNormalization",
        "InstanceNormalization", "LpNormalization", "MeanVarianceNormalization",
    }
)  # fmt: skip
"""Operators that always compute in float."""


TOLD = 8
"""Maximum number of scales in a message."""


@dataclass
class Joined:
    """The accumulated operands of chained Concat nodes."""

    scales: set[float] = field(default_factory=set[float])
    """The smallest scales, as many as are reported."""
    is_rounded: bool = False
    """Whether any of them is computed and quantized."""
    floats: list[str] = field(default_factory=list[str])
    """Operands that are float, or a Concat of such."""
    is_served: bool = True
    """Whether layers read all quantized operands."""

    def add(self, name: str, other: Joined) -> None:
        """Add the operands of another Concat, or a single one, under a name."""
        self.scales = {*sorted(self.scales | other.scales)[:TOLD]}
        self.is_rounded |= other.is_rounded
        self.floats += [name] if other.floats else []
        self.is_served &= other.is_served


def _joined(file: OnnxFile) -> MutableMapping[str, Joined]:
    """Return the operands of each Concat by its output; a nested Concat is processed once."""
    found = file.on_top({}, _joined)
    for node in file.of_kind(JOINING):
        whole = Joined()
        for name in node.input:
            source = file.source(name)
            whole.add(name, found.get(source.output[0] if source is not None else "") or _operand(file, name))
        found[node.output[0]] = whole
    return found


def _operand(file: OnnxFile, name: str) -> Joined:
    """Return the facts about one operand of a Concat."""
    made = file.dequantizer(name)
    if made is None:
        return Joined(floats=[name])
    scale = file.constant(made.input[1])
    scales = {float(scale.flat[0])} if scale is not None and scale.size else set[float]()
    is_rounded = not file.is_weight(made)
    return Joined(scales, is_rounded, is_served=not is_rounded or serves_layers(file, made))


@rule("concat-scales")
def _(file: OnnxFile) -> Found:
    for node in _whole(file):
        scales = file.once(_joined)[node.output[0]].scales
        if len(scales) > 1:
            yield (
                node,
                f"joins tensors of the scales {', '.join(f'{s:.3g}' for s in sorted(scales))}; give all of them one",
            )


@rule("all-operands")
def _(file: OnnxFile) -> Found:
    rounded = file.once(_rounded)
    for node in _whole(file):
        joined = file.once(_joined)[node.output[0]]
        if not joined.is_served or (joined.is_rounded and joined.floats):
            yield from _lacking(node, node.input, joined.floats, rounded)
    for node in file.of_kind(*OF_ONE, *OF_SEVERAL):
        data = _operands(node)
        pairs = [m for name in data if (m := file.dequantizer(name)) is not None and not file.is_weight(m)]
        floats = [name for name in data if file.dequantizer(name) is None]
        if all(serves_layers(file, made) for made in pairs):
            continue  # their purpose
        if node.op_type == "Add" and any(layer_of(file, file.source(name)) for name in floats):
            continue  # the layer itself adds the quantized operand
        yield from _lacking(node, data, floats, rounded)


def _lacking(
    node: onnx.NodeProto, data: Sequence[str], floats: Sequence[str], rounded: MutableMapping[str, bool]
) -> Found:
    """Yield the reason why a node does not run in INT8: float operands, or a float result."""
    if floats:
        lacking = f"only {len(data) - len(floats)} of its {len(data)} operands are quantized"
        yield node, f"{lacking}: it runs in float; quantize all, or none"
    elif node.output[0] not in rounded:
        yield node, "its operands are quantized, and its result is not: it runs in float; quantize all, or none"


def _whole(file: OnnxFile) -> Iterator[onnx.NodeProto]:
    """Yield the outermost Concat nodes; nested ones are reported as part of these."""
    yield from (node for node in file.of_kind(JOINING) if not _is_joined(file, node))


def _operands(node: onnx.NodeProto) -> Sequence[str]:
    """Return the tensor operands of a node."""
    return node.input[:1] if node.op_type in OF_ONE else node.input


def _is_joined(file: OnnxFile, node: onnx.NodeProto) -> bool:
    """Whether a Concat is only read by another Concat."""
    readers = [*file.sinks(node.output[0])]
    return bool(readers) and all(reader.op_type == JOINING for reader in readers)


def _rounded(file: OnnxFile) -> MutableMapping[str, bool]:
    """Return the values that are quantized: directly, after moves, or after operators on such values."""
    found = file.on_top({}, _rounded)
    waiting = [name for n in file.everywhere if n.op_type == QUANTIZE for name in n.input[:1]]
    while waiting:
        name = waiting.pop()
        node = file.makers.get(name)
        if node is None or name in found:
            continue
        found[name] = True
        if node.op_type in (*OF_SEVERAL, JOINING):
            waiting += node.input
        elif node.op_type in (*OF_ONE, *FUSED_BEHIND) or file.moves(node):
            waiting.append(node.input[0])
    return found


@rule("isolated")
def _(file: OnnxFile) -> Found:
    rounded = file.once(_rounded)
    for node in file.of_kind(QUANTIZE):
        is_read = file.readers.get(node.output[0]) or node.output[0] in file.outputs
        if not is_read and not file.is_weight(node):
            yield node, "nothing reads what it makes: the pair costs time and accuracy, and saves none"
        readers = file.behind_pairs(node.output[0])
        if file.inverses(node.output[0]) and not any(_gains(file, reader, rounded) for reader in readers):
            kinds = ", ".join(sorted({reader.op_type for reader in readers})) or "an output"
            yield node, f"only {kinds} reads what it makes, which is float: the pair costs time and accuracy"


def _gains(file: OnnxFile, reader: onnx.NodeProto, rounded: MutableMapping[str, bool]) -> bool:
    """Whether a node runs in INT8 between quantized values, or another rule reports the obstacle."""
    if reader.op_type in (*LAYERS, *OF_ONE, *OF_SEVERAL, JOINING, QUANTIZE):
        return True
    computed = [name for name in reader.input if name and name not in file.constants]
    is_between = all(file.dequantizer(name) is not None for name in computed) and any(
        name in rounded for name in reader.output
    )
    return reader.op_type not in IN_FLOAT and is_between
