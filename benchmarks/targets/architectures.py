"""Twenty architectures of torchvision and transformers with random weights, small enough to calibrate in seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.models import VOCABULARY, Model, make_transformer, make_vision_model

# isort: split
import torch

Inputs = dict[str, torch.Tensor]

LENGTH, IMAGE_SIZE = 32, 64

WIDTH = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
TEXT = {**WIDTH, "vocab_size": VOCABULARY}
DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
PATCHES = {**WIDTH, "image_size": IMAGE_SIZE, "patch_size": 16}


def _make_tokens(batch: int) -> Inputs:
    ids = torch.randint(3, VOCABULARY, (batch, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones(batch, LENGTH, dtype=torch.int64)}


def _make_pixels(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE)}


ARCHITECTURES: dict[str, Callable[[], Model]] = {
    **{
        name: partial(make_vision_model, name)
        for name in (
            "resnet18",
            "mobilenet_v3_large",
            "vit_b_16",
            "swin_t",
            "densenet121",
            "efficientnet_b0",
            "regnet_y_400mf",
            "shufflenet_v2_x1_0",
            "convnext_tiny",
            "squeezenet1_1",
        )
    },
    "bert": partial(make_transformer, "BertModel", _make_tokens, **TEXT),
    "distilbert": partial(
        make_transformer, "DistilBertModel", _make_tokens,
        vocab_size=VOCABULARY, dim=128, n_layers=3, n_heads=4, hidden_dim=512,
    ),
    "electra": partial(make_transformer, "ElectraModel", _make_tokens, embedding_size=128, **TEXT),
    "gpt2": partial(
        make_transformer, "GPT2LMHeadModel", _make_tokens,
        vocab_size=VOCABULARY, n_embd=128, n_layer=3, n_head=4, use_cache=False,
    ),
    "llama": partial(make_transformer, "LlamaForCausalLM", _make_tokens, **DECODER),
    "qwen2": partial(make_transformer, "Qwen2ForCausalLM", _make_tokens, **DECODER),
    "vit": partial(make_transformer, "ViTModel", _make_pixels, **PATCHES),
    "deit": partial(make_transformer, "DeiTModel", _make_pixels, **PATCHES),
    "dinov2": partial(make_transformer, "Dinov2Model", _make_pixels, **PATCHES),
    "clip_vision": partial(make_transformer, "CLIPVisionModel", _make_pixels, **PATCHES),
}  # fmt: skip
"""Models by name, built on demand."""
