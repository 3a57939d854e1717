"""Compare sensitivities and predictions for one subject with runs.

Each layer is quantized alone, and the outputs on other data are held against float: what `sensitivities` estimates.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.subjects import Prepared, read

# isort: split
import torch

from clika_ref import (
    ClikaCompileOptions,
    ClikaModule,
    QuantizationSettings,
)
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

EXACT_SAMPLES = 16
"""Of the test data, on which each layer alone is run."""

JUDGED_SAMPLES = 256
"""Of the test data, on which predictions of whole plans are judged."""

SINGLE_LAYER_OPTIONS = ClikaCompileOptions(observer=DEFAULT_OBSERVER, gptq="off", bias_correction="on")
"""How a layer alone is quantized: rounded to the nearest with its bias corrected, which is what is estimated."""


def main(folder: str) -> dict[str, Any]:
    """Return the rank correlation, and predicted and measured SQNR."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    prepared = read(Path(folder))
    settings = QuantizationSettings(automatic_skip_quantization=False)
    module = compile_quantized(prepared.model, prepared.calibration, "onnxruntime", settings)
    study = SensitivityStudy(module, prepared)
    return {"spearman": study.rank_correlation(), "predictions": study.predictions()}


class SensitivityStudy:
    """One calibrated model, quantized again and again without new data."""

    def __init__(self, module: ClikaModule, prepared: Prepared) -> None:
        self.registry: Registry = load_registry()
        scheme = self.registry.targets["onnxruntime"].scheme
        assert scheme is not None
        self.scheme: QuantizationScheme = scheme
        calibration = module.clika_state.calibration
        assert calibration is not None
        self.calibration: Calibration = calibration
        names = [value.name for value in self.graph.inputs]
        self.test = [[batch[name] for name in names] for batch in prepared.test]

    @property
    def graph(self) -> Graph:
        """The graph as it is going to be written."""
        return self.calibration.graph

    def decide(self, options: ClikaCompileOptions, slow: Mapping[Node, str] | None = None) -> Quantization:
        """Quantize all that is not to stay float."""
        settings = QuantizationSettings(automatic_skip_quantization=False)
        chosen = resolve_node_settings(self.graph, settings, {})
        operators = self.registry.operators
        return QuantizationPipeline(
            self.calibration, self.scheme, chosen, settings, operators, options, dict(slow or {})
        ).decide()

    def rank_correlation(self) -> float:
        """Return Spearman's coefficient of estimates and of exact runs of one layer alone, with the same ranges."""
        found = self.decide(ClikaCompileOptions())
        estimates = {layer.name: layer.sensitivity for layer in found.layers if layer.sensitivity is not None}
        layers = {node.name: node for node in self.graph.nodes if node.name in estimates}
        exact: list[float] = []
        for name in estimates:
            others = {node: "another one is looked at" for other, node in layers.items() if other != name}
            plan = self.decide(SINGLE_LAYER_OPTIONS, others).plan
            ranges = {value: found.plan.activations.get(value, scale) for value, scale in plan.activations.items()}
            exact.append(self._share(replace(plan, activations=ranges), EXACT_SAMPLES))
        return spearman(list(estimates.values()), exact)

    def predictions(self) -> list[tuple[int, float, float]]:
        """Return of some thresholds how many layers they quantize, and the predicted and the measured SQNR, in dB."""
        rows = self.decide(ClikaCompileOptions()).what_if
        found: list[tuple[int, float, float]] = []
        for row in dict.fromkeys(rows[len(rows) * part // 4 - 1] for part in (1, 2, 3, 4)):
            settings = QuantizationSettings()
            chosen = resolve_node_settings(self.graph, settings, {})
            stages = QuantizationPipeline(self.calibration, self.scheme, chosen, settings, self.registry.operators)
            measured = self._sqnr(stages.decide(row.threshold))
            found.append((row.layers, row.sqnr, measured))
        return found

    def _trials(self, samples: int) -> list[CandidateEvaluation]:
        count, evaluations = 0, list[CandidateEvaluation]()
        for inputs in self.test:
            if count < samples:
                evaluations.append(CandidateEvaluation(self.graph, self.registry.operators, inputs))
                count += len(inputs[0])
        return evaluations

    def _share(self, plan: Plan, samples: int) -> float:
        evaluations = self._trials(samples)
        return sum(evaluation.error(plan) for evaluation in evaluations) / len(evaluations)

    def _sqnr(self, found: Quantization) -> float:
        evaluations = self._trials(JUDGED_SAMPLES)
        outputs = torch.cat([evaluation.outputs[0] for evaluation in evaluations]).double()
        varying = float((outputs - outputs.mean(0)).square().sum())
        noise = sum(evaluation.error(found.plan) * sum_squares(evaluation.outputs[0]) for evaluation in evaluations)
        return ratio_in_decibels(varying, noise)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the ranks of two lists."""
    ranks = torch.stack([torch.tensor(x).argsort().argsort().double() for x in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])
