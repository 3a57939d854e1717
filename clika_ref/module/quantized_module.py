"""Quantization of a `ClikaModule`: with data, to an accuracy goal, and for other targets from its ranges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import ForwardFn
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.compress.quantize import begin_calibration, calibrate_graph, decide_quantization, iter_graph_inputs
from clika_ref.compress.target_comparison import TargetComparison, TargetFacts, make_unsupported_row, measure_target
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Target
from clika_ref.distributed.decisions import broadcast_score, check_same_model, check_same_settings, decide_on_rank0
from clika_ref.distributed.ranks import SINGLE_PROCESS, Ranks, open_ranks
from clika_ref.export.configuration import current_configuration
from clika_ref.export.export import target_for
from clika_ref.export.simulation import QuantizationState, is_plan_valid
from clika_ref.module.checkpointed_module import CheckpointedModule
from clika_ref.quantization.algorithms.accuracy_search import AccuracySearch
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.fingerprint import fingerprint
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.pipeline import QuantizationPipeline
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.report import NO_DECISIONS_MESSAGE
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.quantization.weight_checks import reject_nonfinite_weights
from clika_ref.reporting.log import CompilationLog
from clika_ref.settings.argument_checks import check_callable, check_types
from clika_ref.settings.compile_options import BaseDeploymentSettings, DeploymentSettings_ONNXRuntime_ONNX
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

CALIBRATION_INTERRUPTED = (
    "calibration was interrupted after {:,} batches; give the same calibration_inputs once more, and it goes on behind "
    "them, or others, and it begins anew"
)

SAVED_WITHOUT_INPUTS = (
    "the module was saved with the ranges of {:,} batches, but without inputs; give the same calibration_inputs once "
    "more, which are not run again, or others, and calibration begins anew; clika_save(..., "
    "keep_calibration_inputs=True) saves them as well"
)

NO_CALIBRATION_DATA = (
    "there is nothing to calibrate with: the module is a copy, or was loaded, and has neither ranges nor the inputs "
    "that it was traced with; give it calibration_inputs"
)

RANGES_OF_TRACING_INPUTS = (
    "The ranges are those of the {:,} inputs that the module was traced with, whose values need not be like those of "
    "the data; give calibration_inputs"
)


@dataclass(frozen=True)
class _QuantizeArguments:
    """Arguments of `ClikaModule.clika_initialize_algorithms`, under their names."""

    calibration_inputs: Iterable[Any] | None = None
    deployment_settings: BaseDeploymentSettings | None = None
    layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None
    data_transform_fn: Callable[[Any], Any] | None = None
    forward_fn: ForwardFn | None = None
    distributed_training_settings: DistributedTrainingSettings | None = None

    def data(self, unread: LazyDataset | None) -> LazyDataset | None:
        """Return the data to read: the given data, or else the data that compilation has not read."""
        if self.calibration_inputs is not None:
            return LazyDataset(self.calibration_inputs, self.data_transform_fn, self.forward_fn)
        if unread is None:
            return None
        return LazyDataset(
            unread.inputs, self.data_transform_fn or unread.transform, self.forward_fn or unread.forward_fn
        )


@dataclass(frozen=True)
class _CalibratedRun:
    """A finished calibration, with the target, the request, the log and the ranks for the decision."""

    stages: QuantizationPipeline
    deployment: BaseDeploymentSettings
    wanted: QuantizationRequest
    log: CompilationLog
    ranks: Ranks

    def quantized(self, found: Quantization) -> QuantizationState:
        """Return the quantization state of a module for a decision."""
        return QuantizationState(self.deployment.target, found.plan, self.stages.calibration.model, found)


class QuantizedModule(CheckpointedModule):
    """A module around a graph that keeps its calibration ranges and quantizes for one target or another."""

    def clika_initialize_algorithms(
        self,
        quantization_settings: QuantizationSettings | None = None,
        *,
        calibration_inputs: Iterable[Any] | None = None,
        deployment_settings: BaseDeploymentSettings | None = None,
        layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None,
        data_transform_fn: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> Quantization:
        """Calibrate and quantize a compiled module, or quantize it again with other settings; return the decisions.

        Data need not be given twice: a new threshold, new layer settings or weights changed by training reuse the
        existing calibration ranges. Without ranges, the module reads the calibration inputs that `clika_compile` was
        given together with ``tracing_inputs``; failing that, it uses the tracing inputs, with a warning. After an
        interrupt, a call with the same data resumes; a call with another first batch starts again, with a warning.
        Until a call succeeds, the module computes as before.

        Args:
            quantization_settings: as for `clika_compile`; by default ``QuantizationSettings()``.
            calibration_inputs: the data, as for `clika_compile`; see above.
            deployment_settings: the target; by default that of the module.
            layer_quantization_settings: overrides for single layers, as for `clika_compile`.
            data_transform_fn: applied to each element, as for `clika_compile`.
            forward_fn: how to call the model on an element, as for `clika_compile`.
            distributed_training_settings: whether processes work together; by default as the module was compiled.

        Raises:
            ModelError: there is no data, or it does not fit; or the settings cannot be satisfied.
            TargetError: the target computes in float, or no plugin provides it.
        """
        data = (data_transform_fn, forward_fn, distributed_training_settings)
        how = _QuantizeArguments(calibration_inputs, deployment_settings, layer_quantization_settings, *data)
        with self._calibrate(quantization_settings, how) as ready:
            registry = self._clika_registry or load_registry()
            found = decide_quantization(ready.stages, self.graph, ready.wanted, registry, ready.log, ranks=ready.ranks)
        self._clika_deployment = ready.deployment
        self._set_quantization(ready.quantized(found), ready.stages.calibration, ready.wanted)
        return found

    def clika_quantize_to_goal(
        self,
        eval_fn: Callable[[Self], float],
        max_drop: float,
        quantization_settings: QuantizationSettings | None = None,
        *,
        calibration_inputs: Iterable[Any] | None = None,
        deployment_settings: BaseDeploymentSettings | None = None,
        layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None,
        data_transform_fn: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
        distributed_training_settings: DistributedTrainingSettings | None = None,
    ) -> AccuracySearch:
        """Quantize as much as possible while ``eval_fn`` drops by at most ``max_drop``; return the candidates.

        The search bisects sensitivity thresholds: a model of a hundred layers is evaluated eight or nine times, the
        float model first. The module keeps the best candidate, even if ``eval_fn`` raises or is interrupted. If not
        even one layer may be quantized, it stays float, and the ``reason`` of the result says why.

        Args:
            eval_fn: takes this module, in eval mode and without gradients, and returns a score; higher is better.
            max_drop: maximum drop of the score, in its own units; at least 0.
            quantization_settings: as for `clika_compile`. The search replaces its threshold, which decides together
                with ``sparing`` which layers stay float: ``automatic_skip_quantization=False`` and
                ``skip_tail_quantization=False`` have no effect, with a warning. Nor has ``optimize_for="latency"`` with
                weight-only quantization; otherwise layers are timed before the search, and the whole model is not.
            calibration_inputs: this and the following, as for `clika_initialize_algorithms`.
            deployment_settings: the target.
            layer_quantization_settings: overrides for single layers.
            data_transform_fn: applied to each element.
            forward_fn: how to call the model on an element.
            distributed_training_settings: if processes work together, all of them call this, and the score of rank 0
                counts; by default as the module was compiled.

        Raises:
            ModelError: as `clika_initialize_algorithms`; or a score is no finite number, or ``max_drop`` is negative or
                no number.
            TargetError: as `clika_initialize_algorithms`.
        """
        with open_ranks(distributed_training_settings or self._clika_distributed):
            check_callable("eval_fn", eval_fn, ("module",))
            search = AccuracySearch(max_drop)
        data = (data_transform_fn, forward_fn, distributed_training_settings)
        how = _QuantizeArguments(calibration_inputs, deployment_settings, layer_quantization_settings, *data)
        with self._calibrate(quantization_settings, how) as ready:
            self._search(search, eval_fn, ready)
        return search

    def _search(self, search: AccuracySearch, eval_fn: Callable[[Self], float], ready: _CalibratedRun) -> None:
        """Run a search on this module, which ends with the best candidate, or with its previous state."""
        before, former, training = self._learned_quantization, self._clika_wanted, self.training
        stages, wanted = ready.stages, ready.wanted
        if wanted.ineffective_in_search:
            ready.log.warning(f"{', '.join(wanted.ineffective_in_search)} changes nothing in a search by a goal")

        def adopt(found: Quantization | None) -> None:
            quantized = found and ready.quantized(found)
            self._set_quantization(quantized, stages.calibration, replace(wanted, given=search.settings(wanted.given)))

        def score(found: Quantization | None) -> float:
            adopt(found)
            self.eval()  # again, since the last evaluation may have set train mode
            with torch.no_grad():
                own = eval_fn(self)
            return broadcast_score(own, ready.ranks)

        def decide_at(threshold: float) -> Quantization:
            return decide_on_rank0(partial(stages.decided, threshold), stages.scheme, ready.ranks)

        try:
            with ready.log.stage("Searching") as stage:
                search.run(decide_at, score)
                stage.done(search.in_one_line())
        finally:
            if search.best is not None or search.is_done:
                adopt(search.best and search.best.found)
                self._clika_deployment = ready.deployment
            else:
                self._set_quantization(before, stages.calibration, former)
            self.train(training)
        ready.log.table("Goal", search.table)

    def clika_summary(self) -> Quantization:
        """Return the decision for each layer with its reason, and the effect of other thresholds; prints as two tables.

        Raises:
            ModelError: nothing was decided, or only the scales are known, as in a loaded module.
        """
        found = self._clika_quantized and self._clika_quantized.found
        if found is None:
            raise ModelError(NO_DECISIONS_MESSAGE)
        return found

    @property
    def clika_quantization(self) -> Quantization | None:
        """The decision for each layer, and the effect of other thresholds; None where `clika_summary` raises."""
        return self._clika_quantized and self._clika_quantized.found

    @contextlib.contextmanager
    def _calibrate(self, settings: QuantizationSettings | None, how: _QuantizeArguments) -> Iterator[_CalibratedRun]:
        """Calibrate with the user's arguments; existing ranges stay until the new ones are complete."""
        together = open_ranks(how.distributed_training_settings or self._clika_distributed)
        with together as ranks, self._open_log(ranks) as log, outside_autocast():
            check_types({"quantization_settings": settings, **vars(how)})
            registry, known = self._clika_registry or load_registry(), self._clika_calibration
            data = how.data(None if known else self._clika_unread)
            deployment = how.deployment_settings or self._clika_deployment or DeploymentSettings_ONNXRuntime_ONNX()
            layers = how.layer_quantization_settings or {}
            target = target_for(deployment, registry)
            wanted = QuantizationRequest(target, settings or QuantizationSettings(), layers, self._clika_options)
            given = {"deployment_settings": deployment, "clika_compile_options": self._clika_options}
            given |= {"quantization_settings": wanted.given, "layer_quantization_settings": {**layers}}
            given["whether there are calibration_inputs"] = data is not None
            check_same_settings(given, ranks)
            if ranks.is_distributed:
                check_same_model(fingerprint(self.graph), ranks)
            before = self._clika_unfinished if data else known
            if ranks.is_distributed and data:
                before = None  # an interrupt stops each rank at another batch
            calibration = begin_calibration(self.graph, wanted, registry, before, log, has_data=data is not None)
            if data is not None:
                batches, total, file = (
                    self._read_data(data, calibration, log),
                    data.count,
                    self._clika_options.ranges_file,
                )
            else:
                batches = known.reservoir.batches if known else self._tracing_inputs(log)
                total, file = len(batches), ""
            reading = SINGLE_PROCESS if data is None and known else ranks  # existing ranges are those of all ranks
            how_read = {"total": total, "ranges_file": file, "are_given": data is not None, "ranks": reading}
            stages = calibrate_graph(calibration, batches, wanted, registry, log, model=self.graph, **how_read)
            if data is None and known is not None:
                calibration.sizes = known.sizes  # includes batches that were not kept
            self._clika_calibration = calibration
            yield _CalibratedRun(stages, deployment, wanted, log, ranks)
            self._keep_log(log)

    def _open_log(self, ranks: Ranks) -> CompilationLog:
        """Open a log; of several processes, only rank 0 writes to the console."""
        return CompilationLog.open(self._clika_logs_dir, console=ranks.is_first)

    def _read_data(
        self, data: LazyDataset, calibration: Calibration, log: CompilationLog
    ) -> Iterator[list[torch.Tensor]]:
        """Read data for a calibration, which counts as unfinished until all data is read."""
        self._clika_unfinished, self._clika_unread = calibration, None
        yield from iter_graph_inputs(self.graph, self._clika_signature, data.start().calls(make_callable(self)), log)
        self._clika_unfinished = None
        if calibration.reservoir.batches:
            self._clika_calibration = calibration

    def _tracing_inputs(self, log: CompilationLog) -> list[list[torch.Tensor]]:
        """Return the tracing inputs, in place of data.

        Raises:
            ModelError: there are none; or a calibration was interrupted.
        """
        unfinished = self._clika_unfinished
        if unfinished is not None and unfinished.table.batches:
            text = CALIBRATION_INTERRUPTED if unfinished.reservoir.batches else SAVED_WITHOUT_INPUTS
            raise ModelError(text.format(unfinished.table.batches))
        if not self._clika_examples:
            raise ModelError(NO_CALIBRATION_DATA)
        if not self._clika_examples_are_data:
            log.warning(RANGES_OF_TRACING_INPUTS.format(len(self._clika_examples)))
        return self._clika_examples

    def _plan_for(self, deployment: BaseDeploymentSettings) -> Plan | None:
        """Return the quantization plan for a target: the module's own, or one decided from the calibration ranges.

        Raises:
            ModelError: the module holds no ranges, as after loading, or nothing was decided from them; or weights are
                NaN.
            TargetError: the target computes in float, or no plugin provides it.
        """
        own, known, registry = (
            self._learned_quantization,
            self._clika_deployment,
            self._clika_registry or load_registry(),
        )
        if own is None:
            return None
        reject_nonfinite_weights(self.graph)  # as `.eval()` does: an all-NaN module would match its artifact
        target = target_for(deployment, registry)
        if own.target == target.name:
            former = target_for(known, registry) if known is not None and known.target == own.target else None
            if is_plan_valid(own.plan, target, former):
                return own.plan
        return self._decide_for(target).plan

    def _warn_of_trained_weights(self, plan: Plan | None, log: CompilationLog) -> None:
        """Warn if a plan has the scales of weights that have changed since, by training in float or loading."""
        own, is_trained = self._clika_quantized, self._clika_training is not None
        if not is_trained and own is not None and own.plan is plan and own.model not in ("", fingerprint(self.graph)):
            reads = "without data" if self._clika_calibration is not None else "given calibration_inputs"
            log.warning(
                "The weights have changed since their scales were found, and what lies beyond these is cut off; "
                f"clika_initialize_algorithms() finds them anew, {reads}"
            )

    def _ranges_for(self, target: Target) -> tuple[QuantizationRequest, Calibration]:
        """Return the user's quantization request, and the calibration ranges for another target.

        Raises:
            ModelError: there are none, or nothing was decided from them yet.
        """
        wanted, before = self._clika_wanted, self._clika_calibration
        if wanted is None and before is not None:
            msg = (
                f"nothing was decided yet by the ranges that are there, so that nobody knows what is wanted of "
                f"{target.name}; call clika_initialize_algorithms(), which reads no data"
            )
            raise ModelError(msg)
        if wanted is None or before is None:
            msg = (
                f"there are no ranges by which to quantize the module for {target.name}: none were found yet, or it is "
                "a copy or was loaded, and they or their inputs were not kept; give it data, with "
                "clika_initialize_algorithms(calibration_inputs=..., deployment_settings=...)"
            )
            raise ModelError(msg)
        return wanted, before

    def _decide_for(self, target: Target) -> Quantization:
        """Decide the quantization for a target from the calibration ranges."""
        wanted, before = self._ranges_for(target)
        registry, options = self._clika_registry or load_registry(), wanted.options
        if target.emulated_by:  # times on an emulated target decide nothing
            options = replace(options, optimize_for="size")
        other = replace(wanted, target=target, options=options)
        with CompilationLog.open(self._clika_logs_dir) as log, outside_autocast():
            calibration = begin_calibration(self.graph, other, registry, before, log, has_data=False)
            batches = before.reservoir.batches
            stages = calibrate_graph(calibration, batches, other, registry, log, model=self.graph, are_given=False)
            return decide_quantization(stages, self.graph, other, registry, log)

    def clika_compare_targets(self, *deployments: BaseDeploymentSettings) -> TargetComparison:
        """Quantize for each target from the calibration ranges and compare the results; prints as a table.

        Files are written as by `clika_export`, in the form of `export_configuration`. If a target lacks a requested
        feature, such as a weight width, or rejects a node, its row says so.

        Raises:
            ModelError: the module holds no ranges, or nothing was decided from them yet; or no target is given, or an
                argument has the wrong type; or the form names an output that does not exist.
            TargetError: no plugin provides a target.
        """
        for deployment in deployments:
            check_types({"deployment_settings": deployment})
        if not deployments or None in deployments:
            msg = (
                "clika_compare_targets takes deployment settings, one for each target, such as "
                "clika_compare_targets(DeploymentSettings_OpenVINO_ONNX(), DeploymentSettings_TensorRT_ONNX())"
            )
            raise ModelError(msg)
        registry, form = self._clika_registry or load_registry(), current_configuration()
        targets = [target_for(deployment, registry) for deployment in deployments]
        form.kept(self.graph.outputs)  # an error for all targets, not for one row
        _, calibration = self._ranges_for(targets[0])
        rows: list[TargetFacts] = []
        for target in targets:
            try:
                found = self._decide_for(target)
                inputs = calibration.reservoir.batches[0]
                rows.append(measure_target(self.graph, found, target, registry, inputs, form=form))
            except (ModelError, TargetError) as error:
                rows.append(make_unsupported_row(target, error))
        return TargetComparison(rows)
