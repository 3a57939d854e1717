"""What ONNX Runtime makes of a file: which of its nodes run in integers, and why others do not.

Sources: onnxruntime 1.31, ``qdq_selectors.cc`` for what each operator asks of its neighbours; the optimized graph,
which the runtime writes itself, for what came of it.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from clika_ref.core.errors import TargetError
from clika_ref.core.targets import Artifact
from clika_ref.precisions import FLOAT, FUSED, INTEGERS

BORDERS = ("QuantizeLinear", "DequantizeLinear")

BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)

CLOSED = frozenset(
    {"Conv", "Add", "Mul", "Sigmoid", "LeakyRelu", "AveragePool", "GlobalAveragePool", "Concat", "Softmax"}
)
"""ONNX operators that run in integers only where their result is quantized."""

OPEN = frozenset({"MatMul", "Gemm"})
"""Those that can return floats."""

KERNELS = ("QLinear", "QGemm", "MatMulInteger", "DynamicQuantize", "ConvInteger")
"""What the names of the runtime's own operators in integers begin with."""

ABSORBED = frozenset({"Relu", "Clip"})
"""What is computed along with the node before it."""

TOKEN = re.compile(r"_token_\d+$")
"""What ends the names of nodes that were made anew where others of that name had been."""

MOVES = frozenset(
    {"Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze"}
    | {"Transpose", "Unsqueeze"}
)
"""What computes nothing, so that it says of a lowering that holds more only how its ends are moved."""


class ExplainedArtifact(Artifact):
    """An ONNX file that remembers what the runtime makes of it, which takes seconds for a model of 100 MB."""

    @cached_property
    def fused(self) -> OnnxGraph:
        """The graph up to the extended level, where nodes keep their names; behind it layouts change."""
        return optimized_graph(self.path, "ORT_ENABLE_EXTENDED")

    @classmethod
    def of(cls, artifact: Artifact) -> ExplainedArtifact:
        """Return an artifact as one that remembers, itself if it does."""
        if isinstance(artifact, ExplainedArtifact):
            return artifact
        return cls(artifact.path, artifact.target, artifact.input_names, artifact.output_names, artifact.facts)


def precisions(artifact: ExplainedArtifact, *, optimize: bool) -> dict[str, str]:
    """Return what each node of a graph runs in: `INTEGERS`, ``int4 weights``, `FLOAT` and why, or `FUSED`.

    Nodes are said by the names that the graph gives them, with which those in the file begin.

    Args:
        artifact: the ONNX file.
        optimize: whether the runtime may; without, it computes in float what lies between integers.
    """
    written = OnnxGraph.read(artifact.path)
    if not optimize:
        return {owner: written.in_float(owner, "ONNX Runtime's optimizations are off") for owner in written.owners}
    found = artifact.fused
    lost = found.kernels - optimized_graph(artifact.path, "ORT_ENABLE_ALL").kernels
    kept = _kept(written, found)
    return {owner: _precision(owner, kept.get(owner, []), written, found, lost) for owner in written.owners}


def _kept(written: OnnxGraph, found: OnnxGraph) -> dict[str, list[onnx.NodeProto]]:
    """Return what an optimized graph has for each node: by their names, and by what they return where one was made."""
    kept: dict[str, list[onnx.NodeProto]] = {}
    for node in found.nodes:
        owner = written.owner_of(node)
        if owner is not None and node.op_type not in BORDERS:
            kept.setdefault(owner, []).append(node)
    return kept


def _precision(
    owner: str, kept: Sequence[onnx.NodeProto], written: OnnxGraph, found: OnnxGraph, lost: Counter[str]
) -> str:
    computing = [node for node in kept if node.op_type not in MOVES] or kept
    whole = [node.op_type for node in computing if found.runs_in_integers(node)]
    dropped = [kind for kind in whole if lost[kind]]
    if dropped:
        return f"{FLOAT}: with all of its optimizations, ONNX Runtime has {lost[dropped[0]]} {dropped[0]} fewer"
    if whole:
        return INTEGERS
    few = [int(a.i) for node in kept if node.op_type == "MatMulNBits" for a in node.attribute if a.name == "bits"]
    if few:
        return f"int{few[0]} weights"
    return written.in_float(owner) if kept else FUSED


def optimized_graph(path: Path, level: str) -> OnnxGraph:
    """Return the graph that the runtime makes of a file.

    Raises:
        TargetError: the runtime rejects the file.
    """
    import onnxruntime as ort  # noqa: PLC0415 - heavy, and the plugin must load without it

    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = getattr(ort.GraphOptimizationLevel, level), 4
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(place)
        try:
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            msg = f"ONNX Runtime {ort.__version__} cannot load {path}: {error}"
            raise TargetError(msg) from error
        return OnnxGraph.read(place)


