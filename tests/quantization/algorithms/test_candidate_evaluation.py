"""Candidate evaluation: the output error of a whole plan, which selects ranges and bias corrections."""

from dataclasses import replace

import pytest
import torch
from small_schemes import OPERATORS, WithLargeOutput, make_scheme
from torch import nn

from clika_ref import ClikaCompileOptions, QuantizationSettings, clika_compile
from clika_ref.core.execution import interpret
from clika_ref.core.ir import Graph, Value
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.core.types import TensorType
from clika_ref.quantization import pipeline, plan_measurements
from clika_ref.quantization.algorithms.candidate_evaluation import CandidateEvaluation, select_evaluation_batches
from clika_ref.quantization.algorithms.sensitivity import estimate_sensitivities
from clika_ref.quantization.calibration import observer_search
from clika_ref.quantization.calibration.calibrator import Calibration, Reservoir
from clika_ref.quantization.calibration.observers import OBSERVERS, Range
from clika_ref.quantization.layer_settings import resolve_node_settings
from clika_ref.quantization.qdq import fused_pairs, insertion, planning
from clika_ref.quantization.qdq.insertion import Plan, quantize_graph
from clika_ref.quantization.qdq.qparams import compute_qparams

SCHEME = make_scheme(QuantizedType(is_signed=True, is_symmetric=True, is_narrow=True))


def calibrate(net=None, shape=(16,), *, size=32, batches=4):
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    data = [torch.randn(size, *shape) for _ in range(batches)]
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
    trial = CandidateEvaluation(calibration.graph, OPERATORS, [x])
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
    both = CandidateEvaluation(calibration.graph, OPERATORS, [x]).error(plan)
    parts = ([output] for output in calibration.graph.outputs)
    alone, other = (CandidateEvaluation(calibration.graph.clone(part), OPERATORS, [x]).error(plan) for part in parts)
    assert both >= alone / 2 > 0
    assert both == pytest.approx((alone + other) / 2)


def test_candidate_evaluation_batches_of_other_sizes_are_summed():
    """The error over several batches is the sum of their errors over the sum of their squared norms."""
    calibration = calibrate()
    plan, (x, *_) = quantize(calibration).plan, calibration.reservoir.batches[1]
    whole = CandidateEvaluation(calibration.graph, OPERATORS, [[x]]).error(plan)
    parts = CandidateEvaluation(calibration.graph, OPERATORS, [[x[:8]], [x[8:]]])
    assert parts.error(plan) == pytest.approx(whole, rel=1e-6)


def make_graph(*inputs, output):
    """A graph with inputs and an output of these shapes."""
    graph = Graph("mixed")
    for shape in inputs:
        graph.add_input(TensorType(torch.float32, shape), "x")
    graph.add_output(Value(TensorType(torch.float32, output), "y"))
    return graph


SAMPLES = make_graph(("batch", 3), output=("batch", 5))


def number_batches(count, shape, start=0):
    """Batches of one tensor, filled with the number of the batch."""
    return [[torch.full(shape, float(start + number))] for number in range(count)]


@pytest.mark.parametrize(("size", "count"), [(8, 1), (4, 1), (2, 2), (1, 4)])
def test_select_evaluation_batches_samples_of_many_batches(size, count):
    """At least four samples are selected, in batches of the given size, from the quietest to the loudest."""
    found = select_evaluation_batches(SAMPLES, number_batches(10, (size, 3))[::-1])
    assert [x.shape for (x,) in found] == [(size, 3)] * count
    numbers = torch.cat([x[:, 0] for (x,) in found])
    assert (numbers[0], numbers[-1]) == (0, 9)
    assert len(numbers.unique()) >= 4


def test_select_evaluation_batches_other_shapes_kept_whole():
    """Batches without common shapes, or without a common batch dim, are not mixed; two are selected."""
    rows = [[torch.full((4, length), 1.0 + length % 4)] for length in range(3, 8)]
    assert [x.shape for (x,) in select_evaluation_batches(SAMPLES, rows)] == [(4, 4), (4, 7)]
    with_constant = [[x, torch.zeros(7)] for (x,) in number_batches(6, (4, 3))]
    found = select_evaluation_batches(make_graph((4, 3), (7,), output=(4, 3)), with_constant)
    assert [x.unique().tolist() for x, _ in found] == [[0], [5]]


