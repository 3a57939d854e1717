"""Float layers read the float version of activations that others read quantized, as TensorRT requires."""

import onnx
import pytest
import torch
from clika_ref_tensorrt.rules import find_violations
from torch import nn
from torch.nn import functional as F

from clika_ref import (
    ClikaModule,
    DeploymentSettings_TensorRT_ONNX,
    LayerQuantizationSettings,
    QuantizationSettings,
    clika_compile,
)


class SharedInput(nn.Module):
    """Layers that read one activation, one of them after a permute; and a product of two activations."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.query, self.key, self.turned = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(6, 8)

    def forward(self, x):
        x = self.first(x).relu()
        mixed = F.scaled_dot_product_attention(x, x, x)
        return self.query(x), self.key(x), self.turned(x.transpose(1, 2)), mixed, x @ x.transpose(1, 2)


class ConcatWithInput(nn.Module):
    """Concatenates input and output of a layer: quantized if a layer reads the result, otherwise float."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 8, 1)
        self.three, self.four = (nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = self.one(x).relu()
        whole = torch.cat([y, self.three(y).relu()], 1)
        z = self.two(whole).relu()
        return self.head(whole + torch.cat([z, self.four(z).relu()], 1))


def make_batches(*sides):
    return [torch.randn(4, *sides, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def quantize_model(model, data, **settings):
    return clika_compile(
        model.eval(),
        tracing_inputs=data[:1],
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
        **settings,
    ).eval()


def load_eval_copy(module):
    empty = ClikaModule()
    empty.load_state_dict(module.state_dict())
    return empty.eval()


@pytest.mark.parametrize("skipped", ["query", "turned"])
def test_clika_export_skipped_layer_reads_float(skipped, tmp_path):
    """A skipped layer and a product of computed tensors read floats."""
    torch.manual_seed(0)
    data = make_batches(6, 8)
    only = {skipped: LayerQuantizationSettings(skip_quantization=True)}
    module = quantize_model(SharedInput(), data, layer_quantization_settings=only)
    artifact = module.clika_export(tmp_path / "net.onnx")  # which compares it with the module
    assert find_violations(onnx.load(artifact.path)) == []
    for twin in (module, load_eval_copy(module)):
        wanted = twin(data[0])
        torch.testing.assert_close(twin.train()(data[0]), wanted)  # whose fakes read the same
        assert all(torch.equal(a, b) for a, b in zip(twin.eval()(data[0]), wanted, strict=True))


def test_clika_export_float_concat_reads_float(tmp_path):
    """A concatenation in float reads floats."""
    torch.manual_seed(0)
    module = quantize_model(ConcatWithInput(), make_batches(3, 8, 8))
    artifact = module.clika_export(tmp_path / "net.onnx")
    model = onnx.load(artifact.path)
    assert find_violations(model) == []
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    read = [[makers[name] for name in node.input] for node in model.graph.node if node.op_type == "Concat"]
    assert read == [["DequantizeLinear"] * 2, ["Relu"] * 2]


def test_clika_export_experts_stay_float_and_counted(tmp_path):
    """Experts are float layers that read floats, and their MACs are counted."""
    torch.manual_seed(0)
    rows, chosen, width, inner = 4 * 8, 2, 32, 64
    transformers = pytest.importorskip("transformers", reason="`make lowest` does not install it")
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=50, hidden_size=width, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=chosen, use_cache=False,
        )
    )  # fmt: skip
    data = [{"input_ids": torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(i))} for i in range(4)]
    module = quantize_model(model, data)
    artifact = module.clika_export(tmp_path / "net.onnx")
    assert find_violations(onnx.load(artifact.path)) == []
    explained = module.clika_explain()
    experts = [node for node in explained.nodes if node.operator == "grouped_mm"]
    assert [node.macs for node in experts] == [rows * chosen * width * 2 * inner, rows * chosen * inner * width]
    assert {node.planned for node in experts} == {"float"}
    rest = sum(node.macs for node in explained.nodes if node not in experts)
    share = rest / (rest + sum(node.macs for node in experts))
    assert explained.share() == explained.share(planned=True) == share
