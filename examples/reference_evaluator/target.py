"""A target from outside: the reference evaluator of the ``onnx`` package, which computes ONNX files in NumPy.

All that a third party writes to hold a runtime of its own to the conformance suite. In this folder's parent:

    clika-ref conformance run --target reference_evaluator.target:TARGET -k softmax --out report
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx.reference import ReferenceEvaluator

from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.passes import Pass
from clika_ref.core.targets import Artifact, QuantizationScheme
from clika_ref.onnx_emission.emission import emit
from clika_ref.onnx_emission.writing import write_model


@dataclass(frozen=True)
class Reference:
    """ONNX files, computed node by node as the standard says."""

    name: str = "reference-evaluator"
    scheme: QuantizationScheme = field(default_factory=QuantizationScheme)

    def missing(self) -> str | None:
        """Lack nothing: clika-ref needs the onnx package itself."""
        return None

    def refusal(self, node: Node) -> str | None:
        """Refuse what has no form in ONNX, and the dtypes that the evaluator or NumPy does not compute in."""
        if node.op.lowering is None:
            return f"{node.op.name} has no ONNX lowering"
        dtypes = {v.type.dtype for v in (*node.inputs, *node.outputs) if isinstance(v, Value)}
        if torch.bfloat16 in dtypes or any(dtype.is_complex for dtype in dtypes):
            return f"{node.op.name} in bfloat16, which NumPy lacks, or in complex numbers, which ONNX operators lack"
        return computed_wrongly(node)

    def passes(self) -> Sequence[Pass]:
        """Want no passes but the standard ones."""
        return ()

    def compile(self, graph: Graph, path: Path, **_: Any) -> Artifact:
        """Write an ONNX file."""
        model = emit(graph)
        size = write_model(model, path)
        inputs, outputs = (tuple(v.name or "" for v in values) for values in (model.graph.inputs, model.graph.outputs))
        return Artifact(path, self.name, inputs, outputs, {"bytes": size})

    def load(self, artifact: Artifact) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Read the file; return what computes it on one tensor per input.

        Raises:
            TargetError: the file is damaged, or holds what the evaluator does not know.
        """
        try:
            evaluator = ReferenceEvaluator(str(artifact.path))
        except Exception as error:
            msg = f"{artifact.path} cannot be read: {error}"
            raise TargetError(msg) from error
        if tuple(evaluator.output_names) != artifact.output_names:
            msg = (
                f"{artifact.path} returns {evaluator.output_names} instead of {artifact.output_names}; compile it anew"
            )
            raise TargetError(msg)

        def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            feed = dict(zip(artifact.input_names, (to_numpy(t) for t in inputs), strict=True))
            with np.errstate(all="ignore"):  # NaN and infinities are results here
                return [to_torch(np.asarray(a)) for a in evaluator.run(list(artifact.output_names), feed)]

        return run

    def explain(self, _: Artifact) -> Mapping[str, str]:
        """Say nothing of single nodes: all of them compute in the dtypes that they state."""
        return {}


def computed_wrongly(node: Node) -> str | None:
    """Say why the evaluator would return wrong numbers for a node; where it raises, `deviations.toml` says so."""
    name = node.op.name
    if (name.startswith("conv_transpose") or node.attrs.get("transposed")) and node.attrs["groups"] > 1:
        return "ConvTranspose with groups takes all channels for each group"
    pooled = node.inputs[0] if "max_pool" in name else None
    if isinstance(pooled, Value) and not pooled.type.dtype.is_floating_point:
        return "MaxPool of int64 does not exist in ONNX, and float64 does not hold all of its numbers"
    if name in ("max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"):
        return "MaxPool with a ceiling and strides of 1 mixes up the sides, and places in several dimensions"
    return None


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array of its own memory: an evaluator may write to what it is given."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor of its own memory, with as many sides: NumPy likes to make scalars of 0-d arrays."""
    return torch.from_numpy(np.array(array, order="C"))


TARGET = Reference()
