"""The accuracy search: evaluated candidates, the chosen one, and the reason why no more layers are quantized."""

import math

import pytest
import torch
from small_schemes import make_scheme
from torch import nn

from clika_ref import ClikaCompileOptions, ModelError, QuantizationSettings, clika_compile
from clika_ref.core.quantization_scheme import QuantizedType
from clika_ref.quantization.algorithms.accuracy_search import MAX_THRESHOLD, AccuracySearch
from clika_ref.quantization.decision import LayerReport, Quantization, ThresholdPrediction
from clika_ref.quantization.qdq.insertion import Plan

LAYERS = 20
SCHEME = make_scheme(QuantizedType())


def make_decision(threshold):
    """Quantize those of twenty layers, the fifth of sensitivity 0.5, that are not above a threshold."""
    layers = [
        LayerReport(
            f"n{i}", f"block.{i}", "linear", i / 10, "" if i / 10 <= threshold else "too sensitive", (8, 8), 4, 1
        )
        for i in range(LAYERS)
    ]
    rows = [ThresholdPrediction(i / 10, i + 1, 0, 0.0) for i in range(LAYERS)]
    return Quantization(Plan(SCHEME), layers, rows, "", sum(layer.bytes_after for layer in layers))


def count(found):
    return 0 if found is None else sum(not layer.reason for layer in found.layers)


@pytest.mark.parametrize("allowed", [1, 2, 7, 13, 19])
def test_accuracy_search_finds_most_layers_in_few_evaluations(allowed):
    """The largest number of layers within the drop is found with a logarithmic number of evaluations."""
    search = AccuracySearch(max_drop=float(allowed)).run(make_decision, lambda found: -float(count(found)))
    assert count(search.best.found) == search.best.layers == allowed
    assert len(search.candidates) <= 1 + math.ceil(math.log2(LAYERS)) + 1
    assert search.reason.startswith(
        f"with {allowed + 1} quantized layers, of which block.{allowed} is the most sensitive"
    )
    assert search.is_done


def test_accuracy_search_all_layers_within_drop_one_evaluation():
    """If all layers can be quantized, one candidate is evaluated."""
    search = AccuracySearch(max_drop=1.0).run(make_decision, lambda found: -count(found) / 100)
    assert (search.best.layers, len(search.candidates), search.reason) == (LAYERS, 1, "")
    assert math.isinf(search.best.threshold)
    assert search.summarize() == "20 quantized layers, the score drops by 0.2, after 2 evaluations"


def test_accuracy_search_no_layer_within_drop_reports_gap():
    """If no layer can be quantized, the reason states the drop of the score."""
    search = AccuracySearch(max_drop=0.0).run(make_decision, lambda found: -float(count(found)))
    assert search.best is None
    assert search.reason == (
        "with 1 quantized layer, of which block.0 is the most sensitive, the score drops by 1, more than max_drop=0. "
        "Allow more, or train the model further"
    )


def test_accuracy_search_non_monotonic_scores_pick_fewest_bytes():
    """With non-monotonic scores, the candidate within the drop that has the fewest bytes is kept."""
    bad = {20, 10, 5}
    search = AccuracySearch(max_drop=0.5).run(make_decision, lambda found: -float(count(found) in bad))
    assert search.best.layers == max(t.layers for t in search.candidates if t.is_within)
    assert [t.is_within for t in search.candidates] == [t.layers not in bad for t in search.candidates]


@pytest.mark.parametrize("drop", [-0.1, math.nan, math.inf, "1", True])
def test_accuracy_search_invalid_max_drop_raises(drop):
    """A drop that is no finite number from 0 raises an error."""
    with pytest.raises(ModelError, match=r"max_drop is .*. It must be a number of at least 0"):
        AccuracySearch(drop)


@pytest.mark.parametrize("score", [math.nan, None, "good", math.inf])
def test_accuracy_search_invalid_score_raises(score):
    """A score that is no finite number raises an error."""
    with pytest.raises(ModelError, match="eval_fn returned"):
        AccuracySearch(0.1).run(make_decision, lambda _: score)


def compile_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    data = [torch.randn(32, 16) for _ in range(3)]
    return net, data, clika_compile(net, tracing_inputs=data[:1])


