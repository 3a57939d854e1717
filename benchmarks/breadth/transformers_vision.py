"""Vision models of transformers, and models of images with text."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.breadth.architecture import BATCHES, IMAGES, LARGE_IMAGES, TEXT_LENGTHS, Architecture, make_text
from benchmarks.breadth.tiny_configurations import build_tiny
from benchmarks.breadth.transformers_text import Options

SWIN = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 2, "patch_size": 4}
FOUR_STAGES = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
TWO_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {
    **VISION,
    "vocab_size": 100,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 32,
}
DINO = {
    "model_type": "dinov2",
    **VISION,
    "num_hidden_layers": 4,
    "image_size": 32,
    "patch_size": 8,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
    "apply_layernorm": True,
}
IMAGE = {"image_size": 32, "patch_size": 8}

ENCODERS: Options = {
    **{key: {} for key in ("BeitModel", "CLIPVisionModel", "Data2VecVisionModel", "DeiTModel", "Dinov2Model")},
    **{key: {} for key in ("Dinov2WithRegistersModel", "IJepaModel", "SiglipVisionModel", "ViTMAEModel", "ViTModel")},
    **{key: {} for key in ("ViTMSNModel", "YolosModel", "PvtModel")},
    "CvtModel": {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "DPTForDepthEstimation": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
    },
    "EfficientNetModel": {"hidden_dim": 2560},
    "FocalNetModel": {"embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]},
    "LevitModel": {
        "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [2, 4, 6],
        "depths": [1, 1, 1],
        "image_size": 64,
        "patch_size": 16,
    },
    "MobileViTModel": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 16, 16, 24, 24, 32, 32]},
    "Swin2SRForImageSuperResolution": {**SWIN, "patch_size": 1},
    "Swinv2Model": SWIN,
}
"""Networks for images of one size: only the batch is dynamic."""

RESIDUAL = {
    "model_type": "rt_detr_resnet",
    "embedding_size": 8,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
RESIDUAL_CHANNELS = {
    "encoder_in_channels": [32, 48, 64],
    "encoder_hidden_dim": 32,
    "decoder_in_channels": [32, 32, 32],
    "encoder_ffn_dim": 64,
    "encoder_layers": 1,
}
"""A residual network of one block in each stage, and the widths of the layers that follow it."""

NETWORKS: Options = {
    **{key: {**TWO_STAGES, "num_stages": 2} for key in ("ConvNextModel", "ConvNextV2Model")},
    "DINOv3ViTModel": {},
    "DetrForObjectDetection": {"num_queries": 8},
    "DeformableDetrForObjectDetection": {"num_queries": 8},
    "DepthAnythingForDepthEstimation": {
        "backbone_config": DINO,
        "patch_size": 8,
        "reassemble_hidden_size": 32,
        "fusion_hidden_size": 8,
        "neck_hidden_sizes": [8, 8, 8, 8],
    },
    "GLPNForDepthEstimation": {**FOUR_STAGES, "decoder_hidden_size": 16, "num_attention_heads": [1, 2, 2, 4]},
    "MobileNetV2Model": {},
    "PoolFormerModel": FOUR_STAGES,
    # With the default range, the scores of all queries are equal up to rounding, and any of them is a largest one.
    **{
        key: {"num_queries": 8, "initializer_range": 0.1, "backbone_config": RESIDUAL, **RESIDUAL_CHANNELS}
        for key in ("RTDetrForObjectDetection", "RTDetrV2ForObjectDetection")
    },
    "RegNetModel": TWO_STAGES,
    "ResNetModel": TWO_STAGES,
    "SegformerForSemanticSegmentation": {**FOUR_STAGES, "decoder_hidden_size": 16, "num_attention_heads": [1, 2, 2, 4]},
    "SwinModel": SWIN,
    "UperNetForSemanticSegmentation": {},
}
"""Networks with dynamic height and width."""


def _make_pixels(batch: int, height: int = 32, width: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, height, width)}


def _make_videos(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 4, 3, 32, 32)}


def _make_captions(batch: int, length: int) -> dict[str, Tensor]:
    return {**make_text(batch, length), **_make_pixels(batch)}


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""

    def of_pixels(name: str, options: Mapping[str, Any], size: int = 32) -> Architecture:
        inputs = functools.partial(_make_pixels, height=size, width=size)
        return Architecture(functools.partial(build_tiny, name, **options), inputs, BATCHES, "batch")

    def of_captions(name: str, **options: Any) -> Architecture:
        build = functools.partial(build_tiny, name, **options)
        return Architecture(build, _make_captions, TEXT_LENGTHS, "batch, length")

    pair = {"text_config": TEXT, "vision_config": {**VISION, **IMAGE}}
    sizes = {"LevitModel": 64, "MobileViTModel": 64, "EfficientNetModel": 64}
    return {
        **{name: of_pixels(name, options, sizes.get(name, 32)) for name, options in ENCODERS.items()},
        "PixtralVisionModel": of_pixels("PixtralVisionModel", {"head_dim": 8}),
        **{
            name: Architecture(
                functools.partial(build_tiny, name, **options),
                _make_pixels,
                LARGE_IMAGES if "Detr" in name else IMAGES,
                "batch, height, width",
            )
            for name, options in NETWORKS.items()
        },
        **{
            name: Architecture(functools.partial(build_tiny, name, num_frames=4), _make_videos, BATCHES, "batch")
            for name in ("VideoMAEModel", "TimesformerModel")
        },
        "BlipModel": of_captions("BlipModel", **pair),
        "CLIPModel": of_captions("CLIPModel", **pair, projection_dim=16),
        "SiglipModel": of_captions("SiglipModel", **pair),
        "ViltModel": of_captions("ViltModel"),
        "GroupViTModel": of_captions(
            "GroupViTModel",
            text_config=TEXT,
            vision_config={
                **VISION,
                **IMAGE,
                "depths": [1, 1, 1],
                "num_group_tokens": [4, 2, 0],
                "num_output_groups": [4, 2, 0],
            },
        ),
    }
