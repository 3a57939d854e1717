"""Crops of the two photographs of scikit-learn, and batch-norm statistics from such crops."""

from __future__ import annotations

import torch
from sklearn.datasets import load_sample_images
from torch.nn.functional import interpolate

SIZE = 224
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
"""Of ImageNet, as vision models expect."""
MIN_CROP_SIZE = 96
"""In pixels, before a crop is scaled to ``SIZE``."""


def make_crops(count: int, seed: int) -> torch.Tensor:
    """Return random square crops, mirrored half of the time: ``float32[count, 3, 224, 224]``, normalized."""
    photographs = [torch.from_numpy(image.copy()).permute(2, 0, 1) / 255 for image in load_sample_images().images]
    generator = torch.Generator().manual_seed(seed)

    def draw_below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    found: list[torch.Tensor] = []
    for _ in range(count):
        image = photographs[draw_below(len(photographs))]
        height, width = image.shape[1:]
        size = MIN_CROP_SIZE + draw_below(min(height, width) - MIN_CROP_SIZE)
        top, left = draw_below(height - size + 1), draw_below(width - size + 1)
        crop = image[:, top : top + size, left : left + size]
        crop = crop.flip(2) if draw_below(2) else crop
        scaled = interpolate(crop[None], (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
        found.append((scaled[0] - MEAN) / STD)
    return torch.stack(found)


def set_batch_norm_statistics(model: torch.nn.Module, images: torch.Tensor, batch: int = 16) -> torch.nn.Module:
    """Set the statistics of batch norm to means over images: with the initial ones, activations vanish or explode.

    Linear layers that are initialized to zero, as in vision transformers, get random weights. Otherwise all outputs
    would be zero, and no error could be measured.
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
