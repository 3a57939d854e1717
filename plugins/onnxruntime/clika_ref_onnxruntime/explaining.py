"""Determine which nodes of a file ONNX Runtime runs in INT8, and why others stay float.

Sources: onnxruntime 1.31, ``qdq_selectors.cc`` for the conditions of each operator; the optimized graph, as written by
the runtime itself, for the outcome.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION

NO_OPTIMIZATIONS, EXTENDED_OPTIMIZATIONS, ALL_OPTIMIZATIONS = "ORT_DISABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"
"""Optimization levels of ONNX Runtime, by the names of ``onnxruntime.GraphOptimizationLevel``."""

PAIR_OPERATORS = ("QuantizeLinear", "DequantizeLinear")

INT8_TYPES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)

NEEDS_QUANTIZED_OUTPUT = frozenset(
    {"Conv", "Add", "Mul", "Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Concat", "Softmax"}
)
"""ONNX operators that run in INT8 only if their result is quantized."""

ALLOWS_FLOAT_OUTPUT = frozenset({"MatMul", "Gemm"})
"""Operators that can return floats."""

INT8_KERNEL_PREFIXES = ("QLinear", "QGemm", "MatMulInteger", "DynamicQuantize", "ConvInteger")
"""Prefixes of the runtime's own INT8 operators."""

FUSED_ACTIVATIONS = frozenset({"Relu", "Clip"})
"""Operators that are fused into the preceding node."""

RECREATED_SUFFIX = re.compile(r"_token_\d+$")
"""Suffix of nodes that the runtime recreates under an existing name."""

MOVING_OPERATORS = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze"}
    | {"Transpose", "Unsqueeze"}
)
"""Operators without computation. In a lowering with other nodes, they only move its inputs and outputs."""


class ExplainedArtifact(Artifact):
    """An ONNX file that caches its optimized graph, which takes seconds for a model of 100 MB."""

    @cached_property
    def fused(self) -> OnnxGraph:
        """The graph optimized up to the extended level, where nodes keep their names. Later levels change layouts."""
        return load_optimized_graph(self.path, EXTENDED_OPTIMIZATIONS)

    @classmethod
    def of(cls, artifact: Artifact) -> ExplainedArtifact:
        """Wrap an artifact, or return it if it is already wrapped."""
        if isinstance(artifact, ExplainedArtifact):
            return artifact
        return cls(artifact.path, artifact.target, artifact.input_names, artifact.output_names, artifact.facts)


def read_precisions(artifact: ExplainedArtifact, optimization_level: str = ALL_OPTIMIZATIONS) -> dict[str, str]:
    """Return the precision of each node: ``int8``, ``int4 weights``, ``float`` with a reason, or ``fused``.

    Nodes are identified by their names in the graph, which prefix the names in the file.

    Args:
        artifact: the ONNX file.
        optimization_level: that of the runtime. Without optimizations, it computes quantized nodes in float.
    """
    written = OnnxGraph(artifact.path)
    if optimization_level == NO_OPTIMIZATIONS:
        return {
            owner: written.describe_float(owner, "ONNX Runtime's optimizations are off") for owner in written.owners
        }
    has_names = optimization_level != ALL_OPTIMIZATIONS
    found = load_optimized_graph(artifact.path, optimization_level) if has_names else artifact.fused
    lost = Counter[str]()
    if not has_names:
        lost = found.kernels - load_optimized_graph(artifact.path, ALL_OPTIMIZATIONS).kernels
    nodes = _group_by_owner(written, found)
    return {owner: _precision(owner, nodes.get(owner, []), written, found, lost) for owner in written.owners}


