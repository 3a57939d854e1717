"""The ONNX Runtime CPU target: ONNX files, run by ``onnxruntime``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from clika_ref.core.arithmetic import Arithmetic
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.targets import Target
from clika_ref.core.traits import SHARED_QPARAMS, UNIFIED_QPARAMS
from clika_ref.onnx_export.artifact import onnx_unsupported_reason, write_artifact
from clika_ref.targets.island_table import without_operators
from clika_ref_onnxruntime.arithmetic import arithmetic_here
from clika_ref_onnxruntime.explaining import (
    ALL_OPTIMIZATIONS,
    NO_OPTIMIZATIONS,
    ExplainedArtifact,
    OnnxGraph,
    read_precisions,
)
from clika_ref_onnxruntime.fusion_barriers import prevent_fusion
from clika_ref_onnxruntime.kernels import find_missing_kernel
from clika_ref_onnxruntime.profiling import PROFILED_CALLS, seconds_of_nodes
from clika_ref_onnxruntime.scheme import find_measurement, full_scheme, scheme_here
from clika_ref_onnxruntime.slow_kernels import replace_slow_kernels
from clika_ref_onnxruntime.stateful import OnnxRuntimeStatefulRunner
from clika_ref_onnxruntime.tensors import from_onnxruntime, to_onnxruntime

PROVIDERS = ["CPUExecutionProvider"]

COPYING_TRAITS = (SHARED_QPARAMS, UNIFIED_QPARAMS)
"""Traits of operators that copy elements of any dtype."""

NO_BFLOAT16_MESSAGE = (
    "it computes in bfloat16, which ONNX Runtime does not support on CPUs. Compile the model in float32, without "
    "export_bf16"
)


@dataclass(frozen=True)
class OnnxRuntime(Target):
    """ONNX Runtime on the CPU."""

    runtime = "onnxruntime"
    suffixes = (".onnx",)
    name: str = "onnxruntime"
    scheme: QuantizationScheme | None = field(default_factory=scheme_here)
    arithmetic: Sequence[Arithmetic] = field(default_factory=arithmetic_here)
    scheme_note: str = field(default_factory=lambda: find_measurement()[1])
    float_islands: frozenset[str] = field(default_factory=lambda: find_measurement()[0].slower)
    """Operators that run in float between INT8 layers, since that is faster."""
    optimization_level: str = ALL_OPTIMIZATIONS
    """The graph optimizations of a session: a name of ``onnxruntime.GraphOptimizationLevel``."""

    @property
    def _optimizes(self) -> bool:
        return self.optimization_level != NO_OPTIMIZATIONS

    def unavailable_reason(self) -> str | None:
        """Return why the runtime is unavailable, or None."""
        return None if find_spec("onnxruntime") else "onnxruntime is not installed; pip install onnxruntime"

    def unsupported_reason(self, node: Node) -> str | None:
        """Return why a node is unsupported: it has no ONNX form, or no kernel. All operators have float32 kernels."""
        if (reason := onnx_unsupported_reason(node)) is not None:
            return reason
        dtypes = {v.type.dtype for v in (*node.inputs, *node.outputs) if isinstance(v, Value)}
        if torch.bfloat16 in dtypes and node.op.trait not in COPYING_TRAITS and node.op.name not in ("to", "detach"):
            return NO_BFLOAT16_MESSAGE
        if self._optimizes and (reason := _scale_axis_problem(node)):
            return reason
        return find_missing_kernel(node) if dtypes - {torch.float32} else None

    def compile(self, graph: Graph, path: Path, **options: Any) -> Artifact:
        """Write a graph as an ONNX file."""
        rewrite = self._rewrite if self._optimizes else None
        external_data = options.get("external_data", False)
        written = write_artifact(graph, path, self.name, external_data=external_data, rewrite=rewrite)
        return ExplainedArtifact.of(written)

    def _rewrite(self, model: ir.Model) -> None:
        replace_slow_kernels(model)
        prevent_fusion(model, self.float_islands)

    def load(self, artifact: Artifact) -> OnnxRuntimeRunner:
        """Load an ONNX file in the runtime.

        Raises:
            TargetError: the runtime is missing or rejects the file.
        """
        self._require_runtime()
        return OnnxRuntimeRunner(artifact, optimization_level=self.optimization_level)

    def load_with_state(self, artifact: Artifact, state: Mapping[str, str]) -> OnnxRuntimeStatefulRunner:
        """Load an ONNX file in the runtime, which keeps its state.

        Raises:
            TargetError: the runtime is missing or rejects the file.
        """
        return OnnxRuntimeStatefulRunner(self.load(artifact).session, artifact, state)

    def explain(self, artifact: Artifact) -> Mapping[str, str]:
        """Return the precision of each node, read from the graph that the runtime optimizes: see `explaining`.

        Raises:
            TargetError: the runtime is missing or rejects the file.
        """
        self._require_runtime()
        return read_precisions(ExplainedArtifact.of(artifact), self.optimization_level)

    def profile(self, artifact: Artifact, inputs: Sequence[torch.Tensor]) -> Mapping[str, float]:
        """Return the seconds of each node in a call, from the runtime's profile of `PROFILED_CALLS` calls.

        Raises:
            TargetError: the runtime is missing, rejects the file, or fails.
        """
        self._require_runtime()
        with tempfile.TemporaryDirectory() as folder:
            optimized = Path(folder) / "optimized.onnx"
            runner = OnnxRuntimeRunner(artifact, optimization_level=self.optimization_level, profiled=optimized)
            for _ in range(PROFILED_CALLS):
                runner(inputs)
            written = OnnxGraph(artifact.path)
            fused = ExplainedArtifact.of(artifact).fused if self._optimizes else written
            return seconds_of_nodes(written, fused, optimized, Path(runner.session.end_profiling()))

    def _require_runtime(self) -> None:
        problem = self.unavailable_reason()
        if problem is not None:
            raise TargetError(problem)


def keep_islands_in_float(target: OnnxRuntime, in_float: frozenset[str]) -> OnnxRuntime:
    """Return a target that runs operators between INT8 layers in float, and all others in INT8 if it can."""
    return replace(target, scheme=without_operators(full_scheme(), in_float), float_islands=in_float)


UNOPTIMIZED = OnnxRuntime("onnxruntime-unoptimized", optimization_level=NO_OPTIMIZATIONS)
BASIC = OnnxRuntime("onnxruntime-basic", optimization_level="ORT_ENABLE_BASIC")
EXTENDED = OnnxRuntime("onnxruntime-extended", optimization_level="ORT_ENABLE_EXTENDED")
"""ONNX Runtime with fewer graph optimizations or none, to separate their effects from those of the file.

