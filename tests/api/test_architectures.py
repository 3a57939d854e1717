"""Whole architectures of torchvision and transformers: module and artifact agree with eager, static and dynamic.

The bound is `clika_ref.core.comparison.MAX_ROUNDINGS` float32 roundings of the largest element of each result, derived
there. It applies to ONNX Runtime as well, which sums in another order: these networks stay below 20.
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


def make_image(batch: int, height: int = 32, width: int = 32) -> Inputs:
    return {"x": torch.randn(batch, 3, height, width)}


def make_scene(batch: int, height: int = 32, width: int = 32) -> Inputs:
    return {"input": torch.randn(batch, 3, height, width)}


def make_pixels(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def make_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 90, (batch, length))


def make_masked_text(batch: int, length: int) -> Inputs:
    """Return text with padding at the end of the first row."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": make_tokens(batch, length), "attention_mask": mask}


def make_translation_inputs(batch: int, length: int, output: int) -> Inputs:
    return {**make_masked_text(batch, length), "decoder_input_ids": make_tokens(batch, output)}


def make_caption_inputs(batch: int, length: int) -> Inputs:
    return {**make_masked_text(batch, length), **make_pixels(batch)}


def make_speech_inputs(batch: int, output: int) -> Inputs:
    return {"input_features": torch.randn(batch, 8, 32), "decoder_input_ids": make_tokens(batch, output)}


def make_audio_inputs(batch: int, length: int) -> Inputs:
    return {"input_values": torch.randn(batch, length)}


# Models


def torchvision_builder(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=10, **options)


def transformers_builder(name: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name + head)(getattr(transformers, name + "Config")(**options))


def build_densenet() -> nn.Module:
    return torchvision.models.DenseNet(growth_rate=8, block_config=(2, 2, 2), num_init_features=16, num_classes=10)


def build_convnext() -> nn.Module:
    stages = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 48, 1), CNBlockConfig(48, None, 2)]
    return torchvision.models.ConvNeXt(stages, num_classes=10)


def build_vision_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)


def build_swin() -> nn.Module:
    return torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10)


def build_segmentation() -> nn.Module:
    return torchvision.models.get_model("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3)


def build_mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4))


SPACE, SPACE_UNSEEN = ((1, 64, 64), (2, 96, 128)), (3, 128, 96)
BATCH, BATCH_UNSEEN = ((1,), (2,)), (3,)
LENGTH, LENGTH_UNSEEN = ((1, 8), (2, 17)), (3, 11)

TORCHVISION = {
    "resnet18": Architecture(torchvision_builder("resnet18"), make_image, SPACE, SPACE_UNSEEN),
    "mobilenet_v3_small": Architecture(torchvision_builder("mobilenet_v3_small"), make_image, SPACE, SPACE_UNSEEN),
    "shufflenet_v2_x0_5": Architecture(torchvision_builder("shufflenet_v2_x0_5"), make_image, SPACE, SPACE_UNSEEN),
    "regnet_y_400mf": Architecture(torchvision_builder("regnet_y_400mf"), make_image, SPACE, SPACE_UNSEEN),
    "squeezenet1_1": Architecture(torchvision_builder("squeezenet1_1"), make_image, SPACE, SPACE_UNSEEN),
    "densenet": Architecture(build_densenet, make_image, SPACE, SPACE_UNSEEN),
    "convnext": Architecture(build_convnext, make_image, SPACE, SPACE_UNSEEN),
    "lraspp": Architecture(build_segmentation, make_scene, SPACE, SPACE_UNSEEN),
    "vision transformer": Architecture(build_vision_transformer, make_image, BATCH, BATCH_UNSEEN),
    "swin": Architecture(build_swin, make_image, BATCH, BATCH_UNSEEN),
}

TRANSFORMERS = {
    "BERT": Architecture(transformers_builder("Bert", "Model", **TEXT), make_masked_text, LENGTH, LENGTH_UNSEEN),
    "Llama": Architecture(
        transformers_builder("Llama", "ForCausalLM", **DECODER), make_masked_text, LENGTH, LENGTH_UNSEEN
    ),
    "GPT-2": Architecture(
        transformers_builder("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, **UNCACHED),
        make_masked_text,
        LENGTH,
        LENGTH_UNSEEN,
    ),
    "T5": Architecture(
        transformers_builder(
            "T5", "ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **UNCACHED
        ),
        make_translation_inputs,
        ((1, 8, 5), (2, 17, 9)),
        (3, 11, 7),
    ),
    "BART": Architecture(
        transformers_builder("Bart", "ForConditionalGeneration", **STACKS),
        make_translation_inputs,
        ((1, 8, 5), (2, 17, 9)),
        (3, 11, 7),
    ),
    "ViT": Architecture(transformers_builder("ViT", "Model", **PATCHES), make_pixels, BATCH, BATCH_UNSEEN),
    "CLIP": Architecture(
        transformers_builder(
            "CLIP", "Model", text_config={**TEXT, "eos_token_id": 99}, vision_config=PATCHES, projection_dim=16
        ),
        make_caption_inputs,
        LENGTH,
        LENGTH_UNSEEN,
    ),
    "Whisper": Architecture(
        transformers_builder("Whisper", "ForConditionalGeneration", **STACKS, num_mel_bins=8, max_source_positions=16),
        make_speech_inputs,
        ((1, 6), (2, 9)),
        (3, 7),
    ),
    "Wav2Vec2": Architecture(
        transformers_builder(
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
        make_audio_inputs,
        ((1, 800), (2, 1200)),
        (3, 1010),
    ),
    "Mixtral": Architecture(build_mixtral, make_masked_text, LENGTH, LENGTH_UNSEEN),
}

ARCHITECTURES = {**TORCHVISION, **TRANSFORMERS}


def list_tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def compile_and_compare(
    architecture: Architecture, traced: list[tuple[int, ...]], unseen: tuple[int, ...], path: Any
) -> None:
    torch.manual_seed(0)
    model = architecture.build().eval()
    inputs = [architecture.inputs(*sizes) for sizes in traced]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    artifact = module.clika_export(path)
    given = architecture.inputs(*unseen)
    with torch.no_grad():
        expected, actual = model(**given), module(**given)
    assert type(actual) is type(expected)
    assert describe_differences(list_tensors(expected), list_tensors(actual)) == {}
    found = OnnxRuntime().load(artifact)([given[name] for name in artifact.input_names])
    assert describe_differences(list_tensors(expected), found) == {}


@pytest.mark.slow_cases(
    "shufflenet_v2_x0_5", "mobilenet_v3_small", "swin", "Whisper", "Mixtral", "regnet_y_400mf", "lraspp"
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_clika_compile_architecture_static_matches_eager(name, tmp_path):
    """Each architecture with static dims matches eager, as a module and as an ONNX artifact."""
    architecture = ARCHITECTURES[name]
    compile_and_compare(architecture, [architecture.traced[0]], architecture.traced[0], tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_clika_compile_architecture_unseen_size_matches_eager(name, tmp_path):
    """Each architecture with dynamic dims matches eager at a size that was not traced."""
    architecture = ARCHITECTURES[name]
    compile_and_compare(architecture, list(architecture.traced), architecture.unseen, tmp_path / "model.onnx")


def test_architectures_each_library_lists_ten():
    """The tables list ten architectures of torchvision and ten of transformers."""
    assert (len(TORCHVISION), len(TRANSFORMERS)) == (10, 10)
