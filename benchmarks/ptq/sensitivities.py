"""Compare estimated sensitivities and predicted SQNR with measurements, for one subject.

The measurement quantizes one layer at a time, and compares the outputs on test data with float.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ptq.prepared_subjects import PreparedSubject, load_subject
from benchmarks.ptq.quantizers import compile_quantized

# isort: split
import torch

from clika_ref import (
    ClikaCompileOptions,
    ClikaModule,
    QuantizationSettings,
)
from clika_ref.compiled.state import bind_graph
from clika_ref.compress.calibration_pass import prepare_calibration
from clika_ref.compress.quantize import require_ranges
from clika_ref.core.ir import Graph, Node
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.registry import Registry, load_registry
from clika_ref.quantization.algorithms.candidate_evaluation import CandidateEvaluation
from clika_ref.quantization.algorithms.sqnr import sum_squares
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.observer_search import DEFAULT_OBSERVER
from clika_ref.quantization.decision import Quantization, ratio_in_decibels
from clika_ref.quantization.layer_settings import resolve_node_settings
from clika_ref.quantization.pipeline import QuantizationPipeline
from clika_ref.quantization.qdq.insertion import Plan

LAYER_SAMPLES = 16
"""Test samples for the measured error of each layer."""

PLAN_SAMPLES = 256
"""Test samples for the measured SQNR of each plan."""

SINGLE_LAYER_OPTIONS = ClikaCompileOptions(observer=DEFAULT_OBSERVER, gptq="off", bias_correction="on")
"""Round to nearest with bias correction, as the estimates assume."""


def main(folder: str) -> dict[str, Any]:
    """Return the rank correlation of sensitivities, and predicted and measured SQNR."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    prepared = load_subject(Path(folder))
    settings = QuantizationSettings(automatic_skip_quantization=False)
    module = compile_quantized(prepared.model, prepared.calibration, "onnxruntime", settings)
    study = SensitivityStudy(module, prepared)
    return {"spearman": study.measure_rank_correlation(), "predictions": study.measure_predictions()}


class SensitivityStudy:
    """A calibrated model, which can be quantized repeatedly without new data."""

    def __init__(self, module: ClikaModule, prepared: PreparedSubject) -> None:
        self.registry: Registry = load_registry()
        target = self.registry.targets["onnxruntime"]
        assert target.scheme is not None
        self.scheme: QuantizationScheme = target.scheme
        request, stored = require_ranges(module.clika_state, target)  # the state of a module keeps no weights
        self.calibration: Calibration = prepare_calibration(bind_graph(module), request, self.registry, stored)
        names = [value.name for value in self.graph.inputs]
        self.test = [[batch[name] for name in names] for batch in prepared.test]

    @property
    def graph(self) -> Graph:
        """The lowered graph."""
        return self.calibration.graph

    def decide(self, options: ClikaCompileOptions, float_layers: Mapping[Node, str] | None = None) -> Quantization:
        """Quantize all layers except those in ``float_layers``, which maps nodes to reasons."""
        settings = QuantizationSettings(automatic_skip_quantization=False)
        chosen = resolve_node_settings(self.graph, settings, {})
        operators = self.registry.operators
        return QuantizationPipeline(
            self.calibration, self.scheme, chosen, settings, operators, options, dict(float_layers or {})
        ).decide()

    def measure_rank_correlation(self) -> float:
        """Return Spearman's coefficient of estimated and measured errors of single layers, with the same ranges."""
        found = self.decide(ClikaCompileOptions())
        estimates = {layer.name: layer.sensitivity for layer in found.layers if layer.sensitivity is not None}
        layers = {node.name: node for node in self.graph.nodes if node.name in estimates}
        measured: list[float] = []
        for name in estimates:
            others = {node: "only one layer is quantized" for other, node in layers.items() if other != name}
            plan = self.decide(SINGLE_LAYER_OPTIONS, others).plan
            ranges = {value: found.plan.activations.get(value, scale) for value, scale in plan.activations.items()}
            measured.append(self._measure_error(replace(plan, activations=ranges)))
        return compute_spearman(list(estimates.values()), measured)

    def measure_predictions(self) -> list[tuple[int, float, float]]:
        """Return up to four rows: number of quantized layers, predicted SQNR and measured SQNR in dB."""
        rows = self.decide(ClikaCompileOptions()).what_if
        found: list[tuple[int, float, float]] = []
        for row in dict.fromkeys(rows[len(rows) * part // 4 - 1] for part in (1, 2, 3, 4)):
            settings = QuantizationSettings()
            chosen = resolve_node_settings(self.graph, settings, {})
            pipeline = QuantizationPipeline(self.calibration, self.scheme, chosen, settings, self.registry.operators)
            found.append((row.layers, row.sqnr, self._measure_sqnr(pipeline.decide(row.threshold))))
        return found

    def _make_evaluations(self, samples: int) -> list[CandidateEvaluation]:
        count, evaluations = 0, list[CandidateEvaluation]()
        for inputs in self.test:
            if count < samples:
                evaluations.append(CandidateEvaluation(self.graph, self.registry.operators, [inputs]))
                count += len(inputs[0])
        return evaluations

    def _measure_error(self, plan: Plan) -> float:
        """Return the squared error of the outputs as a share of their squared norm."""
        evaluations = self._make_evaluations(LAYER_SAMPLES)
        return sum(evaluation.error(plan) for evaluation in evaluations) / len(evaluations)

    def _measure_sqnr(self, found: Quantization) -> float:
        evaluations = self._make_evaluations(PLAN_SAMPLES)
        outputs = torch.cat([evaluation.outputs[0][0] for evaluation in evaluations]).double()
        signal = float((outputs - outputs.mean(0)).square().sum())
        noise = sum(evaluation.error(found.plan) * sum_squares(evaluation.outputs[0][0]) for evaluation in evaluations)
        return ratio_in_decibels(signal, noise)


def compute_spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation of two lists."""
    ranks = torch.stack([torch.tensor(x).argsort().argsort().double() for x in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])
