"""Candidate evaluation: the output error of a whole plan, which selects ranges and bias corrections."""

from dataclasses import replace

import pytest
import torch
from small_schemes import OPERATORS, WithLargeOutput, make_scheme
from torch import nn

from clika_ref import ClikaCompileOptions, QuantizationSettings, clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization import pipeline
from clika_ref.quantization.algorithms.candidate_evaluation import CandidateEvaluation
from clika_ref.quantization.algorithms.sensitivity import estimate_sensitivities
from clika_ref.quantization.calibration import observer_search
from clika_ref.quantization.calibration.calibrator import Calibration
from clika_ref.quantization.calibration.observers import OBSERVERS, Range
from clika_ref.quantization.layer_settings import resolve_node_settings
from clika_ref.quantization.qdq import planning
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph
from clika_ref.quantization.qdq.qparams import compute_qparams

SCHEME = make_scheme(QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True))


def calibrate(net=None, shape=(16,)):
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    data = [torch.randn(32, *shape) for _ in range(3)]
    found = Calibration(clika_compile(net.eval(), tracing_inputs=data[:1]).graph.clone())
    for x in data:
        found.add([x])
    return found


def quantize(calibration, options=None):
    settings = QuantizationSettings()
    chosen = resolve_node_settings(calibration.graph, settings, {})
    return pipeline.QuantizationPipeline(
        calibration, SCHEME, chosen, settings, OPERATORS, options or ClikaCompileOptions()
    ).decide()


def test_candidate_evaluation_error_matches_quantized_graph():
    """The error of a plan equals that of the quantized graph."""
    calibration = calibrate()
    plan, x = quantize(calibration).plan, calibration.reservoir.batches[1]
    trial = CandidateEvaluation(calibration.graph, OPERATORS, x)
    twin = calibration.graph.clone()
    quantize_graph(twin, plan, OPERATORS)
    with torch.no_grad():
        wanted = interpret(calibration.graph, x)[0][0]
        missed = interpret(twin, x)[0][0] - wanted
    share = float(missed.double().square().sum()) / float(wanted.double().square().sum())
    assert trial.error(plan) == pytest.approx(share, rel=1e-12)
    assert share > 0
    assert trial.error(Plan(SCHEME)) == 0


def test_candidate_evaluation_large_output_keeps_small_visible():
    """Each output counts by its relative error, so that a large output does not hide a small one."""
    calibration = calibrate(WithLargeOutput(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))))
    plan, x = quantize(calibration).plan, calibration.reservoir.batches[1]
    both = CandidateEvaluation(calibration.graph, OPERATORS, x).error(plan)
    parts = ([output] for output in calibration.graph.outputs)
    alone, other = (CandidateEvaluation(calibration.graph.clone(part), OPERATORS, x).error(plan) for part in parts)
    assert both >= alone / 2 > 0
    assert both == pytest.approx((alone + other) / 2)


def test_observer_search_selects_better_observer_per_activation(monkeypatch):
    """Each activation gets the observer with the smaller output error."""
    calibration = calibrate()
    first, rival = (
        planning.OBSERVERS[name] for name in (observer_search.DEFAULT_OBSERVER, observer_search.ALTERNATIVE_OBSERVER)
    )
    values = [*quantize(calibration).plan.activations]
    one = calibration.table.values[values[1]]  # of which the first covers next to nothing, and of others the rival
    bad = Range(0, 1e-3)
    spoilt = {
        observer_search.DEFAULT_OBSERVER: lambda s: bad if s is one else first(s),
        observer_search.ALTERNATIVE_OBSERVER: lambda s: rival(s) if s is one else bad,
    }
    monkeypatch.setattr(planning, "OBSERVERS", {**OBSERVERS, **spoilt})
    found = quantize(calibration)
    assert found.observer == "mean-min-max, mse for 1 tensor"
    covered = [(rival if v == values[1] else first)(calibration.table.values[v]) for v in values]
    assert [*found.plan.activations.values()] == [compute_qparams(c, SCHEME.activations) for c in covered]


