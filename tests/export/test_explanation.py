"""The explanation of a module: each layer with its planned precision, its real precision, and the reason for float."""

import pytest
import torch
from loaded_copies import load_copy
from seeded_tensors import randn
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref import LayerQuantizationSettings as Layer

X = randn(4, 3, 8, 8)


def make_network():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Conv2d(8, 8, 3))
    return nn.Sequential(stem, nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)).eval()


def compile_quantized(layers=None):
    return clika_compile(
        make_network(),
        calibration_inputs=[X, X[:2]],
        quantization_settings=QuantizationSettings(),
        layer_quantization_settings=layers,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )


def planned_and_run_precisions(found):
    return [(n.scope, n.operator, n.planned, n.runs) for n in found.nodes if n.is_in_table]


def test_clika_explain_reports_precision_and_reason():
    """Each layer has its precision, and float nodes between layers have a reason."""
    found = compile_quantized().clika_explain()
    assert planned_and_run_precisions(found) == [
        ("0.0", "conv2d", "int8", "int8"),
        ("0.1", "hardswish", "float", "float"),
        ("0.2", "conv2d", "int8", "int8"),
        ("2", "reshape", "int8", "int8"),
        ("3", "linear", "int8", "int8"),
    ]
    assert [n.reason for n in found.nodes if n.operator == "hardswish"] == [
        "ONNX Runtime has no INT8 kernel for HardSwish"
    ]
    assert not found.not_quantized


def test_explanation_share_counts_macs():
    """MACs are counted for each layer, with the share in INT8."""
    found = compile_quantized({"0.2": Layer(skip_quantization=True)}).clika_explain()
    first, second, third = 4 * 8 * 36 * 27, 4 * 8 * 16 * 72, 4 * 10 * 128
    assert [n.macs for n in found.nodes if n.macs] == [first, second, third]
    assert found.share() == found.share(planned=True) == (first + third) / (first + second + third)


def test_explanation_batched_matmul_counts_all_macs():
    """A batched matmul counts the MACs of each matrix."""

    class Scores(torch.nn.Module):
        def forward(self, query, key):
            return query @ key

    inputs = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    (node,) = clika_compile(Scores(), tracing_inputs=[inputs]).clika_explain().nodes
    assert node.macs == 2 * 3 * 4 * 5 * 6


def test_clika_explain_addmm_with_weight_listed_as_layer():
    """`addmm` with a weight, as in GPT-2, is quantized and listed as linear."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight).relu()

    data = [torch.randn(4, 8) for _ in range(4)]
    settings = QuantizationSettings(automatic_skip_quantization=False)
    module = clika_compile(
        Product().eval(),
        tracing_inputs=data[:1],
        calibration_inputs=data,
        quantization_settings=settings,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    found = module.clika_explain(DeploymentSettings_ONNXRuntime_ONNX())
    assert [(n.operator, n.planned, n.runs) for n in found.nodes if n.macs] == [("linear", "int8", "int8")]


def test_clika_explain_skipped_layer_gives_setting():
    """A layer with `skip_quantization` names the setting as the reason."""
    found = compile_quantized({"0.2": Layer(skip_quantization=True)}).clika_explain()
    (layer,) = (n for n in found.nodes if n.scope == "0.2")
    assert (layer.planned, layer.runs) == ("float", "float")
    assert "skip_quantization" in layer.reason


def test_clika_explain_reasons_saved_with_module():
    """The reasons are saved with the module."""
    module = compile_quantized({"0.2": Layer(skip_quantization=True)})
    again = load_copy(module)
    before, after = (m.clika_explain(DeploymentSettings_ONNXRuntime_ONNX()) for m in (module, again))
    assert [n.reason for n in after.nodes] == [n.reason for n in before.nodes]


def test_clika_explain_constant_factor_not_planned_int8():
    """A multiplication by a constant between INT8 layers is planned in float."""

    class Tripled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            return self.two(self.one(x) * 3)

    module = clika_compile(
        Tripled().eval(),
        calibration_inputs=[X, X[:2]],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    found = module.clika_explain()
    assert [n.planned for n in found.nodes if n.operator in ("conv2d", "mul")] == ["int8", "float", "int8"]
    assert not found.not_quantized


class Summed(nn.Module):
    """Two sums of convolutions: one before a convolution, and one before an output."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x):
        y = torch.relu(self.one(x) + self.two(x))
        return self.three(y) + y


