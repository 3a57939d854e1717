"""Whole architectures of torchvision and transformers: module and artifact agree with eager, static and dynamic.

The bound is `clika_ref.core.comparison.MAX_ROUNDINGS` float32 roundings of the largest element of each result; its
origin is written there. ONNX Runtime, which adds in another order, is held to it as well: these networks stay below 20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
import transformers
from clika_ref_onnxruntime.target import OnnxRuntime
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision.models.convnext import CNBlockConfig

from clika_ref import clika_compile
from clika_ref.core.comparison import describe_differences

Inputs = dict[str, Tensor]

WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**WIDTH, "vocab_size": 100}
DECODER = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False}
UNCACHED = {"vocab_size": 100, "use_cache": False}
PATCHES = {**WIDTH, "image_size": 32, "patch_size": 8}
STACKS = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "eos_token_id"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 1),
    "d_model": 32,
    "vocab_size": 100,
    "use_cache": False,
}


@dataclass(frozen=True)
class Architecture:
    """A model with random weights, its inputs for some sizes, two lists of sizes to trace, and sizes never traced."""

    build: Callable[[], nn.Module]
    inputs: Callable[..., Inputs]
    traced: tuple[tuple[int, ...], tuple[int, ...]]
    unseen: tuple[int, ...]


# Inputs


def image(batch: int, height: int = 32, width: int = 32) -> Inputs:
    return {"x": torch.randn(batch, 3, height, width)}


def scene(batch: int, height: int = 32, width: int = 32) -> Inputs:
    return {"input": torch.randn(batch, 3, height, width)}


def pixels(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 90, (batch, length))


def masked(batch: int, length: int) -> Inputs:
    """Text of which the first row ends early."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": tokens(batch, length), "attention_mask": mask}


def translated(batch: int, length: int, output: int) -> Inputs:
    return {**masked(batch, length), "decoder_input_ids": tokens(batch, output)}


def captioned(batch: int, length: int) -> Inputs:
    return {**masked(batch, length), **pixels(batch)}


def spoken(batch: int, output: int) -> Inputs:
    return {"input_features": torch.randn(batch, 8, 32), "decoder_input_ids": tokens(batch, output)}


def heard(batch: int, length: int) -> Inputs:
    return {"input_values": torch.randn(batch, length)}


# Models


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=10, **options)


def text(name: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name + head)(getattr(transformers, name + "Config")(**options))


def densenet() -> nn.Module:
    return torchvision.models.DenseNet(growth_rate=8, block_config=(2, 2, 2), num_init_features=16, num_classes=10)


def convnext() -> nn.Module:
    stages = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 48, 1), CNBlockConfig(48, None, 2)]
    return torchvision.models.ConvNeXt(stages, num_classes=10)


def transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)


def swin() -> nn.Module:
    return torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10)


def segmentation() -> nn.Module:
    return torchvision.models.get_model("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3)


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4))


SPACE, SPACE_UNSEEN = ((1, 64, 64), (2, 96, 128)), (3, 128, 96)
BATCH, BATCH_UNSEEN = ((1,), (2,)), (3,)
LENGTH, LENGTH_UNSEEN = ((1, 8), (2, 17)), (3, 11)

TORCHVISION = {
    "resnet18": Architecture(vision("resnet18"), image, SPACE, SPACE_UNSEEN),
    "mobilenet_v3_small": Architecture(vision("mobilenet_v3_small"), image, SPACE, SPACE_UNSEEN),
    "shufflenet_v2_x0_5": Architecture(vision("shufflenet_v2_x0_5"), image, SPACE, SPACE_UNSEEN),
    "regnet_y_400mf": Architecture(vision("regnet_y_400mf"), image, SPACE, SPACE_UNSEEN),
    "squeezenet1_1": Architecture(vision("squeezenet1_1"), image, SPACE, SPACE_UNSEEN),
    "densenet": Architecture(densenet, image, SPACE, SPACE_UNSEEN),
    "convnext": Architecture(convnext, image, SPACE, SPACE_UNSEEN),
    "lraspp": Architecture(segmentation, scene, SPACE, SPACE_UNSEEN),
    "vision transformer": Architecture(transformer, image, BATCH, BATCH_UNSEEN),
    "swin": Architecture(swin, image, BATCH, BATCH_UNSEEN),
}

TRANSFORMERS = {
    "BERT": Architecture(text("Bert", "Model", **TEXT), masked, LENGTH, LENGTH_UNSEEN),
    "Llama": Architecture(text("Llama", "ForCausalLM", **DECODER), masked, LENGTH, LENGTH_UNSEEN),
    "GPT-2": Architecture(
        text("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, **UNCACHED),
        masked,
        LENGTH,
        LENGTH_UNSEEN,
    ),
    "T5": Architecture(
        text("T5", "ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **UNCACHED),
        translated,
        ((1, 8, 5), (2, 17, 9)),
        (3, 11, 7),
    ),
    "BART": Architecture(
        text("Bart", "ForConditionalGeneration", **STACKS), translated, ((1, 8, 5), (2, 17, 9)), (3, 11, 7)
    ),
    "ViT": Architecture(text("ViT", "Model", **PATCHES), pixels, BATCH, BATCH_UNSEEN),
    "CLIP": Architecture(
        text("CLIP", "Model", text_config={**TEXT, "eos_token_id": 99}, vision_config=PATCHES, projection_dim=16),
        captioned,
        LENGTH,
        LENGTH_UNSEEN,
    ),
    "Whisper": Architecture(
        text("Whisper", "ForConditionalGeneration", **STACKS, num_mel_bins=8, max_source_positions=16),
        spoken,
        ((1, 6), (2, 9)),
        (3, 7),
    ),
    "Wav2Vec2": Architecture(
        text(
            "Wav2Vec2",
            "Model",
            **WIDTH,
            conv_dim=[16, 16],
            conv_stride=[5, 2],
            conv_kernel=[10, 3],
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            num_feat_extract_layers=2,
        ),
        heard,
        ((1, 800), (2, 1200)),
        (3, 1010),
    ),
    "Mixtral": Architecture(mixtral, masked, LENGTH, LENGTH_UNSEEN),
}

ARCHITECTURES = {**TORCHVISION, **TRANSFORMERS}


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def agrees(architecture: Architecture, traced: list[tuple[int, ...]], unseen: tuple[int, ...], path: Any) -> None:
    torch.manual_seed(0)
    model = architecture.build().eval()
    inputs = [architecture.inputs(*sizes) for sizes in traced]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    artifact = module.clika_export(path)
    given = architecture.inputs(*unseen)
    with torch.no_grad():
        expected, actual = model(**given), module(**given)
    assert type(actual) is type(expected)
    assert describe_differences(tensors(expected), tensors(actual)) == {}
    found = OnnxRuntime().load(artifact)([given[name] for name in artifact.input_names])
    assert describe_differences(tensors(expected), found) == {}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_clika_compile_architecture_static_matches_eager(name, tmp_path):
    """Each architecture with static dims matches eager, as a module and as an ONNX artifact."""
    architecture = ARCHITECTURES[name]
    agrees(architecture, [architecture.traced[0]], architecture.traced[0], tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_clika_compile_architecture_unseen_size_matches_eager(name, tmp_path):
    """Each architecture with dynamic dims matches eager at a size that was not traced."""
    architecture = ARCHITECTURES[name]
    agrees(architecture, list(architecture.traced), architecture.unseen, tmp_path / "model.onnx")


def test_architectures_each_library_lists_ten():
    """The tables list ten architectures of torchvision and ten of transformers."""
    assert (len(TORCHVISION), len(TRANSFORMERS)) == (10, 10)
