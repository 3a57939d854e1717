"""Build models of transformers with tiny configurations: widths and depths that each configuration has are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

LAYERS, HEADS, WIDTH, INNER_WIDTH = 2, 4, 32, 64

TINY: Mapping[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), INNER_WIDTH),
    **dict.fromkeys(("hidden_dim", "d_inner", "n_inner", "dff"), INNER_WIDTH),
    **dict.fromkeys(("d_kv", "head_dim"), WIDTH // HEADS),
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "vocab_size": 100,
    "embedding_size": 16,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "image_size": 32,
    "patch_size": 8,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
    "use_cache": False,
}
"""Attributes of a tiny configuration: each replaces an integer, a flag or None in configurations that have it."""


def build_tiny(name: str, **own: Any) -> nn.Module:
    """Return a model of transformers with random weights.

    Args:
        name: the name of its class.
        own: attributes of its configuration that the tiny ones do not cover; a dict for a nested configuration.
    """
    import transformers  # noqa: PLC0415 - only the process of an entry needs it

    model_class = getattr(transformers, name)
    configuration = model_class.config_class
    default = configuration()
    tiny = {
        key: value
        for key, value in TINY.items()
        if isinstance(getattr(default, key, ""), int | None)
        and not isinstance(getattr(configuration, key, 0), property)
    }
    return model_class(configuration(**{**tiny, **own}))
