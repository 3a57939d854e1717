"""Architectures of timm."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.breadth.architecture import BATCHES, IMAGES, Architecture, make_images

CONVOLUTIONAL = (
    *("convnext_atto", "convnextv2_atto", "cspresnet50", "darknet53", "dla34", "dpn48b", "ecaresnet26t"),
    *("efficientnet_lite0", "fbnetv3_b", "gernet_s", "ghostnet_100", "hardcorenas_a", "inception_next_tiny"),
    *("lcnet_050", "mambaout_femto", "mobilenetv4_conv_small", "mobileone_s0", "nfnet_l0", "poolformer_s12"),
    *("regnety_002", "repghostnet_050", "repvgg_a0", "repvit_m1", "res2net50_26w_4s", "resnest14d", "resnet10t"),
    *("resnetv2_50", "rexnet_100", "selecsls42", "seresnet18", "skresnet18", "starnet_s1", "tf_efficientnet_b0"),
    *("tinynet_e", "vovnet39a", "xception41", "convmixer_768_32", "hrnet_w18_small"),
)
"""Networks with dynamic height and width."""

FIXED_SIZE = (
    *("beit_base_patch16_224", "botnet26t_256", "caformer_s18", "cait_xxs24_224", "coat_tiny", "coatnet_pico_rw_224"),
    *("convit_tiny", "crossvit_tiny_240", "davit_tiny", "deit_tiny_patch16_224", "edgenext_xx_small"),
    *("efficientformer_l1", "efficientvit_b0", "efficientvit_m0", "eva02_tiny_patch14_224", "fastvit_t8"),
    *("focalnet_tiny_srf", "gcvit_xxtiny", "gmlp_s16_224", "halonet26t", "hiera_tiny_224", "inception_v4"),
    *("lambda_resnet26t", "levit_128s", "maxvit_rmlp_pico_rw_256", "mixer_s16_224", "mobilevit_xxs"),
    *("mobilevitv2_050", "mvitv2_tiny", "naflexvit_base_patch16_gap", "nest_tiny", "pit_ti_224", "pvt_v2_b0"),
    *("resmlp_12_224", "samvit_base_patch16_224", "sequencer2d_s", "swiftformer_xs", "swin_tiny_patch4_window7_224"),
    *("swinv2_tiny_window8_256", "tiny_vit_5m_224", "tnt_s_patch16_224", "twins_pcpvt_small", "visformer_tiny"),
    *("vit_base_patch16_siglip_224", "vit_small_patch14_dinov2", "vit_tiny_patch16_224", "volo_d1_224"),
    *("xcit_nano_12_p16_224",),
)
"""Networks for images of one size, or too large for more: only the batch is dynamic."""


def _build(name: str) -> nn.Module:
    import timm  # noqa: PLC0415 - only the process of an entry needs it

    return timm.create_model(name, pretrained=False, num_classes=10)


def _make_images_for(name: str, batch: int) -> dict[str, Tensor]:
    import timm  # noqa: PLC0415

    _, height, width = timm.get_pretrained_cfg(name).input_size
    return {"x": torch.randn(batch, 3, height, width)}


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    make = functools.partial
    return {
        **{
            name: Architecture(make(_build, name), make_images, IMAGES, "batch, height, width")
            for name in CONVOLUTIONAL
        },
        **{
            name: Architecture(make(_build, name), make(_make_images_for, name), BATCHES, "batch")
            for name in FIXED_SIZE
        },
    }