def test_clika_explain_sum_planned_int8_only_if_result_is_quantized():
    """Of two sums of quantized values, only the one that a layer reads is planned in INT8; both run as planned."""
    torch.manual_seed(0)
    module = clika_compile(
        Summed().eval(),
        calibration_inputs=[X],
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    found = module.clika_explain()
    assert [(n.planned, n.runs) for n in found.nodes if n.operator == "add"] == [("int8", "int8"), ("float", "float")]
    assert not found.not_quantized


def test_explanation_str_table_and_summary():
    """The text is a table with a summary line."""
    lines = str(compile_quantized().clika_explain()).splitlines()
    assert lines[0].split()[:3] == ["layer", "operator", "MACs"]
    assert lines[1].split()[:-1] == ["0.0", "conv2d", f"{4 * 8 * 36 * 27:,}", "int8", "int8"]
    assert lines[1].endswith("%")  # of the time
    assert any(
        line.startswith("onnxruntime: 4 of 4 nodes planned as quantized run quantized, with 100.0%") for line in lines
    )


@pytest.mark.parametrize("is_planned", [True, False])
def test_explanation_lists_unexecuted_plan(monkeypatch, is_planned):
    """Layers planned in INT8 that run in float are listed."""
    module = compile_quantized() if is_planned else clika_compile(make_network(), tracing_inputs=[X])
    target = module.clika_state.registry.targets["onnxruntime"]
    monkeypatch.setattr(
        type(target),
        "explain",
        lambda self, artifact: {
            **dict.fromkeys(("conv2d", "conv2d_1"), "int8"),
            **dict.fromkeys(("linear", "output"), "float: for a test"),
            "flatten": "fused",
        },
    )
    found = module.clika_explain()
    missed = [(n.operator, n.reason) for n in found.not_quantized]
    assert missed == ([("linear", "for a test")] if is_planned else [])
    assert found.share() < 1.0


@pytest.mark.parametrize(
    "reports", [{}, {"conv2d": "fused", "conv2d_1": "fused", "linear": "fused"}], ids=["not", "fused"]
)
def test_explanation_lists_layer_unknown_to_runtime(monkeypatch, reports):
    """A layer that the runtime does not name is listed."""
    module = compile_quantized()
    target = module.clika_state.registry.targets["onnxruntime"]
    monkeypatch.setattr(type(target), "explain", lambda self, artifact: {"flatten": "fused", **reports})
    found = module.clika_explain()
    assert [(n.operator, n.runs) for n in found.not_quantized] == [
        ("conv2d", "not reported by the runtime"),
        ("conv2d", "not reported by the runtime"),
        ("linear", "not reported by the runtime"),
    ]
    assert found.share() == 0.0
    assert "1 of 4 nodes planned as quantized run quantized, with 0.0%" in str(found)


class Mixed(nn.Module):
    """A recurrent layer, a bilinear layer and an einsum before a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.both = nn.Embedding(20, 8), nn.Bilinear(8, 8, 8)
        self.read = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)
        self.head, self.last = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 8))

    def forward(self, x):
        words = self.words(x)
        read = self.read(self.both(words, words))[0]
        return torch.einsum("btc,cd->btd", self.head(read), self.last)


def test_clika_explain_unsupported_layers_float_with_macs():
    """Layers without INT8 kernels are listed as float with their MACs, despite INT8 moves after them."""
    data = [torch.randint(0, 20, (4, n), generator=torch.Generator().manual_seed(n)) for n in (7, 9, 8)]
    module = clika_compile(
        Mixed().eval(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    found = module.clika_explain()
    rows = {n.operator: n for n in found.nodes if n.macs}
    assert {kind: (n.planned, n.runs) for kind, n in rows.items()} == {
        **dict.fromkeys(("lstm", "bilinear", "einsum"), ("float", "float")),
        "linear": ("int8", "int8"),
    }
    assert all(rows[kind].reason == f"the target computes {kind} in float" for kind in ("bilinear", "einsum"))
    assert rows["lstm"].reason.startswith("INT8 is not faster for")
    assert found.share() == found.share(planned=True) == rows["linear"].macs / sum(n.macs for n in found.nodes)


def test_clika_explain_fused_float_layer_listed_as_float():
    """A float layer that the runtime fuses is listed as float."""
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    module = clika_compile(
        net.eval(), tracing_inputs=[torch.randn(4, 16)], deployment_settings=DeploymentSettings_ONNXRuntime_ONNX()
    )
    found = module.clika_explain()
    assert [(n.operator, n.runs) for n in found.nodes] == [("linear", "float"), ("relu", "fused"), ("linear", "float")]
