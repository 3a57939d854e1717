"""TensorRT as a target: ONNX files that follow its rules, each with a script next to it that builds an engine.

TensorRT itself needs an NVIDIA GPU. Here, ONNX Runtime runs the files without graph optimizations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
from clika_ref_onnxruntime.explaining import NO_OPTIMIZATIONS
from clika_ref_onnxruntime.target import OnnxRuntime, OnnxRuntimeRunner

from clika_ref.core.artifacts import Artifact, Runner, Violation
from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph, Node, walk
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.targets import Target
from clika_ref.onnx_export.artifact import onnx_unsupported_reason, write_artifact
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref.targets.file_suffixes import companion_path
from clika_ref_tensorrt.bfloat16 import computes_in_bfloat16, emulate_bfloat16
from clika_ref_tensorrt.explaining import predict_precisions
from clika_ref_tensorrt.profiles import build_script, choose_profile, trtexec_command
from clika_ref_tensorrt.rules import find_node_fault, find_violations
from clika_ref_tensorrt.scheme import EXPLICIT_SCHEME


@dataclass(frozen=True)
class TensorRt(Target):
    """TensorRT or TensorRT-LLM with explicit quantization."""

    suffixes = (".onnx",)
    name: str = "tensorrt"
    scheme: QuantizationScheme | None = EXPLICIT_SCHEME
    shapes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])
    """Minimum, optimum and maximum size of dynamic dims, by name; they override the sizes seen in tracing."""
    emulated_by: str = "ONNX Runtime"

    def configure(self, settings: BaseDeploymentSettings) -> TensorRt:
        """Return the target with the shapes of the settings."""
        return replace(self, shapes=getattr(settings, "shapes", {}))

    def unavailable_reason(self) -> str | None:
        """Return why the runtime that emulates TensorRT is unavailable, or None. Files can be written without it."""
        problem = OnnxRuntime().unavailable_reason()
        return None if problem is None else f"{self.name} is emulated by {self.emulated_by} here, and {problem}"

    def unsupported_reason(self, node: Node) -> str | None:
        """Return why a node is unsupported, or None: it lacks an ONNX form, or TensorRT lacks its operator or dtype."""
        inner = (n for body in node.bodies for n in walk(body))
        if any(n.op_type in ("quantize", "dequantize") for n in inner):
            return "TensorRT runs no quantized layers inside control flow. Keep its layers in float"
        return onnx_unsupported_reason(node) or find_node_fault(node)

    def compile(self, graph: Graph, path: Path, **options: Any) -> Artifact:
        """Write a graph as an ONNX file, with a script next to it that builds an engine.

        Exports pass ``observed``, the sizes of traced and calibrated calls. Without it, as in tests of single nodes,
        `shapes` has no effect, since the graph need not have dims of these names.

        Raises:
            TargetError: the sizes of `shapes`, or the observed ones, do not fit the graph.
        """
        observed = options.get("observed")
        profile = choose_profile(graph, observed or {}, self.shapes if observed is not None else {})
        command = trtexec_command(graph, path, profile)
        artifact = write_artifact(graph, path, self.name, external_data=options.get("external_data", False))
        script = companion_path(path, ".trtexec.sh")
        script.write_text(build_script(command, profile), encoding="utf-8")
        script.chmod(script.stat().st_mode | 0o111)
        warnings = {"warnings": (profile.left_out,)} if profile.left_out else {}
        return replace(artifact, facts={**artifact.facts, "trtexec": command, **warnings})

    def load(self, artifact: Artifact) -> Runner:
        """Load an ONNX file in ONNX Runtime, which emulates TensorRT.

        Raises:
            TargetError: ONNX Runtime is not installed, or rejects the file.
        """
        problem = self.unavailable_reason()
        if problem is not None:
            raise TargetError(problem)
        model = _load_model(artifact.path, external=False)
        if not computes_in_bfloat16(model):
            return OnnxRuntimeRunner(artifact, optimization_level=NO_OPTIMIZATIONS)
        with TemporaryDirectory() as folder:
            path = Path(folder) / artifact.path.name
            onnx.save(
                emulate_bfloat16(_load_model(artifact.path, external=True)), str(path), save_as_external_data=False
            )
            return OnnxRuntimeRunner(replace(artifact, path=path), optimization_level=NO_OPTIMIZATIONS)

    def explain(self, artifact: Artifact) -> Mapping[str, str]:
        """Return the predicted precision of each node, from TensorRT's rules."""
        return predict_precisions(artifact.path, has_weight_only=self._has_weight_only)

    def check(self, path: Path) -> Sequence[Violation]:
        """Return the rules that an ONNX file from any exporter violates.

        Raises:
            TargetError: the file is no ONNX file, or external data with scales, zero points or sizes cannot be read.
        """
        model = _load_model(path, external=False)
        return find_violations(model, folder=path.parent, has_weight_only=self._has_weight_only)

    @property
    def _has_weight_only(self) -> bool:
        """Whether 8-bit weights may be multiplied with floats."""
        weights_only = self.scheme.weights_only if self.scheme is not None else None
        return weights_only is not None and 8 in weights_only.bits


def _load_model(path: Path, *, external: bool) -> onnx.ModelProto:
    """Load a file with or without external data."""
    try:
        return onnx.load(str(path), load_external_data=external)
    except Exception as error:
        why = str(error).rstrip(".")
        raise TargetError(f"cannot read {path} as an ONNX file: {why}. Export or copy it again.") from error
