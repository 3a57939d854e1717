"""Reports of a `ClikaModule`: dummy inputs, the explanation of its runtime, and the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from clika_ref_visualize.report.page import REPORT_SUFFIX, render_report
from clika_ref_visualize.report.report_builder import ReportSubject, build_contents
from clika_ref_visualize.report.reproduction import collect_settings

from clika_ref.capture.inputs import pack_arguments
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.core.errors import ModelError
from clika_ref.core.guards import check_inputs
from clika_ref.core.registry import load_registry
from clika_ref.export.configuration import current_configuration
from clika_ref.export.example_inputs import choose_example, dummy_inputs
from clika_ref.export.explanation import Explanation, explain
from clika_ref.export.export import target_for
from clika_ref.export.quantized_check import MIN_MARGIN_SAMPLES
from clika_ref.module.pictured_module import PicturedModule
from clika_ref.module.weights import device_of_weights, weight_dtype_error
from clika_ref.reporting.console import format_size
from clika_ref.reporting.log import CompilationLog
from clika_ref.serialization.atomic_files import require_suffix, write_atomically
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import (
    BaseDeploymentSettings,
    DeploymentSettings_ONNXRuntime_ONNX,
    deployment_settings_named,
)


class ReportedModule(PicturedModule):
    """A module around a graph that can report on itself."""

    def clika_generate_dummy_inputs(self) -> dict[str, Any]:
        """Return dummy inputs of the traced shapes by argument, nested as in a call: ``module(**inputs)``.

        They are on the device of the weights.

        Raises:
            ModelError: the module is empty.
        """
        return dummy_inputs(self._require_graph(), self._clika_signature, device_of_weights(self))

    def clika_explain(self, deployment_settings: BaseDeploymentSettings | None = None) -> Explanation:
        """Export the module and return the precision of each node in the runtime.

        The result prints as a table: the planned precision, the actual precision, and the reasons for the differences.
        `export_configuration` selects FP16, BF16 or INT4 here as well.

        Args:
            deployment_settings: the target; by default that of the module.

        Raises:
            ModelError: ``deployment_settings`` have the wrong type, or the requested form is not available.
            TargetError: the target rejects a node, or its runtime is not installed.
        """
        check_types(locals())  # only the arguments at this point
        self._require_exportable()
        registry = self._clika_registry or load_registry()
        deployment = deployment_settings or self._clika_deployment or DeploymentSettings_ONNXRuntime_ONNX()
        plan = self._plan_for(deployment)
        with outside_autocast():
            target, example = target_for(deployment, registry), self._examples(None)[0]
            return explain(self.graph, plan, target, registry, example, form=current_configuration())

    def clika_report(self, path: str | PathLike[str], deployments: Sequence[BaseDeploymentSettings] = ()) -> Path:
        """Write a report on the module as one self-contained HTML file, and return its path.

        For the model: the modules with their totals, the effect of other thresholds, targets side by side, warnings,
        and the settings and versions to reproduce the run. For each layer: its sensitivity, the decision with its
        reason, the precision in the runtime, the observed values, the quantized range, and the time per node if the
        runtime reports it. Missing facts, as for a float or loaded module, are explained. `export_configuration`
        selects FP16, BF16 or INT4 here as well.

        Args:
            path: the ``.html`` file; an existing one is replaced once the new one is complete.
            deployments: further targets to compare with. The quantization is decided again for each from the
                calibration ranges, which takes longest.

        Raises:
            ModelError: the path has another suffix or cannot be written, the module returns no tensor, or
                ``deployments`` have the wrong type, or need ranges that the module does not hold.
            TargetError: no plugin provides a target.
        """
        place, others = require_suffix(path, "a report", [REPORT_SUFFIX]), _check_deployments(deployments)
        self._require_exportable()
        with write_atomically(place) as file:  # first, so that an invalid path fails early
            rows = self.clika_compare_targets(*others).rows if others else ()
            with CompilationLog.open(self._clika_logs_dir) as log, log.stage("Reporting") as stage, outside_autocast():
                contents = build_contents(self._subject(log), rows, stage.update)
                page = render_report(contents)
                file.write(page)
                stage.done(f"{place.name}, {len(contents.nodes):,} nodes, {format_size(len(page))}")
        return place

    def _subject(self, log: CompilationLog) -> ReportSubject:
        """Return the inputs of a report, with a warning if the weights have changed since their scales were found."""
        own, wanted, registry = self._clika_quantized, self._clika_wanted, self._clika_registry or load_registry()
        deployment = self._clika_deployment or (
            deployment_settings_named(own.target) if own else DeploymentSettings_ONNXRuntime_ONNX()
        )
        plan = self._plan_for(deployment)
        self._warn_of_trained_weights(plan, log)
        given, layers = (wanted.given, wanted.layers) if wanted and own else (None, {})
        return ReportSubject(
            self.graph,
            target_for(deployment, registry),
            registry,
            current_configuration(),
            self._examples(None)[0],
            collect_settings(deployment, self._clika_options, given, layers),
            plan,
            own.found if own and own.target == deployment.target else None,
            self._clika_calibration.table if self._clika_calibration else None,
            (*self._clika_warnings, *log.warnings),
            dict(self._clika_timings),
        )

    # Shared by export and report

    def _require_exportable(self) -> None:
        graph = self.graph
        if not graph.outputs:
            msg = f"{graph.name} returns no tensor, so there is nothing to export"
            raise ModelError(msg)
        moved = [
            (v, v.data.dtype) for v in graph.constants.values() if v.data is not None and v.data.dtype != v.type.dtype
        ]
        if moved:
            value, dtype = moved[0]
            raise weight_dtype_error(value.name, dtype, value.type.dtype)

    def _examples(self, given: Any) -> list[list[torch.Tensor]]:
        if given is None and self._clika_calibration is not None:
            return self._clika_calibration.reservoir.samples(MIN_MARGIN_SAMPLES)
        if given is None and self._clika_examples:
            return self._clika_examples
        if given is None:
            dummy = self._as_inputs((), self.clika_generate_dummy_inputs())
            return [list(choose_example(self.graph, dummy))]
        call = pack_arguments(self._clika_signature.parameters, given)
        return [self._as_inputs(call.args, call.kwargs)]

    def _as_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        inputs = self._clika_signature.graph_inputs(self._clika_signature.flatten(args, kwargs))
        check_inputs(self._clika_graph, inputs)
        return inputs


def _check_deployments(deployments: Any) -> Sequence[BaseDeploymentSettings]:
    """Return deployment settings after checking their type.

    Raises:
        ModelError: they are no list of deployment settings.
    """
    if not isinstance(deployments, Sequence) or not all(isinstance(d, BaseDeploymentSettings) for d in deployments):
        msg = (
            f"deployments is {deployments!r}; give a list of deployment settings, such as "
            "[DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX()]"
        )
        raise ModelError(msg)
    return deployments
