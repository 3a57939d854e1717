"""Rules of TensorRT about pairs around what has no weights: it runs in integers only between integers."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from clika_ref_tensorrt.onnx_file import DEQUANTIZE, QUANTIZE, OnnxFile
from clika_ref_tensorrt.placement_rules import is_of_layer, serves_layers
from clika_ref_tensorrt.rule_book import FUSED_BEHIND, WEIGHTED, Found, rule

OF_ONE = ("Resize", "AveragePool", "GlobalAveragePool", "ReduceMean")
OF_SEVERAL = ("Add", "Mul", "Concat")
LAYERS = tuple(WEIGHTED)


@rule("concat-scales")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind("Concat"):
        made = [file.dequantizer(name) for name in node.input if not file.is_constant(name)]
        pairs = [m for m in made if m is not None]
        scales = {float(s.flat[0]) for m in pairs if (s := file.constant(m.input[1])) is not None and s.size}
        if len(scales) > 1:
            yield (
                node,
                f"joins tensors of the scales {', '.join(f'{s:.3g}' for s in sorted(scales))}; give all of them one",
            )


@rule("all-operands")
def _(file: OnnxFile) -> Found:
    for node in file.of_kind(*OF_ONE, *OF_SEVERAL):
        data = [name for name in (node.input[:1] if node.op_type in OF_ONE else node.input) if name]
        pairs = [m for name in data if (m := file.dequantizer(name)) is not None and not file.is_weight(m)]
        floats = [name for name in data if file.dequantizer(name) is None and not file.is_constant(name)]
        is_joined = node.op_type == "Concat" and pairs and floats
        if all(serves_layers(file, made) for made in pairs) and not is_joined:
            continue  # which is what they are for
        if node.op_type == "Add" and any(is_of_layer(file, file.source(name), LAYERS) for name in floats):
            continue  # which adds what is quantized itself
        if floats:
            lacking = f"{len(pairs)} of its {len(data)} operands are quantized, and the others are not"
            yield node, f"{lacking}: it runs in float; quantize all, or none"
        elif not _is_quantized(file, node):
            yield node, "its operands are quantized, and its result is not: it runs in float; quantize all, or none"


def _is_quantized(file: OnnxFile, node: onnx.NodeProto) -> bool:
    """Whether the result of a node, or of an activation behind it, becomes integers, or is joined to such."""
    return any(
        reader.op_type == QUANTIZE or (reader.op_type in (*OF_ONE, *OF_SEVERAL) and _is_quantized(file, reader))
        for reader in _behind_activation(file, node)
    )


def _behind_activation(file: OnnxFile, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield who reads the result of a node, or of an activation that is computed along with it."""
    for reader in file.sinks(node.output[0]):
        yield reader
        if reader.op_type in FUSED_BEHIND:
            yield from _behind_activation(file, reader)


@rule("isolated")
def _(file: OnnxFile) -> Found:
    useful = {*WEIGHTED, *OF_ONE, *OF_SEVERAL, "MaxPool", QUANTIZE}
    for node in file.of_kind(QUANTIZE):
        if not file.readers.get(node.output[0]) and not file.is_weight(node):
            yield node, "nothing reads what it makes: the pair costs time and accuracy, and saves none"
        readers = file.behind_pairs(node.output[0])
        has_pair = any(reader.op_type == DEQUANTIZE for reader in file.readers.get(node.output[0], []))
        if has_pair and not any(reader.op_type in useful for reader in readers):
            kinds = ", ".join(sorted({reader.op_type for reader in readers})) or "an output"
            yield node, f"only {kinds} reads what it makes, which is float: the pair costs time and accuracy"