def test_observer_search_every_selects_best_of_all(monkeypatch):
    """With `observer='every'`, each activation gets the best of all observers."""
    calibration = calibrate()
    values = [*quantize(calibration).plan.activations]
    own = dict(zip(values, ("min-max", "percentile-99.99"), strict=True))
    of = {id(calibration.table.values[value]): observer for value, observer in own.items()}

    def make_single_observer(observer):
        return lambda s: (
            OBSERVERS["min-max"](s) if of.get(id(s), observer_search.DEFAULT_OBSERVER) == observer else Range(0, 1e-3)
        )

    monkeypatch.setattr(planning, "OBSERVERS", {name: make_single_observer(name) for name in OBSERVERS})
    found = quantize(calibration, ClikaCompileOptions(observer="every"))
    assert found.observer.startswith("mean-min-max, ")
    assert {part.removesuffix(" for 1 tensor") for part in found.observer.split(", ")[1:]} == {*own.values()}
    covered = [OBSERVERS["min-max"](calibration.table.values[value]) for value in values]
    assert [*found.plan.activations.values()] == [compute_qparams(c, SCHEME.activations) for c in covered]


class Permuted(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(8, 8)

    def forward(self, x):
        return self.two(torch.sin(self.one(x)).transpose(1, 2))


def test_observer_search_permuted_tensor_uses_source_observer(monkeypatch):
    """The result of a data movement uses the observer of its source."""
    calibration = calibrate(Permuted(), (8, 6))
    sin, moved = (next(n for n in calibration.graph.nodes if n.op_type == kind).name for kind in ("sin", "permute"))
    one = calibration.table.values[sin]
    first, rival = (
        planning.OBSERVERS[name] for name in (observer_search.DEFAULT_OBSERVER, observer_search.ALTERNATIVE_OBSERVER)
    )
    spoilt = {
        observer_search.DEFAULT_OBSERVER: lambda s: Range(0, 1e-3) if s is one else first(s),
        observer_search.ALTERNATIVE_OBSERVER: lambda s: rival(s) if s is one else Range(0, 1e-3),
    }
    monkeypatch.setattr(planning, "OBSERVERS", {**OBSERVERS, **spoilt})
    found = quantize(calibration)
    assert found.observer == "mean-min-max, mse for 1 tensor"
    assert moved in found.plan.activations
    assert found.plan.activations[moved] == compute_qparams(rival(one), SCHEME.activations)


def test_observer_search_alternative_for_all_if_better(monkeypatch):
    """The alternative observer is used for all activations if that has the smaller error."""
    bad = {observer_search.DEFAULT_OBSERVER: lambda _: Range(0, 1e-3)}
    monkeypatch.setattr(planning, "OBSERVERS", {**OBSERVERS, **bad})

    def estimate_wrongly(*args, **kwargs):
        found = estimate_sensitivities(*args, **kwargs)
        name = min(found.shares, key=found.shares.get)
        return replace(found, rivals=[{**dict.fromkeys(found.shares, 1e9), name: 0.0}])  # as if it gained one alone

    monkeypatch.setattr(pipeline, "estimate_sensitivities", estimate_wrongly)
    assert quantize(calibrate()).observer == observer_search.ALTERNATIVE_OBSERVER


def test_observer_search_default_kept_without_gain(monkeypatch):
    """The default observer is kept if others are not better on other data."""
    weighed = []

    def estimate_wrongly(*args, **kwargs):
        weighed.append(estimate_sensitivities(*args, **kwargs))
        return replace(weighed[-1], rivals=[dict.fromkeys(weighed[-1].shares, 0.0)])

    bad = {observer_search.ALTERNATIVE_OBSERVER: lambda _: Range(0, 1e-3)}
    monkeypatch.setattr(planning, "OBSERVERS", {**OBSERVERS, **bad})
    monkeypatch.setattr(pipeline, "estimate_sensitivities", estimate_wrongly)
    found = quantize(calibrate())
    assert found.observer == observer_search.DEFAULT_OBSERVER
    assert [layer.sensitivity for layer in found.layers] == [*weighed[0].of.values()]


def test_bias_correction_kept_only_if_other_batch_improves(monkeypatch):
    """Bias corrections are kept only if the error on another batch falls."""
    found = quantize(calibrate())
    assert found.plan.corrections
    worse = {name: shift + 1.0 for name, shift in found.plan.corrections.items()}
    monkeypatch.setattr(pipeline.BiasShifts, "corrections", lambda _: worse)
    assert not quantize(calibrate()).plan.corrections
