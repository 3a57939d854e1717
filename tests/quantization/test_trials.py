"""Trials: what a whole plan does to the outputs, and that it is this by which ranges and corrections are kept."""

import torch
from small_schemes import OPERATORS, scheme_with
from torch import nn

from clika_ref import QuantizationSettings, clika_compile
from clika_ref.core.execution import interpret
from clika_ref.quantization import stages
from clika_ref.quantization.calibration import Calibration
from clika_ref.quantization.layers import choices
from clika_ref.quantization.observers import OBSERVERS, Range
from clika_ref.quantization.quantizing import Plan, quantize_graph
from clika_ref.quantization.trials import Trial
from clika_ref.quantization_scheme import Integers

SCHEME = scheme_with(Integers(is_signed=True, is_symmetric=True, is_narrow=True))


def calibrated():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    data = [torch.randn(32, 16) for _ in range(3)]
    found = Calibration(clika_compile(net, tracing_inputs=data[:1]).graph.clone())
    for x in data:
        found.add([x])
    return found


def quantized(calibration):
    settings = QuantizationSettings()
    chosen = choices(calibration.graph, settings, {})
    return stages.Stages(calibration, SCHEME, chosen, settings, OPERATORS).decided()


def test_the_error_of_a_plan_is_that_of_the_graph_which_it_makes():
    calibration = calibrated()
    plan, x = quantized(calibration).plan, calibration.reservoir.batches[1]
    trial = Trial(calibration.graph, OPERATORS, x)
    twin = calibration.graph.clone()
    quantize_graph(twin, plan, OPERATORS)
    with torch.no_grad():
        missed = interpret(twin, x)[0][0] - interpret(calibration.graph, x)[0][0]
    assert trial.error(plan) == float(missed.double().square().sum()) > 0
    assert trial.error(Plan(SCHEME)) == 0


def test_the_observer_is_the_one_whose_plan_is_nearest(monkeypatch):
    for right in stages.TRIED:
        bad = {name: (lambda _: Range(0, 1e-3)) for name in stages.TRIED if name != right}
        with monkeypatch.context() as patch:
            patch.setattr(stages, "OBSERVERS", {**OBSERVERS, **bad})
            assert quantized(calibrated()).observer == right


def test_corrections_are_kept_only_where_another_batch_comes_nearer(monkeypatch):
    found = quantized(calibrated())
    assert found.plan.corrections
    worse = {name: shift + 1.0 for name, shift in found.plan.corrections.items()}
    monkeypatch.setattr(stages, "bias_corrections", lambda *_: worse)
    assert not quantized(calibrated()).plan.corrections