They are no installed targets: ``clika-ref conformance run --target clika_ref_onnxruntime.target:UNOPTIMIZED``.
"""


def _scale_axis_problem(node: Node) -> str | None:
    """Reject quantized weights with scales along an input dim: the runtime's fusion reads them along the output dim.

    ONNX Runtime 1.31 does so silently in MatMul and Gemm of two dequantized operands. It fails if the weight is a stack
    of matrices with more than one scale.
    """
    position, axis = node.op.trait.weight, node.op.trait.axis
    if position is None or axis is None or position >= len(node.inputs) or not _find_dequantize(node.inputs[0]):
        return None
    made, rank = _find_dequantize(node.inputs[position]), node.inputs[position].type.rank
    if made is None or made.attrs["axis"] is None:
        return None
    if axis < 0 and rank > 2 and made.inputs[1].type.shape != (1,):
        return (
            f"its weight has {rank} dims and per-channel scales, but ONNX Runtime takes one scale for a stack of "
            "matrices. Quantize the weight per tensor, as modules compiled for onnxruntime do"
        )
    if made.attrs["axis"] % rank == axis % rank:
        return None
    return (
        f"the scales of its weight are on axis {made.attrs['axis']}, but ONNX Runtime needs them on the output "
        f"channels, axis {axis % rank}. Quantize the weight on that axis, or per tensor"
    )


def _find_dequantize(value: object) -> Node | None:
    made = value.producer if isinstance(value, Value) else None
    return made if made is not None and made.op.name == "dequantize" else None


class OnnxRuntimeRunner:
    """An ONNX Runtime session on tensors."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        optimization_level: str = ALL_OPTIMIZATIONS,
        profiled: Path | None = None,
    ) -> None:
        """Load an artifact.

        Args:
            artifact: the artifact.
            optimization_level: the graph optimizations of the runtime.
            profiled: where to write the executed graph; the profile is written next to it.
        """
        import onnxruntime as ort  # noqa: PLC0415 - heavy, and the plugin must load without it

        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # errors are raised, and warnings are about the file
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, optimization_level)
        if profiled is not None:
            options.optimized_model_filepath = str(profiled)
            options.enable_profiling, options.profile_file_prefix = True, str(profiled.with_suffix(""))
        try:
            self.session = ort.InferenceSession(str(artifact.path), options, providers=PROVIDERS)
        except Exception as error:
            raise TargetError(f"ONNX Runtime {ort.__version__} cannot load {artifact.path}: {error}") from error
        self.artifact = artifact

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model on one tensor per input, in order.

        Raises:
            TargetError: the runtime fails.
        """
        feed = {n: to_onnxruntime(t) for n, t in zip(self.artifact.input_names, inputs, strict=True)}
        try:
            results = self.session.run_with_ort_values(list(self.artifact.output_names), feed)
        except Exception as error:
            raise TargetError(f"ONNX Runtime failed on {self.artifact.path.name}: {error}") from error
        return [from_onnxruntime(r) for r in results]
