"""Results of a quantization: the dry run, predictions, the log and the summary."""

import copy

import pytest
import torch
from loaded_copies import load_copy
from quantized_nets import HERE, build_net, compile_net, make_batches
from seeded_tensors import randn
from torch import nn

from clika_ref import LayerQuantizationSettings, ModelError, QuantizationSettings, clika_compile


@pytest.fixture(scope="module")
def module():
    return compile_net()


@pytest.mark.parametrize("is_trained", [True, False])
def test_is_model_pretrained_false_warns(tmp_path, is_trained):
    """`is_model_pretrained=False` warns that it does not change the decisions."""
    compile_net(is_model_pretrained=is_trained, logs_dir=tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    assert ("is_model_pretrained=False has no effect" in log) is not is_trained


def test_clika_compile_dry_run_prints_summary(capsys):
    """A dry run prints the summary and returns the model."""
    model = build_net()
    same = clika_compile(
        model,
        calibration_inputs=make_batches(),
        quantization_settings=QuantizationSettings(),
        deployment_settings=HERE,
        is_dry_run=True,
    )
    shown = capsys.readouterr().out
    assert same is model
    assert "Predicted quantization" in shown
    assert all(name in shown for name in ("stem.0", "body", "head", "predicted SQNR"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prediction_table_bytes_match_file(tmp_path, dtype):
    """The predicted bytes match the exported file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(dtype).eval()
    module = clika_compile(model, tracing_inputs=[torch.randn(16, 512, dtype=dtype)]).eval()
    settings = QuantizationSettings(
        automatic_skip_quantization=False,
        prefer_weights_only_quantization=dtype == torch.float16,
        weights_only_quantization_block_size=0,
    )
    found = module.clika_initialize_algorithms(settings, deployment_settings=HERE)
    size = module.clika_export(tmp_path / "model.onnx").path.stat().st_size
    assert found.what_if[-1].bytes == pytest.approx(size, rel=0.05)
    assert found.what_if[0].bytes == pytest.approx(512 * 512 * (1 + dtype.itemsize), rel=0.02), "one of two layers"


class Tied(nn.Module):
    """Three layers with one weight; the last output is by far the most sensitive. On request an embedding shares it."""

    def __init__(self, *, embeds=False):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(256, 256) for _ in range(3))
        self.two.weight = self.three.weight = self.one.weight
        self.embeds = embeds

    def forward(self, x):
        x = self.two(torch.relu(self.one(x)))
        x = self.three(torch.tanh(50 * x))
        return x + nn.functional.embedding(torch.arange(4), self.one.weight).sum() if self.embeds else x


@pytest.mark.slow
@pytest.mark.parametrize("embeds", [False, True])
def test_prediction_table_shared_weight_counted_once(tmp_path, embeds):
    """A weight that several layers read is counted as in the file."""
    data = [randn(16, 256, seed=i) for i in range(3)]
    module = clika_compile(Tied(embeds=embeds).eval(), tracing_inputs=data[:1], smooth_quant="off").eval()
    found = module.clika_initialize_algorithms(
        QuantizationSettings(automatic_skip_quantization=False), calibration_inputs=data, deployment_settings=HERE
    )
    thresholds = [row.threshold for row in found.what_if]
    sizes = []
    for threshold in thresholds:
        part = module.clika_initialize_algorithms(QuantizationSettings(quantization_sensitivity_threshold=threshold))
        sizes.append(module.clika_export(tmp_path / "model.onnx").path.stat().st_size)
        assert part.bytes == found.what_if[len(sizes) - 1].bytes
    assert [row.bytes for row in found.what_if] == pytest.approx(sizes, rel=0.06)
    goal = module.clika_quantize_to_goal(lambda _: 0.0, 1.0)
    assert goal.best.bytes == found.what_if[-1].bytes


def test_log_contains_lines_of_reference(tmp_path):
    """The log contains the lines of clika-ace."""
    compile_net(logs_dir=tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("*.log"))
    for line in (
        "Global Quantization Settings:",
        "+ quantization_sensitivity_threshold = 0.005",
        "Processing Quantization statistics 1/",
        "Quantization: Processed 3/3 - 'linear'",
        "Quantization: done",
        "Summary:",
        "Predictions for other values of quantization_sensitivity_threshold:",
    ):
        assert line in log


def test_clika_compile_no_quantized_layer_warns_once(capsys):
    """A model without any quantized layer warns once, with the reason."""
    half = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).half().eval()
    data = [torch.randn(4, 8).half() for _ in range(3)]
    settings = QuantizationSettings()
    clika_compile(half, calibration_inputs=data, quantization_settings=settings, deployment_settings=HERE)
    said = capsys.readouterr().err
    assert said.count("Warning: No layer is quantized; 2 of 2 because: its weight is torch.float16, and") == 1
    assert "Quantized 0/2 layers, weights 0.2 -> 0.2 KB" in said
    compile_net()
    assert "No layer is quantized" not in capsys.readouterr().err


def test_clika_summary_shown_on_request_without_log(tmp_path, capsys):
    """Without a log, the console names `clika_summary`, and its text lists the decisions."""
    module = compile_net()
    assert "print(module.clika_summary()) shows the decision for each layer" in capsys.readouterr().err
    lines = str(module.clika_summary()).splitlines()
    assert lines[0].split()[:5] == ["layer", "operator", "weights", "activations", "QS"]
    assert [line.split()[0] for line in lines[1:4]] == ["stem.0", "body", "head"]
    assert lines[5] == "Predictions for other values of quantization_sensitivity_threshold:"
    assert str(copy.deepcopy(module).clika_summary()) == str(module.clika_summary())
    module.clika_initialize_algorithms(
        layer_quantization_settings={"body": LayerQuantizationSettings(skip_quantization=True)}
    )
    assert "skip_quantization" in str(module.clika_summary())
    compile_net(logs_dir=tmp_path)
    assert "module.clika_summary()" not in capsys.readouterr().err


def test_clika_summary_without_decisions_raises(module):
    """A module without known decisions raises an error."""
    loaded = load_copy(module)
    for one in (loaded, clika_compile(build_net(), tracing_inputs=make_batches(1))):
        with pytest.raises(ModelError, match=r"no decisions are known.* clika_initialize_algorithms"):
            one.clika_summary()