@pytest.mark.parametrize("output", [(4, 2), (3,)])
def test_select_evaluation_batches_mixed_along_batch_dim_only(output):
    """Samples are mixed only if the outputs have the same dim 0: others may be images without a batch dim."""
    found = select_evaluation_batches(make_graph((4, 3), output=output), number_batches(10, (4, 3)))
    assert [len(x.unique()) for (x,) in found] == ([4] if output == (4, 2) else [1, 1])


def test_select_evaluation_batches_integers_spaced_evenly():
    """Integers have no loudness: their samples are spaced evenly."""
    ((x,),) = select_evaluation_batches(SAMPLES, [[torch.full((4, 3), number)] for number in range(10)])
    assert x[:, 0].tolist() == [0, 3, 6, 9]


def test_select_evaluation_batches_single_batch_returned():
    """A single batch is returned as it is."""
    (only,) = number_batches(1, (4, 3))
    assert select_evaluation_batches(SAMPLES, [only]) == [only]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 20])
def test_reservoir_holds_out_every_other_batch(count):
    """Held-out batches are not fitted to, unless there is only one; more than one is held out if there are three."""
    reservoir = Reservoir(batches=number_batches(count, (4, 3)))
    assert reservoir.fitted_indices[0] == 0
    assert set(reservoir.fitted_indices).isdisjoint(reservoir.evaluation_indices) or count == 1
    assert len(reservoir.evaluation_indices) >= min(count - 1, 2)
    assert {*reservoir.fitted_indices, *reservoir.evaluation_indices} >= set(range(min(count, 9)))


def test_pipeline_evaluation_uses_several_batches():
    """The default evaluation has samples of more than one held-out batch."""
    calibration = calibrate()
    settings = QuantizationSettings()
    chosen = resolve_node_settings(calibration.graph, settings, {})
    made = pipeline.QuantizationPipeline(calibration, SCHEME, chosen, settings, OPERATORS)
    ((x,),) = made.evaluation.batches
    rows = {id(batch): {tuple(row) for row in batch[0].tolist()} for batch in calibration.reservoir.batches}
    first, second, third, fourth = (sum(tuple(row) in known for row in x.tolist()) for known in rows.values())
    assert (first, second + fourth, third) == (0, 32, 0)
    assert min(second, fourth) >= 8


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [
        ((1.0, 0.97, 0.96), "min-max"),
        ((1.0, 0.9, 0.88), "min-max, mse for 1 tensor"),
        ((1.0, 0.9, 0.8), "mse"),
        ((1.0, 0.97, 0.9), "mse"),
    ],
)
def test_observer_search_small_gain_keeps_wider_range(errors, chosen):
    """Narrower ranges must reduce the error of an activation by a fifth, and of the model by a twentieth."""
    calibration = calibrate()
    settings = QuantizationSettings()
    nodes = resolve_node_settings(calibration.graph, settings, {})
    made = pipeline.QuantizationPipeline(calibration, SCHEME, nodes, settings, OPERATORS)
    shares = dict.fromkeys(quantize(calibration).plan.activations, 1.0)
    first, second, *_ = shares

    def estimate(plan, rivals):
        found = estimate_sensitivities(calibration.graph, made.placement, plan, OPERATORS, [torch.randn(4, 16)])
        parts = {n: replace(p, values=dict.fromkeys(p.values, 1.0)) for n, p in found.parts.items()}
        return replace(found, parts=parts, rivals=[{**shares, first: 0.9, second: 0.7}])

    given = iter(errors)
    found = observer_search.search_observers(made.planner, made.placement, lambda _: next(given), estimate)
    assert found.observers == chosen


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
    assert found.observer == "min-max, mse for 1 tensor"
    covered = [(rival if v == values[1] else first)(calibration.table.values[v]) for v in values]
    assert [*found.plan.activations.values()] == [compute_qparams(c, SCHEME.activations) for c in covered]


