"""Architectures of diffusers, with tiny configurations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.breadth.architecture import BATCHES, Architecture, MakeInputs

LATENTS = ((1, 8, 8), (2, 16, 24)), (3, 24, 16)
PROMPTED = ((1, 8, 8, 7), (2, 16, 24, 11)), (3, 24, 16, 9)
"""Sizes of latent images, and the length of a prompt."""

BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")


def _build(name: str, **options: Any) -> nn.Module:
    import diffusers  # noqa: PLC0415 - only the process of an entry needs it

    return getattr(diffusers, name)(**options)


def _make_times(batch: int) -> Tensor:
    return torch.linspace(10, 900, batch)


def _make_samples(batch: int, height: int, width: int) -> dict[str, Tensor]:
    return {"sample": torch.randn(batch, 4, height, width), "timestep": _make_times(batch)}


def _make_prompted(batch: int, height: int, width: int, length: int) -> dict[str, Tensor]:
    return {**_make_samples(batch, height, width), "encoder_hidden_states": torch.randn(batch, length, 8)}


def _make_controlled(batch: int, height: int, width: int, length: int) -> dict[str, Tensor]:
    cond = torch.rand(batch, 3, 8 * height, 8 * width)
    return {**_make_prompted(batch, height, width, length), "controlnet_cond": cond}


def _make_pictures(batch: int, height: int, width: int) -> dict[str, Tensor]:
    return {"sample": torch.rand(batch, 3, 4 * height, 4 * width)}


def _make_labels(batch: int) -> dict[str, Tensor]:
    latents = torch.randn(batch, 4, 8, 8)
    return {"hidden_states": latents, "timestep": _make_times(batch).long(), "class_labels": torch.arange(batch)}


def _make_sd3_inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(batch, 4, 8, 8),
        "timestep": _make_times(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
        "pooled_projections": torch.randn(batch, 16),
    }


def _make_flux_inputs(batch: int, patches: int, length: int) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(batch, patches, 4),
        "timestep": _make_times(batch) / 1000,
        "encoder_hidden_states": torch.randn(batch, length, 16),
        "pooled_projections": torch.randn(batch, 16),
        "img_ids": torch.randint(0, 9, (patches, 3)).float(),
        "txt_ids": torch.zeros(length, 3),
    }


def _make_pixart_inputs(batch: int, length: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, 8, 8),
        "timestep": _make_times(batch),
        "encoder_hidden_states": torch.randn(batch, length, 16),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


CODERS: Mapping[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    **BLOCKS,
}
ATTENTION: Mapping[str, Any] = {"cross_attention_dim": 8, "attention_head_dim": 2, **BLOCKS}
HEADS: Mapping[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
JOINT: Mapping[str, Any] = {"joint_attention_dim": 16, "pooled_projection_dim": 16, "in_channels": 4}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "UNet2DModel": {
        **BLOCKS,
        "in_channels": 4,
        "out_channels": 4,
        "attention_head_dim": 4,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "UNet2DConditionModel": {**ATTENTION, "down_block_types": DOWN, "up_block_types": UP},
    "ControlNetModel": {
        **ATTENTION,
        "down_block_types": DOWN,
        "conditioning_embedding_out_channels": (4, 4, 8, 8),
    },
    "AutoencoderKL": CODERS,
    "VQModel": {**CODERS, "latent_channels": 3},
    "AutoencoderTiny": {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
    "DiTTransformer2DModel": {**HEADS, "sample_size": 8, "num_embeds_ada_norm": 10},
    "SD3Transformer2DModel": {
        **HEADS,
        **JOINT,
        "sample_size": 8,
        "patch_size": 2,
        "caption_projection_dim": 16,
        "out_channels": 4,
    },
    "FluxTransformer2DModel": {**HEADS, **JOINT, "num_single_layers": 1, "axes_dims_rope": (2, 2, 4)},
    "PixArtTransformer2DModel": {
        **HEADS,
        "sample_size": 8,
        "cross_attention_dim": 16,
        "caption_channels": 16,
        "out_channels": 4,
        "use_additional_conditions": False,
    },
}
"""Options of each class."""

BATCH_AND_LENGTH = ((1, 7), (2, 11)), (3, 9)
LATENT_SIZES, PROMPTED_SIZES = "batch, height, width", "batch, height, width, length"

INPUTS: Mapping[str, tuple[MakeInputs, Any, str]] = {
    "UNet2DModel": (_make_samples, LATENTS, LATENT_SIZES),
    "UNet2DConditionModel": (_make_prompted, PROMPTED, PROMPTED_SIZES),
    "ControlNetModel": (_make_controlled, PROMPTED, PROMPTED_SIZES),
    "AutoencoderKL": (_make_pictures, LATENTS, LATENT_SIZES),
    "VQModel": (_make_pictures, LATENTS, LATENT_SIZES),
    "AutoencoderTiny": (_make_pictures, LATENTS, LATENT_SIZES),
    "DiTTransformer2DModel": (_make_labels, BATCHES, "batch"),
    "SD3Transformer2DModel": (_make_sd3_inputs, BATCH_AND_LENGTH, "batch, length"),
    "FluxTransformer2DModel": (_make_flux_inputs, (((1, 16, 7), (2, 24, 11)), (3, 20, 9)), "batch, patches, length"),
    "PixArtTransformer2DModel": (_make_pixart_inputs, BATCH_AND_LENGTH, "batch, length"),
}
"""Functions that make inputs, with the sizes that are dynamic."""


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    return {
        name: Architecture(functools.partial(_build, name, **options), *INPUTS[name])
        for name, options in OPTIONS.items()
    }
