"""A pass over data that was interrupted goes on with the same data, and with nothing else; files keep their ranges."""

import pytest
import torch
from calibrated_nets import HERE, Net, batches, compiled, told, traced

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_OpenVINO_ONNX,
    QuantizationSettings,
)
from clika_ref.quantization.calibration.fingerprint import batch_fingerprint
from clika_ref.quantization.calibration.range_table import RangeTable


def after_an_interrupt(module, data, stops=5):
    def stopping():
        yield from batches(6, seed=7)[:stops]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=stopping(), deployment_settings=HERE)
    module.clika_initialize_algorithms(calibration_inputs=data, deployment_settings=HERE)
    return module.clika_state.calibration


@pytest.mark.parametrize("smoothing", ["on", "off"])
def test_other_data_than_that_of_a_pass_that_was_interrupted_is_counted_from_its_first_element(tmp_path, smoothing):
    options = {"clika_compile_options": ClikaCompileOptions(smoothing=smoothing)}
    found = after_an_interrupt(traced(logs_dir=tmp_path, **options), iter(batches(7, seed=1)))
    assert found.table.batches == found.sizes.total() == len(found.reservoir.batches) == 7
    assert "begins with another batch than the pass that was interrupted after 5" in told(tmp_path)
    alone = traced(**options)
    alone.clika_initialize_algorithms(calibration_inputs=batches(7, seed=1), deployment_settings=HERE)
    x, module = batches()[0], traced(**options)
    after_an_interrupt(module, batches(7, seed=1))
    assert torch.equal(module.eval()(x), alone.eval()(x))


def test_the_same_data_goes_on_where_it_stopped_without_a_warning(tmp_path):
    assert after_an_interrupt(traced(logs_dir=tmp_path), batches(6, seed=7)).table.batches == 6
    assert "6 batches, 5 of them from before" in told(tmp_path)
    assert "begins with another batch" not in told(tmp_path)


def test_a_compilation_that_is_interrupted_says_how_its_ranges_would_be_kept(tmp_path, capsys):
    def stopping():
        yield from batches(6, seed=7)[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled(calibration_inputs=stopping())
    said = capsys.readouterr().err
    assert (
        "The ranges of the 5 batches before are lost; with ClikaCompileOptions(ranges_file=...) they are kept" in said
    )
    file = tmp_path / "ranges.safetensors"
    with pytest.raises(KeyboardInterrupt):
        compiled(calibration_inputs=stopping(), ranges_file=file)
    compiled(calibration_inputs=batches(6, seed=7), ranges_file=file)
    said = capsys.readouterr().err
    assert "are lost" not in said
    assert "6 batches, 5 of them from before" in said


def test_an_interrupt_at_the_second_batch_keeps_the_first_where_other_inputs_are_traced(tmp_path):
    data, file = batches(3, seed=7), tmp_path / "ranges.safetensors"

    def stopping():
        yield data[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled(tracing_inputs=data[:2], calibration_inputs=stopping(), ranges_file=file)
    assert RangeTable.load(file).batches == 1


def test_ranges_of_a_file_stay_where_data_comes_in_another_order_with_a_warning(tmp_path):
    file = tmp_path / "ranges.safetensors"
    compiled(ranges_file=file)
    before = file.read_bytes()
    module = compiled(ranges_file=file, calibration_inputs=batches()[::-1], logs_dir=tmp_path)
    assert "begins with another batch than the ranges in" in told(tmp_path)
    assert module.clika_state.calibration.table.batches == 4
    assert file.read_bytes() == before
    assert RangeTable.load(file).first == batch_fingerprint(batches()[:1])


@pytest.mark.parametrize("is_in_file", [True, False])
def test_what_is_smoothed_is_so_once_where_a_pass_goes_on_with_the_ranges_of_a_file(tmp_path, is_in_file):
    data = batches(6, seed=7, factor=60.0)
    file = tmp_path / "ranges.safetensors" if is_in_file else ""
    module, alone = traced(ranges_file=file, smoothing="on"), traced(smoothing="on")

    def stopping():
        yield from data[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=stopping(), deployment_settings=HERE)
    for one in (module, alone):
        one.clika_initialize_algorithms(calibration_inputs=data, deployment_settings=HERE)
    assert module.clika_state.calibration.table.smoothing
    assert module.clika_state.calibration.table.batches == 6
    assert torch.equal(module.eval()(data[0]), alone.eval()(data[0]))


def test_ranges_of_a_file_serve_later_decisions_though_other_data_stood_beside_it(tmp_path):
    file = tmp_path / "ranges.safetensors"
    compiled(ranges_file=file)
    module = compiled(ranges_file=file, calibration_inputs=batches()[::-1][:3], logs_dir=tmp_path)
    module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=0.1))
    assert module.clika_state.calibration.table.batches == 4
    module.clika_export(tmp_path / "other.onnx", deployment_settings=DeploymentSettings_OpenVINO_ONNX())
    assert "the pass that was interrupted" not in told(tmp_path)


def test_a_pass_begins_anew_where_weights_were_changed_since_it_was_interrupted(tmp_path):
    module, data, original = traced(logs_dir=tmp_path), batches(6, seed=7), Net()

    def stopping():
        yield from data[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=stopping(), deployment_settings=HERE)
    with torch.no_grad():
        for parameter in (*module.parameters(), *original.parameters()):
            parameter.mul_(0.1)
    module.clika_initialize_algorithms(calibration_inputs=data, deployment_settings=HERE)
    assert "its 5 batches are run again" in told(tmp_path)
    with torch.no_grad():
        largest = max(float(original(x).abs().max()) for x in data)
    (output,) = module.clika_state.calibration.graph.outputs
    found = module.clika_state.calibration.table.values[output.name]
    assert max(-found.low, found.high) == pytest.approx(largest, rel=1e-4)
    assert module.clika_state.calibration.table.batches == 6
