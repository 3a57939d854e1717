"""TensorRT's own operators, which its parser and plugins recognize by name in any domain.

Sources: the importers of onnx-tensorrt and its docs/TRT_custom_ops.md; the table of TensorRT's plugin/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

ONNX_DOMAINS = ("", "ai.onnx")
"""Names of the domain of ONNX's own operators."""

TENSORRT_DOMAIN = "trt"
"""Domain that exporters use for TensorRT's own operators."""

CHECKED_DOMAINS = (*ONNX_DOMAINS, TENSORRT_DOMAIN)
"""Domains of nodes that the rules cover."""

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

TYPES = onnx.TensorProto

MXFP8_BLOCK_SIZE = 32
"""Number of 8-bit floats that share an exponent-only scale."""

QUANTIZED_TYPE_ATTRIBUTE = "quantized_type"
"""Attribute for the quantized type that `separate_own_operators` reads from an operator's name."""

TYPED_PAIR_OPERATORS: Mapping[str, tuple[str, int]] = {
    f"TRT_{name}{kind}": (kind, quantized_type)
    for name, quantized_type in (("FP8", TYPES.FLOAT8E4M3FN), ("MXFP8", TYPES.FLOAT8E4M3FN), ("INT4", TYPES.INT4))
    for kind in (QUANTIZE, DEQUANTIZE)
}
"""Variants of an ONNX operator with a fixed quantized type: the ONNX operator, and the type."""

DYNAMIC_QUANTIZERS: Mapping[str, tuple[int, int]] = {
    "TRT_FP4DynamicQuantize": (TYPES.FLOAT4E2M1, TYPES.FLOAT8E4M3FN),
    "TRT_MXFP8DynamicQuantize": (TYPES.FLOAT8E4M3FN, TYPES.FLOAT8E8M0),
    "TRT_DynamicQuantize": (0, 0),
}
"""Operators that return a quantized value and its scales: the types of both, 0 if set by attributes."""

OTHER_OPERATORS = frozenset(
    {
        "TRT_Attention", "TRT_AveragePool", "TRT_BlockDequantize", "TRT_BlockQuantize", "TRT_Conv", "TRT_Deconv",
        "TRT_FloorDiv", "TRT_Gather", "TRT_KVCacheUpdate", "TRT_MatMul", "TRT_MaxAverageBlendPool", "TRT_MaxPool",
        "TRT_PluginV2", "TRT_QuantizedAttention", "TRT_RaggedSoftmax", "TRT_Resize", "TRT_Scale", "TRT_Shuffle",
        "TRT_Slice", "TRT_TopK_Min",
    }
)  # fmt: skip
"""Other operators of the parser."""

PLUGIN_OPERATORS = frozenset(
    {
        "BatchTilePlugin_TRT", "BatchedNMSDynamic_TRT", "BatchedNMS_TRT", "Clip_TRT", "CoordConvAC", "CropAndResize",
        "CropAndResizeDynamic", "CustomEmbLayerNormPluginDynamic", "CustomFCPluginDynamic", "CustomGeluPluginDynamic",
        "CustomQKVToContextPluginDynamic", "CustomSkipLayerNormPluginDynamic", "DecodeBbox3DPlugin",
        "DetectionLayer_TRT", "DisentangledAttention_TRT", "EfficientNMS_ONNX_TRT", "EfficientNMS_TRT",
        "FlattenConcat_TRT", "GenerateDetection_TRT", "GridAnchorRect_TRT", "GridAnchor_TRT",
        "GroupNormalizationPlugin", "InstanceNormalization_TRT", "LReLU_TRT", "ModulatedDeformConv2d",
        "MultilevelCropAndResize_TRT", "MultilevelProposeROI_TRT", "MultiscaleDeformableAttnPlugin_TRT",
        "NMSDynamic_TRT", "NMS_TRT", "Normalize_TRT", "PillarScatterPlugin", "PriorBox_TRT", "Proposal",
        "ProposalDynamic", "ProposalLayer_TRT", "PyramidROIAlign_TRT", "ROIAlign_TRT", "RPROI_TRT", "Region_TRT",
        "Reorg_TRT", "ResizeNearest_TRT", "SpecialSlice_TRT", "VoxelGeneratorPlugin",
    }
)  # fmt: skip
"""The plugins included in TensorRT."""

KNOWN_OPERATORS = frozenset({*TYPED_PAIR_OPERATORS, *DYNAMIC_QUANTIZERS, *OTHER_OPERATORS, *PLUGIN_OPERATORS})


def is_known(node: onnx.NodeProto) -> bool:
    """Whether TensorRT recognizes a node that is no ONNX operator."""
    return node.op_type in KNOWN_OPERATORS or (
        node.domain == TENSORRT_DOMAIN and node.op_type in (QUANTIZE, DEQUANTIZE)
    )


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its nested graphs: branches and loop bodies."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_of(attribute.g)


def separate_own_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file with TensorRT's own operators moved to a domain of their own.

    Variants of ONNX operators get the ONNX name there, with their type in an attribute.
    """
    if not any(node.op_type in KNOWN_OPERATORS for graph in graphs_of(model.graph) for node in graph.node):
        return model
    stored = onnx.ModelProto()
    stored.CopyFrom(model)
    for graph in graphs_of(stored.graph):
        for node in graph.node:
            if node.op_type in KNOWN_OPERATORS:
                _move_to_own_domain(node)
    if all(opset.domain != TENSORRT_DOMAIN for opset in stored.opset_import):
        stored.opset_import.append(onnx.helper.make_opsetid(TENSORRT_DOMAIN, 1))
    return stored


def _move_to_own_domain(node: onnx.NodeProto) -> None:
    node.domain = TENSORRT_DOMAIN
    if node.op_type.startswith("TRT_MXFP8") and all(a.name != "block_size" for a in node.attribute):
        node.attribute.append(onnx.helper.make_attribute("block_size", MXFP8_BLOCK_SIZE))
    if node.op_type in TYPED_PAIR_OPERATORS:
        node.op_type, quantized_type = TYPED_PAIR_OPERATORS[node.op_type]
        node.attribute.append(onnx.helper.make_attribute(QUANTIZED_TYPE_ATTRIBUTE, quantized_type))


def output_types(node: onnx.NodeProto) -> dict[str, int]:
    """Return the element types of the outputs of a TensorRT operator, as far as it determines them."""
    stated = {a.name: a.i for a in node.attribute}
    if node.domain != TENSORRT_DOMAIN:
        return {}
    if node.op_type in DYNAMIC_QUANTIZERS:
        kinds = DYNAMIC_QUANTIZERS[node.op_type]
        requested = [
            kind or stated.get(name, 0) for kind, name in zip(kinds, ("output_type", "scale_type"), strict=True)
        ]
    elif node.op_type == QUANTIZE:
        requested = [stated.get(QUANTIZED_TYPE_ATTRIBUTE, 0) or stated.get("output_dtype", 0)]
    else:
        requested = [stated.get("output_dtype", 0)]
    return {name: kind for name, kind in zip(node.output, requested, strict=False) if name and kind}
