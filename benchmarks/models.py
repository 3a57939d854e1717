"""The models of the benchmarks, with random weights, so that nothing is downloaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import conftest  # noqa: F401 - first, so that torchvision and transformers import with a torch without CUDA

# isort: split
import torch
import torchvision

VOCABULARY = 1000


@dataclass(frozen=True)
class Model:
    """A model, and the keyword arguments of a call with a given batch size."""

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]

    def make(self) -> torch.nn.Module:
        """Return a new instance in eval mode, with the same weights each time."""
        torch.manual_seed(0)
        return self.build().eval()


class Encoder(torch.nn.Module):
    """A transformer encoder with four heads."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[n, length, width]`` for sequences ``x[n, length, width]``."""
        return self.encoder(x)


def make_vision_model(name: str) -> Model:
    """Return a model of torchvision."""
    build = getattr(torchvision.models, name)
    (argument,) = inspect.signature(build().forward).parameters
    return Model(lambda: build(weights=None), lambda batch: {argument: torch.randn(batch, 3, 224, 224)})


def make_tokens(batch: int) -> dict[str, torch.Tensor]:
    """Return ``batch`` sequences of 32 tokens."""
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, 32)), "attention_mask": torch.ones(batch, 32).long()}


def make_transformer(
    architecture: str, inputs: Callable[[int], dict[str, torch.Tensor]] = make_tokens, **sizes: Any
) -> Model:
    """Return a model of transformers with the given sizes in its configuration."""
    import transformers  # noqa: PLC0415 - it loads parts of torch that exports of other models load themselves

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**sizes)
    return Model(lambda: model_class(config), inputs)


TEXT_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}


MODELS: dict[str, Callable[[], Model]] = {
    **{
        name: (lambda name=name: make_vision_model(name))
        for name in ("resnet18", "mobilenet_v3_large", "vit_b_16", "swin_t", "densenet121", "maxvit_t")
    },
    "bert": lambda: make_transformer("BertModel", vocab_size=VOCABULARY, **TEXT_SIZES),
    "llama": lambda: make_transformer(
        "LlamaForCausalLM", vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **TEXT_SIZES
    ),
    "gpt2": lambda: make_transformer(
        "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, use_cache=False
    ),
}
"""Models by name, built on demand so that only the measured one costs memory."""
