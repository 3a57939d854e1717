"""Rules of TensorRT about pairs around what has no weights: it runs in integers only between integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from clika_ref_tensorrt.onnx_file import QUANTIZE, OnnxFile
from clika_ref_tensorrt.placement_rules import layer_of, serves_layers
from clika_ref_tensorrt.rule_book import FUSED_BEHIND, WEIGHTED, Found, rule

JOINING = "Concat"
OF_ONE = ("Resize", "AveragePool", "GlobalAveragePool", "ReduceMean")
OF_SEVERAL = ("Add", "Mul", JOINING)
IN_FLOAT = frozenset(
    {
        "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "GroupNormalization",
        "InstanceNormalization", "LpNormalization", "MeanVarianceNormalization",
    }
)  # fmt: skip
"""Operators that compute in float whatever stands around them."""


@rule("concat-scales")
def _(file: OnnxFile) -> Found:
    for node in _whole(file, JOINING):
        made = [file.dequantizer(name) for name in _operands(file, node) if name not in file.constants]
        pairs = [m for m in made if m is not None]
        scales = {float(s.flat[0]) for m in pairs if (s := file.constant(m.input[1])) is not None and s.size}
        if len(scales) > 1:
            yield (
                node,
                f"joins tensors of the scales {', '.join(f'{s:.3g}' for s in sorted(scales))}; give all of them one",
            )


@rule("all-operands")
def _(file: OnnxFile) -> Found:
    rounded = _rounded(file)
    for node in _whole(file, *OF_ONE, *OF_SEVERAL):
        data = _operands(file, node)
        pairs = [m for name in data if (m := file.dequantizer(name)) is not None and not file.is_weight(m)]
        floats = [name for name in data if file.dequantizer(name) is None]
        is_mixed = node.op_type == JOINING and pairs and floats
        if all(serves_layers(file, made) for made in pairs) and not is_mixed:
            continue  # which is what they are for
        if node.op_type == "Add" and any(layer_of(file, file.source(name)) for name in floats):
            continue  # which adds what is quantized itself
        if floats:
            lacking = f"only {len(pairs)} of its {len(data)} operands are quantized"
            yield node, f"{lacking}: it runs in float; quantize all, or none"
        elif node.output[0] not in rounded:
            yield node, "its operands are quantized, and its result is not: it runs in float; quantize all, or none"


def _whole(file: OnnxFile, *kinds: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of some operators, but for what is only joined to more: of that, what joins it speaks."""
    yield from (node for node in file.of_kind(*kinds) if not _is_joined(file, node))


def _operands(file: OnnxFile, node: onnx.NodeProto) -> Sequence[str]:
    """Return the tensors that a node computes with; those of what it joins, where that was joined itself."""
    if node.op_type != JOINING:
        return node.input[:1] if node.op_type in OF_ONE else node.input
    found, waiting, seen = dict[str, None](), [*node.input], set[str]()
    while waiting:
        name = waiting.pop(0)
        made = file.source(name)
        if made is None or made.op_type != JOINING:
            found[name] = None
        elif made.output[0] not in seen:
            seen.add(made.output[0])
            waiting += made.input
    return [*found]


def _is_joined(file: OnnxFile, node: onnx.NodeProto) -> bool:
    """Whether a node joins what is only joined to more."""
    readers = [*file.sinks(node.output[0])] if node.op_type == JOINING else []
    return bool(readers) and all(reader.op_type == JOINING for reader in readers)


def _rounded(file: OnnxFile) -> set[str]:
    """Return the values that become integers: themselves, what is moved from them, or what is computed of such."""
    waiting, found = [name for n in file.everywhere if n.op_type == QUANTIZE for name in n.input[:1]], set[str]()
    while waiting:
        name = waiting.pop()
        node = file.makers.get(name)
        if node is None or name in found:
            continue
        found.add(name)
        if node.op_type in OF_SEVERAL:
            waiting += node.input
        elif node.op_type in (*OF_ONE, *FUSED_BEHIND) or file.moves(node):
            waiting.append(node.input[0])
    return found


@rule("isolated")
def _(file: OnnxFile) -> Found:
    rounded = _rounded(file)
    for node in file.of_kind(QUANTIZE):
        is_read = file.readers.get(node.output[0]) or node.output[0] in file.outputs
        if not is_read and not file.is_weight(node):
            yield node, "nothing reads what it makes: the pair costs time and accuracy, and saves none"
        readers = file.behind_pairs(node.output[0])
        if file.inverses(node.output[0]) and not any(_gains(file, reader, rounded) for reader in readers):
            kinds = ", ".join(sorted({reader.op_type for reader in readers})) or "an output"
            yield node, f"only {kinds} reads what it makes, which is float: the pair costs time and accuracy"


def _gains(file: OnnxFile, reader: onnx.NodeProto, rounded: set[str]) -> bool:
    """Whether a node runs in integers between such, or another rule says what it lacks for that."""
    if reader.op_type in (*WEIGHTED, *OF_ONE, *OF_SEVERAL, QUANTIZE):
        return True
    computed = [name for name in reader.input if name and name not in file.constants]
    is_between = all(file.dequantizer(name) is not None for name in computed) and {*reader.output} & rounded
    return reader.op_type not in IN_FLOAT and bool(is_between)
