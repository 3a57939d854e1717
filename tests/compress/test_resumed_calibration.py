"""An interrupted pass over data continues with the same data only, and files keep their ranges."""

import pytest
import torch
from calibrated_nets import HERE, Net, compile_net, make_batches, trace_net
from interrupted_data import interrupt_after
from log_files import read_logs

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_OpenVINO_ONNX,
    QuantizationSettings,
)
from clika_ref.core.errors import ModelError
from clika_ref.quantization.calibration import range_table
from clika_ref.quantization.calibration.fingerprint import batch_fingerprint
from clika_ref.quantization.calibration.range_table import RangeTable


def interrupt_and_resume(module, data, stops=5):
    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(
            calibration_inputs=interrupt_after(make_batches(6, seed=7)[:stops]), deployment_settings=HERE
        )
    module.clika_initialize_algorithms(calibration_inputs=data, deployment_settings=HERE)
    return module.clika_state.calibration


@pytest.mark.parametrize("smooth_quant", ["on", "off"])
def test_resumed_calibration_other_data_restarts(tmp_path, smooth_quant):
    """Other data than that of the interrupted pass is counted from its first element."""
    options = {"clika_compile_options": ClikaCompileOptions(smooth_quant=smooth_quant)}
    found = interrupt_and_resume(trace_net(logs_dir=tmp_path, **options), iter(make_batches(7, seed=1)))
    assert found.table.batches == found.sizes.total() == len(found.reservoir.batches) == 7
    assert "begins with another batch than the interrupted pass: calibration starts again, without its 5" in read_logs(
        tmp_path
    )
    alone = trace_net(**options)
    alone.clika_initialize_algorithms(calibration_inputs=make_batches(7, seed=1), deployment_settings=HERE)
    x, module = make_batches()[0], trace_net(**options)
    interrupt_and_resume(module, make_batches(7, seed=1))
    assert torch.equal(module.eval()(x), alone.eval()(x))


def test_resumed_calibration_same_data_continues(tmp_path):
    """The same data continues after the last batch, without a warning."""
    assert interrupt_and_resume(trace_net(logs_dir=tmp_path), make_batches(6, seed=7)).table.batches == 6
    assert "6 batches, 5 of them from an earlier pass" in read_logs(tmp_path)
    assert "begins with another batch" not in read_logs(tmp_path)


def test_clika_compile_interrupted_suggests_ranges_file(tmp_path, capsys):
    """An interrupted compilation reports lost ranges and suggests `ranges_file`."""
    with pytest.raises(KeyboardInterrupt):
        compile_net(calibration_inputs=interrupt_after(make_batches(6, seed=7)[:5]))
    said = capsys.readouterr().err
    assert (
        "The ranges of 5 batches are lost: calibration was interrupted. Set ClikaCompileOptions(ranges_file=...)"
        in said
    )
    file = tmp_path / "ranges.safetensors"
    with pytest.raises(KeyboardInterrupt):
        compile_net(calibration_inputs=interrupt_after(make_batches(6, seed=7)[:5]), ranges_file=file)
    compile_net(calibration_inputs=make_batches(6, seed=7), ranges_file=file)
    said = capsys.readouterr().err
    assert "are lost" not in said
    assert "6 batches, 5 of them from an earlier pass" in said


def test_ranges_file_interrupt_at_second_batch_keeps_first(tmp_path):
    """An interrupt at the second batch keeps the first one in the file."""
    data, file = make_batches(3, seed=7), tmp_path / "ranges.safetensors"

    with pytest.raises(KeyboardInterrupt):
        compile_net(tracing_inputs=data[:2], calibration_inputs=interrupt_after([data[0]]), ranges_file=file)
    assert RangeTable.load(file).batches == 1


def test_ranges_file_reordered_data_keeps_file_and_warns(tmp_path):
    """Reordered data gives a warning, and the file keeps its activation ranges."""
    file = tmp_path / "ranges.safetensors"
    compile_net(ranges_file=file)
    before = file.read_bytes()
    module = compile_net(ranges_file=file, calibration_inputs=make_batches()[::-1], logs_dir=tmp_path)
    assert "begins with another batch than the ranges in" in read_logs(tmp_path)
    assert module.clika_state.calibration.table.batches == 4
    assert file.read_bytes() == before
    assert RangeTable.load(file).first == batch_fingerprint(make_batches()[:1])


def test_ranges_file_of_development_version_raises(tmp_path, monkeypatch):
    """A ranges file of an older format raises an error that asks to remove the file."""
    file = tmp_path / "ranges.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(range_table, "RANGE_TABLE_VERSION", range_table.RANGE_TABLE_VERSION - 1)
        RangeTable(batches=1).save(file)
    with pytest.raises(
        ModelError, match=r"cannot load .*: it was saved by a development version; compile again"
    ) as info:
        compile_net(ranges_file=file)
    assert info.value.__notes__ == ["Name another file in ranges_file, or remove this one, to calibrate again."]


@pytest.mark.parametrize("is_in_file", [True, False])
def test_smooth_quant_resumed_pass_applied_once(tmp_path, is_in_file):
    """A resumed pass applies SmoothQuant once, with and without a ranges file."""
    data = make_batches(6, seed=7, factor=60.0)
    file = tmp_path / "ranges.safetensors" if is_in_file else ""
    module, alone = trace_net(ranges_file=file, smooth_quant="on"), trace_net(smooth_quant="on")

    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=interrupt_after(data[:5]), deployment_settings=HERE)
    for one in (module, alone):
        one.clika_initialize_algorithms(calibration_inputs=data, deployment_settings=HERE)
    assert module.clika_state.calibration.table.smoothing
    assert module.clika_state.calibration.table.batches == 6
    assert torch.equal(module.eval()(data[0]), alone.eval()(data[0]))


def test_ranges_file_other_data_serves_later_decisions(tmp_path):
    """Later decisions use the ranges file even if other data was passed with it."""
    file = tmp_path / "ranges.safetensors"
    compile_net(ranges_file=file)
    module = compile_net(ranges_file=file, calibration_inputs=make_batches()[::-1][:3], logs_dir=tmp_path)
    module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=0.1))
    assert module.clika_state.calibration.table.batches == 4
    module.clika_export(tmp_path / "other.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())
    assert "the interrupted pass" not in read_logs(tmp_path)


def test_resumed_calibration_changed_weights_restarts(tmp_path):
    """An interrupted pass restarts if weights have changed since."""
    module, data, original = trace_net(logs_dir=tmp_path), make_batches(6, seed=7), Net()

    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=interrupt_after(data[:5]), deployment_settings=HERE)
    with torch.no_grad():
        for parameter in (*module.parameters(), *original.parameters()):
            parameter.mul_(0.1)
    module.clika_initialize_algorithms(calibration_inputs=data, deployment_settings=HERE)
    assert "its 5 batches must run again" in read_logs(tmp_path)
    with torch.no_grad():
        largest = max(float(original(x).abs().max()) for x in data)
    (output,) = module.clika_state.calibration.graph.outputs
    found = module.clika_state.calibration.table.values[output.name]
    assert max(-found.low, found.high) == pytest.approx(largest, rel=1e-4)
    assert module.clika_state.calibration.table.batches == 6
