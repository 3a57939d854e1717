"""Lets tests import torchvision, which timm and transformers do, where torch was built without CUDA."""

import importlib.util
from pathlib import Path

import torch


def declare_torchvision_operators() -> torch.library.Library | None:
    """Declare the two operators ``import torchvision`` needs if its own library, linked to CUDA, cannot load."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return declared
    return None


torchvision_operators = declare_torchvision_operators()  # a Library takes its operators with it when it is collected
