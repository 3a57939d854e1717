"""Reports of a `ClikaModule`: dummy inputs, the explanation of its runtime, and the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compiled.lowering import target_for
from clika_ref.compiled.state import bind_graph
from clika_ref.compress.quantize import plan_for, warn_of_changed_weights
from clika_ref.core.errors import ModelError
from clika_ref.export.configuration import current_configuration
from clika_ref.export.explanation import Explanation, explain
from clika_ref.export.module_export import bind_exportable_graph, list_examples
from clika_ref.export.target_comparison import compare_targets
from clika_ref.module.pictured_module import PicturedModule
from clika_ref.report.page import REPORT_SUFFIX, render_report
from clika_ref.report.report_builder import ReportSubject, build_contents
from clika_ref.report.reproduction import collect_settings
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
        graph = bind_exportable_graph(self)
        registry = self.clika_state.registry
        deployment = deployment_settings or self.clika_state.deployment or DeploymentSettings_ONNXRuntime_ONNX()
        plan = plan_for(self, deployment)
        with outside_autocast():
            target, example = target_for(deployment, registry), list_examples(self, bind_graph(self), None)[0]
            return explain(graph, plan, target, registry, example, form=current_configuration())

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
        bind_exportable_graph(self)
        with write_atomically(place) as file:  # first, so that an invalid path fails early
            rows = compare_targets(self, others).rows if others else ()
            with (
                CompilationLog.open(self.clika_state.logs_dir) as log,
                log.stage("Reporting") as stage,
                outside_autocast(),
            ):
                contents = build_contents(self._subject(log), rows, stage.update)
                page = render_report(contents)
                file.write(page)
                stage.done(f"{place.name}, {len(contents.nodes):,} nodes, {format_size(len(page))}")
        return place

    def _subject(self, log: CompilationLog) -> ReportSubject:
        """Return the inputs of a report, with a warning if the weights have changed since their scales were found."""
        own, wanted, registry = self.clika_state.quantized, self.clika_state.request, self.clika_state.registry
        deployment = self.clika_state.deployment or (
            deployment_settings_named(own.target) if own else DeploymentSettings_ONNXRuntime_ONNX()
        )
        plan = plan_for(self, deployment)
        warn_of_changed_weights(self, bind_graph(self), plan, log)
        given, layers = (wanted.given, wanted.layers) if wanted and own else (None, {})
        return ReportSubject(
            bind_graph(self),
            target_for(deployment, registry),
            registry,
            current_configuration(),
            list_examples(self, bind_graph(self), None)[0],
            collect_settings(deployment, self.clika_state.options, given, layers),
            plan,
            own.found if own and own.target == deployment.target else None,
            self.clika_state.calibration.table if self.clika_state.calibration else None,
            (*self.clika_state.warnings, *log.warnings),
            dict(self.clika_state.timings),
        )


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
