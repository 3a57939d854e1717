"""Speed of an artifact compared with the float model: verdicts, limits of time, and what an export reports."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.compiled.latency import TIMING_ROUNDS, take_one_sample, time_in_turns
from clika_ref.core.errors import TargetError
from clika_ref.export import speed
from clika_ref.export.speed import SpeedComparison, use_threads


def compile_quantized(deployment=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    data = [torch.randn(2, 3, 12, 12) for _ in range(3)]
    return clika_compile(
        model,
        calibration_inputs=data,
        tracing_inputs=[data[0][:1], data[0]],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=deployment or DeploymentSettings_ONNXRuntime_ONNX(),
        clika_compile_options=ClikaCompileOptions(**options),
    )


@pytest.mark.parametrize(
    ("own", "other", "verdict"),
    [
        ([1.0] * 5, [2.0] * 5, True),
        ([2.0] * 5, [1.0] * 5, False),
        ([1.02] * 5, [1.0] * 5, None),
        ([0.98] * 5, [1.0] * 5, None),
        ([1.0, 9.0, 1.0, 1.0, 1.0], [2.0] * 5, True),  # one slow call
        ([1.0, 3.0, 1.0, 3.0, 2.0], [2.0] * 5, None),
        ([1.0] * 4, [2.0] * 4, None),
    ],
)
def test_is_faster_needs_pairs_and_separate_times(own, other, verdict):
    """A verdict needs five pairs, middle halves that do not overlap, and a difference above 3 %."""
    assert SpeedComparison(1, own, other).is_faster is verdict


def test_speed_comparison_str_names_missing_verdict():
    """The text states why there is no verdict."""
    assert str(SpeedComparison(2, [1.0] * 5, [2.0] * 5)) == "0.50x the time of float on 2 threads"
    assert str(SpeedComparison(1, [1.0] * 2, [2.0] * 2)) == "unknown on 1 thread: 2 pairs in 1 s (0.50x)"
    assert str(SpeedComparison(1, [1.0, 3.0] * 3, [2.0] * 6)) == "unknown on 1 thread: no clear difference (1.00x)"


def test_time_in_turns_stops_at_limit():
    """No round starts after the limit, but there is always one."""
    assert len(time_in_turns(lambda _: None, [], lambda _: None, [], max_seconds=0)) == 1
    assert len(time_in_turns(lambda _: None, [], lambda _: None, [])) == TIMING_ROUNDS


def test_use_threads_restores_count():
    """After the block, the number of threads is that of before."""
    before = torch.get_num_threads()
    with use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_take_one_sample_needs_dynamic_batch():
    """A fixed batch stays whole."""
    x = torch.ones(3, 2)
    for traced, expected in (([x, x[:1]], 1), ([x], 3)):
        graph = clika_compile(nn.Linear(2, 2).eval(), tracing_inputs=traced).graph
        assert len(take_one_sample(graph, [x])[0]) == expected


def test_take_one_sample_inputs_of_other_lengths_stay_whole():
    """An input that another one may index is not cut."""

    class Indexed(nn.Module):
        def forward(self, x, index):
            return x[index]

    inputs = [[torch.randn(n, 2), torch.arange(m)] for n, m in ((3, 2), (5, 4))]
    graph = clika_compile(Indexed(), tracing_inputs=[tuple(each) for each in inputs]).graph
    assert [len(x) for x in take_one_sample(graph, inputs[0])] == [3, 2]


def test_clika_export_reports_speed(tmp_path, capsys):
    """A quantized export reports the ratio for one thread and all threads; the file does not depend on it."""
    module = compile_quantized()
    artifact = module.clika_export(tmp_path / "one.onnx")
    assert [each.threads for each in artifact.facts["speed"]] == list(dict.fromkeys([1, torch.get_num_threads()]))
    assert "Timing" in capsys.readouterr().err
    again = module.clika_export(tmp_path / "two.onnx")
    assert artifact.path.read_bytes() == again.path.read_bytes()


def test_clika_export_slower_artifact_warns_with_slowest_nodes(tmp_path, monkeypatch, capsys):
    """A slower artifact has a warning that names three nodes, and what to do."""
    monkeypatch.setattr(speed, "compare_speed", lambda *_: [SpeedComparison(1, [2.0] * 5, [1.0] * 5)])
    compile_quantized().clika_export(tmp_path / "model.onnx")
    shown = " ".join(capsys.readouterr().err.split())
    assert "model.onnx is slower than float in onnxruntime: 2.00x the time of float on 1 thread." in shown
    slowest = shown.partition("Most time goes to ")[2].partition(". Compile")[0]
    assert len(slowest.split(", ")) == 3
    assert "quantize_" not in slowest  # conversions count as one
    assert "quantize and dequantize nodes" in slowest
    assert "optimize_for='latency'" in shown


def test_clika_export_error_of_timing_keeps_artifact(tmp_path, monkeypatch, capsys):
    """An error while timing loses no artifact; the log has its message."""

    def raise_target_error(*_):
        raise TargetError("the float model is too large")

    monkeypatch.setattr(speed, "compare_speed", raise_target_error)
    artifact = compile_quantized().clika_export(tmp_path / "model.onnx")
    assert artifact.path.exists()
    assert "speed" not in artifact.facts
    assert "not timed: the float model is too large" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("deployment", "options"),
    [(None, {"compare_after_export": False}), (DeploymentSettings_TensorRT_ONNX(), {})],
    ids=["off", "emulated"],
)
def test_clika_export_unmeasurable_speed_is_absent(deployment, options, tmp_path):
    """Without comparison, and for an emulated target, nothing is timed."""
    module = compile_quantized(deployment, **options)
    assert "speed" not in module.clika_export(tmp_path / "model.onnx").facts


def test_clika_export_float_module_is_not_timed(tmp_path):
    """A float module has no speed to compare."""
    module = clika_compile(nn.Linear(3, 4).eval(), tracing_inputs=[torch.ones(1, 3)])
    assert "speed" not in module.clika_export(tmp_path / "model.onnx").facts


def test_clika_explain_lists_float_nodes_between_int8_nodes():
    """A float node between INT8 nodes is in the table, with its share of the time; fused ones are not."""
    found = compile_quantized().clika_explain()
    between = [node for node in found.nodes if node.is_between_int8]
    assert [node.operator for node in between] == ["tanh"]
    assert between[0].is_in_table
    assert 0 < between[0].time_share < 1
    assert sum(node.time_share or 0 for node in found.nodes) <= 1 + 1e-9  # conversions take the rest
    assert found.speed
    assert str(found.speed[0]) in str(found)


def test_clika_explain_without_comparison_measures_nothing():
    """`compare_after_export=False` also disables the times of `clika_explain`."""
    found = compile_quantized(compare_after_export=False).clika_explain()
    assert not found.speed
    assert {node.time_share for node in found.nodes} == {None}
    assert replace(found, speed=()) == found
