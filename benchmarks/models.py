"""The models that are measured: random weights, no download."""

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

VOCABULARY = 1000


@dataclass(frozen=True)
class Model:
    """A model, and the keyword arguments of a call with a given batch."""

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]

    def make(self) -> torch.nn.Module:
        """Return a new instance, the same each time."""
        torch.manual_seed(0)
        return self.build().eval()


def _vision(name: str) -> Model:
    build = getattr(torchvision.models, name)
    (argument,) = (n for n in inspect.signature(build().forward).parameters)
    return Model(lambda: build(weights=None), lambda batch: {argument: torch.randn(batch, 3, 224, 224)})


def _tokens(batch: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, 32)), "attention_mask": torch.ones(batch, 32).long()}


def _language(architecture: str, config: str, **sizes: Any) -> Model:
    chosen = getattr(transformers, config)(vocab_size=VOCABULARY, **sizes)
    return Model(lambda: getattr(transformers, architecture)(chosen), _tokens)


MODELS: dict[str, Callable[[], Model]] = {
    **{
        name: (lambda name=name: _vision(name))
        for name in ("resnet18", "mobilenet_v3_large", "vit_b_16", "swin_t", "densenet121", "maxvit_t")
    },
    "bert": lambda: _language(
        "BertModel", "BertConfig", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
    ),
    "llama": lambda: _language(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        use_cache=False,
    ),
    "gpt2": lambda: _language("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=4, n_head=4, use_cache=False),
}
"""Each made on demand: only the one that is measured costs memory."""
