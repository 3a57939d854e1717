"""Calibration of a module: its data, interrupts, resumption, and the file of ranges."""

import copy

import pytest
import torch
from calibrated_nets import sqnr_in_decibels
from clika_ref_conformance.targets.identity import Identity
from interrupted_data import interrupt_after
from log_files import read_logs
from quantized_nets import HERE, build_net, compile_net, make_batches
from torch import nn

from clika_ref import LayerQuantizationSettings, ModelError, QuantizationSettings, TargetError, clika_compile
from clika_ref.capture.calibration_inputs import STREAM_EXAMPLE_COUNT
from clika_ref.quantization.request import QuantizationRequest

NAN, INFINITE = (torch.full((4, 3, 10, 10), number) for number in (float("nan"), float("inf")))


def test_calibration_data_read_once_and_reused():
    """Data is read once, and another threshold reads none."""
    read = []

    def yield_and_count():
        for x in make_batches(6):
            read.append(len(read))
            yield x

    module = compile_net(data=yield_and_count())
    assert read == [*range(6)]
    assert module.clika_state.calibration.table.batches == 6
    found = module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=0))
    assert [bool(layer.reason) for layer in found.layers] == [True] * 3
    x = make_batches(1)[0]
    assert torch.allclose(module(x), build_net()(x), atol=1e-6)


def test_clika_initialize_algorithms_on_float_module():
    """A float module is quantized later."""
    module = clika_compile(build_net(), tracing_inputs=make_batches(1))
    x = make_batches(1)[0]
    before = module(x)
    found = module.clika_initialize_algorithms(calibration_inputs=make_batches())
    assert sum(not layer.reason for layer in found.layers) == 3
    assert 20 < sqnr_in_decibels(before, module(x)) < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_quantization_settings": {"bdoy": LayerQuantizationSettings()}}, "Near matches: 'body'"),
        (
            {"layer_quantization_settings": {"stem.1": LayerQuantizationSettings()}},
            "is folded into other layers.*'conv2d'",
        ),
        (
            {"quantization_settings": QuantizationSettings(weights_num_bits=3)},
            "weights_num_bits: 3 bits are requested for",
        ),
        (
            {"quantization_settings": QuantizationSettings(weights_num_bits=3, prefer_weights_only_quantization=True)},
            "weights_num_bits: 3 bits are requested for",
        ),
    ],
)
def test_layer_settings_invalid_key_raises_before_data(arguments, message):
    """Invalid keys and bit widths raise an error before data is read."""

    def read_once():
        for x in make_batches(6):
            read.append(1)
            yield x

    read = []
    module = clika_compile(build_net(), tracing_inputs=make_batches(1), calibration_inputs=read_once())
    with pytest.raises(ModelError, match=message):
        module.clika_initialize_algorithms(**arguments)
    assert not read
    settings = {"settings": arguments.get("quantization_settings"), **arguments}
    settings.pop("quantization_settings", None)
    with pytest.raises(ModelError, match=message):
        compile_net(**settings, data=read_once(), tracing_inputs=make_batches(1))
    assert len(read) <= STREAM_EXAMPLE_COUNT, "no more than to trace with"
    with pytest.raises(ModelError, match=message):
        compile_net(**settings, data=read_once())
    assert len(read) <= 2 * STREAM_EXAMPLE_COUNT
    module.clika_initialize_algorithms()
    assert module.clika_state.calibration.table.batches == 6


@pytest.mark.parametrize("transform", [None, torch.neg])
def test_clika_initialize_algorithms_reads_unread_data(tmp_path, transform):
    """Data that compiling did not read is read later."""
    data = iter([x.neg() if transform else x for x in make_batches()])
    module = clika_compile(
        build_net(), tracing_inputs=make_batches(1, seed=9), calibration_inputs=data, data_transform_fn=transform
    ).eval()
    found = module.clika_initialize_algorithms(deployment_settings=HERE)
    assert sum(not layer.reason for layer in found.layers) == 3
    assert torch.equal(module(make_batches(1)[0]), compile_net()(make_batches(1)[0]))
    module.clika_initialize_algorithms()  # with the ranges that there are now
    assert torch.equal(module(make_batches(1)[0]), compile_net()(make_batches(1)[0]))


def test_calibration_interrupted_asks_for_data_again():
    """After an interrupted calibration, the kept data must be given again."""
    module = clika_compile(
        build_net(), tracing_inputs=make_batches(1), calibration_inputs=interrupt_after(make_batches(6)[:5])
    )
    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms()
    with pytest.raises(ModelError, match=r"interrupted after 5 batches. Pass the same calibration_inputs to resume"):
        module.clika_initialize_algorithms()
    module.clika_initialize_algorithms(calibration_inputs=make_batches(6))
    assert module.clika_state.calibration.table.batches == 6


@pytest.mark.parametrize("traced", ["tracing_inputs", "calibration_inputs"])
def test_tracing_inputs_used_for_calibration_warn(tmp_path, traced):
    """Calibrating on tracing inputs warns."""
    module = clika_compile(build_net(), **{traced: make_batches()}, logs_dir=tmp_path)
    module.clika_initialize_algorithms()
    warned = "Calibration uses the 4 tracing inputs, which may differ" in "".join(
        p.read_text() for p in tmp_path.iterdir()
    )
    assert warned is (traced == "tracing_inputs")


def test_copy_without_inputs_asks_for_data():
    """A copy keeps no inputs and asks for data."""
    copied = copy.deepcopy(
        clika_compile(build_net(), tracing_inputs=make_batches(1), calibration_inputs=make_batches())
    )
    with pytest.raises(ModelError, match=r"cannot calibrate: the module is a copy or was loaded, .* Pass cal"):
        copied.clika_initialize_algorithms()


