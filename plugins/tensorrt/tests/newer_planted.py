"""Faults and similar correct graphs: TensorRT's own operators, low-bit weights, newer operators, and stale types."""

from functools import partial

from newer_sketches import (
    add_stale_types,
    append_plugin,
    build_attention_heads,
    build_attention_opset23,
    build_bfloat16_middle,
    build_block_quantized,
    build_cast_after_pairs,
    build_dynamic_float8,
    build_einsum,
    build_float64_random,
    build_gemm_weight_first,
    build_int4_and_float8,
    build_int32_weight,
    build_loop,
    build_mxfp8,
    build_nvfp4,
    build_other_dynamic_scale,
    build_permuted_input,
    build_permuted_int8_output,
    build_plugin_output,
    build_quantized_branch,
    build_resize,
    build_scaled_sizes,
    build_second_pair,
    build_stale_branch,
    build_tensorrt_float8,
    build_tensorrt_int4,
    build_tensorrt_mxfp8,
    build_two_types,
    insert_cast,
    rename_to_tensorrt_operators,
)
from onnx import TensorProto as Kind
from planting import build_with_unsupported_operator, drop, set_axis, set_constant, set_node_inputs
from sketches import build_blockwise, build_convolution, build_perceptron

W = "w_Q w_DQ"
NEWER = {
    "float64 of data next to sizes": (partial(build_scaled_sizes, "x"), "data-type", "scaled x32"),
    "float4 as a pair of another name": (
        lambda: rename_to_tensorrt_operators(build_perceptron(), DequantizeLinear="TRT_FP4QDQ"),
        "known-operators pair",
        "x_DQ w_DQ v_DQ relu_DQ",
    ),
    "TensorRT int4 in blocks of 32": (partial(build_tensorrt_int4, 32), "blocks", "w_DQ"),
    "TensorRT float8 per channel": (
        lambda: build_tensorrt_float8(set_constant(build_perceptron(), "x_scale", 0.05, shape=[32])),
        "activation-per-tensor",
        "x_Q x_DQ",
    ),
    "TensorRT float8 of a float weight": (
        lambda: (
            drop(model := build_tensorrt_float8(build_perceptron()), "w_Q", "w_DQ")
            or set_node_inputs(model, "gemm", "x_DQ w bias")
        ),
        "all-inputs",
        "gemm",
    ),
    "axis 1 under stale shapes": (
        lambda: add_stale_types(build_convolution(axis=1), relu=[7], w_DQ=[7]),
        "weight-axis",
        f"{W} conv",
    ),
    "attention of a float key": (partial(build_attention_opset23, "k"), "all-inputs", "out"),
    "Einsum of a float weight": (partial(build_einsum, quantized=False), "all-inputs", "out"),
    "Einsum of scales along what is summed": (partial(build_einsum, axis=0), "weight-axis", "w_DQ"),
    "Einsum of scales along what is summed, unsaid": (partial(build_einsum, "bik,kj", 0), "weight-axis", "w_DQ"),
    "INT8 values that a Cast reads": (
        lambda: set_node_inputs(build_cast_after_pairs(), "w_cast", "w_Q"),
        "all-inputs isolated pair",
        "w_Q w_cast gemm x_Q",
    ),
    "float4 in blocks of 32": (partial(build_nvfp4, block=32), "blocks", "w_DQ"),
    "float8 scales as they are": (
        partial(build_nvfp4, is_dynamic=False, is_stored=False),
        "scale-type valid-onnx",
        "w_DQ FILE",
    ),
    "exponents of int8": (
        partial(build_mxfp8, quantized_kind=Kind.INT8),
        "all-inputs blocks int8-with-float8 scale-type",
        "w_DQ out x_DQ",
    ),
    "exponents of blocks of 16": (partial(build_mxfp8, 16), "blocks scale-type", "w_DQ"),
    "input in blocks of 16": (partial(build_tensorrt_mxfp8, 16), "blocks", "x_Q"),
    "exponents of no blocks": (partial(build_mxfp8, 0), "scale-type", "w_DQ"),
    "float weight in blocks of 32": (partial(build_block_quantized, 32), "blocks", W),
    "float weight in int8 and blocks": (
        partial(build_block_quantized, kind=Kind.INT8),
        "all-inputs blocks",
        f"{W} out",
    ),
    "other blocks than its inverse": (partial(build_block_quantized, other=65), "blocks pair", W),
    "TensorRT float8 of another scale than its inverse": (
        lambda: set_constant(
            set_node_inputs(build_tensorrt_float8(build_perceptron()), "x_Q", "x other"), "other", 0.5
        ),
        "pair",
        "x_Q",
    ),
    "INT8 of TensorRT that a Cast reads": (
        lambda: insert_cast(build_tensorrt_float8(build_perceptron(opset=19)), "x_Q", "x_DQ", Kind.FLOAT),
        "pair",
        "moved x_DQ",
    ),
    "INT8 of a plugin": (partial(build_plugin_output, Kind.INT32), "data-type", "y_Q"),
    "scales of something else": (build_other_dynamic_scale, "scale", "x_DQ"),
    "axis 1 after a cast": (
        lambda: set_axis(set_axis(build_cast_after_pairs(), "w_Q", 1), "w_DQ", 1),
        "weight-axis",
        "w_DQ",
    ),
    "random float64": (build_float64_random, "data-type", "out"),
    "quantized again in a branch": (build_quantized_branch, "one-quantizer", "again_Q"),
    "axis 1 in a loop": (partial(build_loop, 1), "weight-axis", W),
    "zero point of 3 in a loop": (partial(build_loop, zero=3), "zero-point", "x_Q x_DQ"),
    "Gemm's first operand of axis 1": (partial(build_gemm_weight_first, 1), "weight-axis", W),
    "Gemm's first operand, transposed, of axis 0": (partial(build_gemm_weight_first, 0, transA=1), "weight-axis", W),
    "int32 weight": (build_int32_weight, "integer-type", "w_DQ"),
    "INT8 returned, transposed": (build_permuted_int8_output, "pair", "relu_Q"),
    "quantized again": (build_second_pair, "one-quantizer", "x_DQ_Q"),
    "Unique": (lambda: build_with_unsupported_operator("Unique", "x"), "known-operators", "odd"),
    "int8 and float8 in two layers": (build_two_types, "int8-with-float8", "relu_Q"),
}