@dataclass
class OnnxGraph:
    """The nodes of an ONNX file, and what they read and make."""

    nodes: list[onnx.NodeProto]
    dtypes: Mapping[str, int]
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict[str, onnx.NodeProto])
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict[str, list[onnx.NodeProto]])
    outputs: frozenset[str] = frozenset()
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Constants without sides."""

    @classmethod
    def read(cls, path: Path) -> OnnxGraph:
        """Read a file, but for what lies beside it."""
        graph = onnx.load(str(path), load_external_data=False).graph
        typed: Iterable[Any] = (*graph.input, *graph.value_info, *graph.output)
        file = cls([*graph.node], {v.name: v.type.tensor_type.elem_type for v in typed})
        file.outputs = frozenset(v.name for v in graph.output)
        file.numbers = {t.name: onnx.numpy_helper.to_array(t)[()] for t in graph.initializer if not t.dims}
        for node in file.nodes:
            file.makers |= dict.fromkeys(node.output, node)
            for name in node.input:
                file.readers.setdefault(name, []).append(node)
        return file

    @cached_property
    def owners(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes of a file that was written, by the node of the graph whose lowering made them."""
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            found.setdefault(node.name.rpartition("/")[0], []).append(node)
        return found

    def owner_of(self, node: onnx.NodeProto) -> str | None:
        """Return whose node one of an optimized graph was: by its name, around which fusions write their own.

        One that was made anew is known by what it returns.
        """
        name = node.name.removeprefix("fused ")
        name = name if name in self._owner_by_name else TOKEN.sub("", name)
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
        """How many nodes there are of each kind that exists in integers only."""
        return Counter(node.op_type for node in self.nodes if node.op_type.startswith(KERNELS))

    def runs_in_integers(self, node: onnx.NodeProto) -> bool:
        """Whether a node of an optimized graph reads or returns bytes; the borders between them and floats do not.

        Of what lies between reshapes of its own the runtime does not write the types.
        """
        ends = [*node.input[:1], *node.output[:1]]
        is_border = node.op_type in BORDERS
        return not is_border and (node.op_type.startswith(KERNELS) or any(self.dtypes.get(n) in BYTES for n in ends))

    def in_float(self, owner: str, reason: str = "") -> str:
        """Return `FLOAT`, and why not in integers where an operand of the node was quantized."""
        read = (node for node in self.owners[owner] if any(map(self._is_dequantized, node.input)))
        return next((f"{FLOAT}: {reason or self._reason(node)}" for node in read), FLOAT)

    def _reason(self, node: onnx.NodeProto) -> str:
        kind = node.op_type
        if kind not in CLOSED | OPEN:
            return f"ONNX Runtime has no kernel for {kind} in integers"
        floats = [n for n in node.input[: 2 if kind in OPEN | {"Conv"} else None] if n and not self._is_dequantized(n)]
        if floats:
            return f"its operand {floats[0]} is not quantized"
        behind = self._quantized_behind(node)
        if kind in CLOSED and behind is None:
            return f"ONNX Runtime runs {kind} in integers only where its result is quantized before anything reads it"
        bias = [n for n in node.input[2:] if not self._is_dequantized(n)]
        if kind == "Gemm" and bias and behind is None:
            return "its bias is float, which ONNX Runtime adds in integers only where the result is quantized, too"
        if behind is not None and self._cuts(node):
            return "what is cut off behind it lies in the range of the integers that hold the result"
        return "ONNX Runtime left it so, and no rule that is known here says why"

    def _is_dequantized(self, name: str) -> bool:
        return name in self.makers and self.makers[name].op_type == "DequantizeLinear"

    def _cuts(self, node: onnx.NodeProto) -> bool:
        """Whether a relu stays between a node and the integers of its result, some of which are negative."""
        (reader,) = self.readers[node.output[0]]
        if reader.op_type != "Relu":
            return False
        (quantize,) = self.readers[reader.output[0]]
        zero_point = self.numbers.get(quantize.input[2])
        return zero_point is not None and int(zero_point) > np.iinfo(zero_point.dtype).min

    def _quantized_behind(self, node: onnx.NodeProto) -> str | None:
        """Return the integers that the only reader of a result makes of it, or of what is computed along with it."""
        name = node.output[0]
        while name not in self.outputs and len(self.readers.get(name, [])) == 1:
            (reader,) = self.readers[name]
            if reader.op_type == "QuantizeLinear":
                return reader.output[0]
            if reader.op_type not in ABSORBED:
                break
            name = reader.output[0]
        return None