def test_calibration_interrupt_keeps_module_and_resumes():
    """After an interrupt, the module is unchanged and the calibration resumes."""
    module = clika_compile(build_net(), tracing_inputs=make_batches(1))
    x = make_batches(1)[0]
    before = module(x)

    with pytest.raises(KeyboardInterrupt):
        module.clika_initialize_algorithms(calibration_inputs=interrupt_after(make_batches(6)[:5]))
    assert torch.equal(module(x), before)
    with pytest.raises(ModelError, match=r"interrupted after 5 batches. Pass the same calibration_inputs to resume"):
        module.clika_initialize_algorithms()
    module.clika_initialize_algorithms(calibration_inputs=make_batches(6))
    assert module.clika_state.calibration.table.batches == 6
    assert torch.equal(module(x), compile_net(data=make_batches(6))(x))


@pytest.mark.parametrize("broken", [NAN, None], ids=["NaN", "an interrupt"])
def test_calibration_failure_keeps_previous_ranges(tmp_path, broken):
    """A failed calibration keeps the previous ranges."""

    def yield_then_fail():
        yield from make_batches(5, seed=7)
        if broken is None:
            raise KeyboardInterrupt
        yield broken

    module, x = compile_net(logs_dir=tmp_path), make_batches(1)[0]
    before = module(x)
    for _ in range(2):
        with pytest.raises((ModelError, KeyboardInterrupt)):
            module.clika_initialize_algorithms(calibration_inputs=yield_then_fail())
    assert torch.equal(module(x), before)
    assert module.clika_compare_targets(HERE).rows[0].layers == 3
    module.clika_initialize_algorithms(calibration_inputs=make_batches(6, seed=7))
    assert torch.equal(module(x), compile_net(data=make_batches(6, seed=7))(x))
    assert "6 batches, 5 of them from an earlier pass" in read_logs(tmp_path)
    with pytest.raises((ModelError, KeyboardInterrupt)):
        module.clika_initialize_algorithms(calibration_inputs=yield_then_fail())
    module.clika_initialize_algorithms()
    assert torch.equal(module(x), compile_net(data=make_batches(6, seed=7))(x))


def test_ranges_file_saved_on_interrupt_and_resumed(tmp_path):
    """Ranges are saved on an interrupt and used later; those of another model raise an error."""
    file = str(tmp_path / "ranges.safetensors")

    def yield_data(fails):
        for number, x in enumerate(make_batches(6)):
            if fails and number == 5:
                raise KeyboardInterrupt
            yield x

    with pytest.raises(KeyboardInterrupt):
        compile_net(data=yield_data(fails=True), tracing_inputs=make_batches(1), ranges_file=file)
    found = compile_net(
        data=yield_data(fails=False), tracing_inputs=make_batches(1), ranges_file=file, logs_dir=tmp_path
    )
    (runs,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert "6 batches, 5 of them from an earlier pass" in runs
    assert torch.equal(found(make_batches(1)[0]), compile_net(data=make_batches(6))(make_batches(1)[0]))
    others = build_net()
    with torch.no_grad():
        others.body.weight += 0.01
    for other, x in ((nn.Linear(3, 3), torch.randn(2, 3)), (others, make_batches(1)[0])):
        with pytest.raises(ModelError, match=r"they are of another model, or of other weights"):
            clika_compile(
                other,
                calibration_inputs=[x],
                quantization_settings=QuantizationSettings(),
                deployment_settings=HERE,
                ranges_file=file,
            )


def test_ranges_file_saved_by_later_quantization(tmp_path):
    """Ranges are also saved if quantization comes later."""
    file = tmp_path / "ranges.safetensors"
    module = clika_compile(build_net(), tracing_inputs=make_batches(1), ranges_file=file).eval()
    module.clika_initialize_algorithms(calibration_inputs=make_batches(), deployment_settings=HERE)
    assert file.exists()


def test_calibration_smaller_last_batch_dropped_with_warning(tmp_path):
    """A smaller last batch is left out, with a warning."""
    data = [*make_batches(5), make_batches(1, 2)[0]]
    compile_net(data=iter(data), logs_dir=tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert "Warning: calibration batch 6: input 'x': float32[2, 3, 10, 10]" in log
    assert "The last batch is skipped." in log


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "has no elements"),
        (iter([]), "has no elements"),
        (
            iter([*make_batches(5), make_batches(1, 2)[0], make_batches(1)[0]]),
            r"calibration batch 6: input 'x': .* dim 0 must be 4",
        ),
        ([*make_batches(2), NAN], r"batch 3: the input 'x' contains NaN"),
        ([*make_batches(2), INFINITE], r"batch 3: the input 'x' contains infinity"),
    ],
)
def test_calibration_bad_data_names_batch(data, message):
    """Bad data raises an error that names the batch."""
    settings = {"quantization_settings": QuantizationSettings(), "deployment_settings": HERE}
    with pytest.raises(ModelError, match=message):
        clika_compile(build_net(), calibration_inputs=data, **settings)


def test_quantization_missing_arguments_raise_before_data():
    """Missing settings, data or schemes raise an error before data is read."""

    def raise_if_read():
        raise AssertionError
        yield

    with pytest.raises(TargetError, match="identity: it computes in float and declares no scheme"):
        QuantizationRequest(Identity(), QuantizationSettings())
    with pytest.raises(ValueError, match="quantization_settings are given without deployment_settings"):
        clika_compile(build_net(), calibration_inputs=raise_if_read(), quantization_settings=QuantizationSettings())
    with pytest.raises(ValueError, match="quantization_settings are given without calibration_inputs"):
        clika_compile(build_net(), deployment_settings=HERE, quantization_settings=QuantizationSettings())
