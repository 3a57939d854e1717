"""Twenty architectures, of torchvision and of transformers: random weights, in sizes that calibrate in seconds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import conftest  # noqa: F401 - lets torchvision and transformers import with a torch without CUDA, so it comes first

# isort: split
import torch
import torchvision
import transformers

Inputs = dict[str, torch.Tensor]

VOCABULARY, LENGTH, IMAGE_SIZE = 1000, 32, 64

WIDTH = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
TEXT = {**WIDTH, "vocab_size": VOCABULARY}
DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
PATCHES = {**WIDTH, "image_size": IMAGE_SIZE, "patch_size": 16}


@dataclass(frozen=True)
class Architecture:
    """A model, and the arguments of a call with a given batch size."""

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int], Inputs]


def _vision(name: str, size: int = 224) -> Architecture:
    build = getattr(torchvision.models, name)
    (argument,) = inspect.signature(build().forward).parameters
    return Architecture(lambda: build(weights=None), lambda batch: {argument: torch.randn(batch, 3, size, size)})


def _tokens(batch: int) -> Inputs:
    ids = torch.randint(3, VOCABULARY, (batch, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones(batch, LENGTH, dtype=torch.int64)}


def _pixels(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE)}


def _make_architecture(model: str, config: str, inputs: Callable[[int], Inputs], **sizes: Any) -> Architecture:
    chosen = getattr(transformers, config)(**sizes)
    return Architecture(lambda: getattr(transformers, model)(chosen), inputs)


def _declare(build: Callable[..., Architecture], *arguments: Any, **sizes: Any) -> Callable[[], Architecture]:
    return lambda: build(*arguments, **sizes)


ARCHITECTURES: dict[str, Callable[[], Architecture]] = {
    **{
        name: _declare(_vision, name)
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
    "bert": _declare(_make_architecture, "BertModel", "BertConfig", _tokens, **TEXT),
    "distilbert": _declare(
        _make_architecture, "DistilBertModel", "DistilBertConfig", _tokens,
        vocab_size=VOCABULARY, dim=128, n_layers=3, n_heads=4, hidden_dim=512,
    ),
    "electra": _declare(_make_architecture, "ElectraModel", "ElectraConfig", _tokens, embedding_size=128, **TEXT),
    "gpt2": _declare(
        _make_architecture, "GPT2LMHeadModel", "GPT2Config", _tokens,
        vocab_size=VOCABULARY, n_embd=128, n_layer=3, n_head=4, use_cache=False,
    ),
    "llama": _declare(_make_architecture, "LlamaForCausalLM", "LlamaConfig", _tokens, **DECODER),
    "qwen2": _declare(_make_architecture, "Qwen2ForCausalLM", "Qwen2Config", _tokens, **DECODER),
    "vit": _declare(_make_architecture, "ViTModel", "ViTConfig", _pixels, **PATCHES),
    "deit": _declare(_make_architecture, "DeiTModel", "DeiTConfig", _pixels, **PATCHES),
    "dinov2": _declare(_make_architecture, "Dinov2Model", "Dinov2Config", _pixels, **PATCHES),
    "clip_vision": _declare(_make_architecture, "CLIPVisionModel", "CLIPVisionConfig", _pixels, **PATCHES),
}  # fmt: skip
"""By name; each is made on demand."""
