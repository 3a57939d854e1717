"""Crops of the two photographs of scikit-learn, and networks with batch norm statistics of such crops."""

from __future__ import annotations

import torch
from sklearn.datasets import load_sample_images
from torch.nn.functional import interpolate

SIZE = 224
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
"""Those of ImageNet, which models of vision expect."""
MIN_IMAGE_SIZE = 96
"""Of a crop, in pixels, before it is scaled to ``SIZE``."""


def crops(count: int, seed: int) -> torch.Tensor:
    """Return square crops at random positions and scales, half of them mirrored: ``float32[count, 3, 224, 224]``."""
    photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1) / 255 for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    found: list[torch.Tensor] = []
    for _ in range(count):
        image = photographs[below(len(photographs))]
        height, width = image.shape[1:]
        size = MIN_IMAGE_SIZE + below(min(height, width) - MIN_IMAGE_SIZE)
        top, left = below(height - size + 1), below(width - size + 1)
        crop = image[:, top : top + size, left : left + size]
        crop = crop.flip(2) if below(2) else crop
        scaled = interpolate(crop[None], (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
        found.append((scaled[0] - MEAN) / STD)
    return torch.stack(found)


def set_batch_norm_statistics(model: torch.nn.Module, images: torch.Tensor, batch: int = 16) -> torch.nn.Module:
    """Give batch norms the mean statistics of images: with the initial ones, activations vanish or explode.

    A last layer of zeros, as vision transformers are initialized with, is drawn at random, so that outputs differ.
    """
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and not bool(layer.weight.any()):
            torch.nn.init.trunc_normal_(layer.weight, std=0.02)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    if norms:
        model.train()
        with torch.no_grad():
            for part in images.split(batch):
                model(part)
    return model.eval()
