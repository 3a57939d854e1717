"""A third-party target: the reference evaluator of the ``onnx`` package, which computes ONNX files in NumPy.

It is all the code that the conformance suite needs to test another runtime. Run in the parent of this folder:

    clika-ref conformance run --target reference_evaluator.target:TARGET -k softmax --out report
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx.reference import ReferenceEvaluator

from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.targets import Target
from clika_ref.onnx_export.emission import emit
from clika_ref.onnx_export.writing import write_model


class Reference(Target):
    """ONNX files, computed node by node as the standard defines."""

    name = "reference-evaluator"

    def unsupported_reason(self, node: Node) -> str | None:
        """Reject nodes that have no ONNX form, or that the evaluator or NumPy does not compute correctly."""
        name, values = node.op.name, [v for v in (*node.inputs, *node.outputs) if isinstance(v, Value)]
        if node.op.lowering is None:
            return f"{name} has no ONNX lowering"
        if any(v.type.dtype is torch.bfloat16 or v.type.dtype.is_complex for v in values):
            return f"{name} in bfloat16, which NumPy lacks, or in complex numbers, which ONNX operators lack"
        if (name.startswith("conv_transpose") or node.attrs.get("transposed")) and node.attrs["groups"] > 1:
            return "ConvTranspose with groups takes all channels for each group"
        if "max_pool" in name and not values[0].type.dtype.is_floating_point:
            return "MaxPool of int64 does not exist in ONNX, and float64 cannot represent all of its numbers"
        if name in ("max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"):
            return "MaxPool with ceil_mode and strides of 1 confuses dims, and its indices are wrong in several dims"
        return None

    def compile(self, graph: Graph, path: Path, **_: Any) -> Artifact:
        """Write an ONNX file."""
        model = emit(graph)
        size = write_model(model, path)
        inputs, outputs = (tuple(v.name or "" for v in values) for values in (model.graph.inputs, model.graph.outputs))
        return Artifact(path, self.name, inputs, outputs, {"bytes": size})

    def load(self, artifact: Artifact) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Read the file, and return a function from one tensor per input to the outputs, in new memory.

        Raises:
            TargetError: the file is damaged, or belongs to another artifact.
        """
        try:
            evaluator = ReferenceEvaluator(str(artifact.path))
        except Exception as error:
            raise TargetError(f"load {artifact.path}: it cannot be read: {error}. Export the model again.") from error
        if tuple(evaluator.output_names) != artifact.output_names:
            raise TargetError(f"load {artifact.path}: it returns {evaluator.output_names}. Export the model again.")

        def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            arrays = [t.detach().clone(memory_format=torch.contiguous_format).numpy() for t in inputs]
            with np.errstate(all="ignore"):  # NaN and infinities are results here
                results = evaluator.run(None, dict(zip(artifact.input_names, arrays, strict=True)))
            return [torch.from_numpy(np.array(a, order="C")) for a in results]  # NumPy makes scalars of 0-d arrays

        return run


TARGET = Reference()
