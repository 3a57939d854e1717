"""The OpenVINO CPU target: ONNX files, or OpenVINO's own ``.xml`` and ``.bin``, run by ``openvino``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from clika_ref.core.artifacts import Artifact, OpenedFile
from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph, Node
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.targets import Target
from clika_ref.onnx_export.artifact import onnx_unsupported_reason, write_artifact
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref_openvino.biases import separate_biases
from clika_ref_openvino.core import core
from clika_ref_openvino.explaining import read_precisions, seconds_of_nodes
from clika_ref_openvino.own_files import open_own_file
from clika_ref_openvino.runtime_properties import (
    DEVICE,
    GROUP_SIZE_KEY,
    session_options,
    store_group_size,
    store_group_size_in_onnx,
    write_config,
)
from clika_ref_openvino.scheme import find_measurement, make_symmetric, round_inputs, scheme_here
from clika_ref_openvino.stateful import OpenVinoStatefulRunner
from clika_ref_openvino.tensors import from_openvino, run_request, to_openvino

OWN_SUFFIX = ".xml"
"""Suffix of OpenVINO's own files; the weights are next to them in ``.bin``."""

PROFILED_CALLS = 12
"""Number of timed calls: enough for a median that ignores the first ones, which allocate."""

UNSUPPORTED_OPERATORS: Mapping[str, str] = {
    "deform_conv2d": "OpenVINO does not read deformable convolutions (DeformConv of ONNX)",
    "roi_pool": "OpenVINO rounds the corners of regions differently. Use roi_align",
}
"""Operators that OpenVINO 2026.4 does not run, or computes differently, and the reasons."""


