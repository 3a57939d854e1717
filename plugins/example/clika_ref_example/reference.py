"""A whole target in one file: ONNX files, run by onnx's own evaluator, which is slow and needs no runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx.version_converter
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref.core.hooks import hookimpl
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.core.targets import Target
from clika_ref.onnx_export.artifact import onnx_unsupported_reason, write_artifact

CLIKA_REF_API = 1

WEIGHT_TYPE = QuantizedType(is_signed=True, is_symmetric=True)
REFERENCE_SCHEME = QuantizationScheme(
    activations=QuantizedType(), weights=WEIGHT_TYPE, layers=frozenset({"conv2d", "linear"})
)


@dataclass(frozen=True)
class OnnxReference(Target):
    """The evaluator of the package onnx."""

    name: str = "onnx-reference"
    scheme: QuantizationScheme | None = REFERENCE_SCHEME

    def unsupported_reason(self, node: Node) -> str | None:
        """Reject bfloat16, nodes without an ONNX form, and random numbers, which differ in each run."""
        if any(isinstance(v, Value) and v.type.dtype == torch.bfloat16 for v in (*node.inputs, *node.outputs)):
            return "it computes in bfloat16, which is not supported. Compile and export in float32 or float16"
        return f"{node.op.name} draws random numbers" if node.is_random else onnx_unsupported_reason(node)

    def compile(self, graph: Graph, path: Path, **options: Any) -> Artifact:
        """Write a graph as an ONNX file."""
        return write_artifact(graph, path, self.name, external_data=options.get("external_data", False))

    def load(self, artifact: Artifact) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function that runs a file on one tensor for each input."""
        try:
            # The evaluator lacks the DequantizeLinear of opset 18, the default of exports.
            model = onnx.version_converter.convert_version(onnx.load(str(artifact.path)), 21)
            evaluator = ReferenceEvaluator(model)
        except Exception as error:
            raise TargetError(f"onnx cannot read {artifact.path}: {error}") from error

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            feed = {n: t.detach().numpy() for n, t in zip(artifact.input_names, inputs, strict=True)}
            return [torch.as_tensor(result) for result in evaluator.run([*artifact.output_names], feed)]

        return run

    def explain(self, artifact: Artifact) -> Mapping[str, str]:
        """Return ``float`` for every node: the evaluator dequantizes before it computes."""
        nodes = onnx.load(str(artifact.path), load_external_data=False).graph.node
        return {node.name.rpartition("/")[0]: "float" for node in nodes}


@hookimpl
def clika_ref_targets() -> Sequence[Target]:
    """Return the target."""
    return [OnnxReference()]