def test_observer_search_every_selects_best_of_all(monkeypatch):
    """With `observer='every'`, each activation gets the best of all observers."""
    calibration = calibrate()
    values = [*quantize(calibration).plan.activations]
    own = dict(zip(values, ("mean-min-max", "percentile-99.99"), strict=True))
    of = {id(calibration.table.values[value]): observer for value, observer in own.items()}

    def make_single_observer(observer):
        return lambda s: (
            OBSERVERS["min-max"](s) if of.get(id(s), observer_search.DEFAULT_OBSERVER) == observer else Range(0, 1e-3)
        )

    monkeypatch.setattr(planning, "OBSERVERS", {name: make_single_observer(name) for name in OBSERVERS})
    found = quantize(calibration, ClikaCompileOptions(observer="every"))
    assert found.observer.startswith("min-max, ")
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
    assert found.observer == "min-max, mse for 1 tensor"
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
    found = quantize(calibrate(), ClikaCompileOptions(bias_correction="off"))
    assert found.observer == observer_search.ALTERNATIVE_OBSERVER


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
    monkeypatch.setattr(plan_measurements.BiasShifts, "corrections", lambda _: worse)
    assert not quantize(calibrate()).plan.corrections


def measure_first_plan(switch):
    """The error of min-max that the observer search compares, and the error without bias correction."""
    calibration, settings = calibrate(), QuantizationSettings()
    chosen, options = (
        resolve_node_settings(calibration.graph, settings, {}),
        ClikaCompileOptions(bias_correction=switch),
    )
    made = pipeline.QuantizationPipeline(calibration, SCHEME, chosen, settings, OPERATORS, options)
    plan = made.planner.plan(made.placement, "min-max")
    return made.observer_search.error, made.evaluation.error(plan)


def test_observer_search_compares_with_bias_correction(monkeypatch):
    """Observers are compared with bias correction, unless it is off or increases the error."""
    monkeypatch.setitem(observer_search.OBSERVER_CANDIDATES, "auto", ("min-max",))
    error, without = measure_first_plan("auto")
    assert error < without
    error, without = measure_first_plan("off")
    assert error == without
    shift = {"linear": torch.ones(32)}
    monkeypatch.setattr(plan_measurements.BiasShifts, "corrections", lambda _: shift)
    error, without = measure_first_plan("auto")
    assert error == without
    error, without = measure_first_plan("on")
    assert error > without


@pytest.mark.parametrize(("size", "fitted"), [(1, [4, 8]), (3, [2, 6]), (4, [1, 4])])
def test_bias_correction_evaluated_after_four_samples(monkeypatch, size, fitted):
    """Bias corrections are fitted to four samples or more before they are evaluated, and then to 16."""
    counts = []
    corrections = plan_measurements.BiasShifts.corrections

    def count_batches(shifts):
        counts.append({len(of_layer) for of_layer in shifts.of.values()})
        return corrections(shifts)

    monkeypatch.setattr(plan_measurements.BiasShifts, "corrections", count_batches)
    quantize(calibrate(size=size, batches=20), ClikaCompileOptions(bias_correction="on"))
    *before, last = counts
    assert before == [{fitted[0]}] * len(before) != []
    assert last == {fitted[1]}


def test_plans_with_equal_weight_scales_share_quantized_weights(monkeypatch):
    calibration = calibrate()
    plan = quantize(calibration).plan
    made = []
    quantize_one = fused_pairs.quantize_weight

    def count(*args):
        made.append(args[0].name)
        return quantize_one(*args)

    monkeypatch.setattr(insertion, "quantize_weight", count)
    monkeypatch.setattr(fused_pairs, "quantize_weight", count)
    trial = CandidateEvaluation(calibration.graph, OPERATORS, calibration.reservoir.batches[:2])
    first = trial.error(plan)
    layers = len(made)
    assert layers == len(plan.weights)
    assert trial.error(plan) == first
    assert len(made) == layers


def test_plan_with_other_weight_scales_quantizes_weights_again():
    calibration = calibrate()
    plan = quantize(calibration).plan
    coarse = replace(plan, weights={name: scales * 8 for name, scales in plan.weights.items()})
    batches = calibration.reservoir.batches[:2]
    trial = CandidateEvaluation(calibration.graph, OPERATORS, batches)
    assert trial.error(plan) < trial.error(coarse)
    assert trial.error(coarse) == CandidateEvaluation(calibration.graph, OPERATORS, batches).error(coarse)
