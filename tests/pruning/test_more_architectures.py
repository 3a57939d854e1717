"""Further whole models: the pruned part is exported, and the kept part has its reason."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.shufflenetv2 import ShuffleNetV2
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from clika_ref import PruningSettings, clika_compile


class UNet(nn.Module):
    """A small U-Net: concatenates early activations with the results of transposed convolutions."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.norm = norm
        self.down, self.deep, self.up = self.block(3, 16), self.block(16, 32), nn.ConvTranspose2d(32, 16, 2, 2)
        self.joined, self.head = self.block(32, 16), nn.Conv2d(16, 2, 1)

    def block(self, given, made):
        return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), self.norm(made), nn.ReLU())

    def forward(self, x):
        kept = self.down(x)
        return self.head(self.joined(torch.cat([self.up(self.deep(F.max_pool2d(kept, 2))), kept], 1)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.lstm, self.head = nn.Linear(8, 16), nn.LSTM(16, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.lstm(self.wide(x).relu())[0])


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


def build_llama(attention):
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=128,
        attn_implementation=attention,
    )
    return Logits(LlamaForCausalLM(config))


def build_gpt2():
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return Logits(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=64, n_layer=1, n_head=4, n_positions=32, **ends)))


IMAGES, TOKENS, SEQUENCES = ((3, 32, 32), None), ((8,), 50), ((5, 8), None)
RETURNED = "the model returns"

MODELS = {
    "resnet": (lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), IMAGES, 0.3, {}),
    "unet": (UNet, IMAGES, 0.3, {}),
    "unet with group norm": (
        lambda: UNet(lambda channels: nn.GroupNorm(4, channels)),
        IMAGES,
        0.95,
        dict.fromkeys(("down.0", "deep.0"), r"group_norm.* combines elements along dim 1") | {"head": RETURNED},
    ),
    "shufflenet": (
        lambda: ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], num_classes=10),
        IMAGES,
        0.6,
        dict.fromkeys(("stage3.0.branch1.0", "stage4.0.branch1.0"), "divided differently"),
    ),
    "llama": (lambda: build_llama("sdpa"), TOKENS, 0.6, {"model.lm_head": RETURNED}),
    "llama with a softmax of its own": (lambda: build_llama("eager"), TOKENS, 0.6, {"model.lm_head": RETURNED}),
    "gpt2": (build_gpt2, TOKENS, 1, {"model.lm_head": r"embedding.* selects from dim 0 of its operand .* by data"}),
    "lstm": (Recurrent, SEQUENCES, 1, {"wide": "lstm.* combines elements along", "head": RETURNED}),
}
"""By name: the model, the shape of a sample and the number of tokens, where it is of these, which share of MACs stays
at most, and which layers stay, for what reason."""


def draw_inputs(shape, tokens):
    sizes = [(2, *shape), (3, *shape)]
    return [torch.randn(s) if tokens is None else torch.randint(0, tokens, s) for s in sizes]


@pytest.mark.slow_cases("shufflenet", "llama with a softmax of its own")
@pytest.mark.parametrize("name", MODELS)
def test_clika_prune_architecture_reports_unpruned_layers(name, tmp_path):
    """Further architectures are pruned and exported, and each unpruned layer has its reason."""
    torch.manual_seed(0)
    build, sample, most, reasons = MODELS[name]
    data = draw_inputs(*sample)
    module = clika_compile(build().eval(), calibration_inputs=data)
    found = module.clika_prune(PruningSettings("structured", None, 0.5), calibration_inputs=data)
    stays = {layer.scope: layer.decision for layer in found.layers if layer.before == layer.after}
    assert stays.keys() == reasons.keys()
    assert all(re.search(reasons[scope], text) for scope, text in stays.items())
    assert found.macs_after <= most * found.macs_before
    module.clika_export(tmp_path / "after.onnx")  # compared in ONNX Runtime