NEAR_NEWER = {
    "sizes in float64": build_scaled_sizes,
    "TensorRT float8": lambda: build_tensorrt_float8(build_perceptron()),
    "TensorRT int4": build_tensorrt_int4,
    "TensorRT plugin": partial(append_plugin, "EfficientNMS_TRT", "TRT"),
    "attention of opset 23": build_attention_opset23,
    "Einsum": build_einsum,
    "Einsum of a weight that is transposed": partial(build_einsum, "bik,jk->bij", 0),
    "Einsum without a result": partial(build_einsum, "bik,kj"),
    "casts after pairs": build_cast_after_pairs,
    "Tile": partial(build_permuted_input, "Tile", ([2], [2, 1])),
    "GatherND": partial(build_permuted_input, "GatherND", ([2, 1], [[0], [3]])),
    "GatherElements": partial(build_permuted_input, "GatherElements", ([4, 32], 0), axis=0),
    "ReverseSequence": partial(build_permuted_input, "ReverseSequence", ([4], 32), batch_axis=0, time_axis=1),
    "float4 and its scales in float8": build_nvfp4,
    "float4 weight-only": partial(build_nvfp4, is_dynamic=False),
    "float8 with exponents": build_mxfp8,
    "TensorRT float8 with exponents": build_tensorrt_mxfp8,
    "float weight in blocks": build_block_quantized,
    "float8 in two layers": partial(build_two_types, Kind.FLOAT8E4M3FN),
    "TensorRT dynamic float8": build_dynamic_float8,
    "floats of a plugin": partial(build_plugin_output, Kind.FLOAT),
    "float4 and a stale type": lambda: add_stale_types(build_nvfp4(), x_Q=[4, 64]),
    "Einsum with an ellipsis": partial(build_einsum, "...k,kj->...j"),
    "cast after blocks": lambda: insert_cast(build_blockwise(), "w_DQ", "out", Kind.FLOAT16),
    "loop": build_loop,
    "Gemm's first operand": partial(build_gemm_weight_first, 0),
    "Gemm's first operand, transposed": partial(build_gemm_weight_first, 1, transA=1),
    "quantized again, of another scale": partial(build_second_pair, 0.1),
    "Resize and Concat": build_resize,
    "heads by hand": build_attention_heads,
    "int4 next to float8": build_int4_and_float8,
}

UNKNOWN_TO_ONNX = {
    "bfloat16 before its opset": build_bfloat16_middle,
    "TensorRT plugin without a domain": partial(append_plugin, "EfficientNMS_TRT", ""),
    "TensorRT float8 without a domain": lambda: [  # as exporters without one write it
        model := build_tensorrt_float8(build_convolution()),
        [one.ClearField("domain") for one in model.graph.node],
    ][0],
    "stale shapes": lambda: add_stale_types(build_convolution(), relu=[1, 2], conv=[7], norm=[4, 16, 9, 9]),
    "stale type in a branch": build_stale_branch,
}
"""Graphs that ONNX rejects and TensorRT accepts."""