def test_clika_quantize_to_goal_keeps_and_exports_best(tmp_path):
    """The module keeps the best candidate, computes with it and exports it."""
    net, data, module = compile_layers()
    expected = [net(x).detach() for x in data]

    def compute_score(m):
        assert not m.training
        return -sum(float((m(x) - w).square().sum()) for x, w in zip(data, expected, strict=True))

    whole = module.train().clika_quantize_to_goal(compute_score, MAX_THRESHOLD, calibration_inputs=data)
    assert (whole.best.layers, module.training) == (3, True)
    found = module.eval().clika_quantize_to_goal(compute_score, whole.best.drop / 2)
    assert 0 < found.best.layers < 3
    with torch.no_grad():
        assert compute_score(module) == found.best.score
    assert module.clika_export(tmp_path / "part.onnx").path.exists()
    missed = module.clika_quantize_to_goal(compute_score, 0.0, QuantizationSettings())
    assert missed.best is None
    with torch.no_grad():
        assert compute_score(module) == missed.baseline


def test_clika_quantize_to_goal_selects_wider_weights():
    """If the narrowest bit width degrades the score too much, a wider one is selected."""
    _, data, module = compile_layers()
    settings = QuantizationSettings(
        weights_num_bits=[8, 4], prefer_weights_only_quantization=True, weights_only_quantization_block_size=0
    )

    def read_bits(m):
        return (
            [held.bits for held in m.clika_state.quantized.plan.packed_weights.values()]
            if m.clika_state.quantized
            else []
        )

    found = module.clika_quantize_to_goal(lambda m: -float(4 in read_bits(m)), 0.5, settings, calibration_inputs=data)
    assert read_bits(module) == [8, 8, 8]
    assert "with 3 quantized layers" in found.reason, "the one that fails with the most bytes"


@pytest.mark.parametrize(
    ("settings", "goal", "idle"),
    [
        ({"skip_tail_quantization": False}, "size", "skip_tail_quantization=False has no effect"),
        ({"automatic_skip_quantization": False}, "latency", "automatic_skip_quantization=False has no effect"),
        (
            {"prefer_weights_only_quantization": True},
            "latency",
            "optimize_for='latency' with weight-only quantization has no effect",
        ),
        ({"prefer_weights_only_quantization": True, "skip_tail_quantization": True}, "size", ""),
    ],
)
def test_clika_quantize_to_goal_idle_settings_warn(tmp_path, settings, goal, idle):
    """Settings without an effect on the search are logged as a warning."""
    net, data, _ = compile_layers()
    options = {"clika_compile_options": ClikaCompileOptions(optimize_for=goal), "logs_dir": tmp_path}
    module = clika_compile(net, tracing_inputs=data[:1], **options)
    module.clika_quantize_to_goal(lambda _: 0.0, 1.0, QuantizationSettings(**settings), calibration_inputs=data)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log") if "Searching" in path.read_text())
    assert ("in a search by a goal" in log) is bool(idle)
    assert idle in log


@pytest.mark.parametrize("calls", [1, 3])
def test_clika_quantize_to_goal_interrupt_keeps_best_so_far(calls):
    """An interrupt keeps the best candidate so far, or the previous plan."""
    _, data, module = compile_layers()
    module.clika_initialize_algorithms(calibration_inputs=data)
    before, seen = module.clika_state.quantized, []

    def score_then_interrupt(m):
        seen.append(m.clika_state.quantized)
        if len(seen) > calls:
            raise KeyboardInterrupt
        return -float(len(seen) == 2)  # the whole is not within, the first part of it is

    with pytest.raises(KeyboardInterrupt):
        module.train().clika_quantize_to_goal(score_then_interrupt, 0.5)
    assert module.training
    assert module.clika_state.quantized.plan is (before if calls == 1 else seen[2]).plan


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"eval_fn": None}, r"eval_fn is None, .* Give a function that is called as eval_fn\(module\)"),
        ({"eval_fn": lambda: 1.0}, r"takes \(\), but is called as eval_fn\(module\)"),
        ({"quantization_settings": {}}, "Give a QuantizationSettings"),
        ({"calibration_inputs": torch.zeros(1)}, "calibration_inputs are a Tensor"),
        ({"layer_quantization_settings": {"conv": True}}, "a dict from names of layers to LayerQuantizationSettings"),
    ],
)
def test_clika_quantize_to_goal_invalid_arguments_raise(arguments, expected):
    """Arguments of a wrong type raise an error before any work."""
    _, _, module = compile_layers()
    with pytest.raises(ModelError, match=expected):
        module.clika_quantize_to_goal(**{"eval_fn": lambda module: 1.0, "max_drop": 0.5, **arguments})
    if "eval_fn" not in arguments:
        with pytest.raises(ModelError, match=expected):
            module.clika_initialize_algorithms(**arguments)