@dataclass(frozen=True)
class OpenVino(Target):
    """OpenVINO on the CPU."""

    runtime = "openvino"
    suffixes = (".onnx", OWN_SUFFIX)
    name: str = "openvino"
    scheme: QuantizationScheme | None = field(default_factory=scheme_here)
    scheme_note: str = field(default_factory=lambda: find_measurement()[1])

    def configure(self, settings: BaseDeploymentSettings) -> OpenVino:
        """Return the target with the preset of the settings."""
        if self.scheme is None or getattr(settings, "preset", "mixed") != "performance":
            return self
        return replace(self, scheme=make_symmetric(self.scheme))

    def with_rounded_inputs(self, block_size: int) -> OpenVino:
        """Return the target with ``DYNAMIC_QUANTIZATION_GROUP_SIZE``: see `runtime_properties`."""
        return self if self.scheme is None else replace(self, scheme=round_inputs(self.scheme, block_size))

    @property
    def dynamic_group_size(self) -> int:
        """Number of neighbors in an input that share a scale when the runtime rounds it; 0 computes in float."""
        only = self.scheme.weights_only if self.scheme is not None else None
        return only.block_size if only is not None and only.rounds_inputs else 0

    def unavailable_reason(self) -> str | None:
        """Return why the runtime is unavailable, or None."""
        return None if find_spec("openvino") else "openvino is not installed; pip install openvino"

    def unsupported_reason(self, node: Node) -> str | None:
        """Return why a node cannot be written as ONNX, or read by OpenVINO, or None."""
        return UNSUPPORTED_OPERATORS.get(node.op.name) or onnx_unsupported_reason(node)

    def compile(self, graph: Graph, path: Path, **options: Any) -> Artifact:
        """Write a graph as an ONNX file, or in OpenVINO's own format if the path ends in ``.xml``.

        A target with rounded inputs stores its group size in the file, and writes a file with it next to it.

        Raises:
            TargetError: the suffix is ``.xml`` in upper case, or the runtime that writes it is missing or rejects the
                graph.
        """
        if path.suffix == OWN_SUFFIX:
            artifact = self._compile_own_format(graph, path)
        else:
            _check_suffix_case(path)
            external_data = options.get("external_data", False)
            artifact = write_artifact(graph, path, self.name, external_data=external_data, rewrite=self._rewrite)
        size = self.dynamic_group_size
        return replace(artifact, facts={**artifact.facts, **write_config(path, size)}) if size else artifact

    def _rewrite(self, model: ir.Model) -> None:
        separate_biases(model)
        if self.dynamic_group_size:
            store_group_size_in_onnx(model, self.dynamic_group_size)

    def _compile_own_format(self, graph: Graph, path: Path) -> Artifact:
        ov = self._runtime()
        with tempfile.TemporaryDirectory() as folder:
            onnx = write_artifact(graph, Path(folder) / "model.onnx", self.name, rewrite=separate_biases)
            try:
                model = core().read_model(str(onnx.path))
                if self.dynamic_group_size:
                    store_group_size(model, self.dynamic_group_size)
                ov.save_model(model, str(path), compress_to_fp16=False)
            except RuntimeError as error:
                raise TargetError(f"OpenVINO {ov.__version__} cannot convert {graph.name}: {error}") from error
        size = path.stat().st_size + path.with_suffix(".bin").stat().st_size
        return replace(onnx, path=path, facts={**onnx.facts, "bytes": size})

    def load(self, artifact: Artifact) -> OpenVinoRunner:
        """Load a file in the runtime, with the group size that is stored in it.

        Raises:
            TargetError: the runtime is missing or rejects the file.
        """
        return OpenVinoRunner(artifact, self._runtime())

    def load_with_state(self, artifact: Artifact, state: Mapping[str, str]) -> OpenVinoStatefulRunner:
        """Load a file in the runtime, which keeps its state in variables.

        Raises:
            TargetError: the runtime is missing or rejects the file.
        """
        return OpenVinoStatefulRunner(artifact, state, self._runtime())

    def explain(self, artifact: Artifact) -> Mapping[str, str]:
        """Return the precision of each node, read from the graph that the runtime executes: see `explaining`.

        Raises:
            TargetError: the runtime is missing or rejects the file.
        """
        compiled, read = OpenVinoRunner(artifact, self._runtime()).model, core().read_model(str(artifact.path))
        group_size = int(compiled.get_property(GROUP_SIZE_KEY))
        return read_precisions(compiled.get_runtime_model(), read, artifact.output_names, group_size=group_size)

    def open_file(self, path: Path, folder: Path) -> OpenedFile:
        """Open a file in OpenVINO's own format from any source: see `opening`.

        Raises:
            TargetError: the runtime is missing or cannot read the file.
        """
        return open_own_file(path, folder, self._runtime())

    def profile(self, artifact: Artifact, inputs: Sequence[torch.Tensor]) -> Mapping[str, float]:
        """Return the seconds of each node in a call, from the runtime's performance counters: see `explaining`.

        Raises:
            TargetError: the runtime is missing, rejects the file, or fails.
        """
        ov = self._runtime()
        runner, counts = OpenVinoRunner(artifact, ov, counts=True), list[Mapping[str, float]]()
        for _ in range(PROFILED_CALLS):
            runner(inputs)
            counts.append({info.node_name: info.real_time.total_seconds() for info in runner.request.profiling_info})
        read, executed = core().read_model(str(artifact.path)), runner.model.get_runtime_model()
        return seconds_of_nodes(executed, read, artifact.output_names, counts)

    def _runtime(self) -> Any:
        problem = self.unavailable_reason()
        if problem is not None:
            raise TargetError(problem)
        import openvino  # noqa: PLC0415 - heavy, and the plugin must load without it

        return openvino


def _check_suffix_case(path: Path) -> None:
    if path.suffix.lower() == OWN_SUFFIX:
        raise TargetError(
            f"cannot write {path.name}: OpenVINO's own files end in {OWN_SUFFIX!r}, not {path.suffix!r}. Use "
            "lower case."
        )


class OpenVinoRunner:
    """A compiled OpenVINO model on tensors."""

    def __init__(self, artifact: Artifact, ov: Any, *, counts: bool = False) -> None:
        """Load an artifact; ``counts`` enables the runtime's performance counters."""
        try:
            model = core().read_model(str(artifact.path))
            options = {**session_options(model), "PERF_COUNT": counts}
            self.model: Any = core().compile_model(model, DEVICE, options)
        except RuntimeError as error:
            raise TargetError(f"OpenVINO {ov.__version__} cannot load {artifact.path}: {error}") from error
        self.artifact, self.request, self._ov = artifact, self.model.create_infer_request(), ov
        self._has_one_thread = options["INFERENCE_NUM_THREADS"] == 1

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model on one tensor per input, in order.

        Raises:
            TargetError: the runtime fails.
        """
        feed = {n: to_openvino(t, self._ov) for n, t in zip(self.artifact.input_names, inputs, strict=True)}
        try:
            results = run_request(self.request, feed, has_one_thread=self._has_one_thread)
        except RuntimeError as error:
            raise TargetError(f"OpenVINO failed on {self.artifact.path.name}: {error}") from error
        return [from_openvino(self.model.output(name), results[name], self._ov) for name in self.artifact.output_names]