def _group_by_owner(written: OnnxGraph, found: OnnxGraph) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes of an optimized graph by their owner: from the name, or from the outputs for recreated nodes."""
    nodes: dict[str, list[onnx.NodeProto]] = {}
    for node in found.nodes:
        owner = written.owner_of(node)
        if owner is not None and node.op_type not in PAIR_OPERATORS:
            nodes.setdefault(owner, []).append(node)
    return nodes


def _precision(
    owner: str, nodes: Sequence[onnx.NodeProto], written: OnnxGraph, found: OnnxGraph, lost: Counter[str]
) -> str:
    computing = [node for node in nodes if node.op_type not in MOVING_OPERATORS] or nodes
    whole = [node.op_type for node in computing if found.runs_in_int8(node)]
    dropped = [kind for kind in whole if lost[kind]]
    if dropped:
        return (
            f"{FLOAT_PRECISION}: after all optimizations of ONNX Runtime, {lost[dropped[0]]} {dropped[0]} are missing"
        )
    if whole:
        return INT8_PRECISION
    bit_widths = [
        int(a.i) for node in nodes if node.op_type == "MatMulNBits" for a in node.attribute if a.name == "bits"
    ]
    if bit_widths:
        return f"int{bit_widths[0]} weights"
    return written.describe_float(owner) if nodes else FUSED_PRECISION


def load_optimized_graph(path: Path, level: str) -> OnnxGraph:
    """Return the graph of a file after the runtime's optimizations.

    Raises:
        TargetError: the runtime rejects the file.
    """
    import onnxruntime as ort  # noqa: PLC0415 - heavy, and the plugin must load without it

    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = getattr(ort.GraphOptimizationLevel, level), 4
    with tempfile.TemporaryDirectory() as folder:
        optimized_path = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(optimized_path)
        try:
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise TargetError(f"ONNX Runtime {ort.__version__} cannot load {path}: {error}") from error
        return OnnxGraph(optimized_path)


class OnnxGraph:
    """The nodes of an ONNX file, with the producer and the readers of each value; ``numbers`` are scalar constants."""

    def __init__(self, path: Path) -> None:
        """Read a file without external data."""
        graph = onnx.load(str(path), load_external_data=False).graph
        self.nodes = [*graph.node]
        typed: Iterable[Any] = (*graph.input, *graph.value_info, *graph.output)
        self.dtypes = {v.name: v.type.tensor_type.elem_type for v in typed}
        self.outputs = frozenset(v.name for v in graph.output)
        self.numbers = {t.name: onnx.numpy_helper.to_array(t)[()] for t in graph.initializer if not t.dims}
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    @cached_property
    def owners(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes of an exported file, by the graph node that they were lowered from."""
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            found.setdefault(node.name.rpartition("/")[0], []).append(node)
        return found

    def owner_of(self, node: onnx.NodeProto) -> str | None:
        """Return the owner of a node in an optimized graph, from its name, which fusions extend.

        A recreated node is identified by its outputs.
        """
        name = node.name.removeprefix("fused ")
        name = name if name in self._owner_by_name else RECREATED_SUFFIX.sub("", name)
        while name and name not in self._owner_by_name:
            name = name.rpartition("/")[0]
        if name:
            return self._owner_by_name[name]
        return next((self._owner_by_result[n] for n in node.output if n in self._owner_by_result), None)

    @cached_property
    def _owner_by_name(self) -> Mapping[str, str]:
        return {node.name: owner for owner, nodes in self.owners.items() for node in nodes}

    @cached_property
    def _owner_by_result(self) -> Mapping[str, str]:
        return {name: owner for owner, nodes in self.owners.items() for node in nodes for name in node.output}

    @property
    def kernels(self) -> Counter[str]:
        """Number of nodes of each INT8-only operator."""
        return Counter(node.op_type for node in self.nodes if node.op_type.startswith(INT8_KERNEL_PREFIXES))

    def runs_in_int8(self, node: onnx.NodeProto) -> bool:
        """Whether a node of an optimized graph reads or returns INT8, except quantize and dequantize nodes.

        The runtime writes no types for values between its own reshapes.
        """
        if node.op_type in PAIR_OPERATORS:
            return False
        values = [*node.input[:1], *node.output[:1]]
        return node.op_type.startswith(INT8_KERNEL_PREFIXES) or any(self.dtypes.get(n) in INT8_TYPES for n in values)

    def describe_float(self, owner: str, reason: str = "") -> str:
        """Return `FLOAT_PRECISION`, with the reason if an operand of the node was quantized."""
        read = (node for node in self.owners[owner] if any(map(self._is_dequantized, node.input)))
        return next((f"{FLOAT_PRECISION}: {reason or self._reason(node)}" for node in read), FLOAT_PRECISION)

    def _reason(self, node: onnx.NodeProto) -> str:
        kind = node.op_type
        if self._is_kept_in_float(node):
            return f"the file keeps {kind} in float, since INT8 is slower or less accurate there"
        if kind not in NEEDS_QUANTIZED_OUTPUT | ALLOWS_FLOAT_OUTPUT:
            return f"ONNX Runtime has no INT8 kernel for {kind}"
        floats = [
            n
            for n in node.input[: 2 if kind in ALLOWS_FLOAT_OUTPUT | {"Conv"} else None]
            if n and not self._is_dequantized(n)
        ]
        if floats:
            return f"its operand {floats[0]} is not quantized"
        quantized = self._find_quantized_result(node)
        if kind in NEEDS_QUANTIZED_OUTPUT and quantized is None:
            return f"ONNX Runtime runs {kind} in INT8 only if its output is quantized right after it"
        bias = [n for n in node.input[2:] if not self._is_dequantized(n)]
        if kind == "Gemm" and bias and quantized is None:
            return "its bias is float, and ONNX Runtime adds it in INT8 only if the output is quantized too"
        if quantized is not None and self._has_remaining_relu(node):
            return "the activation after it clips within the quantized range of the output"
        return "ONNX Runtime kept it in float, for a reason unknown to this plugin"

    def _is_kept_in_float(self, node: onnx.NodeProto) -> bool:
        """Whether a ``Sum`` of one operand separates a node from what follows (`fusion_barriers`)."""
        readers = (reader for name in node.output for reader in self.readers.get(name, []))
        return any(reader.op_type == "Sum" and len(reader.input) == 1 for reader in readers)

    def _is_dequantized(self, name: str) -> bool:
        return name in self.makers and self.makers[name].op_type == "DequantizeLinear"

    def _has_remaining_relu(self, node: onnx.NodeProto) -> bool:
        """Whether a relu remains between a node and its quantized result, although the result has negative values."""
        (reader,) = self.readers[node.output[0]]
        if reader.op_type != "Relu":
            return False
        (quantize,) = self.readers[reader.output[0]]
        zero_point = self.numbers.get(quantize.input[2])
        return zero_point is not None and int(zero_point) > np.iinfo(zero_point.dtype).min

    def _find_quantized_result(self, node: onnx.NodeProto) -> str | None:
        """Return the quantized result of a node, if its only reader quantizes it, directly or after fused nodes."""
        name = node.output[0]
        while name not in self.outputs and len(self.readers.get(name, [])) == 1:
            (reader,) = self.readers[name]
            if reader.op_type == "QuantizeLinear":
                return reader.output[0]
            if reader.op_type not in FUSED_ACTIVATIONS:
                break
            name = reader.output[0]
        return None
